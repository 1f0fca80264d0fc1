"""The agent: wakes when something may be different, looks at everything, and mends what is not as it should be.

The loop itself only waits and counts. A look runs beside it in a thread, so that the loop
never stands still, whatever the kernel takes its time for: events are read, a signal is
heard, and the probes see it turn. Stopping, in whatever way, changes nothing in the kernel.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kura_shaper.agent.devices import KeptDevice
from kura_shaper.agent.due import Due
from kura_shaper.agent.events import KernelEvents
from kura_shaper.agent.keeper import Looked, Verdict
from kura_shaper.agent.marker import read_marker
from kura_shaper.agent.view import AgentView
from kura_shaper.errors import KuraShaperError, UsageError
from kura_shaper.kernel.links import egress_devices, read_device
from kura_shaper.log import event
from kura_shaper.tree.model import Shape
from kura_shaper.tree.preflight import Permission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kura_shaper.agent.events import FileEvents
    from kura_shaper.agent.settings import AgentSettings
    from kura_shaper.agent.source import Source, Told
    from kura_shaper.clock import Clock
    from kura_shaper.kernel.retransmits import RetransmitCounter
    from kura_shaper.tenants.marks import MarkLayout
    from kura_shaper.tree.build import Capabilities
    from kura_shaper.units import Rate

_LOG = logging.getLogger("kura_shaper.agent")
_SECOND = 1_000_000_000
_TURN_EVERY_S = 5.0
_RETRY_FIRST_NS, _RETRY_MAX_NS = 2 * _SECOND, 60 * _SECOND
_OUR_FAULT = "a fault of the agent itself, see its log"
# The shaper that this fleet ran before: it shapes the pods' own leg, by a device of this name.
_OTHER_SHAPER_DEVICE, OTHER_SHAPER = "kura-egress0", "egress-tree-agent"


class Agent:
    """One agent of this network namespace. `run` returns when `stop` was called, from whatever thread or signal."""

    def __init__(
        self,
        settings: AgentSettings,
        source: Source,
        capabilities: Capabilities,
        *,
        clock: Clock,
        files: FileEvents | None = None,
        count_retransmits: Callable[[MarkLayout], RetransmitCounter] | None = None,
    ) -> None:
        self.view = AgentView(observes=settings.observe, alive_at_ns=clock.now_ns())
        self._settings, self._source, self._capabilities, self._clock = settings, source, capabilities, clock
        self._files = files
        self._kept: dict[str, KeptDevice] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not with `run`: whoever wakes the agent does not know that it has just ended.
        self._wake_end = weakref.finalize(self, os.close, self._wake_fd)
        # A queue that a signal handler may put to while its own thread takes from it.
        self._wakes: SimpleQueue[str] = SimpleQueue()
        self._is_stopped = False
        self._due = Due(clock.now_ns())
        self._retry_ns = _RETRY_FIRST_NS
        self._said: dict[str, str] = {}
        self._open_counter = count_retransmits
        self._counted_by: MarkLayout | None = None
        self._counters: list[RetransmitCounter] = []

    def stop(self) -> None:
        """Let `run` return, after the look that is under way."""
        self._is_stopped = True
        self.wake("stop")

    def wake(self, reason: str) -> None:
        """Let the agent look soon. For any thread, and for signals; reasons are of a fixed list, for the metrics."""
        self._wakes.put(reason)
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        """Keep everything in step until stopped. Once."""
        with ExitStack() as stack:
            stack.callback(self._close_devices)
            kernel = KernelEvents()
            stack.callback(kernel.close)
            selector = stack.enter_context(selectors.DefaultSelector())
            descriptors = [kernel.fileno(), self._wake_fd, *([self._files.fileno()] if self._files else [])]
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            self._turn(kernel, selector, stack.enter_context(ThreadPoolExecutor(1, "look")))

    def _turn(self, kernel: KernelEvents, selector: selectors.BaseSelector, worker: ThreadPoolExecutor) -> None:
        look: Future[int] | None = None
        while not (self._is_stopped and look is None):
            selector.select(self._patience_s(look))
            self.view.alive_at_ns = self._clock.now_ns()
            self._hear(kernel)
            if look is not None and look.done():
                self._due.no_later(self._clock.now_ns() + look.result())
                look = None
            if look is None and not self._is_stopped and self._clock.now_ns() >= self._due.at_ns:
                self._due.began(self._clock.now_ns() + self._settings.resync_s * _SECOND)
                look = worker.submit(self._look)
                look.add_done_callback(lambda _: os.eventfd_write(self._wake_fd, 1))

    def _close_devices(self) -> None:
        self.view.retransmits = None
        for counter in self._counters:
            counter.close()
        for kept in self._kept.values():
            kept.close()

    def _patience_s(self, look: Future[int] | None) -> float:
        if look is not None:
            return _TURN_EVERY_S
        return min(_TURN_EVERY_S, max(0.0, (self._due.at_ns - self._clock.now_ns()) / _SECOND))

    def _hear(self, kernel: KernelEvents) -> None:
        """Take in what woke the loop."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        kept = self._kept.values()
        balanced = {each.device.ifindex for each in kept if each.is_balanced}
        reasons = set(kernel.drain({each.device.ifindex for each in kept}, balanced))
        if self._settings.devices:
            reasons.discard("route")
        with suppress(Empty):
            while True:
                reasons.add(self._wakes.get_nowait())
        if self._files is not None and self._files.drain():
            reasons.add("file")
        if reasons:
            self.view.wakes.update(reasons)
            self._due.heard(self._clock.now_ns())

    def _look(self) -> int:
        """Look at everything once, and return in how many nanoseconds to look again without a reason."""
        view, began_ns = self.view, self._clock.now_ns()
        view.look_began_ns = began_ns
        try:
            is_well = self._look_at_all()
        except KuraShaperError as error:
            is_well = False
            view.problems = (str(error),)
            self._say("agent", logging.ERROR, str(error))
        except Exception:
            # A fault of ours must not end what watches over the tree; the tree itself stands.
            is_well = False
            view.problems = (_OUR_FAULT,)
            _LOG.exception("look_failed")
        view.looks += 1
        view.looks_seconds += (self._clock.now_ns() - began_ns) / _SECOND
        view.look_began_ns = 0
        if is_well:
            self._say("agent", logging.INFO, "")
            self._retry_ns = _RETRY_FIRST_NS
            again = (device.looked.again_in_ns for device in view.devices.values() if device.looked)
            return min((self._settings.resync_s * _SECOND, *filter(None, again)))
        wait_ns, self._retry_ns = self._retry_ns, min(2 * self._retry_ns, _RETRY_MAX_NS)
        return wait_ns

    def _look_at_all(self) -> bool:
        view = self.view
        view.told = told = self._source.told()
        self._say("source", logging.ERROR, "" if told.is_valid else "; ".join(told.problems) or "nothing was told yet")
        view.disabled = read_marker(self._settings.node_file)
        self._say("disabled", logging.WARNING, f"held off: {view.disabled.reason}" if view.disabled else "")
        if told.document is not None:
            self._count_retransmits(told.document.marks)
        view.other_shapers = tuple(other_shapers())
        self._say("other_shaper", logging.WARNING, ", ".join(view.other_shapers))
        budget = self._settings.budget or told.budget
        problems: list[str] = []
        self._find_devices(problems)
        view.problems = tuple(problems)
        self._say("devices", logging.ERROR, "; ".join(problems))
        view.waiting_for = self._missing(told, budget)
        self._say("waiting", logging.WARNING, view.waiting_for)
        if view.waiting_for or told.document is None or budget is None:
            # No promise and no cap is invented. What stands, stands.
            return told.is_valid and not problems
        results = [self._look_at(kept, told, budget) for kept in self._kept.values()]
        return all(results) and told.is_valid and not problems

    def _count_retransmits(self, marks: MarkLayout) -> None:
        """Count by these marks from now on, in the best way that this node allows."""
        if self._open_counter is None or self._counted_by == marks:
            return
        self._counted_by = marks
        try:
            counter = self._open_counter(marks)
        except KuraShaperError as error:
            self._say("retransmits", logging.WARNING, str(error))
            return
        # The one before stays open until the end: a scrape may be reading it.
        self._counters.append(counter)
        self.view.retransmits = counter
        event(_LOG, "retransmits_counted", way=counter.way, better=[str(refused) for refused in counter.refused])

    def _missing(self, told: Told, budget: Rate | None) -> str:
        if told.document is None:
            return "a tenants document"
        if budget is None:
            return "this node's budget"
        return "" if self._kept else "a device to shape"

    def _find_devices(self, problems: list[str]) -> None:
        """Bring what is kept in line with the devices that there are. What can't be read is kept as it was."""
        found: dict[str, KeptDevice] = {}
        for name in self._names(problems):
            try:
                found[name] = self._keeping(name)
            except UsageError as error:
                problems.append(f"{name}: {error}")
            except (KuraShaperError, OSError) as error:
                problems.append(f"{name}: {error}")
                if name in self._kept:
                    found[name] = self._kept[name]
        before, self._kept = self._kept, found
        self.view.devices = {name: kept.view for name, kept in found.items()}
        for name, kept in before.items():
            if found.get(name) is not kept:
                kept.close()

    def _names(self, problems: list[str]) -> Sequence[str]:
        if self._settings.devices:
            return self._settings.devices
        try:
            # A default route that is gone for a while takes no device from us.
            return egress_devices() or tuple(self._kept)
        except KuraShaperError as error:
            problems.append(str(error))
            return tuple(self._kept)

    def _keeping(self, name: str) -> KeptDevice:
        """Return what keeps the device of this name, made anew when the device is not what it was."""
        device = read_device(name)
        same = [kept for kept in self._kept.values() if kept.device.ifindex == device.ifindex]
        for kept in same:
            if kept.device == device:
                return kept
        made = KeptDevice(device, self._settings.state_dir, self._capabilities, clock=self._clock, wake=self.wake)
        for kept in same:
            made.keeper.follow(kept.keeper)
        return made

    def _look_at(self, kept: KeptDevice, told: Told, budget: Rate) -> bool:
        is_held = self._settings.observe or self.view.disabled is not None
        try:
            looked = self._looked(kept, told, budget, is_held=is_held)
        except Exception:
            # Neither may it cost the other devices anything.
            looked = Looked(Verdict.FAILED, (_OUR_FAULT,))
            _LOG.exception("look_failed")
        kept.view.looked, kept.view.looked_at_ns, kept.view.budget = looked, self._clock.now_ns(), budget
        is_steered = looked.shape is Shape.MQ
        if looked.shape is not None or is_held:
            # A look that came to nothing tells nothing of what stands.
            kept.balance(budget, looked.shaped_queues if is_steered and not is_held else 0)
            kept.peek(is_steered=is_steered)
        self._tell(kept.device.name, looked)
        return looked.verdict.is_well or looked.verdict is Verdict.WOULD_CHANGE

    def _looked(self, kept: KeptDevice, told: Told, budget: Rate, *, is_held: bool) -> Looked:
        assert told.document is not None  # noqa: S101 - the caller has looked
        permission = Permission.DISRUPTION if told.may_disrupt else Permission.NONE
        return kept.keeper.look(told.document, self._settings.tree(budget), observe=is_held, permission=permission)

    def _tell(self, name: str, looked: Looked) -> None:
        """Log what was done, and the beginning and the end of what keeps a device from being in step."""
        if looked.operations and looked.verdict.is_well:
            level = logging.WARNING if looked.verdict is Verdict.REPAIRED else logging.INFO
            drift = dict(looked.drift)
            event(
                _LOG, f"tree_{looked.verdict}", level=level, device=name, operations=len(looked.operations), drift=drift
            )
        self._say(f"device {name}", logging.ERROR, "" if looked.verdict.is_well else "; ".join(looked.reasons))
        self._say(f"foreign {name}", logging.WARNING, ", ".join(looked.foreign))

    def _say(self, subject: str, level: int, words: str) -> None:
        if self._said.get(subject, "") == words:
            return
        self._said[subject] = words
        name = subject.partition(" ")[0]
        if words:
            event(_LOG, name, level=level, subject=subject, reason=words)
        else:
            event(_LOG, f"{name}_over", subject=subject)


def other_shapers() -> Iterable[str]:
    """Return the other shapers of this fleet that are on this node."""
    with suppress(OSError):
        socket.if_nametoindex(_OTHER_SHAPER_DEVICE)
        return (OTHER_SHAPER,)
    return ()
