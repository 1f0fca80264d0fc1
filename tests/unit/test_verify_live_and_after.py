"""Load from outside held against what its class counted, and a run held against an earlier one: over values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from verify_values import ACME, FLEET, MS, NODE, TRAFFIC, observed, report, series

from kura_shaper.clock import SystemClock
from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown
from kura_shaper.verify.active import Load, LoadRun, Step
from kura_shaper.verify.after import Facts, read_facts
from kura_shaper.verify.checks import CHECKS
from kura_shaper.verify.report.machine import to_json
from kura_shaper.verify.run import Settings, judge
from kura_shaper.verify.values import Outcome, Phase, Result

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.verify.observed import Observed

CEILING_BYTES = ACME.ceiling.bytes_per_second


def result(seen: Observed, phase: Phase) -> Result:
    (found,) = judge(seen, Settings(), (phase,))
    return found


def codes(seen: Observed, phase: Phase) -> list[str]:
    return [finding.code.name for finding in result(seen, phase).findings]


# Load.


def loaded(received: int, counted: int, *, tenant: str = ACME.name) -> Observed:
    """A client received so much in a second, in which the class counted so much."""
    moved = series((0, 0), (100, 0), (1_100, counted), (1_200, counted))
    traffic = replace(TRAFFIC, sent={**TRAFFIC.sent, ACME.class_id: moved})
    step = Step(8, 100 * MS, 1_100 * MS, received)
    return replace(observed(traffic=traffic), load=Load(tenant, (step,)))


def test_load_at_its_ceiling_that_came_by_its_class_holds() -> None:
    found = result(loaded(CEILING_BYTES * 95 // 100, CEILING_BYTES), Phase.ACTIVE)
    assert found.outcome is Outcome.HOLDS
    assert "8 streams 475.0 Mbit/s" in found.words


@pytest.mark.finding("live-over-ceiling")
def test_a_client_that_got_twice_the_ceiling_whatever_our_counters_say() -> None:
    """Path B of the failure that this product exists for: it doubled when streams were added."""
    assert codes(loaded(2 * CEILING_BYTES, 2 * CEILING_BYTES), Phase.ACTIVE) == ["live-over-ceiling"]


@pytest.mark.finding("live-not-in-class")
def test_a_client_whose_bytes_the_class_never_counted() -> None:
    assert codes(loaded(CEILING_BYTES * 9 // 10, CEILING_BYTES // 2), Phase.ACTIVE) == ["live-not-in-class"]


def test_load_that_does_not_reach_the_ceiling_does_not_put_it_to_the_test() -> None:
    found = result(loaded(CEILING_BYTES // 2, CEILING_BYTES // 2), Phase.ACTIVE)
    assert found.outcome is Outcome.UNKNOWN
    assert "do not put a ceiling of 500M to the test" in found.unknown


@pytest.mark.parametrize(
    "seen",
    [
        replace(observed(), load=Unknown("the client did not start")),
        loaded(CEILING_BYTES, CEILING_BYTES, tenant="nobody"),
        replace(loaded(CEILING_BYTES, CEILING_BYTES), traffic=Unknown("no permission")),
    ],
    ids=["no client", "no tenant", "no counters"],
)
def test_load_that_says_nothing_is_unknown(seen: Observed) -> None:
    assert result(seen, Phase.ACTIVE).outcome is Outcome.UNKNOWN


class Client:
    tenant = ACME.name

    def run(self, streams: int) -> Step:
        if streams == 4:
            raise StateUnknownError("it broke off")
        now_ns = SystemClock().now_ns()
        return Step(streams, now_ns, now_ns + 1, 5)


def test_steps_are_made_one_after_the_other_and_a_client_that_fails_is_unknown() -> None:
    for streams, found in (((1, 8), [1, 8]), ((1, 4), None)):
        load = LoadRun((Client(),), streams)
        load.start()
        made = load.result()
        assert load.is_over
        if found is None:
            assert made == Unknown("no load over 4 streams: it broke off")
        else:
            assert isinstance(made, Load)
            assert [step.streams for step in made.steps] == found


# After a restart.

BOOT = "5f3c"
SNAPSHOT = NODE.snapshot
assert isinstance(SNAPSHOT, Snapshot)
MOVED = replace(SNAPSHOT, counters=dict.fromkeys(SNAPSHOT.classes, ClassCounters(1_000)))
EARLIER = Facts(
    boot=BOOT,
    ifindex=NODE.device.ifindex,
    shape="single",
    sent_bytes={str(classid): 900 for classid in MOVED.classes},
    tenants={tenant.name: tenant.class_id for tenant in FLEET.document.tenants},
    gateway=(71,),
    started_at="yesterday",
)


def after(earlier: Facts = EARLIER, *, boot: str = BOOT, snapshot: Snapshot | Unknown = MOVED) -> Observed:
    return replace(observed(boot=boot, snapshot=snapshot), earlier=earlier)


def test_a_tree_that_lived_through_a_restart_of_the_gateway_holds_and_says_so() -> None:
    found = result(after(replace(EARLIER, gateway=(5,))), Phase.AFTER)
    assert found.outcome is Outcome.HOLDS
    assert "the gateway was restarted" in found.words
    assert "the same gateway" in result(after(), Phase.AFTER).words


@pytest.mark.finding("tree-rebuilt")
@pytest.mark.parametrize(
    "earlier",
    [replace(EARLIER, sent_bytes={"20:2a7": 1_001}), replace(EARLIER, ifindex=99)],
    ids=["counters", "device"],
)
def test_a_tree_that_was_made_anew_is_told(earlier: Facts) -> None:
    assert codes(after(earlier), Phase.AFTER) == ["tree-rebuilt"]


def test_a_node_that_was_started_anew_has_new_counters_and_that_is_no_news() -> None:
    found = result(after(replace(EARLIER, sent_bytes={"20:2a7": 1_001}), boot="another"), Phase.AFTER)
    assert found.outcome is Outcome.HOLDS
    assert "started anew" in found.words


@pytest.mark.finding("shape-changed")
def test_another_shape_is_told_once() -> None:
    assert codes(after(replace(EARLIER, shape="mq", ifindex=99)), Phase.AFTER) == ["shape-changed"]


@pytest.mark.finding("class-renumbered")
def test_a_tenant_that_has_another_class_is_told_also_after_a_boot() -> None:
    moved = replace(EARLIER, tenants={**EARLIER.tenants, ACME.name: 0x333})
    assert codes(after(moved), Phase.AFTER) == ["class-renumbered"]
    assert codes(after(moved, boot="another"), Phase.AFTER) == ["class-renumbered"]


@pytest.mark.parametrize("seen", [after(boot=""), after(snapshot=Unknown("no permission"))], ids=["boot", "tree"])
def test_what_can_not_be_compared_is_unknown(seen: Observed) -> None:
    assert result(seen, Phase.AFTER).outcome is Outcome.UNKNOWN


def test_the_facts_of_a_report_are_read_back_from_its_json(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    file.write_text(json.dumps(to_json(report(after()))))
    facts = read_facts(file)
    assert facts.boot == BOOT
    assert facts.tenants == EARLIER.tenants
    assert facts.sent_bytes["20:2a7"] == 1_000
    assert result(after(facts), Phase.AFTER).outcome is Outcome.HOLDS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"facts": {}, "started_at": ""}', '{"facts": 5}'])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "before.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="verify --json"):
        read_facts(file)
    with pytest.raises(UsageError, match="can't be read"):
        read_facts(tmp_path / "nothing")


def test_every_phase_has_a_check() -> None:
    assert {check.phase for check in CHECKS} == set(Phase)
