"""A watch on a clock that a test moves: when it looks, what it does then, and what it says about it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from gateway_model import ACME, BETA, FakeGateway, document
from prometheus_client import CollectorRegistry

from kura_shaper.clock import FakeClock
from kura_shaper.errors import DocumentError, StateUnknownError, UsageError
from kura_shaper.haproxy.apply import ReloadPolicy, Site
from kura_shaper.haproxy.decide import Kind
from kura_shaper.haproxy.master import MasterSocket
from kura_shaper.haproxy.metrics import WatchMetrics
from kura_shaper.haproxy.options import GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.watch import Watch, stamp_of
from kura_shaper.haproxy.write import read_generation, write_generation
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tenants.document import TenantsDocument

OLD = document(ACME, BETA)
FAILURE = "Success=0\n--\n[ALERT]    (1) : no\n"


def alias(host: str) -> TenantsDocument:
    return document(replace(ACME, hosts=("acme.kura.test", host)), BETA)


def ceiling(rate: str) -> TenantsDocument:
    return document(replace(ACME, ceiling=Rate.parse(rate)), BETA)


class Scene:
    """A watch, its source, its gateway and its clock."""

    def __init__(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="kura_shaper")
        logging.getLogger("kura_shaper").propagate = True
        self.caplog, self.source, self.clock = caplog, tmp_path / "tenants.yaml", FakeClock(10**9)
        options = GatewayOptions(
            (3, 0, 11),
            directory=PurePosixPath(tmp_path, "out", "current"),
            run_directory=PurePosixPath("/absent"),
            certificate=PurePosixPath(tmp_path, "tls.crt"),
        )
        out = tmp_path / "out"
        write_generation(render(OLD, options), out)
        self.gateway = FakeGateway(options, files=lambda: read_generation(out))
        self.gateway.load(read_generation(out))
        self.site = Site(options, out, self.gateway, policy=ReloadPolicy(30, 8))
        self.found: TenantsDocument | Exception = OLD
        self.looks = 0
        self.watch = Watch(self._load, self._site, sources=lambda: [self.source], clock=self.clock, resync_s=60)
        self.publish(OLD)

    def _load(self) -> TenantsDocument:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def _site(self) -> Site:
        self.looks += 1
        return self.site

    def publish(self, found: TenantsDocument | Exception) -> None:
        self.found = found
        temporary = self.source.with_suffix(".new")
        temporary.write_text(repr(found))
        temporary.replace(self.source)

    def pass_s(self, seconds: int) -> None:
        """Let time pass, a look each second."""
        for _ in range(seconds):
            self.clock.wait_ns(10**9)
            self.gateway.age_s += 1
            self.watch.step()

    @property
    def names(self) -> set[str]:
        return {row.split(" ")[0] for row in self.gateway.maps[self.site.options.file("sni.map")]}

    def said(self) -> list[str]:
        """Return the events since the last time it was asked."""
        events = [record.getMessage() for record in self.caplog.records if record.name.startswith("kura_shaper")]
        self.caplog.clear()
        return events


@pytest.fixture
def scene(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Scene:
    made = Scene(tmp_path, caplog)
    made.watch.step()
    assert made.said() == []
    return made


def test_a_change_is_done_at_the_next_look_and_said_once(scene: Scene) -> None:
    scene.publish(alias("one.test"))
    scene.pass_s(1)
    assert "one.test" in scene.names
    assert scene.said() == ["gateway_applied"]
    scene.pass_s(300)
    assert scene.said() == []
    assert scene.watch.state.decisions == {Kind.NONE: 0, Kind.RUNTIME: 1, Kind.RELOAD: 0}
    assert scene.watch.state.in_step


def test_between_looks_at_the_gateway_lies_the_resync(scene: Scene) -> None:
    assert scene.looks == 1
    scene.pass_s(59)
    assert scene.looks == 1
    scene.gateway.maps[scene.site.options.file("sni.map")].clear()
    scene.pass_s(1)
    assert scene.looks == 2
    assert scene.names == {"acme.kura.test", "beta.kura.test"}
    assert scene.said() == ["gateway_applied"]
    scene.pass_s(120)
    assert scene.looks == 4


@pytest.mark.parametrize("fault", [DocumentError("no"), UsageError("no"), OSError("gone")])
def test_a_bad_document_leaves_the_last_good_one_in_force(scene: Scene, fault: Exception) -> None:
    scene.publish(alias("one.test"))
    scene.pass_s(1)
    scene.said()
    scene.publish(fault)
    scene.pass_s(200)
    assert scene.said() == ["source_failed"]
    assert not scene.watch.state.source_valid
    scene.gateway.maps[scene.site.options.file("sni.map")].clear()
    scene.pass_s(60)
    assert "one.test" in scene.names
    assert scene.said() == ["gateway_applied"]
    scene.publish(alias("two.test"))
    scene.pass_s(1)
    assert scene.said() == ["source_recovered", "gateway_applied"]
    assert (scene.watch.state.source_valid, "two.test" in scene.names) == (True, True)


def test_another_fault_is_said_too(scene: Scene) -> None:
    for fault in ("one", "one", "two"):
        scene.publish(UsageError(fault))
        scene.pass_s(1)
    assert scene.said() == ["source_failed", "source_failed"]


def test_without_any_good_document_nothing_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path, caplog)
    scene.publish(UsageError("no"))
    scene.watch.step()
    scene.pass_s(100)
    assert (scene.looks, scene.gateway.asked, scene.said()) == (0, [], ["source_failed"])
    scene.publish(alias("one.test"))
    scene.pass_s(1)
    assert "one.test" in scene.names


def test_an_apply_that_fails_is_tried_again_ever_later(scene: Scene) -> None:
    scene.gateway.refuses, scene.gateway.refusal = "show proc", ""
    scene.publish(alias("one.test"))
    tries = []
    for second in range(1, 200):
        before = scene.looks
        scene.pass_s(1)
        if scene.looks > before:
            tries.append(second)
    assert tries == [1, 3, 7, 15, 31, 63, 123, 183]
    assert scene.said() == ["apply_failed"]
    assert (scene.watch.state.failures, scene.watch.state.in_step) == (8, False)
    scene.gateway.refuses = "nothing"
    scene.pass_s(60)
    assert scene.said() == ["apply_recovered", "gateway_applied"]
    assert scene.watch.state.in_step
    # And the next failure begins anew.
    scene.gateway.refuses = "show proc"
    while not scene.said():
        scene.pass_s(1)
    before = scene.looks
    scene.pass_s(2)
    assert scene.looks == before + 1


def test_a_changed_document_is_tried_at_once_whatever_failed_before(scene: Scene) -> None:
    scene.gateway.refuses, scene.gateway.refusal = "show proc", ""
    scene.publish(alias("one.test"))
    scene.pass_s(64)
    scene.gateway.refuses = "nothing"
    scene.publish(alias("two.test"))
    scene.pass_s(1)
    assert "two.test" in scene.names


def test_a_reload_that_failed_is_not_tried_again_for_long(scene: Scene) -> None:
    scene.gateway.refuses, scene.gateway.refusal = "reload", FAILURE
    scene.publish(ceiling("2G"))
    scene.pass_s(600)
    assert scene.gateway.asked.count("reload") == 1
    assert scene.said() == ["apply_failed"]
    scene.pass_s(1)
    assert scene.gateway.asked.count("reload") == 2
    scene.gateway.refuses = "nothing"
    scene.publish(ceiling("3G"))
    scene.pass_s(1)
    assert scene.said() == ["apply_recovered", "gateway_applied"]


def test_a_reload_waits_for_its_turn_and_brings_the_last_document(scene: Scene) -> None:
    scene.publish(ceiling("2G"))
    scene.pass_s(1)
    assert scene.said() == ["gateway_applied"]
    for second in range(5):
        scene.publish(ceiling(f"{second + 3}G"))
        scene.pass_s(2)
    assert (series(scene)["reload_pending"], series(scene)["in_step"]) == (1, 0)
    assert scene.said() == ["reload_waits"]
    assert scene.gateway.asked.count("reload") == 1
    scene.pass_s(30)
    assert scene.said() == ["reload_recovered", "gateway_applied"]
    assert series(scene)["reload_pending"] == 0
    assert scene.gateway.asked.count("reload") == 2
    assert read_generation(scene.site.directory) == render(ceiling("7G"), scene.site.options)


def test_a_reload_that_waits_is_not_waiting_once_something_fails(scene: Scene) -> None:
    scene.gateway.age_s = 0
    scene.publish(ceiling("2G"))
    scene.pass_s(1)
    assert series(scene)["reload_pending"] == 1
    scene.gateway.refuses, scene.gateway.refusal = "show proc", ""
    scene.pass_s(60)
    assert series(scene)["reload_pending"] == 0


def test_a_gateway_that_is_gone_is_said_and_what_it_missed_is_on_disk(scene: Scene) -> None:
    scene.gateway.is_running = False
    scene.publish(alias("one.test"))
    scene.pass_s(10)
    assert scene.said() == ["gateway_waits"]
    assert not scene.watch.state.in_step
    assert read_generation(scene.site.directory) == render(alias("one.test"), scene.site.options)
    scene.gateway.is_running = True
    scene.gateway.load(read_generation(scene.site.directory))
    scene.pass_s(2)
    assert scene.said() == ["gateway_recovered"]
    assert scene.watch.state.in_step


def test_a_stamp_follows_links_and_knows_what_is_missing(tmp_path: Path) -> None:
    for turn in ("1", "2"):
        (tmp_path / f"..{turn}").mkdir()
        (tmp_path / f"..{turn}" / "f").write_text("same")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "f").symlink_to("..data/f")
    (tmp_path / "loop").symlink_to("loop")
    paths = [tmp_path / "f", tmp_path / "absent", tmp_path / "loop"]
    before = stamp_of(paths)
    assert before[1:] == (None, None)
    assert stamp_of(paths) == before
    (tmp_path / "new").symlink_to("..2")
    (tmp_path / "new").replace(tmp_path / "..data")
    assert stamp_of(paths) != before
    os.utime(tmp_path / "f", ns=(1, 1))
    between = stamp_of(paths)
    (tmp_path / "f").write_text("same")
    assert stamp_of(paths) != between


# What Prometheus is told.


def series(scene: Scene, master: Any = None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(WatchMetrics(scene.watch.state, master or scene.gateway, scene.clock))
    return {
        sample.name.removeprefix("kura_shaper_gateway_") + "".join(sorted(sample.labels.values())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_metrics_tell_what_is(scene: Scene) -> None:
    scene.publish(alias("one.test"))
    scene.pass_s(1)
    scene.clock.wait_ns(5 * 10**9)
    scene.gateway.old, scene.gateway.age_s = 2, 77
    found = series(scene)
    assert found.pop(f"generation_info{scene.watch.state.generation}") == 1
    assert found == {
        "source_valid": 1,
        "source_age_seconds": 5,
        "in_step": 1,
        "in_step_age_seconds": 5,
        "reload_pending": 0,
        "tenants": 2,
        "certificate_findings": 0,
        "apply_failures_total": 0,
        "applies_totalnone": 0,
        "applies_totalruntime": 1,
        "applies_totalreload": 0,
        "up": 1,
        "old_workers": 2,
        "worker_age_seconds": 77,
    }


def test_metrics_of_a_gateway_that_is_gone_are_absent_and_up_is_0(scene: Scene, tmp_path: Path) -> None:
    found = series(scene, MasterSocket(tmp_path / "absent"))
    assert found["up"] == 0
    assert not {"old_workers", "worker_age_seconds"} & found.keys()

    class Mute:
        def ask(self, command: str, payload: str = "", *, timeout_s: float = 0) -> str:
            raise StateUnknownError("no answer")

    assert series(scene, Mute())["up"] == 0
