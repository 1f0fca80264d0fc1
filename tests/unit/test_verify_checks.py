"""The checks of `verify` over values: what no test can do to a real kernel, and where each line is drawn."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest
from strategies import ETH0, case, kernel_with, mq_case, snapshot_of, tenant
from verify_values import (
    ACME,
    BETA,
    FLEET,
    HOLDERS,
    LINKS,
    LISTENERS,
    MS,
    NODE,
    QUESTION,
    TRAFFIC,
    codes_of,
    connection,
    observed,
    report,
    series,
)

from kura_shaper.haproxy.master import Worker, Workers
from kura_shaper.haproxy.sessions import Attribution
from kura_shaper.kernel.byways import HardwareFilter, Link, MarkRule, Port
from kura_shaper.kernel.processes import Holders, Process
from kura_shaper.kernel.prove import Proof
from kura_shaper.kernel.sockets import Listener, XdpSocket
from kura_shaper.kernel.softnet import Softnet
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import ROOT, Handle, LeafKind, MqQdisc, OtherQdisc
from kura_shaper.tree.observe import Asked
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.verify.expect import observed_of
from kura_shaper.verify.observed import Hungry, Observed, Question, Sockets, Traffic
from kura_shaper.verify.run import Settings
from kura_shaper.verify.values import Outcome

MARK = FLEET.document.marks.mark(ACME.class_id)
ANY = ip_address("0.0.0.0")
GBIT = 10**9


def outcomes(seen: Observed) -> dict[str, Outcome]:
    return {result.check.name: result.outcome for result in report(seen).results}


def test_a_healthy_node_has_no_finding_and_nothing_unknown() -> None:
    made = report(observed())
    assert [finding.message for finding in made.findings] == []
    assert [(result.check.name, result.unknown) for result in made.unknown] == []
    assert (made.verdict, made.exit_code) == ("pass", 0)


# What only hardware has.


@pytest.mark.finding("budget-above-link")
def test_a_budget_that_the_link_can_not_carry() -> None:
    assert codes_of(observed(port=Port(GBIT))) == ["budget-above-link"]
    assert codes_of(observed(port=Port(3 * GBIT))) == []
    assert codes_of(observed(port=Port(0))) == [], "a link that tells no speed"
    made_up = replace(ETH0, kind="veth")
    assert codes_of(observed(port=Port(GBIT), device=made_up)) == []


@pytest.mark.finding("port-shared")
def test_a_port_that_virtual_functions_share() -> None:
    assert codes_of(observed(port=Port(virtual_functions=2))) == ["port-shared"]


@pytest.mark.finding("hardware-forwards")
def test_filters_that_hardware_carries_out() -> None:
    assert codes_of(observed(hardware_filters=(HardwareFilter(7, "flower", 1),))) == ["hardware-forwards"]
    assert codes_of(observed(port=Port(has_tc_offload=True))) == [], "that it could is no finding"


@pytest.mark.finding("softnet-drops")
def test_packets_that_were_dropped_before_any_class() -> None:
    assert codes_of(observed(traffic=replace(TRAFFIC, softnet=(Softnet(5, 0), Softnet(6, 0))))) == ["softnet-drops"]


@pytest.mark.finding("bandwidth-manager-on")
def test_the_qdiscs_of_the_bandwidth_manager() -> None:
    mq = MqQdisc(Handle(0x8000))
    fqs = {mq.child(queue): OtherQdisc("fq", Handle(0x8001 + queue), mq.child(queue)) for queue in range(4)}
    assert codes_of(observed(snapshot=Snapshot(ETH0, mq, queues=fqs))) == ["bandwidth-manager-on"]


def test_an_af_xdp_socket_of_another_device_does_no_harm() -> None:
    assert codes_of(observed(xdp_sockets=(XdpSocket(ETH0.ifindex + 1),))) == []
    assert codes_of(observed(xdp_sockets=(XdpSocket(ETH0.ifindex, is_zero_copy=True),))) == ["af-xdp-socket"]


# Unknown is never a pass.


@pytest.mark.parametrize(
    ("part", "check"),
    [
        ("snapshot", "tree"),
        ("snapshot", "owner"),
        ("snapshot", "steering"),
        ("links", "marks"),
        ("rules", "marks"),
        ("xdp_sockets", "byways"),
        ("hardware_filters", "byways"),
        ("port", "byways"),
        ("default_devices", "routes"),
        ("listeners", "gateway-ports"),
        ("holders", "gateway-ports"),
        ("holders", "gateway-capability"),
        ("attribution", "gateway-configuration"),
    ],
)
def test_what_can_not_be_read_is_unknown_and_ends_with_4(part: str, check: str) -> None:
    made = report(observed_of(QUESTION, replace(NODE, **{part: Unknown("no permission")}), TRAFFIC))  # type: ignore[arg-type]
    (result,) = [result for result in made.results if result.check.name == check]
    assert result.outcome is Outcome.UNKNOWN
    assert "no permission" in result.unknown
    assert (made.verdict, made.exit_code) == ("unknown", 4)


def test_a_finding_ends_with_1_whatever_else_is_unknown() -> None:
    made = report(observed(holders=Unknown("no permission"), port=Port(GBIT)))
    assert made.unknown
    assert made.exit_code == 1


def test_a_part_that_could_not_be_asked_stays_unknown_when_the_findings_of_the_rest_are_accepted() -> None:
    seen = observed(links=(Link("eth0", 2, has_xdp=True),), xdp_sockets=Unknown("no permission"))
    accepted = Settings(accepted=frozenset({"xdp-attached"}))
    assert report(seen).exit_code == 1
    assert report(seen, accepted).exit_code == 4


@pytest.mark.parametrize(
    "traffic",
    [replace(TRAFFIC, before=Unknown("no permission")), replace(TRAFFIC, after=Unknown("no permission"))],
    ids=["before", "after"],
)
def test_sockets_that_can_not_be_read_are_unknown(traffic: Traffic) -> None:
    seen = outcomes(observed(traffic=traffic))
    assert (seen["sockets"], seen["losses"]) == (Outcome.UNKNOWN, Outcome.UNKNOWN)


def test_marks_that_are_not_shown_are_not_taken_for_none() -> None:
    traffic = replace(TRAFFIC, after=Sockets((connection(None, 1_000),)))
    made = report(observed(traffic=traffic))
    assert made.findings == ()
    assert outcomes(observed(traffic=traffic))["sockets"] is Outcome.UNKNOWN


def test_a_class_that_was_made_anew_meanwhile_is_unknown() -> None:
    seen = observed(traffic=replace(TRAFFIC, broken={ACME.class_id: "its counter began again"}))
    assert outcomes(seen)["ceilings"] is Outcome.UNKNOWN


def test_traffic_without_a_tree_proves_nothing() -> None:
    seen = observed(snapshot=Snapshot(ETH0, OtherQdisc("pfifo_fast", Handle(0), ROOT)))
    assert codes_of(seen) == ["tree-absent"]
    made = outcomes(seen)
    for name in ("ceilings", "budget", "floors", "attribution", "accounting", "sockets"):
        assert made[name] is Outcome.UNKNOWN, name


def test_a_link_that_is_down_proves_no_steering() -> None:
    made = mq_case(ACME)
    snapshot = snapshot_of(made.wanted(), made.device)
    device = replace(snapshot.device, is_up=False)
    question = Question(made.document, Asked(budget=made.settings.budget))
    proof = Proof(is_proven=False, reason="the link is down")
    seen = observed(question, device=device, snapshot=replace(snapshot, device=device), proof=proof)
    assert outcomes(seen)["steering"] is Outcome.UNKNOWN


# Where the lines are.

CEILING, BUCKET, PACKET = ACME.ceiling, 65_536, ETH0.gso_max_bytes


def sent(count: int, *, in_ms: int = 1_000) -> Traffic:
    moved = series((0, 0), (in_ms, count))
    return replace(TRAFFIC, sent={**TRAFFIC.sent, ACME.class_id: moved, ReservedClass.BUDGET: moved})


def test_a_ceiling_is_rate_times_time_and_the_bucket_and_one_packet_and_not_a_byte_more() -> None:
    most = CEILING.bytes_per_second + max(BUCKET, CEILING.bytes_in_us(1_000)) + PACKET
    assert codes_of(observed(traffic=sent(most))) == []
    assert codes_of(observed(traffic=sent(most + 8))) == ["ceiling-exceeded"]


def test_a_short_burst_counts_in_the_short_window_that_it_was_in() -> None:
    """25 MB in a second are 40 % of the ceiling, and in 100 ms four times of it."""
    burst = series((0, 0), (400, 0), (500, 25_000_000), (1_000, 25_000_000))
    traffic = replace(TRAFFIC, sent={**TRAFFIC.sent, ACME.class_id: burst})
    made = report(observed(traffic=traffic))
    assert [finding.code.name for finding in made.findings] == ["ceiling-exceeded"]
    assert made.findings[0].evidence["window_ms"] == 100
    assert made.findings[0].tenant == ACME.name


def hungry(sent_bytes: int, *, ms: int = 1_000, used_percent: int = 100) -> Observed:
    budget = FLEET.settings.budget.bytes_per_second * ms // 1_000 * used_percent // 100
    stretch = Hungry(0, ms * MS, sent_bytes, budget)
    return observed(traffic=replace(TRAFFIC, hungry={ACME.class_id: (stretch,)}))


def test_a_floor_is_owed_to_who_waits_while_the_budget_is_full() -> None:
    owed = ACME.floor.bytes_per_second - BUCKET - PACKET
    assert codes_of(hungry(owed)) == []
    assert outcomes(hungry(owed))["floors"] is Outcome.HOLDS
    assert codes_of(hungry(owed - 9)) == ["floor-missed"]
    assert codes_of(hungry(0, used_percent=90)) == []
    assert codes_of(hungry(0, ms=400)) == []


def test_packets_that_an_fq_holds_back_are_no_sign_of_want() -> None:
    made = case(ACME, BETA, leaf=LeafKind.FQ)
    question = Question(made.document, Asked(budget=made.settings.budget))
    stretch = Hungry(0, 1_000 * MS, 0, made.settings.budget.bytes_per_second)
    traffic = replace(TRAFFIC, hungry={ACME.class_id: (stretch,)})
    seen = observed(question, traffic, snapshot=kernel_with(made.wanted()).snapshot())
    assert codes_of(seen) == []
    assert outcomes(seen)["floors"] is Outcome.SKIPPED


def between(sent_bytes: int, counted: int, **traffic: Any) -> Observed:
    """acme's connection sent so much, and its class counted so much."""
    moved = series((0, 0), (1_000, counted))
    return observed(
        traffic=replace(
            TRAFFIC,
            sent={**TRAFFIC.sent, ACME.class_id: moved},
            before=Sockets((connection(MARK, 5),)),
            after=Sockets((connection(MARK, 5 + sent_bytes),)),
            **traffic,
        )
    )


