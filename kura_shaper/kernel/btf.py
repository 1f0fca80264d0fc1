"""Where a kernel keeps what: byte offsets of members, from the type information that it carries along (BTF).

Read is only what is asked for: one walk over all types notes where each begins, since a type is known
by its number in that order. (Documentation/bpf/btf.rst)
"""

from __future__ import annotations

import errno
import struct
from pathlib import Path

from kura_shaper.kernel.errors import UnsupportedError

_VMLINUX = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_HEADER = struct.Struct("=HBBIIIII")  # magic, version, flags, header's length, types: where and how long, strings
_TYPE = struct.Struct("=III")  # name, what it is, size or the type that it refers to
_MEMBER = struct.Struct("=III")  # name, type, bit offset

_PTR, _STRUCT, _UNION, _TYPEDEF, _FUNC_PROTO = 2, 4, 5, 8, 13
_QUALIFIERS = frozenset({_TYPEDEF, 9, 10, 11, 18})  # const, volatile, restrict, a tag
# What follows a type: so many bytes, and so many for each of its parts.
_MORE = {1: 4, 3: 12, 14: 4, 17: 4}
_MORE_EACH = {_STRUCT: 12, _UNION: 12, 6: 8, _FUNC_PROTO: 8, 15: 12, 19: 12}
_KIND_MAX = 19
_DEPTH_MAX = 16
_BITS = 8


class Btf:
    """The types of one kernel. What it does not have, or not in one meaning only, raises UnsupportedError."""

    def __init__(self, data: bytes) -> None:
        if len(data) < _HEADER.size or _HEADER.unpack_from(data)[0] != _MAGIC:
            raise _unusable("it is no BTF of this kind of processor")
        *_, header, types_at, types_length, strings_at, strings_length = _HEADER.unpack_from(data)
        self._types = data[header + types_at : header + types_at + types_length]
        self._strings = data[header + strings_at : header + strings_at + strings_length]
        self._starts = _starts(self._types)

    def offset(self, struct_name: str, path: str) -> int:
        """Return at which byte of a struct a member is; `a.b` is member b of its member a."""
        found = {at for type_id in self._named(struct_name, _STRUCT) for at in self._members(type_id, path.split("."))}
        if len(found) != 1 or min(found) % _BITS:
            raise _unusable(f"struct {struct_name} has not one {path}")
        return found.pop() // _BITS

    def parameters(self, typedef: str) -> int:
        """Return how many parameters a function has that a typedef names a pointer to."""
        for type_id in self._named(typedef, _TYPEDEF):
            kind, count, _, to = self._type(self._bare(type_id))
            if kind == _PTR:
                kind, count, _, _ = self._type(self._bare(to))
                if kind == _FUNC_PROTO:
                    return count
        raise _unusable(f"it has no function {typedef}")

    def _named(self, name: str, kind: int) -> list[int]:
        at = self._strings.find(b"\0" + name.encode() + b"\0")
        if at < 0:
            return []
        unpack, types = _TYPE.unpack_from, self._types
        found = []
        for type_id, start in enumerate(self._starts):
            named, info, _ = unpack(types, start)
            if named == at + 1 and info >> 24 & 0x1F == kind and type_id:
                found.append(type_id)
        return found

    def _type(self, type_id: int) -> tuple[int, int, bool, int]:
        """Return a type's kind, how many parts it has, whether they are bit fields, and what it refers to."""
        if not 0 < type_id < len(self._starts):
            return 0, 0, False, 0
        _, info, to = _TYPE.unpack_from(self._types, self._starts[type_id])
        return info >> 24 & 0x1F, info & 0xFFFF, bool(info >> 31), to

    def _bare(self, type_id: int) -> int:
        for _ in range(_DEPTH_MAX):
            kind, _, _, to = self._type(type_id)
            if kind not in _QUALIFIERS:
                break
            type_id = to
        return type_id

    def _members(self, type_id: int, path: list[str], depth: int = 0) -> list[int]:
        """Return the bit offsets of members of that path; the members of an unnamed one are its parent's."""
        kind, count, has_bit_fields, _ = self._type(self._bare(type_id))
        if kind not in (_STRUCT, _UNION) or depth > _DEPTH_MAX:
            return []
        found = []
        start = self._starts[self._bare(type_id)] + _TYPE.size
        for at in range(start, start + count * _MEMBER.size, _MEMBER.size):
            name, member, offset = _MEMBER.unpack_from(self._types, at)
            bits = offset & 0xFFFFFF if has_bit_fields else offset
            rest = path if not name else path[1:] if self._is(name, path[0]) else None
            if rest is not None:
                inner = self._members(member, rest, depth + 1) if rest else [0]
                found += [bits + each for each in inner]
        return found

    def _is(self, at: int, name: str) -> bool:
        return self._strings.startswith(name.encode() + b"\0", at)


def read_btf(path: Path = _VMLINUX) -> Btf:
    """Return the types of the running kernel. Raises UnsupportedError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnsupportedError(
            errno.EOPNOTSUPP, "this kernel lacks BTF, or shows none here", doing=f"reading {path}"
        ) from error
    return Btf(data)


def _starts(types: bytes) -> list[int]:
    """Return where each type begins; type 0 is void and not there."""
    starts = [0]
    at, end = 0, len(types)
    unpack = _TYPE.unpack_from
    while at + _TYPE.size <= end:
        starts.append(at)
        info = unpack(types, at)[1]
        kind = info >> 24 & 0x1F
        if kind > _KIND_MAX:
            raise _unusable(f"it has types of kind {kind}, which is not known")
        at += _TYPE.size + _MORE.get(kind, 0) + _MORE_EACH.get(kind, 0) * (info & 0xFFFF)
    return starts


def _unusable(why: str) -> UnsupportedError:
    return UnsupportedError(errno.EOPNOTSUPP, why, doing="reading this kernel's BTF")
