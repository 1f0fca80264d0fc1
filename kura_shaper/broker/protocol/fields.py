"""Kinds of fields of a frame: each reads a JSON value, and says the same as JSON Schema.

One table of these is the decoder, the check of what is sent, and the published schema, so
the three can't differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.limits import INTEGER_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Json = dict[str, Any]
_PLACE_CHARACTERS = 64


class Kind(Protocol):
    """What a value may be."""

    def read(self, value: object, place: str) -> Any:
        """Return the value as the frame has it. Raises ProtocolViolationError."""
        ...

    def schema(self) -> Json:
        """Return the same rule as JSON Schema (draft 2020-12)."""
        ...


def _refuse(place: str, wanted: str) -> ProtocolViolationError:
    return ProtocolViolationError(f"{place[:_PLACE_CHARACTERS]} is not {wanted}")


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number. 1.0 and true are none."""

    least: int = 0
    most: int = INTEGER_MAX

    def read(self, value: object, place: str) -> int:
        """See Kind."""
        if type(value) is not int or not self.least <= value <= self.most:
            raise _refuse(place, f"a whole number from {self.least} to {self.most}")
        return value

    def schema(self) -> Json:
        """See Kind."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, value: object, place: str) -> bool:
        """See Kind."""
        if type(value) is not bool:
            raise _refuse(place, "true or false")
        return value

    def schema(self) -> Json:
        """See Kind."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text:
    """A text of so many characters; a pattern is for all of it. Half a surrogate pair is no text."""

    least: int = 1
    most: int = 256
    pattern: str = ""

    def read(self, value: object, place: str) -> str:
        """See Kind."""
        if not isinstance(value, str) or not self.least <= len(value) <= self.most:
            raise _refuse(place, f"a text of {self.least} to {self.most} characters")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise _refuse(place, f"a text of the form {self.pattern}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _refuse(place, "a text that has UTF-8") from error
        return value

    def schema(self) -> Json:
        """See Kind."""
        made: Json = {"type": "string", "minLength": self.least, "maxLength": self.most}
        return made | ({"pattern": f"^{self.pattern}$"} if self.pattern else {})


@dataclass(frozen=True, slots=True)
class TextList:
    """Texts of one kind, none of them twice."""

    each: Text
    least: int
    most: int

    def read(self, value: object, place: str) -> tuple[str, ...]:
        """See Kind."""
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            raise _refuse(place, f"a list of {self.least} to {self.most} texts")
        found = tuple(self.each.read(item, f"{place}[{at}]") for at, item in enumerate(value))
        if len(set(found)) != len(found):
            raise _refuse(place, "a list of different texts")
        return found

    def schema(self) -> Json:
        """See Kind."""
        bounds = {"minItems": self.least, "maxItems": self.most, "uniqueItems": True}
        return {"type": "array", "items": self.each.schema(), **bounds}


@dataclass(frozen=True, slots=True)
class Shape:
    """An object of known fields, made into a value by `make`; what is not known is ignored."""

    make: Callable[..., Any]
    required: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)

    def read(self, value: object, place: str) -> Any:
        """See Kind."""
        if not isinstance(value, dict):
            raise _refuse(place, "an object")
        found: Json = {}
        for name, kind in self.required.items():
            if name not in value:
                raise ProtocolViolationError(f"{place} has no {name}")
            found[name] = kind.read(value[name], f"{place}.{name}")
        for name, kind in self.optional.items():
            if name in value:
                found[name] = kind.read(value[name], f"{place}.{name}")
        return self.make(**found)

    def schema(self) -> Json:
        """See Kind."""
        known = {**self.required, **self.optional}
        return {
            "type": "object",
            "properties": {name: kind.schema() for name, kind in known.items()},
            "required": list(self.required),
        }
