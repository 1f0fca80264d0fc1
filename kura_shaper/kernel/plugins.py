"""The general netlink library for cold paths, with the kinds that it lacks and a guard before it.

The product programs its tree with `wire` and `client`. What is set up once and is not
ours (the mechanism that the lab compares with, the qdiscs beside our HTB) goes through
pyroute2. It has no plugin for fq and mq, and gives a kind that it does not know the
parent `root`, so that a replace below a class takes the whole tree away with status 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyroute2 import IPBatch
from pyroute2.netlink import nla
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.tcmsg import plugins

from kura_shaper.errors import UsageError
from kura_shaper.kernel import wire
from kura_shaper.kernel.errors import refusal
from kura_shaper.tree.model import ROOT, Handle

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_VERBS, _OBJECTS = ("add", "change", "replace"), ("", "-class", "-filter")
_COMMANDS = frozenset(verb + what for verb in _VERBS for what in _OBJECTS) | {"del", "del-class"}
_RATES = ("rate", "ceil", "peak", "flow_max_rate")

# include/uapi/linux/pkt_sched.h, TCA_FQ_*, in order.
_FQ_ATTRIBUTES = (
    *(("UNSPEC", "none"), ("PLIMIT", "uint32"), ("FLOW_PLIMIT", "uint32"), ("QUANTUM", "uint32")),
    *(("INITIAL_QUANTUM", "uint32"), ("RATE_ENABLE", "uint32"), ("FLOW_DEFAULT_RATE", "uint32")),
    *(("FLOW_MAX_RATE", "uint32"), ("BUCKETS_LOG", "uint32"), ("FLOW_REFILL_DELAY", "uint32")),
    *(("ORPHAN_MASK", "uint32"), ("LOW_RATE_THRESHOLD", "uint32"), ("CE_THRESHOLD", "uint32")),
    *(("TIMER_SLACK", "uint32"), ("HORIZON", "uint32"), ("HORIZON_DROP", "uint8")),
)


class _FqOptions(nla):  # type: ignore[misc]  # the library has no types
    nla_map = tuple((f"TCA_FQ_{name}", kind) for name, kind in _FQ_ATTRIBUTES)


class Fq:
    """fq by the names of its attributes in lower case: plimit, flow_plimit, quantum, horizon (in us)."""

    parent = ROOT.u32
    options = _FqOptions

    @staticmethod
    def get_parameters(given: dict[str, Any]) -> dict[str, Any]:
        """Return the options as the library wants them."""
        names = [name.lower() for name, _ in _FQ_ATTRIBUTES]
        return {"attrs": [[f"TCA_FQ_{name.upper()}", given[name]] for name in names if name in given]}


class Mq:
    """mq: a qdisc for each transmit queue, without options."""

    parent = ROOT.u32


def register() -> None:
    """Add the plugins that the library lacks; those it has by then stay."""
    plugins.setdefault("fq", Fq)
    plugins.setdefault("mq", Mq)


def tc(
    ip: IPRoute,
    command: str,
    kind: str,
    ifindex: int,
    *,
    handle: Handle | int | str = 0,
    parent: Handle | int | str | None = None,
    **parameters: Any,
) -> None:
    """Run one command of `IPRoute.tc`, once the message was built and is what was asked for.

    Without a parent a qdisc goes where its kind belongs. Rates are whole bytes a second.
    Raises UsageError where the library would do something else, KernelRefusedError when
    the kernel says no.
    """
    register()
    _check(command, kind, parameters)
    above = _parent(command, kind, parent)
    request = dict(parameters, index=ifindex, handle=_u32(handle), parent=above)
    # A removal goes by handle; with a kind the library wants a rate for it.
    named = None if command.startswith("del") else kind
    _check_built(_built(command, named, request), ifindex=ifindex, parent=above)
    try:
        ip.tc(command, named, **request)
    except NetlinkError as error:
        raise refusal(error.code, doing=f"{command} {kind}") from error


def _check(command: str, kind: str, parameters: dict[str, Any]) -> None:
    if command not in _COMMANDS:
        raise UsageError(f"{command!r} is no command of tc here", remedy=f"known: {', '.join(sorted(_COMMANDS))}")
    if kind not in plugins:
        raise UsageError(f"no plugin for the kind {kind!r}", remedy="without one it would become the root qdisc")
    for name in _RATES:
        if not isinstance(parameters.get(name, 0), int):
            remedy = "the library can't read a fraction, and takes a bare number for bytes"
            raise UsageError(f"{name} {parameters[name]!r} is not a whole number of bytes a second", remedy=remedy)


def _parent(command: str, kind: str, asked: Handle | int | str | None) -> int:
    if asked is not None:
        return _u32(asked)
    if command == "del-class":
        return 0
    if "-" in command:
        raise UsageError(f"{command} needs a parent", remedy="give the handle of the qdisc or class above")
    return int(plugins[kind].parent)


def _u32(value: Handle | int | str) -> int:
    """Return a handle as 32 bits. Raises UsageError when a half has more than 16."""
    if isinstance(value, int):
        if not 0 <= value <= 0xFFFFFFFF:
            raise UsageError(f"handle {value:#x} is out of range", remedy="a handle has 32 bits")
        return value
    if isinstance(value, str):
        try:
            major, _, minor = value.partition(":")
            value = Handle(int(major or "0", 16), int(minor or "0", 16))
        except ValueError as error:
            raise UsageError(f"{value!r} is no handle", remedy="write major:minor in hex, e.g. 1:10") from error
    return value.u32


def _built(command: str, kind: str | None, request: dict[str, Any]) -> bytes:
    batch = IPBatch()
    try:
        batch.tc(command, kind, **request)
        return bytes(batch.batch)
    finally:
        batch.close()


def _check_built(message: bytes, *, ifindex: int, parent: int) -> None:
    _, built_ifindex, _, built_parent, _ = wire.TCMSG.unpack_from(message, wire.HEADER.size)
    if (built_ifindex, built_parent) != (ifindex, parent):
        problem = f"device {built_ifindex}, parent {built_parent:#x} instead of {ifindex}, {parent:#x}"
        raise UsageError(f"the library built a message for {problem}", remedy="nothing was sent")
