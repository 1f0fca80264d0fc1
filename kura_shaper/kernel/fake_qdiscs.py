"""Qdiscs of the fake kernel: what each is called, and what one becomes when it is changed."""

from __future__ import annotations

from dataclasses import replace

from kura_shaper.tree.model import FqCodel, HtbQdisc, Leaf, MqQdisc, OtherQdisc

Qdisc = HtbQdisc | MqQdisc | Leaf | OtherQdisc


def kind_of(qdisc: Qdisc) -> str:
    """Return the kernel's name of its kind."""
    return qdisc.parameters.kind if isinstance(qdisc, Leaf) else qdisc.kind


def plain(qdisc: Qdisc) -> OtherQdisc:
    """Return a qdisc as a dump of all of them has it, but for the options of ours."""
    if isinstance(qdisc, OtherQdisc):
        return qdisc
    return OtherQdisc(str(kind_of(qdisc)), qdisc.handle, qdisc.parent)


def changed_to(
    old: HtbQdisc | Leaf | OtherQdisc, new: HtbQdisc | Leaf | OtherQdisc, *, in_place: bool
) -> HtbQdisc | Leaf | OtherQdisc | None:
    """Return what a qdisc of the same kind and handle becomes; None when the kernel does not change it."""
    if isinstance(new, HtbQdisc):
        return None  # htb knows no change
    if not (isinstance(old, Leaf) and isinstance(new, Leaf)):
        return new
    if not (isinstance(old.parameters, FqCodel) and isinstance(new.parameters, FqCodel)):
        return new
    # The number of flows can be chosen only once, and without in_place it is sent.
    return replace(new, parameters=replace(new.parameters, flows=old.parameters.flows)) if in_place else None
