"""Class ids for tenants that have none: chosen once, never changed, and reused late.

The id of a name is a hash of it, and where that is taken the next free one, so the same
names come to the same ids wherever they are allocated. An id that exists is never
changed: metrics, dashboards and marks of running connections know it.

An id whose tenant is gone may still be on connections and in dashboards, so for some days
nobody else gets it. What was freed when can't be seen in the document, so a ledger beside
it (`tenants.yaml.quarantine.yaml`) keeps who had which id; it belongs under version control as
the document does. A tenant that comes back gets its own id back at once.

The document stays as people wrote it. A key is put into its text at the place that the
parser gives, and then the whole is loaded: what does not come out as it was meant is not written.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import yaml

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.tenants import check
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tenants.ledger import Freed, Ledger
from kura_shaper.tenants.marks import TENANT_CLASS_MIN, MarkLayout

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from datetime import datetime

DEFAULT_QUARANTINE = timedelta(days=7)

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BOM = "\ufeff"
_LINE_END = re.compile("[\r\n]")
_LINE_IN_MESSAGE = re.compile(r"\bline ([0-9]+)")


@dataclass(frozen=True, slots=True)
class Missing:
    """A tenant without a class, and the line of its name."""

    tenant: str
    line: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an allocation comes to: nothing is written yet.

    `early` tells of tenants that were given an id by hand while it is still somebody else's.
    """

    text: str
    missing: tuple[Missing, ...]
    assigned: Mapping[str, int]
    ledger: Ledger
    early: tuple[str, ...] = ()


def candidate(name: str, *, class_id_max: int) -> int:
    """Return the id that a name comes to when it is free."""
    digest = hashlib.sha256(name.encode()).digest()
    return TENANT_CLASS_MIN + int.from_bytes(digest[:8]) % (class_id_max - TENANT_CLASS_MIN + 1)


def choose(name: str, taken: Collection[int], *, class_id_max: int) -> int:
    """Return the first id that is free, from the candidate of the name on. Raises UsageError when there is none."""
    count = class_id_max - TENANT_CLASS_MIN + 1
    first = candidate(name, class_id_max=class_id_max) - TENANT_CLASS_MIN
    for step in range(count):
        class_id = TENANT_CLASS_MIN + (first + step) % count
        if class_id not in taken:
            return class_id
    raise UsageError(f"no class is free for {name}", remedy="widen the mask, or wait until freed ids may be used again")


def allocate(
    text: str, ledger: Ledger, *, file: str, now: datetime, quarantine: timedelta = DEFAULT_QUARANTINE
) -> Allocation:
    """Return the text of a document with a class for every tenant. `file` only names it.

    Raises DocumentError for a document that has anything else wrong, with the line in the text as it is.
    """
    content = text.removeprefix(_BOM)
    draft = _Draft(content)
    freed = _freed(draft, ledger, now=now, quarantine=quarantine)
    ids = dict(draft.classes)
    # Ids that are in use or not to be used yet. A name's own freed id is its own.
    taken = {*ids.values(), *(entry.class_id for entry in freed)}
    most = draft.marks.class_id_max
    own = {e.tenant: e.class_id for e in freed if e.class_id not in ids.values() and e.class_id <= most}
    assigned: dict[str, int] = {}
    for name in sorted(place.tenant for place in draft.places):
        class_id = own.get(name) or choose(name, taken, class_id_max=most)
        assigned[name] = class_id
        taken.add(class_id)
    changed = _written(content, draft, assigned, file=file)
    ids |= assigned
    kept = tuple(sorted(entry for entry in freed if ids.get(entry.tenant) != entry.class_id))
    owners = {class_id: name for name, class_id in draft.classes.items()}
    early = tuple(
        f"class {entry.class_id:#x} of {owners[entry.class_id]} was that of {entry.tenant}, "
        f"and free again on {(entry.at + quarantine).date()}"
        for entry in kept
        if entry.class_id in owners
    )
    prefix = text[: len(text) - len(content)]
    missing = tuple(Missing(place.tenant, place.line) for place in draft.places)
    return Allocation(prefix + changed, missing, assigned, Ledger(ids, kept), early)


def _freed(draft: _Draft, ledger: Ledger, *, now: datetime, quarantine: timedelta) -> list[Freed]:
    """Return the ids that nobody may have yet: those freed before, and those that the document no longer has."""
    found = [entry for entry in ledger.freed if now < entry.at + quarantine]
    known = {(entry.class_id, entry.tenant) for entry in found}
    for name, class_id in ledger.held.items():
        if draft.classes.get(name) != class_id and (class_id, name) not in known:
            found.append(Freed(class_id, name, now))
    return found


