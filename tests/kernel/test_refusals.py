"""What the kernel refuses comes back typed, at its place in a batch, in the kernel's own words."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
from kernel_trees import ACME, MBIT, ROOT_HANDLE, ZETA, htb_class

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.errors import (
    AlreadyThereError,
    InUseError,
    InvalidError,
    KernelRefusedError,
    NoPermissionError,
    NotThereError,
    UnsupportedError,
    refusal,
)
from kura_shaper.tree import params
from kura_shaper.tree.model import ROOT, Bfifo, Filter, Handle, HtbQdisc, Leaf, LeafKind, OtherMatch, OtherQdisc
from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteRoot,
    Operation,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
)
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Network

pytestmark = pytest.mark.privileged

QDISC = HtbQdisc(ROOT_HANDLE, ROOT, 2, 1000)
INNER, MISSING = Handle(0x20, 0x100), Handle(0x20, 0x300)
SMALL_LEAF = Bfifo(1_000_000)
# ACME is below INNER, and both are on the device.
TREE: list[Operation] = [AddRoot(QDISC), AddClass(htb_class(INNER)), AddClass(htb_class(ACME, parent=INNER))]

REFUSALS: list[tuple[Operation, int, type[KernelRefusedError], str]] = [
    (AddClass(htb_class(ACME, parent=INNER)), errno.EEXIST, AlreadyThereError, ""),
    (ChangeClass(htb_class(MISSING)), errno.ENOENT, NotThereError, ""),
    (DeleteClass(MISSING), errno.ENOENT, NotThereError, ""),
    (SetLeaf(Leaf(Handle(0x300), MISSING, SMALL_LEAF)), errno.ENOENT, NotThereError, "Specified class not found"),
    (AddClass(htb_class(Handle(0x21, 5))), errno.EINVAL, InvalidError, ""),
    (DeleteRoot(Handle(0x77)), errno.EINVAL, InvalidError, "Invalid handle"),
    (DeleteClass(INNER), errno.EBUSY, InUseError, ""),  # Linux 6.1 has no words for it
    (
        AddRoot(HtbQdisc(ROOT_HANDLE, ROOT, 3, 1000)),
        errno.EINVAL,
        InvalidError,
        "Change operation not supported by specified qdisc",
    ),
    (
        RestoreQdisc(OtherQdisc("nosuchkind", Handle(0x99), ROOT)),
        errno.ENOENT,
        UnsupportedError,
        "Specified qdisc kind is unknown",
    ),
    (
        SetFilter(Filter(ROOT_HANDLE, 7, 0x0003, 1, OtherMatch("nosuchkind"))),
        errno.ENOENT,
        UnsupportedError,
        "TC classifier not found",
    ),
]


def send(network: Network, *operations: Operation, ifindex: int = 0) -> list[KernelRefusedError | None]:
    return network.client().send(operations, ifindex or network.device.ifindex)


@pytest.mark.parametrize(("operation", "number", "kind", "words"), REFUSALS)
def test_a_refusal_is_typed_by_its_errno_says_the_kernels_words_and_changes_nothing(
    network: Network, operation: Operation, number: int, kind: type[KernelRefusedError], words: str
) -> None:
    assert send(network, *TREE) == [None] * len(TREE)
    before = network.read()
    (refused,) = send(network, operation)
    assert type(refused) is kind
    assert refused.errno == number
    assert refused.exit_code == 3
    assert words in refused.detail
    assert str(refused).startswith(f"{operation.describe()}: the kernel says {errno.errorcode[number]}: ")
    after = network.read()
    assert (after.root, after.classes, after.leaves) == (before.root, before.classes, before.leaves)


EVERY_KIND: list[Operation] = [
    AddRoot(QDISC),
    AddClass(htb_class(MISSING)),
    ChangeClass(htb_class(ACME)),
    SetLeaf(Leaf(Handle(0x2A7), ACME, SMALL_LEAF)),
    SetFilter(Filter(ROOT_HANDLE, 7, 0x0003, 1, OtherMatch("bpf"))),
    DeleteFilter(Filter(ROOT_HANDLE, 7, 0x0003, 1, OtherMatch("bpf"))),
    DeleteClass(ACME),
    RestoreQdisc(OtherQdisc("pfifo", Handle(0x99), ROOT)),
    DeleteRoot(ROOT_HANDLE),
]


def test_without_privilege_every_operation_is_refused_as_such(
    network: Network, in_child: Callable[[Callable[[], None]], Any], drop_capabilities: Callable[[], None]
) -> None:
    send(network, *TREE)
    before = network.read()

    def unprivileged() -> None:
        drop_capabilities()
        refused = send(network, *EVERY_KIND)
        print(*(type(error).__name__ for error in refused))

    ended = in_child(unprivileged)
    assert ended.stdout.split() == [NoPermissionError.__name__] * len(EVERY_KIND), ended.stderr
    assert network.read().classes == before.classes


@pytest.mark.parametrize("operation", EVERY_KIND, ids=lambda operation: type(operation).__name__)
def test_a_device_that_is_gone_is_said_to_be(network: Network, operation: Operation) -> None:
    (refused,) = send(network, operation, ifindex=4_000)
    assert type(refused) is NotThereError
    assert refused.errno == errno.ENODEV


@pytest.mark.case("C7")
def test_a_change_of_a_class_that_is_gone_makes_none(network: Network) -> None:
    """Case C7."""
    send(network, AddRoot(QDISC))
    assert [type(error) for error in send(network, ChangeClass(htb_class(ACME)))] == [NotThereError]
    assert network.read().classes == {}


# A batch has 256 messages, and only its last one asks for an answer.
@pytest.mark.parametrize(
    "wrong", [{0}, {599}, {255}, {256}, {254, 255, 256, 257}, {511, 512}, set(range(600)), set(range(0, 600, 7))]
)
def test_a_refusal_stands_at_its_place_among_600_and_stops_no_other(network: Network, wrong: set[int]) -> None:
    send(network, *TREE)
    classids = [Handle(0x20, 0x1000 + at) for at in range(600)]
    refused = send(
        network,
        *(
            ChangeClass(htb_class(classid)) if at in wrong else AddClass(htb_class(classid))
            for at, classid in enumerate(classids)
        ),
    )
    assert {at for at, error in enumerate(refused) if error is not None} == wrong
    assert {type(error) for error in refused if error is not None} <= {NotThereError}
    made = network.read().classes.keys() - {INNER, ACME}
    assert made == {classid for at, classid in enumerate(classids) if at not in wrong}


class Deaf(TcClient):
    """Loses what the socket would have said, once."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error: OSError | None = error

    def _receive(self) -> memoryview:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return super()._receive()


