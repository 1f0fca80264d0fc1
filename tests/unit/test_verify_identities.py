"""One identity of the event broker is one pod, by the Deployments that kubectl tells of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from verify_values import QUESTION, codes_of, observed, report

from kura_shaper.errors import UsageError
from kura_shaper.verify.deployments import Deployment, read_deployments
from kura_shaper.verify.report.machine import to_json
from kura_shaper.verify.report.redact import redacted

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.verify.observed import Observed


def deployment(name: str, *words: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "args": list(words)}
    whole = {"template": {"spec": {"containers": [container]}}, **spec}
    return {"kind": "Deployment", "metadata": {"name": name, "namespace": "gpu"}, "spec": whole}


def seen(*deployments: Deployment) -> Observed:
    return observed(replace(QUESTION, deployments=deployments))


@pytest.mark.finding("broker-replicated")
def test_an_identity_with_two_pods_is_one_finding_and_its_name_goes_with_the_others() -> None:
    one, two = Deployment("gpu/broker-a", 1, runs_broker=True), Deployment("gpu/broker-b", 2, runs_broker=True)
    web = Deployment("gpu/web", 9, runs_broker=False)
    assert codes_of(seen(one, web)) == []
    broken = seen(one, two, web)
    assert codes_of(broken) == ["broker-replicated"]
    text = json.dumps(to_json(report(broken)))
    assert "gpu/broker-b has 2 replicas" in text
    hidden = json.dumps(to_json(redacted(report(broken))))
    assert "broker-b" not in hidden
    assert "deployment-2 has 2 replicas" in hidden


def test_what_nobody_gave_is_not_looked_at() -> None:
    (found,) = [result for result in report(observed()).results if result.check.name == "broker-identities"]
    assert "no Deployments were given" in found.words


def test_deployments_are_read_as_kubectl_has_them(tmp_path: Path) -> None:
    path = tmp_path / "deployments.json"
    items = [
        deployment("broker-a", "event-broker", "--config", "/etc/c.yaml"),
        deployment("broker-b", "kura-shaper", "event-broker", replicas=3),
        deployment("web", "serve", "--name", "event-broker", replicas=2),
        {"kind": "StatefulSet", "metadata": {}, "spec": {}},
    ]
    path.write_text(json.dumps({"kind": "List", "items": items}))
    assert read_deployments(path) == (
        Deployment("gpu/broker-a", 1, runs_broker=True),
        Deployment("gpu/broker-b", 3, runs_broker=True),
        Deployment("gpu/web", 2, runs_broker=False),
    )
    path.write_text(json.dumps(items[1]))
    assert [one.replicas for one in read_deployments(path)] == [3]


@pytest.mark.parametrize(
    "text", ["", "[]", "5", '{"items": 5}', '{"items": [5]}', '{"items": [{"kind": "Deployment"}]}']
)
def test_what_is_no_list_of_them_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deployments.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no list of Deployments"):
        read_deployments(path)
    with pytest.raises(UsageError, match="can't be read"):
        read_deployments(tmp_path / "none")