def test_bytes_of_a_tenants_sockets_have_to_come_to_its_class() -> None:
    assert codes_of(between(20_000_000, 20_000_000)) == []
    assert codes_of(between(20_000_000, 18_000_000)) == ["bytes-not-in-class"]
    assert codes_of(between(900_000, 0)) == [], "too little to tell from the moments of reading"
    assert codes_of(between(20_000_000, 18_000_000, backlog_bytes={ACME.class_id: 2_000_000})) == []
    assert codes_of(between(20_000_000, 18_000_000, dropped_packets={ACME.class_id: 30})) == []


def test_a_connection_that_only_one_of_the_readings_saw_says_nothing_of_bytes() -> None:
    traffic = replace(TRAFFIC, after=Sockets((connection(MARK, 50_000_000),)))
    assert codes_of(observed(traffic=traffic)) == []


@pytest.mark.parametrize(
    ("link", "counts"),
    [
        (Link("eth1", 9), True),
        (Link("veth123", 9, "veth"), False),
        (Link("cilium_vxlan", 9, "vxlan"), False),
        (Link("lo", 9), False),
    ],
)
def test_connections_that_leave_by_another_nic_count_and_those_to_pods_do_not(link: Link, counts: bool) -> None:
    traffic = replace(TRAFFIC, after=Sockets((connection(0, 5_000),)), ways={"203.0.113.7": 9})
    seen = observed(traffic=traffic, links=(*LINKS, link))
    assert codes_of(seen) == (["socket-unmarked"] if counts else [])