def test_answers_that_were_lost_are_no_refusals_and_a_reading_tells(network: Network) -> None:
    send(network, *TREE)
    operations: list[Operation] = [AddClass(htb_class(ZETA)), ChangeClass(htb_class(MISSING)), DeleteClass(MISSING)]
    with Deaf(OSError(errno.ENOBUFS, "lost")) as client:
        client.send(operations, network.device.ifindex)
        assert client.send([AddClass(htb_class(MISSING))], network.device.ifindex) == [None]
    assert network.read().classes.keys() == {INNER, ACME, ZETA, MISSING}


def test_a_kernel_that_does_not_answer_leaves_the_state_unknown(network: Network) -> None:
    with Deaf(TimeoutError()) as client:
        with pytest.raises(StateUnknownError, match="did not answer"):
            client.send(TREE, network.device.ifindex)
        # The late answer is of no harm to what comes next.
        assert client.send([AddClass(htb_class(ZETA))], network.device.ifindex) == [None]
    assert network.read().classes.keys() == {INNER, ACME, ZETA}


def test_message_numbers_start_again_after_the_largest(network: Network) -> None:
    with TcClient() as client:
        client._last_number = 0xFFFFFFFF - 1
        operations = [*TREE, ChangeClass(htb_class(MISSING))]
        refused = client.send(operations, network.device.ifindex)
        assert [type(error) for error in refused] == [type(None)] * 3 + [NotThereError]
    assert network.read().classes.keys() == {INNER, ACME}


def test_nothing_to_do_sends_nothing(network: Network) -> None:
    assert send(network) == []


def test_an_errno_that_nobody_listed_is_still_a_refusal() -> None:
    error = refusal(errno.EXFULL, "its words", doing="trying")
    assert type(error) is KernelRefusedError
    assert str(error) == "trying: the kernel says EXFULL: its words; see the kernel's own words above"
    assert refusal(9999).errno == 9999


def test_a_leaf_that_the_kernel_lacks_is_unsupported(network: Network, capabilities: Any) -> None:
    missing = [kind for kind in LeafKind if kind not in capabilities.leaves]
    if not missing:
        pytest.skip("this kernel has every kind of leaf")
    leaf = Leaf(Handle(0x2A7), ACME, params.leaf_parameters(missing[0], Rate(MBIT), network.device))
    refused = send(network, *TREE, SetLeaf(leaf))[-1]
    assert type(refused) is UnsupportedError
    assert refused.hint == "this kernel lacks it"
