"""The probe's Deployment: what Kustomize makes of it is taken by Kubernetes and by the program, and may do nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import typer
import yaml
from manifest_tools import DAEMONSET, Manifest, check_schemas, containers, kustomized, manifests, run, the, tool

from kura_shaper.cli.main import app
from kura_shaper.probe.target import Protocol
from kura_shaper.probe.task import load_tasks


def rendered() -> list[Manifest]:
    return manifests(kustomized("probe"))


def pod() -> Manifest:
    found: Manifest = the(rendered(), "Deployment")["spec"]["template"]
    return found


def test_it_may_do_nothing_but_ask() -> None:
    (container,) = containers(the(rendered(), "Deployment"))
    granted, spec = container["securityContext"], pod()["spec"]
    assert granted == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "tolerations"} & spec.keys()
    assert [volume.keys() - {"name"} for volume in spec["volumes"]] == [{"configMap"}]
    labels = the(rendered(), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["kind"] for each in rendered()} == {"Namespace", "ConfigMap", "Deployment"}


def test_the_program_takes_its_words_and_its_targets(tmp_path: Path) -> None:
    (container,) = containers(the(rendered(), "Deployment"))
    (name, *words) = [word.replace("$(POD_IP)", "10.0.0.7") for word in container["args"]]
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    given = group.commands[name].make_context(name, words).params
    (mount,) = container["volumeMounts"]
    config = the(rendered(), "ConfigMap")
    assert str(given["targets"]) == f"{mount['mountPath']}/{next(iter(config['data']))}"
    assert pod()["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "metrics")
    assert given["listen"] == f"10.0.0.7:{port}"
    path = tmp_path / "targets.yaml"
    path.write_text(config["data"]["targets.yaml"])
    tasks = load_tasks(path, {})
    assert {task.target.protocol for task in tasks} == {Protocol.HTTP2, Protocol.TCP}
    # A round is over before the next, and heard of within the patience of the rules.
    interval_s = float(given["interval"])
    assert all(task.longest_ns / 1e9 <= interval_s for task in tasks)
    assert interval_s <= 300


def test_no_image_floats() -> None:
    (container,) = containers(the(rendered(), "Deployment"))
    assert re.search(r":v?\d+\.\d+\.\d+$|@sha256:[0-9a-f]{64}$", container["image"])


def test_a_pod_monitor_finds_it_and_names_where_it_is(tmp_path: Path) -> None:
    relative = Path(os.path.relpath(DAEMONSET, tmp_path.resolve()))
    both = {"resources": [str(relative / "probe")], "components": [str(relative / "components/probe-monitoring")]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(both))
    found = manifests(run(tool("kubectl"), "kustomize", tmp_path).stdout)
    monitor = the(found, "PodMonitor")
    assert monitor["metadata"]["namespace"] == the(found, "Deployment")["metadata"]["namespace"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod()["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for each in pod()["spec"]["containers"] for port in each["ports"]}
    assert "instance" in {each.get("targetLabel") for each in endpoint["relabelings"]}


def test_the_schemas_of_kubernetes_take_it() -> None:
    check_schemas(kustomized("probe"))


@pytest.mark.privileged
def test_it_runs_without_a_capability_and_writes_nowhere() -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv of util-linux")
    read_only = 'mount --make-rprivate / && mount -o remount,bind,ro / && exec "$@"'
    confined = ("unshare", "--mount", "sh", "-c", read_only, "sh", "setpriv", "--bounding-set=-all", "--inh-caps=-all")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    words = (sys.executable, "-m", "kura_shaper", "probe", "--url", f"https://127.0.0.1:{port}/", "--json")
    done = run(*confined, "--no-new-privs", *words, check=False)
    assert done.returncode == 1, done.stderr
    (target,) = json.loads(done.stdout)["targets"]
    assert [failure["reason"] for failure in target["failures"]] == ["connect"]
