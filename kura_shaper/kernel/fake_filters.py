"""The filters of the fake kernel: which it takes, and which classes they hold."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.tree.model import BpfMatch, DirectBpf, FlowerMatch, FwMatch, OtherMatch

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from kura_shaper.tree.model import Filter, Handle

Key = tuple[int, int, int, int]


def set_filter(filters: dict[Key, Filter], new: Filter) -> int:
    """Add a filter or replace the one with its key; return the errno of why not."""
    for other in _of_priority(filters, new):
        problem = _clash(new, other, replacing=new.key in filters)
        if problem:
            return problem
    filters[new.key] = new
    return 0


def delete_filter(filters: dict[Key, Filter], gone: Filter) -> int:
    """Remove a filter, or with handle 0 all of its priority; return the errno of why not."""
    of_priority = _of_priority(filters, gone)
    if not of_priority:
        return errno.ENOENT
    if not _is_alike(of_priority[0], gone):
        return errno.EINVAL
    if gone.handle == 0:
        for each in of_priority:
            del filters[each.key]
        return 0
    return 0 if filters.pop(gone.key, None) else errno.ENOENT


def is_named(classid: Handle, filters: Iterable[Filter], *, unbound: Container[Key]) -> bool:
    """Whether a filter holds a class, so that it can't be deleted; one that came before its class does not."""
    return any(named_class(each) == classid and each.key not in unbound for each in filters)


def named_class(filter_: Filter) -> Handle | None:
    """Return the class that a filter names; a program only returns a number and names none."""
    return filter_.match.classid if isinstance(filter_.match, FwMatch | FlowerMatch) else None


def _of_priority(filters: dict[Key, Filter], like: Filter) -> list[Filter]:
    return [each for each in filters.values() if (each.parent, each.priority) == (like.parent, like.priority)]


def _is_alike(one: Filter, other: Filter) -> bool:
    """Whether a priority can hold both: it has one protocol and one kind."""
    return one.ethertype == other.ethertype and _kind(one) == _kind(other)


def _kind(filter_: Filter) -> str:
    match filter_.match:
        case BpfMatch() | DirectBpf():
            return "bpf"
        case FwMatch():
            return "fw"
        case FlowerMatch():
            return "flower"
        case OtherMatch(kind):
            return kind


def _clash(new: Filter, other: Filter, *, replacing: bool) -> int:
    """Return the errno of setting a filter where there is another one of its priority."""
    if not _is_alike(other, new):
        return errno.EINVAL
    match new.match, other.match:
        case FwMatch(mask=mask), FwMatch(mask=shared):
            # All fw filters of a priority share the mask of the first (net/sched/cls_fw.c).
            return 0 if mask == shared else errno.EINVAL
        case FlowerMatch() as key, FlowerMatch() as taken:
            # No two flower filters match alike, unless one replaces a third (net/sched/cls_flower.c).
            alike = replace(key, classid=taken.classid) == taken
            return errno.EEXIST if alike and not replacing else 0
    return 0
