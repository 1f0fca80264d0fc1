"""Where members are, by types that are made up by hand."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from kura_shaper.kernel.btf import Btf, read_btf
from kura_shaper.kernel.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


class Types:
    """BTF that is made up by hand."""

    def __init__(self) -> None:
        self._types, self._strings = b"", b"\0"

    def name(self, text: str) -> int:
        if not text:
            return 0
        at = self._strings.find(b"\0" + text.encode() + b"\0") + 1
        if not at:
            at = len(self._strings)
            self._strings += text.encode() + b"\0"
        return at

    def add(
        self, name: str, kind: int, to: int = 0, *, parts: int = 0, bit_fields: bool = False, more: bytes = b""
    ) -> None:
        info = kind << 24 | parts | bit_fields << 31
        self._types += struct.pack("=III", self.name(name), info, to) + more

    def struct(self, name: str, *members: tuple[str, int, int], bit_fields: bool = False, kind: int = 4) -> None:
        more = b"".join(struct.pack("=III", self.name(member), type_id, at) for member, type_id, at in members)
        self.add(name, kind, 64, parts=len(members), bit_fields=bit_fields, more=more)

    @property
    def data(self) -> bytes:
        header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(self._types), len(self._types), len(self._strings))
        return header + self._types + self._strings


@pytest.fixture
def types() -> Types:
    """Return types of many kinds; their numbers are in the comments."""
    made = Types()
    made.add("int", 1, 4, more=bytes(4))  # 1
    made.add("", 3, more=bytes(12))  # 2
    made.add("color", 6, 4, parts=2, more=bytes(16))  # 3
    made.struct("inner", ("first", 1, 0), ("second", 1, 32))  # 4
    made.add("inner_t", 8, 4)  # 5
    made.add("", 10, 5)  # 6: const
    made.struct("", ("left", 1, 0), ("right", 6, 64), kind=5)  # 7: a union without a name
    made.struct("outer", ("head", 1, 0), ("", 7, 128), ("tail", 6, 256))  # 8
    made.struct("flags", ("one", 1, 1 << 24 | 3), ("whole", 1, 64), bit_fields=True)  # 9
    made.add("", 13, 1, parts=3, more=bytes(24))  # 10: a function of three
    made.add("", 2, 10)  # 11: a pointer to it
    made.add("btf_trace_event", 8, 11)  # 12
    made.add("not_a_function", 8, 1)  # 13
    made.struct("twice", ("member", 1, 0))  # 14
    made.struct("twice", ("member", 1, 64))  # 15
    return made


@pytest.mark.parametrize(
    ("name", "path", "offset"),
    [
        ("inner", "second", 4),
        ("outer", "head", 0),
        ("outer", "left", 16),
        ("outer", "right.second", 16 + 8 + 4),
        ("outer", "tail.first", 32),
        ("flags", "whole", 8),
    ],
)
def test_a_member_is_found_through_typedefs_and_unnamed_unions(types: Types, name: str, path: str, offset: int) -> None:
    assert Btf(types.data).offset(name, path) == offset


@pytest.mark.parametrize(
    ("name", "path"),
    [("nowhere", "x"), ("outer", "x"), ("outer", "head.x"), ("flags", "one"), ("twice", "member"), ("color", "x")],
)
def test_what_is_not_there_or_not_in_one_place_is_refused(types: Types, name: str, path: str) -> None:
    with pytest.raises(UnsupportedError):
        Btf(types.data).offset(name, path)


def test_a_function_has_so_many_parameters(types: Types) -> None:
    assert Btf(types.data).parameters("btf_trace_event") == 3
    for name in ("not_a_function", "nowhere", "outer"):
        with pytest.raises(UnsupportedError):
            Btf(types.data).parameters(name)


def test_types_that_nobody_knows_yet_are_not_guessed_at(types: Types, tmp_path: Path) -> None:
    types.add("later", 30)
    with pytest.raises(UnsupportedError, match="kind 30"):
        Btf(types.data)
    for data in (b"", b"\x9f\xeb", struct.pack(">HBBIIIII", 0xEB9F, 1, 0, 24, 0, 0, 0, 0)):
        with pytest.raises(UnsupportedError):
            Btf(data)
    with pytest.raises(UnsupportedError, match="this kernel lacks BTF"):
        read_btf(tmp_path / "vmlinux")
