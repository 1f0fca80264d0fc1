"""What waits for a router, to the byte: what fits exactly is kept, one byte more is not, and all is given back."""

from __future__ import annotations

from random import Random

import pytest

from kura_shaper.broker.protocol.buffer import Budget, StreamBuffer
from kura_shaper.broker.protocol.limits import CHUNK_OVERHEAD_BYTES, MIB, SESSION_BUFFER_BYTES

LEAST = 16_384


@pytest.mark.case("EB28")
def test_at_the_least_budget_252_pieces_of_one_byte_fit_and_no_more() -> None:
    budget = Budget()
    buffer = StreamBuffer(LEAST, budget)
    assert [buffer.put(b"x") for _ in range(253)] == [True] * 252 + [False]
    assert buffer.charged_bytes == budget.used_bytes == 252 * 65


@pytest.mark.parametrize(("length", "fits"), [(LEAST - 64, True), (LEAST - 63, False)])
@pytest.mark.case("EB28")
def test_a_piece_that_fits_exactly_is_kept(length: int, fits: bool) -> None:
    budget = Budget()
    assert StreamBuffer(LEAST, budget).put(bytes(length)) is fits
    assert budget.used_bytes == (LEAST if fits else 0)


@pytest.mark.case("EB30")
def test_the_budget_of_a_session_refuses_whoever_wants_more_and_nobody_else() -> None:
    budget = Budget()
    streams = [StreamBuffer(MIB, budget) for _ in range(65)]
    assert all(stream.put(bytes(MIB - CHUNK_OVERHEAD_BYTES)) for stream in streams[:64])
    assert budget.used_bytes == SESSION_BUFFER_BYTES
    assert not streams[64].put(b"")
    streams[0].drop()
    assert streams[64].put(bytes(MIB - CHUNK_OVERHEAD_BYTES))
    assert budget.high_water_bytes == SESSION_BUFFER_BYTES


def test_what_the_connection_holds_counts_as_well() -> None:
    budget = Budget(1_000)
    budget.outside_bytes = 900
    assert not StreamBuffer(MIB, budget).put(bytes(37))
    assert StreamBuffer(MIB, budget).put(bytes(36))


def test_bytes_come_out_in_order_whatever_is_asked_for_and_the_cost_of_a_piece_goes_with_its_last_byte() -> None:
    for seed in range(200):
        random = Random(seed)
        budget = Budget()
        buffer = StreamBuffer(MIB, budget)
        put, taken = bytearray(), bytearray()
        lengths: list[int] = []
        while len(put) < 20_000 or buffer:
            if len(put) < 20_000 and random.random() < 0.6:
                piece = random.randbytes(random.choice([1, 2, 100, 1_000]))
                assert buffer.put(piece)
                put += piece
                lengths.append(len(piece))
            elif buffer:
                most = random.choice([1, 50, 1_000, 5_000])
                data = buffer.take(most)
                assert len(data) == min(most, buffer.length_bytes + len(data))
                taken += data
                while lengths and sum(lengths) - buffer.length_bytes >= lengths[0]:
                    del lengths[0]
                assert buffer.charged_bytes == buffer.length_bytes + CHUNK_OVERHEAD_BYTES * len(lengths)
        assert put == taken
        assert budget.used_bytes == buffer.length_bytes == 0


def test_a_piece_that_is_asked_for_whole_is_not_copied() -> None:
    buffer = StreamBuffer(MIB, Budget())
    piece = bytes(1_000)
    buffer.put(piece)
    assert buffer.take(65_536) is piece


def test_what_is_dropped_is_given_back_to_the_last_byte() -> None:
    budget = Budget()
    buffer = StreamBuffer(MIB, budget)
    for length in (10, 20, 30):
        buffer.put(bytes(length))
    buffer.take(15)
    buffer.drop()
    assert (budget.used_bytes, buffer.charged_bytes, buffer.length_bytes, bool(buffer)) == (0, 0, 0, False)
    assert buffer.put(b"x")
    assert buffer.take(5) == b"x"