def test_the_gateways_own_mark_is_no_strangers() -> None:
    own = FLEET.document.marks.mark(ReservedClass.GATEWAY)
    assert codes_of(observed(traffic=replace(TRAFFIC, after=Sockets((connection(own, 7),))))) == []


@pytest.mark.parametrize(("again", "total", "is_much"), [(99, 99, False), (100, 4_999, True), (100, 5_001, False)])
def test_segments_that_were_sent_again_count_from_two_percent_and_a_hundred_on(
    again: int, total: int, is_much: bool
) -> None:
    before = connection(MARK, 5, sent_segments=7, resent_segments=3)
    after = connection(MARK, 5, sent_segments=7 + total, resent_segments=3 + again)
    traffic = replace(TRAFFIC, before=Sockets((before,)), after=Sockets((after,)))
    assert codes_of(observed(traffic=traffic)) == (["retransmits-high"] if is_much else [])


def test_a_rule_that_no_tenants_mark_matches_takes_nobody() -> None:
    tailscale = MarkRule(5210, 2, 0x80000, 0xFF0000, 52)
    low = MarkRule(100, 2, 0x200, 0xF00, 2004)
    assert codes_of(observed(rules=(tailscale, low))) == []
    hit = MarkRule(5, 10, MARK & 0xFF0000, 0xFF0000, 9)
    made = report(observed(rules=(hit,)))
    assert [finding.code.name for finding in made.findings] == ["mark-routed"]
    assert "IPv6 rule 5" in made.findings[0].message


