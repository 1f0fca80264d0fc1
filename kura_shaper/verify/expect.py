"""What should be on a device by the document and the settings, worked out from one reading of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build, check_settings
from kura_shaper.tree.model import HostTraffic, LeafKind
from kura_shaper.tree.observe import compare, missing_parts
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.units import Rate
from kura_shaper.verify.observed import Observed

if TYPE_CHECKING:
    from kura_shaper.tree.observe import Asked
    from kura_shaper.verify.observed import NodeReading, Question, Traffic

_HOST_RESERVE = Rate(50_000_000)


def observed_of(question: Question, node: NodeReading, traffic: Traffic | Unknown | None = None) -> Observed:
    """Put the readings beside what they should show."""
    actual = node.snapshot
    if isinstance(actual, Unknown):
        return Observed(question, node, actual, actual, traffic=traffic)
    if is_ours(actual.root) and not missing_parts(actual):
        try:
            compared = compare(actual, question.document, question.asked)
        except KuraShaperError as error:
            none = Unknown(f"there is no tree for this document: {error}")
            return Observed(question, node, none, none, impossible=str(error), traffic=traffic)
        return Observed(question, node, compared.wanted, compared, traffic=traffic)
    none = Unknown("there is no whole tree of ours to compare")
    try:
        wanted = build(
            question.document,
            actual.device,
            settings=_settings(question.asked),
            capabilities=Capabilities(),
        )
    except KuraShaperError as error:
        return Observed(question, node, Unknown(str(error)), none, impossible=str(error), traffic=traffic)
    return Observed(question, node, wanted, none, traffic=traffic)


def _settings(asked: Asked) -> TreeSettings:
    """Return the settings of a tree that is not there: what was asked for, and for the rest what `apply` would take."""
    budget = asked.budget or Rate(0)
    settings = TreeSettings(
        budget=budget,
        # Which shape it would be makes no difference to what fits into the budget.
        shape=ShapeChoice.SINGLE,
        leaf=asked.leaf or LeafKind.FQ_CODEL,
        host_traffic=asked.host_traffic or HostTraffic.OUTSIDE,
        host_reserve=asked.host_reserve or _HOST_RESERVE,
    )
    check_settings(settings)
    return settings
