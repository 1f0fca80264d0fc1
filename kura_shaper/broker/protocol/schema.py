"""JSON Schema of every frame, made from the table that reads them, for the author of another end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.frames import SHAPES

if TYPE_CHECKING:
    from kura_shaper.broker.protocol.fields import Json

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def bus_schema() -> Json:
    """Return the schema of any frame. A frame of a type that is not listed is ignored by both ends.

    `sentBy` says which end may send it: broker, router or both.
    """
    frames = {}
    for name, (sender, shape) in SHAPES.items():
        made = shape.schema()
        made["properties"] = {"type": {"const": name}, **made["properties"]}
        made["required"] = ["type", *made["required"]]
        frames[name] = {**made, "sentBy": sender.value}
    return {
        "$schema": _DIALECT,
        "title": "Event bus v1: the JSON object of each frame",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in frames],
        "$defs": frames,
    }
