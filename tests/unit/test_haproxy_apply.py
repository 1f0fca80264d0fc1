"""Applying to a gateway that is a value: what is in force on disk and in the gateway after each way it can end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from gateway_model import ACME, BETA, FakeGateway, FakeServer, document, tenant

from kura_shaper.clock import FakeClock
from kura_shaper.errors import RefusedError, StateUnknownError
from kura_shaper.haproxy.apply import (
    Applied,
    Emptying,
    EmptyingError,
    Outcome,
    ReloadPolicy,
    Site,
    alone,
    carry_out,
    prepare,
    refuse_emptying,
)
from kura_shaper.haproxy.certificates import throwaway_pem
from kura_shaper.haproxy.decide import Kind
from kura_shaper.haproxy.generation import EMPTY
from kura_shaper.haproxy.master import ReloadFailedError
from kura_shaper.haproxy.options import CertificateKind, GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.write import GENERATIONS, read_generation, write_generation
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, TenantsDocument
from kura_shaper.units import Rate

OLD = document(ACME, BETA)
ALIAS = document(replace(ACME, hosts=("acme.kura.test", "alias.test")), BETA)
DEARER = document(replace(ACME, ceiling=Rate.parse("2G")), BETA)
FAILURE = "Success=0\n--\n[ALERT] (1) : no\n"


class Lab:
    """A directory, and a gateway that was started with what is in it."""

    def __init__(self, tmp_path: Path, first: TenantsDocument | None = OLD, **changes: Any) -> None:
        self.options = GatewayOptions(
            (3, 0, 11),
            directory=PurePosixPath(tmp_path, "out", "current"),
            run_directory=PurePosixPath("/absent"),
            certificate=PurePosixPath(tmp_path, "tls.crt"),
        )
        self.out = tmp_path / "out"
        self.gateway = FakeGateway(self.options, files=lambda: read_generation(self.out))
        self.site = replace(Site(self.options, self.out, self.gateway, policy=ReloadPolicy(30, 8)), **changes)
        if first is not None:
            write_generation(render(first, self.options), self.out)
            self.gateway.load(read_generation(self.out))

    def apply(self, new: TenantsDocument) -> Applied:
        return carry_out(prepare(new, self.site), self.site)

    def in_force(self, *documents: TenantsDocument) -> bool:
        return read_generation(self.out) in [render(d, self.options) for d in documents]

    @property
    def names(self) -> set[str]:
        return {row.split(" ")[0] for row in self.gateway.maps[self.options.file("sni.map")]}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def moved(turn: int) -> TenantsDocument:
    return document(
        replace(ACME, backends=Backends(http=Endpoint("10.0.1.1", turn), grpc=Endpoint("10.0.1.1", 5000))), BETA
    )


def test_nothing_is_asked_for_when_nothing_differs(lab: Lab) -> None:
    done = lab.apply(OLD)
    assert (done.outcome, done.decision.kind) == (Outcome.UNCHANGED, Kind.NONE)
    assert all(" show " in f" {command}" for command in lab.gateway.asked)


def test_a_change_while_it_runs_is_on_disk_before_it_is_asked_for(lab: Lab) -> None:
    seen: list[bool] = []
    lab.gateway.after_each = lambda: seen.append(lab.in_force(ALIAS))
    done = lab.apply(ALIAS)
    first = next(n for n, command in enumerate(lab.gateway.asked) if " show " not in f" {command}")
    assert all(seen[first:])
    assert (done.outcome, done.decision.kind, done.notes) == (Outcome.APPLIED, Kind.RUNTIME, ())
    assert "alias.test" in lab.names


def test_a_reload_is_read_back(lab: Lab) -> None:
    done = lab.apply(DEARER)
    assert (done.outcome, done.decision.kind) == (Outcome.APPLIED, Kind.RELOAD)
    assert done.workers
    assert done.workers.current.pid == 101


def test_a_reload_that_brings_another_configuration_is_said(lab: Lab) -> None:
    lab.gateway.files = lambda: render(OLD, lab.options)
    with pytest.raises(RefusedError, match=r"after the reload the gateway runs configuration [0-9a-f]{16}"):
        lab.apply(DEARER)


def test_without_a_gateway_the_files_are_written(tmp_path: Path) -> None:
    lab = Lab(tmp_path, first=None)
    lab.gateway.is_running = False
    assert lab.apply(OLD).outcome is Outcome.NOT_RUNNING
    assert lab.in_force(OLD)


@pytest.mark.parametrize(("age_s", "old", "wait_s"), [(10, 0, 20), (0, 0, 30), (29, 0, 1), (30, 0, 0), (1000, 8, 30)])
def test_a_reload_waits_and_nothing_is_written(lab: Lab, age_s: int, old: int, wait_s: int) -> None:
    lab.gateway.age_s, lab.gateway.old = age_s, old
    done = lab.apply(DEARER)
    assert (done.outcome, done.wait_s) == (Outcome.DEFERRED if wait_s else Outcome.APPLIED, wait_s)
    assert lab.in_force(OLD if wait_s else DEARER)
    assert ("reload" in lab.gateway.asked) is (wait_s == 0)


def test_what_takes_no_reload_does_not_wait(lab: Lab) -> None:
    lab.gateway.age_s, lab.gateway.old = 0, 99
    assert lab.apply(ALIAS).outcome is Outcome.APPLIED


def test_a_refused_step_is_made_good_by_a_reload(lab: Lab) -> None:
    lab.gateway.refuses = "add ssl"
    done = lab.apply(ALIAS)
    assert done.outcome is Outcome.APPLIED
    assert "refused" in done.notes[0]
    assert "alias.test" in lab.names


def test_a_step_that_does_nothing_is_made_good_by_a_reload(lab: Lab) -> None:
    lab.gateway.refuses, lab.gateway.refusal = "set server", "\n"
    done = lab.apply(moved(4999))
    assert done.outcome is Outcome.APPLIED
    assert "did not last: server acme_http/p0" in done.notes[0]
    assert lab.gateway.servers["acme_http/p0"].port == 4999


@pytest.mark.parametrize(("age_s", "old"), [(10, 0), (1000, 8)])
def test_that_reload_waits_for_its_turn_as_well(lab: Lab, age_s: int, old: int) -> None:
    lab.gateway.refuses, lab.gateway.age_s, lab.gateway.old = "add ssl", age_s, old
    done = lab.apply(ALIAS)
    assert (done.outcome, len(done.notes)) == (Outcome.DEFERRED, 2)
    assert done.wait_s > 0
    assert "reload" not in lab.gateway.asked
    lab.gateway.age_s, lab.gateway.old = 1000, 0
    assert lab.apply(ALIAS).outcome is Outcome.APPLIED
    assert "alias.test" in lab.names


class Broken(FakeGateway):
    """Refuses more than one thing."""

    broken: tuple[str, ...] = ()

    def ask(self, command: str, payload: str = "", *, timeout_s: float = 1.0) -> str:
        if command == "reload" and "reload" in self.broken:
            return FAILURE
        if any(words in command for words in self.broken if words != "reload" and " " in words):
            return "Sorry.\n"
        return super().ask(command, payload, timeout_s=timeout_s)


@pytest.fixture
def broken(lab: Lab) -> Broken:
    made = Broken(lab.options, files=lambda: read_generation(lab.out))
    made.load(read_generation(lab.out))
    lab.gateway, lab.site = made, replace(lab.site, master=made)
    return made


def test_a_reload_that_fails_leaves_what_was_in_force(lab: Lab, broken: Broken) -> None:
    lab.apply(ALIAS)
    broken.broken = ("reload",)
    with pytest.raises(ReloadFailedError):
        lab.apply(DEARER)
    assert lab.in_force(ALIAS)
    assert "alias.test" in lab.names


def test_what_was_changed_before_the_reload_failed_is_taken_back(lab: Lab, broken: Broken) -> None:
    """The certificate list grows, and the map that is next is refused."""
    lab.apply(moved(4998))
    broken.broken = ("prepare map", "reload")
    with pytest.raises(ReloadFailedError):
        lab.apply(document(replace(ACME, hosts=("acme.kura.test", "alias.test")), BETA))
    assert lab.in_force(moved(4998))
    assert [host for _, host, _ in broken.rows] == ["acme.kura.test", "beta.kura.test"]
    assert broken.servers["acme_http/p0"].port == 4998


def test_an_unchanged_document_is_never_the_reason_to_go_back(lab: Lab, broken: Broken) -> None:
    lab.apply(ALIAS)
    broken.rows.append(("/c", "evil.test", 99))
    broken.broken = ("del ssl", "reload")
    with pytest.raises(RefusedError):
        lab.apply(ALIAS)
    assert lab.in_force(ALIAS)
    assert "alias.test" in lab.names


def test_after_an_apply_that_was_cut_short_the_newest_that_the_worker_has_is_put_back(lab: Lab, broken: Broken) -> None:
    lab.apply(ALIAS)
    write_generation(render(DEARER, lab.options), lab.out)
    broken.broken = ("reload",)
    for new in (DEARER, document(replace(ACME, ceiling=Rate.parse("3G")), BETA)):
        with pytest.raises(ReloadFailedError):
            lab.apply(new)
        assert lab.in_force(ALIAS)


def test_where_nobody_knows_what_is_loaded_current_stays_as_it_was(lab: Lab, broken: Broken) -> None:
    broken.description, broken.broken = "a stranger", ("reload",)
    for new in (OLD, ALIAS):
        with pytest.raises(ReloadFailedError):
            lab.apply(new)
        assert lab.in_force(OLD)


def test_where_nothing_was_in_force_nothing_is_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path, first=None)
    lab.gateway.refuses, lab.gateway.refusal = "reload", FAILURE
    with pytest.raises(ReloadFailedError):
        lab.apply(OLD)
    assert read_generation(lab.out) == EMPTY


def test_the_loaded_generation_is_kept_through_changes_and_what_is_put_back(lab: Lab, broken: Broken) -> None:
    for turn in range(1, 20):
        assert lab.apply(moved(turn)).decision.kind is Kind.RUNTIME
    broken.broken = ("reload",)
    with pytest.raises(ReloadFailedError):
        lab.apply(DEARER)
    broken.broken = ()
    assert lab.apply(moved(99)).decision.kind is Kind.RUNTIME
    assert len(list((lab.out / GENERATIONS).iterdir())) <= 6


def test_a_place_in_the_files_is_named_and_whose_it_is(lab: Lab) -> None:
    number = render(DEARER, lab.options).text("haproxy.cfg").split("\n").index("backend acme_edge from tcp") + 2
    place = f"[{lab.options.directory}/haproxy.cfg:{number}]"
    lab.gateway.refuses, lab.gateway.refusal = (
        "reload",
        f"Success=0\n--\n[ALERT]    (77) : config : parsing {place} : no\n",
    )
    with pytest.raises(ReloadFailedError) as failed:
        lab.apply(DEARER)
    assert f"haproxy.cfg:{number}: alert: tenant acme: " in str(failed.value)
    assert "77" not in str(failed.value)


class Losing(FakeGateway):
    """Does what it is asked, and loses its answer."""

    loses = ""
    does = True

    def ask(self, command: str, payload: str = "", *, timeout_s: float = 1.0) -> str:
        if self.loses and command.removeprefix("@1 ").startswith(self.loses):
            if self.does:
                super().ask(command, payload)
            raise StateUnknownError("no answer")
        return super().ask(command, payload)


@pytest.mark.parametrize("does", [True, False])
def test_a_reload_whose_answer_is_lost_is_asked_after(lab: Lab, does: bool) -> None:
    losing = Losing(lab.options, files=lambda: read_generation(lab.out))
    losing.load(read_generation(lab.out))
    losing.loses, losing.does = "reload", does
    lab.site = replace(lab.site, master=losing)
    if does:
        assert lab.apply(DEARER).outcome is Outcome.APPLIED
        return
    with pytest.raises(StateUnknownError):
        lab.apply(DEARER)
    losing.loses = ""
    assert lab.apply(DEARER).outcome is Outcome.APPLIED


@pytest.mark.parametrize("does", [True, False])
@pytest.mark.parametrize("at", ["add ssl", "prepare map", "add map", "commit map", "del ssl", "set server"])
def test_a_change_whose_answer_is_lost_is_made_good_by_the_next(lab: Lab, at: str, does: bool) -> None:
    losing = Losing(lab.options, files=lambda: read_generation(lab.out))
    losing.load(read_generation(lab.out))
    losing.loses, losing.does = at, does
    lab.gateway, lab.site = losing, replace(lab.site, master=losing)
    new = document(replace(moved(4999).tenants[0], hosts=("alias.test",)), BETA)
    with pytest.raises(StateUnknownError):
        lab.apply(new)
    losing.loses = ""
    assert lab.apply(new).outcome in {Outcome.APPLIED, Outcome.UNCHANGED}
    assert lab.apply(new).outcome is Outcome.UNCHANGED
    assert lab.names == {"alias.test", "beta.kura.test"}
    assert sorted(host for _, host, _ in losing.rows) == ["alias.test", "beta.kura.test"]


def test_a_map_is_not_emptied_by_accident(lab: Lab) -> None:
    with pytest.raises(EmptyingError, match=r"sni\.map would be empty, and has 2 names"):
        lab.apply(document())
    assert lab.in_force(OLD)
    lab.site = replace(lab.site, emptying=Emptying.ALLOWED)
    assert lab.apply(document()).outcome is Outcome.APPLIED
    lab.site = replace(lab.site, emptying=Emptying.REFUSED)
    assert lab.apply(document()).outcome is Outcome.UNCHANGED


def test_a_plane_whose_ports_go_takes_its_names_along() -> None:
    options = GatewayOptions((3, 2, 26))
    peer = Backends(ACME.backends.http, None, Endpoint("10.0.0.5", 7443))
    before = document(replace(ACME, peer_hosts=("peer.acme.test",), backends=peer))
    nobody = document(replace(ACME, peer_hosts=(), backends=peer))
    with pytest.raises(EmptyingError, match=r"peer\.map"):
        refuse_emptying(render(nobody, options), render(before, options), None)
    closed = replace(nobody, gateway=Gateway(peer_ports=()))
    refuse_emptying(render(closed, options), render(before, options), None)


def test_names_that_only_the_gateway_has_are_not_emptied_either(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (lab.out / "current").unlink()
    with pytest.raises(EmptyingError):
        lab.apply(document())


def test_certificates_that_cannot_be_compared_are_noted_and_change_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    directory.mkdir()
    lab = Lab(tmp_path)
    options = replace(lab.options, certificate=PurePosixPath(directory), certificate_kind=CertificateKind.DIRECTORY)
    lab.site, lab.gateway.options = replace(lab.site, options=options), options
    write_generation(render(OLD, options), lab.out)
    lab.gateway.load(read_generation(lab.out))
    for name in ("b c.pem", "ü.pem", "d;e.pem"):
        (directory / name).write_bytes(throwaway_pem())
    (directory / "binary.pem").write_bytes(b"\xff")
    (directory / "none.pem").write_text("nothing")
    done = lab.apply(OLD)
    assert done.outcome is Outcome.UNCHANGED
    assert len(done.decision.notes) == 5
    (directory / "good.pem").write_bytes(throwaway_pem())
    assert prepare(OLD, lab.site).decision.reasons == (f"certificate {directory}/good.pem is new",)


def test_addresses_of_names_are_left_for_the_new_worker_and_through_no_link(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / "servers.new").symlink_to(victim)
    dns = tenant("dns", 0x105, backends=Backends(http=Endpoint("dns.svc.test", 4000, is_dns_name=True)))
    lab = Lab(tmp_path, first=document(ACME, dns))
    short = Path(f"/proc/self/fd/{os.open(run, os.O_RDONLY)}")
    options = replace(lab.options, run_directory=PurePosixPath(short))
    lab.site, lab.gateway.options = replace(lab.site, options=options), options
    read: list[str] = []

    def files() -> Any:
        read.append((run / "servers.state").read_text())
        return read_generation(lab.out)

    lab.gateway.files = files
    lab.gateway.servers["dns_http/p1"] = FakeServer("10.0.0.7", 4000, 0, "dns.svc.test")
    lab.gateway.servers["dns_http/p2"] = FakeServer("-", 4000, 0, "dns.svc.test")
    assert lab.apply(document(replace(ACME, ceiling=Rate.parse("2G")), dns)).outcome is Outcome.APPLIED
    (state,) = read
    assert " p1 10.0.0.7 " in state
    assert state.count("\n") == 3
    assert victim.read_text() == "precious"
    assert list(run.iterdir()) == [run / "servers.new"] or list(run.iterdir()) == []
    os.close(int(short.name))


def test_two_take_turns_and_the_second_gives_up_after_a_while(tmp_path: Path) -> None:
    clock = FakeClock()
    place = tmp_path / "new" / "out"
    with (
        alone(place, clock),
        pytest.raises(RefusedError, match="another apply has been at work"),
        alone(place, clock, patience_s=3),
    ):
        pass
    assert 3 <= clock.now_ns() / 1e9 < 4
    with alone(tmp_path / "new" / "out", clock):
        pass


def test_the_ports_of_another_door_take_a_reload(lab: Lab) -> None:
    assert lab.apply(replace(OLD, gateway=Gateway(https_ports=(8443,)))).decision.kind is Kind.RELOAD
