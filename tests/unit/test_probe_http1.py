"""HTTP/1.1 as the probe reads it: the same whatever pieces it comes in, and bounded whatever comes."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.probe.failures import ClientError, Reason
from kura_shaper.probe.http1 import Response
from kura_shaper.probe.request import Method, Request

REQUEST = Request(authority="acme.test", path="/x")


def read(content: bytes, cuts: list[int] | None = None) -> tuple[Response, int]:
    """Feed an answer in pieces that end at the cuts."""
    response, payload_bytes, begin = Response(REQUEST), 0, 0
    for end in [*sorted({cut for cut in cuts or () if 0 < cut < len(content)}), len(content)]:
        payload_bytes += response.feed(memoryview(content)[begin:end])
        begin = end
    return response, payload_bytes


BODY = b"0123456789" * 7
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b'46;ext="a"\r\n' + BODY + b"\r\n1\r\nx\r\n0\r\nx-trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 70\r\nX: y\r\n\r\n" + BODY


@given(st.sampled_from([(CHUNKED, 71), (SIZED, 70)]), st.lists(st.integers(1, 200), max_size=12))
def test_pieces_make_no_difference(answer: tuple[bytes, int], cuts: list[int]) -> None:
    content, body_bytes = answer
    response, payload_bytes = read(content, cuts)
    assert (response.status, response.is_finished, payload_bytes) == (200, True, body_bytes)


@pytest.mark.parametrize(("content", "body_bytes"), [(CHUNKED, 71), (SIZED, 70)])
def test_it_may_be_cut_anywhere(content: bytes, body_bytes: int) -> None:
    everywhere = list(range(len(content)))
    for cuts in (*([cut] for cut in everywhere), everywhere):
        response, payload_bytes = read(content, cuts)
        assert (response.is_finished, payload_bytes) == (True, body_bytes), cuts


NOISE = st.tuples(st.integers(0, 250), st.binary(min_size=1, max_size=20))


@given(st.sampled_from([CHUNKED, SIZED]), NOISE, st.lists(st.integers(1, 200)))
def test_whatever_comes_is_an_answer_or_a_reason(content: bytes, noise: tuple[int, bytes], cuts: list[int]) -> None:
    at, more = noise
    # Anything else that it raises is a fault of ours.
    with suppress(ClientError):
        read(content[:at] + more + content[at:], cuts)


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive, Close", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0", False),
        (b"HTTP/1.1 204", True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\ncontent-length: 0", True),
    ],
)
def test_an_answer_without_a_body_ends_with_its_head(head: bytes, keeps: bool) -> None:
    response, _ = read(head + b"\r\n\r\n")
    assert (response.is_finished, response.keeps_connection) == (True, keeps)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200\tOK",
        b"HTTP/1.1  200 OK",
        b"HTTP/1.1 099 OK",
        b"HTTP/1.1 101 Switching Protocols",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_0",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 30,
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(ClientError) as raised:
        read(head + b"\r\n\r\n")
    assert raised.value.reason is Reason.PROTOCOL


@pytest.mark.parametrize("size", [b"", b"-1", b"0x5", b"g", b"1" * 16, b" 5"])
def test_a_chunk_that_does_not_say_how_long_it_is_is_refused(size: bytes) -> None:
    with pytest.raises(ClientError, match="does not say"):
        read(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + size + b"\r\nhello\r\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "instead of an answer"),
        (b"HTTP/1.1 200", "instead of an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", "after 3 of 9 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "before the last chunk"),
    ],
)
def test_an_end_that_comes_too_early_is_a_reset(content: bytes, words: str) -> None:
    response = Response(REQUEST)
    response.feed(memoryview(content))
    with pytest.raises(ClientError, match=words) as raised:
        response.feed_end()
    assert raised.value.reason is Reason.RESET


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    response, payload_bytes = read(b"HTTP/1.1 200 OK\r\n\r\nabc", [20])
    assert (response.is_finished, payload_bytes) == (False, 3)
    response.feed_end()
    assert (response.is_finished, response.keeps_connection) == (True, False)


def test_a_request_says_what_it_is_and_shows_no_secret() -> None:
    request = Request(authority="a.test:8443", path="/x?y=1", headers=(("authorization", "Bearer s3cret"),))
    lines = request.http1().decode().split("\r\n")
    assert lines[:2] == ["GET /x?y=1 HTTP/1.1", "host: a.test:8443"]
    assert "authorization: Bearer s3cret" in lines
    assert lines[-2:] == ["", ""]
    fields = dict(request.http2())
    assert (fields[":authority"], fields["authorization"], "te" in fields) == ("a.test:8443", "Bearer s3cret", False)
    assert "s3cret" not in repr(request)
    grpc = dict(Request(authority="a.test", path="/s/M", method=Method.GRPC).http2())
    assert (grpc[":method"], grpc["te"]) == ("POST", "trailers")