def test_a_process_that_shares_the_port_with_the_gateway_is_named_once() -> None:
    nginx = Process(8, "nginx", "/usr/sbin/nginx", can_mark=True)
    both = (*LISTENERS, Listener("tcp", ANY, 443, 99), Listener("tcp", ip_address("::"), 443, 98))
    holders = Holders({**HOLDERS, 99: (nginx,), 98: (nginx,)})
    made = report(observed(listeners=both, holders=holders))
    assert [finding.code.name for finding in made.findings] == ["gateway-port-foreign"]
    assert "nginx (pid 8, /usr/sbin/nginx)" in made.findings[0].message


def test_a_listener_whose_process_is_not_seen_is_unknown() -> None:
    seen = observed(holders=Holders({}, unreadable=3))
    assert codes_of(seen) == []
    assert outcomes(seen)["gateway-ports"] is Outcome.UNKNOWN


def test_a_gateway_without_a_map_of_marks_was_not_rendered_here() -> None:
    seen = observed(attribution=Attribution(Workers(Worker(1, 10)), None))
    assert outcomes(seen)["gateway-configuration"] is Outcome.UNKNOWN


def test_five_thousand_differences_are_one_finding_with_the_first_of_them() -> None:
    many = [tenant(0x100 + number, floor="0") for number in range(40)]
    made = case(*many, budget="40G")
    question = Question(case(*(replace(t, ceiling=BETA.ceiling.scaled(2, 1)) for t in many)).document, QUESTION.asked)
    seen = observed(question, snapshot=kernel_with(made.wanted()).snapshot())
    (finding,) = [f for f in report(seen).findings if f.code.name == "tree-differs"]
    assert int(str(finding.evidence["count"])) > 40
    first = finding.evidence["first"]
    assert isinstance(first, tuple)
    assert len(first) == 20
