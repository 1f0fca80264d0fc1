"""`render-haproxy --apply` on a real HAProxy: what it serves afterwards, and what is left when something goes wrong."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from apply_rig import ELSEWHERE, ApplyRig, MasterProxy, apply_rig, request, wait_until
from gateway_rig import VERSIONS, haproxy_of

from kura_shaper.haproxy.master import MasterSocket
from kura_shaper.haproxy.write import KEPT_GENERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.privileged


@pytest.fixture(params=VERSIONS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApplyRig]:
    with apply_rig(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait long for a master that does not answer."""
    defaults = MasterSocket.ask.__kwdefaults__
    assert defaults
    monkeypatch.setitem(defaults, "timeout_s", 0.5)
    monkeypatch.setattr("kura_shaper.haproxy.master._RELOAD_S", 0.5)


def decided(ran: dict[str, Any]) -> tuple[str, str]:
    return ran["decision"], ran["outcome"]


def via(proxy: MasterProxy) -> tuple[str, str]:
    return "--master-socket", str(proxy.path)


# What it is for.


def test_nothing_then_a_change_while_it_runs_then_a_reload(rig: ApplyRig) -> None:
    worker = rig.pid
    assert decided(rig.applied()) == ("none", "unchanged")
    alias = rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"])
    rig.write(alias, rig.tenant("beta"))
    assert decided(rig.applied()) == ("runtime", "applied")
    assert decided(rig.applied()) == ("none", "unchanged")
    assert rig.pid == worker
    rig.write(alias, rig.tenant("beta"), rig.tenant("gamma"))
    done = rig.applied()
    assert decided(done) == ("reload", "applied")
    assert all(reason.startswith("tenant gamma: ") for reason in done["reasons"])
    assert done["workers"]["current"]["pid"] == rig.pid != worker
    assert decided(rig.applied()) == ("none", "unchanged")
    assert [rig.get(f"{name}.kura.test") for name in ("acme", "beta", "gamma")] == ["200 acme", "200 beta", "200 gamma"]
    assert rig.get("acme.cache.test") == "200 acme"
    assert rig.loads()


