"""A report in each of its forms: complete, escaped, and without names where it is to be."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from ipaddress import ip_address
from xml.etree import ElementTree as ET

import pytest
from strategies import ETH0
from verify_values import FLEET, HOLDERS, LISTENERS, PEER, TRAFFIC, connection, observed, report

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.master import Worker, Workers
from kura_shaper.haproxy.sessions import Attribution
from kura_shaper.kernel.byways import Link, Port
from kura_shaper.kernel.processes import Holders, Process
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.observed import Sockets
from kura_shaper.verify.report.bundle import write_bundle
from kura_shaper.verify.report.html import to_html
from kura_shaper.verify.report.machine import to_json, to_junit
from kura_shaper.verify.report.redact import Redactor, redacted
from kura_shaper.verify.report.text import to_lines
from kura_shaper.verify.run import Report, Settings

EVIL = Process(8, '<script>alert("&")</script>\x1b[2J'.replace("\x1b", "?"), "/x", can_mark=True)
TRAFFIC_WITH_A_BARE_ONE = replace(TRAFFIC, after=Sockets((connection(0, 4_000),)))


def broken() -> Report:
    """A report with an error, a warning, and something unknown."""
    holders = Holders({**HOLDERS, LISTENERS[0].inode: (EVIL,)})
    return report(
        observed(traffic=TRAFFIC_WITH_A_BARE_ONE, holders=holders, port=Port(10**9), rules=Unknown("no permission"))
    )


def test_text_has_errors_first_with_their_remedy_and_every_check_with_what_it_saw() -> None:
    lines = list(to_lines(broken()))
    codes = [line.partition("]")[0].partition("[")[2] for line in lines if line.startswith(("error[", "warning["))]
    assert codes == ["gateway-port-foreign", "socket-unmarked", "budget-above-link"]
    assert sum(line.strip().startswith("remedy: ") for line in lines) == 3
    assert any(line.startswith("unknown") and "marks" in line and "no permission" in line for line in lines)
    assert lines[-1].startswith("eth0: findings: ")
    assert "3 findings" in lines[-1]


def test_json_is_one_object_that_says_everything_and_nothing_else() -> None:
    found = json.loads(json.dumps(to_json(broken())))
    assert (found["verdict"], found["exit_code"]) == ("findings", 1)
    assert {"code", "severity", "message", "tenant", "evidence", "meaning", "remedy"} == found["findings"][0].keys()
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert (outcomes["marks"], outcomes["tree"], outcomes["sockets"]) == ("unknown", "holds", "finding")
    assert found["facts"]["tenants"] == {"t2a7": "0x2a7", "t2b0": "0x2b0"}


def test_junit_has_a_case_for_each_check_and_counts_them_right() -> None:
    made = broken()
    suite = ET.fromstring(to_junit(made))
    counts = [len(suite.findall(f"testcase/{name}")) for name in ("failure", "error", "skipped")]
    assert [suite.get(name) for name in ("failures", "errors", "skipped")] == [str(count) for count in counts]
    assert (len(suite.findall("testcase")), counts[:2]) == (len(made.results), [3, 1])


def test_junit_of_an_accepted_finding_is_no_failure() -> None:
    made = report(observed(port=Port(10**9)), Settings(accepted=frozenset({"budget-above-link"})))
    suite = ET.fromstring(to_junit(made))
    assert (suite.get("failures"), made.exit_code) == ("0", 0)


def test_a_page_needs_no_network_and_runs_nothing_that_a_process_chose_as_its_name() -> None:
    page = to_html(broken())
    assert "<script src" not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    for title in ("The device", "Unattributed"):
        assert f"<h2>{title}</h2>" in page


def test_control_characters_reach_no_form() -> None:
    made = report(observed(rules=Unknown("a\x00b\x1b[2J")))
    ET.fromstring(to_junit(made))
    assert "\x1b" not in "\n".join(to_lines(made))


def bundle_of(made: Report) -> dict[str, str]:
    file = io.BytesIO()
    write_bundle(made, file, extra={"report.html": "<html>"})
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        found = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive.getmembers()}
        return {name: part.read().decode() for name, part in found.items() if part}


def test_a_bundle_has_the_readings_as_they_were_read_and_sums_of_all_files() -> None:
    parts = bundle_of(broken())
    tree = json.loads(parts["readings/tree.json"])
    assert tree["classes"]["20:2a7"]["ceil"] == 500_000_000
    assert json.loads(parts["readings/gateway.json"])["listeners"][0]["port"] == 443
    assert json.loads(parts["readings/network.json"])["mark_rules"] == {"reason": "no permission"}
    assert parts["samples.csv"].splitlines()[0] == "counter,at_ns,spread_ns,bytes"
    assert len(parts["SHA256SUMS"].splitlines()) == len(parts) - 1
    assert "kernel" in json.loads(parts["node.json"])


def named() -> Report:
    """A report in which every kind of name and address occurs."""
    attribution = Attribution(Workers(Worker(1, 5)), {"t2a7": 5, "gone": 6}, {(PEER, 40_001): "t2a7"})
    after = Sockets((connection(0, 4_000), connection(0x2A7 << 16, 5, cookie=2)), attribution)
    traffic = replace(TRAFFIC, after=after, before=Unknown("203.0.113.7 and host acme.example said no to t2b0"))
    listeners = tuple(replace(one, address=ip_address("198.51.100.1")) for one in LISTENERS)
    return report(observed(traffic=traffic, listeners=listeners, attribution=attribution, links=(Link("eth0", 2),)))


def test_a_redacted_report_says_the_same_of_others() -> None:
    made, other = named(), redacted(named())
    assert [f.code.name for f in made.findings] == [f.code.name for f in other.findings]
    assert [r.outcome for r in made.results] == [r.outcome for r in other.results]
    texts = [*bundle_of(other).values(), "\n".join(to_lines(other)), to_junit(other), json.dumps(to_json(other))]
    for text in texts:
        for word in ("t2a7", "t2b0", "gone", "203.0.113", "198.51.100"):
            assert word not in text, word
    assert "tenant-1" in json.dumps(to_json(other))


def test_what_is_replaced_is_replaced_by_the_same_everywhere() -> None:
    by = Redactor(FLEET.document)
    first = by.address(PEER)
    assert by.address(PEER) == first
    assert by.address(ip_address("203.0.113.8")) != first
    assert by.text(f"to {PEER} port 5, [2001:db9::1]:443, 52:54:00:12:34:56, t2a7's, t2a7x, fine") == (
        f"to {first} port 5, [2001:db8::3]:443, 02:00:00:00:00:00, tenant-1's, t2a7x, fine"
    )
    assert by.name("t2a7") == "tenant-1"
    assert by.address(ip_address("127.0.0.1")) == ip_address("127.0.0.1")


@pytest.mark.parametrize(
    "changes",
    [{"window_ms": 5}, {"duration_ms": 100}, {"accepted": frozenset({"no-such-code"})}],
)
def test_settings_that_can_not_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(Settings(), **changes)  # type: ignore[arg-type]


def test_a_device_that_is_not_the_one_of_the_reading_is_named_in_the_verdict() -> None:
    assert list(to_lines(report(observed())))[-1] == (
        f"{ETH0.name}: pass: {sum(r.outcome == 'holds' for r in report(observed()).results)} checks hold,"
        f" {sum(r.outcome == 'skipped' for r in report(observed()).results)} had nothing to look at"
    )