# The text.


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the class of a tenant belongs: behind its name, in the manner in which the tenant is written."""

    tenant: str
    line: int
    index: int
    before: str
    after: str = ""


class _Draft:
    """What a text says about classes, whatever else is wrong with it: that is told when the whole is loaded."""

    def __init__(self, content: str) -> None:
        self.places: list[_Place] = []
        self.classes: dict[str, int] = {}
        self.marks = MarkLayout()
        self._content = content
        self._line_end = next((end for end in ("\r\n", "\n", "\r") if end in content), "\n")
        try:
            self._events = yaml.parse(content, Loader=_LOADER)
            self._read_document()
        except (yaml.YAMLError, ValueError, OverflowError, StopIteration):
            self.places = []

    def _read_document(self) -> None:
        for event in self._events:
            if isinstance(event, yaml.MappingStartEvent):
                break
        else:
            return
        for key, value in self._entries():
            if key.value == "tenants" and isinstance(value, yaml.SequenceStartEvent):
                self._read_tenants()
            elif key.value == "marks" and isinstance(value, yaml.MappingStartEvent):
                self._read_marks()
            else:
                self._skip(value)

    def _entries(self) -> Iterator[tuple[yaml.ScalarEvent, yaml.Event]]:
        """Give the keys of a mapping that has begun, each with the first event of its value."""
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            if isinstance(key, yaml.ScalarEvent):
                yield key, next(self._events)
            else:  # a key that is no word
                self._skip(key)
                self._skip(next(self._events))

    def _skip(self, event: yaml.Event) -> None:
        depth = 0
        while True:
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth <= 0:
                return
            event = next(self._events)

    def _read_marks(self) -> None:
        for key, value in self._entries():
            if key.value == "mask" and isinstance(value, yaml.ScalarEvent):
                self.marks = _layout(value.value)
            self._skip(value)

    def _read_tenants(self) -> None:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            if isinstance(event, yaml.MappingStartEvent):
                self._read_tenant(is_flow=bool(event.flow_style))
            else:
                self._skip(event)

    def _read_tenant(self, *, is_flow: bool) -> None:
        found: dict[str, tuple[yaml.ScalarEvent, yaml.Event]] = {}
        for key, value in self._entries():
            found[key.value] = (key, value)
            self._skip(value)
        if "name" not in found or not isinstance(found["name"][1], yaml.ScalarEvent):
            return
        key, name = found["name"]
        if "class" not in found:
            self.places.append(self._place(key, name, is_flow=is_flow))
            return
        value = found["class"][1]
        if isinstance(value, yaml.ScalarEvent) and (class_id := _integer(value.value)):
            self.classes[found["name"][1].value] = class_id

    def _place(self, key: Any, name: Any, *, is_flow: bool) -> _Place:
        line, index = name.start_mark.line + 1, name.end_mark.index
        if is_flow:
            return _Place(name.value, line, index, ", class: ")
        new_line = f"{self._line_end}{' ' * key.start_mark.column}"
        if name.start_mark.line != name.end_mark.line:
            return _Place(name.value, line, key.start_mark.index, "class: ", new_line)
        # What else stands on the line is a comment, which belongs to the name.
        end = _LINE_END.search(self._content, index)
        return _Place(name.value, line, end.start() if end else len(self._content), f"{new_line}class: ")


def _layout(mask: str) -> MarkLayout:
    try:
        return MarkLayout(check.integer(mask))
    except UsageError:
        return MarkLayout()


def _integer(content: str) -> int:
    try:
        return check.integer(content)
    except UsageError:
        return 0


def _written(content: str, draft: _Draft, assigned: Mapping[str, int], *, file: str) -> str:
    """Return the text with the assigned ids in it. Raises DocumentError when it is no document then."""
    parts: list[str] = []
    added: list[int] = []
    start = 0
    for place in sorted(draft.places, key=lambda place: place.index):
        parts += [content[start : place.index], f"{place.before}{assigned[place.tenant]:#x}{place.after}"]
        start = place.index
        if "," not in place.before:
            added.append(place.line + len(added) + 1)
    changed = "".join((*parts, content[start:]))
    try:
        document = parse_tenants(changed, file=file)
    except DocumentError as error:
        raise _at_home(error, added) from error
    found = {tenant.name: tenant.class_id for tenant in document.tenants}
    for place in draft.places:
        if found.get(place.tenant) != assigned[place.tenant]:
            remedy = f"write class: {assigned[place.tenant]:#x} there yourself"
            raise DocumentError(
                f"{place.tenant} can't be given a class here", file=file, line=place.line, remedy=remedy
            )
    return changed


def _at_home(error: DocumentError, added: list[int]) -> DocumentError:
    """Return an error about a text with lines that were added as one about the text without them."""

    def home(line: int) -> int:
        return line - sum(new < line for new in added)

    message = _LINE_IN_MESSAGE.sub(lambda match: f"line {home(int(match[1]))}", error.message)
    return DocumentError(message, file=error.file, line=home(error.line), path=error.path, remedy=error.remedy)