def test_an_alias_is_served_at_once_and_refused_once_it_is_gone(rig: ApplyRig) -> None:
    worker = rig.pid
    assert rig.get("acme.cache.test") == "refused"
    rig.write(rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"]), rig.tenant("beta"))
    rig.applied()
    assert rig.get("acme.cache.test") == "200 acme"
    rig.write(rig.tenant("acme"), rig.tenant("beta", hosts=["beta.kura.test", "acme.cache.test"]))
    rig.applied()
    assert rig.get("acme.cache.test") == "200 beta"
    rig.write(rig.tenant("acme"), rig.tenant("beta"))
    rig.applied()
    assert [rig.get(host) for host in ("acme.cache.test", "acme.kura.test")] == ["refused", "200 acme"]
    assert rig.pid == worker


def test_a_removed_tenant_is_refused_and_served_again_when_it_returns(rig: ApplyRig) -> None:
    worker = rig.pid
    rig.write(rig.tenant("acme"))
    done = rig.applied()
    assert decided(done) == ("runtime", "applied")
    assert "beta" in done["decision_notes"][0]
    assert rig.get("beta.kura.test") == "refused"
    assert decided(rig.applied()) == ("none", "unchanged")
    rig.write(rig.tenant("acme"), rig.tenant("beta"))
    assert decided(rig.applied()) == ("runtime", "applied")
    assert (rig.get("beta.kura.test"), rig.pid) == ("200 beta", worker)


def test_a_moved_address_counts_for_the_next_request(rig: ApplyRig) -> None:
    rig.listen(ELSEWHERE, "moved")
    worker = rig.pid
    moved = {"http": {"address": f"{rig.address}:{ELSEWHERE}"}}
    with rig.connect("acme.kura.test") as kept:
        assert request(kept, "acme.kura.test") == "200 acme"
        rig.write(rig.tenant("acme", backends=moved), rig.tenant("beta"))
        assert decided(rig.applied()) == ("runtime", "applied")
        assert request(kept, "acme.kura.test") == "200 moved"
    assert (rig.get("acme.kura.test"), rig.get("beta.kura.test"), rig.pid) == ("200 moved", "200 beta", worker)


@pytest.mark.parametrize("joined", [False, True], ids=["beside", "in-one-file"])
def test_a_rotated_certificate_is_shown_without_a_reload(rig: ApplyRig, joined: bool) -> None:
    worker = rig.pid
    serial = rig.certify(joined=joined)
    assert rig.serial("acme.kura.test") != serial
    assert decided(rig.applied()) == ("runtime", "applied")
    assert (rig.serial("acme.kura.test"), rig.pid) == (serial, worker)
    assert decided(rig.applied()) == ("none", "unchanged")


def test_a_certificate_whose_key_is_another_ones_is_refused_and_the_old_one_stays(rig: ApplyRig) -> None:
    serial = rig.serial("acme.kura.test")
    key = rig.certificate.with_suffix(".key").read_bytes()
    rig.certify()
    rig.certificate.with_suffix(".key").write_bytes(key)
    ran = rig.apply()
    assert ran.code == 3, ran
    assert "haproxy_check" in ran.out
    assert rig.serial("acme.kura.test") == serial


def test_what_somebody_changed_by_hand_is_put_right(rig: ApplyRig) -> None:
    current, worker = rig.out / "current", rig.pid
    for command in (
        f"@1 add map {current}/sni.map evil.kura.test acme",
        f"@1 add map {current}/sni.map beta.kura.test acme",
        f"@1 del map {current}/sni.map acme.kura.test",
        f"@1 clear map {current}/mark.map",
        f"@1 del ssl crt-list {current}/crt-list.txt {rig.certificate}:2",
        f"@1 set server acme_http/p0 addr {rig.address} port 1",
    ):
        rig.master.ask(command)
    rig.master.ask(f"@1 add ssl crt-list {current}/crt-list.txt", f"{rig.certificate} a.kura.test acme.kura.test\n")
    rig.master.ask(f"@1 add ssl crt-list {current}/crt-list.txt", f"{rig.certificate}\n")
    assert rig.get("acme.kura.test") == "refused"
    assert decided(rig.applied()) == ("runtime", "applied")
    served = [rig.get(f"{name}.kura.test") for name in ("acme", "beta", "evil", "a")]
    assert served == ["200 acme", "200 beta", "refused", "refused"]
    assert decided(rig.applied()) == ("none", "unchanged")
    assert rig.pid == worker


def test_a_server_that_somebody_checks_at_another_port_is_put_right(rig: ApplyRig) -> None:
    rig.master.ask("@1 set server acme_http/p0 check-port 1")
    rig.applied()
    assert decided(rig.applied()) == ("none", "unchanged")
    rows = rig.master.ask("@1 show servers state acme_http").splitlines()
    assert dict(zip(rows[1].split()[1:], rows[2].split(), strict=True))["srv_check_port"] == "0"


# Reloads.


def test_a_reload_counts_the_old_worker_that_still_sends(rig: ApplyRig) -> None:
    worker = rig.pid
    before = rig.master.ask("@1 show info")
    with rig.connect("acme.kura.test") as download:
        download.sendall(b"GET /endless HTTP/1.1\r\nHost: acme.kura.test\r\n\r\n")
        assert download.recv(10)
        rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
        done = rig.applied()
        assert decided(done) == ("reload", "applied")
        assert done["reasons"] == ["tenant acme: another ceiling, and HAProxy takes a shared limit as a constant"]
        assert [old["pid"] for old in done["workers"]["old"]] == [worker]
        assert download.recv(10)
        (said,) = (row for row in rig.master.ask("@1 show info").splitlines() if row.startswith("description: "))
        assert said not in before
        assert said.endswith(str(rig.out.joinpath("current/haproxy.cfg").read_text().split("kura-shaper-")[1][:16]))
        rig.write(rig.tenant("acme", ceiling="90M"), rig.tenant("beta"))
        ran = rig.apply("--old-workers-max", "1")
        assert (ran.code, ran.json["outcome"], ran.json["workers"]["old"][0]["pid"]) == (1, "deferred", worker)
        assert "1 old workers still serve" in ran.json["outcome_notes"][0]
    wait_until(lambda: not rig.workers.old, what="the old worker to end")
    assert decided(rig.applied("--old-workers-max", "1")) == ("reload", "applied")


def occupy(rig: ApplyRig, port: int) -> socket.socket:
    # Without SO_REUSEPORT nobody else can bind it.
    return socket.create_server((rig.address, port))


def test_a_reload_that_fails_leaves_the_last_good_generation_in_force(rig: ApplyRig) -> None:
    good = rig.current
    rig.write(rig.tenant("acme"), rig.tenant("beta"), gateway={"https_ports": [443, 8443]})
    with occupy(rig, 8443):
        for _ in range(3):
            ran = rig.apply()
            assert ran.code == 3, ran
            assert ran.json["error"]["code"] == "reload_failed"
            assert f"{rig.address}:8443" in ran.json["error"]["message"]
            assert (rig.current, rig.loads()) == (good, True)
            # HAProxy lets the old worker pause while the new one tries to bind.
            wait_until(lambda: rig.get("acme.kura.test") == "200 acme")
            assert not rig.workers.is_disowned
    assert decided(rig.applied()) == ("reload", "applied")
    assert rig.current != good


def test_a_reload_that_fails_the_same_way_is_told_in_the_same_words(rig: ApplyRig) -> None:
    rig.write(rig.tenant("acme"), rig.tenant("beta"), gateway={"https_ports": [443, 8443]})
    with occupy(rig, 8443):
        first, second = rig.apply(), rig.apply()
    assert first.err == second.err


def test_a_reload_whose_certificate_is_gone_leaves_the_last_good_generation(rig: ApplyRig) -> None:
    good, serial = rig.current, rig.serial("acme.kura.test")
    rig.certificate.unlink()
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    ran = rig.apply()
    assert ran.code == 3, ran
    assert "tls.crt" in ran.json["error"]["message"]
    assert (rig.current, rig.serial("acme.kura.test")) == (good, serial)


def test_a_reload_that_fails_takes_back_no_earlier_change(rig: ApplyRig) -> None:
    """The worker's own generation is older than what was changed while it ran."""
    proxy = MasterProxy(rig)
    alias = rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"])
    rig.write(alias, rig.tenant("beta"))
    rig.applied()
    good = rig.current
    # The document stays, and what the worker does not take is a certificate.
    rig.certify()
    proxy.refuse("set ssl cert")
    proxy.refuse("reload\n", "Success=0\n--\n[ALERT]    (1) : nobody knows\n")
    ran = rig.apply(*via(proxy))
    assert (ran.code, "nobody knows" in ran.err) == (3, True), ran
    assert rig.current == good
    assert rig.get("acme.cache.test") == "200 acme"


def test_a_generation_that_was_put_back_does_not_push_out_the_one_that_is_loaded(rig: ApplyRig) -> None:
    for port in range(KEPT_GENERATIONS + 2):
        moved = {"http": {"address": f"{rig.address}:{ELSEWHERE + port}"}}
        rig.write(rig.tenant("acme", backends=moved), rig.tenant("beta"))
        assert decided(rig.applied()) == ("runtime", "applied")
    rig.write(rig.tenant("acme"), rig.tenant("beta"), gateway={"https_ports": [443, 8443]})
    with occupy(rig, 8443):
        assert rig.apply().code == 3
    rig.write(rig.tenant("acme"), rig.tenant("beta"))
    assert decided(rig.applied()) == ("runtime", "applied")


def test_when_a_stranger_gateway_refuses_to_reload_current_stays(rig: ApplyRig) -> None:
    """Nobody knows what it runs, so there is nothing better to put back."""
    proxy = MasterProxy(rig)
    good = rig.current
    proxy.refuse("reload\n", "Success=0\n--\n[ALERT]    (1) : nobody knows\n")
    proxy.rules.insert(0, ("@1 show info", lambda _: "Version: 3.0.11\n"))
    ran = rig.apply(*via(proxy), "--haproxy-version", ".".join(map(str, rig.binary.version[:2])))
    assert ran.code == 3
    assert rig.current == good


def test_the_loaded_generation_is_never_pruned(rig: ApplyRig) -> None:
    worker = rig.pid
    for turn in range(20):
        moved = {"http": {"address": f"{rig.address}:{ELSEWHERE + turn}"}}
        rig.write(rig.tenant("acme", backends=moved), rig.tenant("beta"))
        assert decided(rig.applied()) == ("runtime", "applied")
    assert len(list((rig.out / "generations").iterdir())) <= KEPT_GENERATIONS + 1
    assert rig.pid == worker


def test_a_second_reload_waits_for_its_turn(rig: ApplyRig) -> None:
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    rig.applied()
    rig.write(rig.tenant("acme", ceiling="90M"), rig.tenant("beta"))
    started = time.monotonic()
    ran = rig.cli("--apply", "--json", "--reload-interval-s", "2")
    assert (ran.code, ran.json["outcome"]) == (0, "applied"), ran
    # The worker's age is told in whole seconds.
    assert 0.9 < time.monotonic() - started < 5
    assert "waiting" in ran.err
    # What takes no reload does not wait.
    rig.write(rig.tenant("acme", ceiling="90M", hosts=["acme.cache.test"]), rig.tenant("beta"))
    ran = rig.cli("--apply", "--json", "--reload-interval-s", "100")
    assert (ran.code, ran.json["decision"]) == (0, "runtime"), ran


# A master that is in the way.


def test_a_step_that_is_refused_is_made_good_by_a_reload(rig: ApplyRig) -> None:
    proxy, worker = MasterProxy(rig), rig.pid
    proxy.refuse("add ssl crt-list")
    rig.write(rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"]), rig.tenant("beta"))
    done = rig.applied(*via(proxy))
    assert decided(done) == ("runtime", "applied")
    assert "Sorry." in done["outcome_notes"][0]
    assert rig.pid != worker
    assert rig.get("acme.cache.test") == "200 acme"


def test_a_server_that_does_not_move_is_made_good_by_a_reload(rig: ApplyRig) -> None:
    """Its answer is for people, so only reading it back tells."""
    proxy, worker = MasterProxy(rig), rig.pid
    rig.listen(ELSEWHERE, "moved")
    proxy.refuse("set server")
    rig.write(rig.tenant("acme", backends={"http": {"address": f"{rig.address}:{ELSEWHERE}"}}), rig.tenant("beta"))
    done = rig.applied(*via(proxy))
    assert (decided(done), len(done["outcome_notes"])) == (("runtime", "applied"), 1)
    assert rig.pid != worker
    assert rig.get("acme.kura.test") == "200 moved"


def test_the_reload_that_makes_good_waits_for_its_turn_too(rig: ApplyRig) -> None:
    proxy, worker = MasterProxy(rig), rig.pid
    proxy.refuse("add ssl crt-list")
    rig.write(rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"]), rig.tenant("beta"))
    ran = _deferred(rig, proxy)
    assert ran["outcome"] == "deferred"
    assert rig.pid == worker


def _deferred(rig: ApplyRig, proxy: MasterProxy) -> dict[str, Any]:
    show = rig.master.ask("show proc")
    old = show.replace("# workers", "# workers\n# old workers\n1 worker 1 0d00h00m01s 3.0\n# workers")
    proxy.rules.append(("show proc", lambda _: old))
    ran = rig.apply("--old-workers-max", "1", *via(proxy))
    assert ran.code == 1, ran
    return ran.json


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", ["cut", "stall", "lose_answer"])
@pytest.mark.parametrize("at", ["add ssl crt-list", "prepare map", "commit map", "set ssl cert", "set server"])
def test_a_master_that_fails_halfway_loses_nothing(rig: ApplyRig, way: str, at: str) -> None:
    proxy = MasterProxy(rig)
    rig.listen(ELSEWHERE, "moved")
    getattr(proxy, way)(at)
    serial = rig.certify()
    moved = {"http": {"address": f"{rig.address}:{ELSEWHERE}"}}
    rig.write(rig.tenant("acme", hosts=["acme.cache.test"], backends=moved), rig.tenant("beta"))
    ran = rig.apply(*via(proxy))
    assert ran.code in {0, 3, 4}, ran
    assert "internal" not in ran.out
    assert rig.get("beta.kura.test") == "200 beta"
    assert rig.loads()
    rig.applied()
    assert decided(rig.applied()) == ("none", "unchanged")
    assert [rig.get(host) for host in ("acme.cache.test", "acme.kura.test")] == ["200 moved", "refused"]
    assert rig.serial("beta.kura.test") == serial


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", ["cut", "stall"])
def test_a_reload_without_an_answer_is_unknown_and_not_refused(rig: ApplyRig, way: str) -> None:
    proxy, worker = MasterProxy(rig), rig.pid
    getattr(proxy, way)("reload\n")
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    ran = rig.apply(*via(proxy))
    assert (ran.code, ran.json["error"]["code"]) == (4, "state_unknown"), ran
    assert (rig.pid, rig.get("acme.kura.test"), rig.loads()) == (worker, "200 acme", True)
    assert decided(rig.applied()) == ("reload", "applied")


def test_a_reload_whose_answer_is_lost_is_read_back(rig: ApplyRig) -> None:
    proxy, worker = MasterProxy(rig), rig.pid
    proxy.lose_answer("reload\n")
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    assert decided(rig.applied(*via(proxy))) == ("reload", "applied")
    assert rig.pid != worker
    assert decided(rig.applied()) == ("none", "unchanged")


@pytest.mark.usefixtures("quick")
def test_a_master_that_never_answers_is_unknown_within_the_time_for_it(rig: ApplyRig) -> None:
    good = rig.current
    proxy = MasterProxy(rig)
    proxy.stall("")
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    started = time.monotonic()
    ran = rig.apply(*via(proxy))
    assert time.monotonic() - started < 3
    assert (ran.code, ran.json["error"]["code"]) == (4, "state_unknown")
    assert rig.current == good


def test_without_a_gateway_the_files_are_written_for_its_start(rig: ApplyRig) -> None:
    rig.stop()
    rig.write(rig.tenant("acme"), rig.tenant("beta"), rig.tenant("gamma"))
    ran = rig.apply()
    assert (ran.code, ran.json["outcome"], ran.json["changed"]) == (1, "not running", True), ran
    rig.start()
    assert rig.get("gamma.kura.test") == "200 gamma"
    assert decided(rig.applied()) == ("none", "unchanged")


def test_a_chain_too_long_for_the_buffer_is_served_after_all(rig: ApplyRig) -> None:
    serial = rig.certify()
    chain = rig.certificate.read_bytes()
    more = b"".join(rig.authority.issue_cert(f"filler{n}.test").cert_chain_pems[0].bytes() for n in range(30))
    rig.certificate.write_bytes(chain + more)
    done = rig.applied()
    assert "a reload, since" in done["outcome_notes"][0]
    assert rig.serial("acme.kura.test") == serial
    assert decided(rig.applied()) == ("none", "unchanged")


# What is asked for.


def test_an_empty_document_needs_to_be_allowed(rig: ApplyRig) -> None:
    good = rig.current
    rig.write()
    ran = rig.apply()
    assert (ran.code, ran.json["error"]["code"]) == (3, "empty"), ran
    assert (rig.current, rig.get("acme.kura.test")) == (good, "200 acme")
    assert decided(rig.applied("--allow-empty"))[1] == "applied"
    assert rig.get("acme.kura.test") == "refused"
    assert decided(rig.applied()) == ("none", "unchanged")


def snapshot(rig: ApplyRig) -> tuple[object, ...]:
    files = {str(path): path.lstat().st_mtime_ns for path in sorted(rig.out.rglob("*"))}
    maps = [rig.master.ask(f"@1 show map {rig.out}/current/{name}.map") for name in ("sni", "mark", "peer", "grpc")]
    return files, maps, rig.pid, rig.current


def test_diff_changes_nothing(rig: ApplyRig) -> None:
    before = snapshot(rig)
    rig.write(rig.tenant("acme", hosts=["acme.cache.test"]), rig.tenant("beta"))
    ran = rig.cli("--apply", "--diff")
    assert ran.code == 1
    assert "+acme.cache.test acme\n" in ran.out
    assert "decision   runtime" in ran.out
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    ran = rig.cli("--apply", "--diff", "--json")
    assert (ran.code, ran.json["decision"]) == (1, "reload")
    assert rig.spawn("--watch", "--diff").wait(timeout=5) == 2
    rig.write(rig.tenant("acme"), rig.tenant("beta"))
    assert rig.cli("--apply", "--diff").code == 0
    after = snapshot(rig)
    assert after[1:] == before[1:]
    assert after[0] == before[0]


def test_directory_certificates_with_odd_names_are_no_crash(rig: ApplyRig) -> None:
    directory = rig.directory / "certs"
    directory.mkdir()
    issued = rig.authority.issue_cert("*.kura.test", "*.cache.test").private_key_and_cert_chain_pem.bytes()
    for name in ("a.pem", "b c.pem", "ü.pem", "d;e.pem"):
        (directory / name).write_bytes(issued)
    rig.options = ["--certificate-dir", str(directory)]
    for _ in range(2):
        ran = rig.apply()
        assert ran.code in {0, 1}, ran
    assert ran.json["decision"] == "none", ran
    assert rig.get("acme.kura.test") == "200 acme"


def test_a_directory_of_certificates_is_rotated_and_grows(rig: ApplyRig) -> None:
    directory = rig.directory / "certs"
    directory.mkdir()
    rig.options = ["--certificate-dir", str(directory)]

    def issue(file: str, name: str) -> None:
        (directory / file).write_bytes(rig.authority.issue_cert(name).private_key_and_cert_chain_pem.bytes())

    issue("kura.pem", "*.kura.test")
    assert decided(rig.applied()) == ("reload", "applied")
    worker, serial = rig.pid, rig.serial("acme.kura.test")
    issue("kura.pem", "*.kura.test")
    assert decided(rig.applied()) == ("runtime", "applied")
    assert rig.serial("acme.kura.test") != serial
    assert rig.pid == worker
    issue("cache.pem", "*.cache.test")
    rig.write(rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"]), rig.tenant("beta"))
    done = rig.applied()
    assert (decided(done), "is new" in done["reasons"][0]) == (("reload", "applied"), True)
    assert rig.get("acme.cache.test") == "200 acme"


def test_a_gateway_of_another_branch_than_the_program_here_is_served_as_well(rig: ApplyRig) -> None:
    """What the one here says about files for another branch says nothing about them."""
    rig.binary = haproxy_of(next(version for version in VERSIONS if version != f"3.{rig.binary.version[1]}"))
    rig.write(rig.tenant("acme", hosts=["acme.kura.test", "acme.cache.test"]), rig.tenant("beta"))
    assert decided(rig.applied()) == ("runtime", "applied")
    rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
    assert decided(rig.applied()) == ("reload", "applied")
    assert decided(rig.applied()) == ("none", "unchanged")
