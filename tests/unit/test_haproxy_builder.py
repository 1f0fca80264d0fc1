"""No word can end its word, its line or its section; what HAProxy can't read is refused here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.haproxy.builder import MAX_LINE_CHARS, MAX_WORDS, Line, Section, WordError, line, quote, to_bytes


@pytest.mark.parametrize("word", ["443", "unix@/run/tls.sock", "%[src]", "{", "!allowed", "a,b:c", ":::443", "-m"])
def test_a_safe_word_is_written_bare(word: str) -> None:
    assert quote(word) == word


@pytest.mark.parametrize("word", ["", "a b", "#", 'a"b', "$HOME", "a\\", "`"])
def test_a_word_that_means_something_to_the_parser_is_quoted(word: str) -> None:
    assert quote(word) == f"'{word}'"


@pytest.mark.parametrize("word", ["'", "a\nb", "a\rb", "a\0b", "\t", "\x7f", "é", "\u2028", "\ud800"])
def test_a_word_that_could_end_its_quotes_or_its_line_is_refused(word: str) -> None:
    with pytest.raises(WordError):
        quote(word)


@given(st.text())
def test_no_text_is_more_than_one_word(word: str) -> None:
    try:
        text = quote(word)
    except WordError:
        return
    assert text.isascii()
    assert text.isprintable()
    assert text == word or (text == f"'{word}'" and "'" not in word)
    assert text[0] == "'" or not set(text) & set(" #'\"\\$")


def test_a_line_is_its_phrases_words_and_one_word_for_each_argument() -> None:
    assert line("server p0", "a b", "check") == Line(("server", "p0", "a b", "check"))
    assert str(line("server p0", "a b", "check")) == "server p0 'a b' check"


@pytest.mark.parametrize("count", [0, MAX_WORDS + 1])
def test_a_line_of_too_few_or_too_many_words_is_refused(count: int) -> None:
    with pytest.raises(WordError, match=f"a line of {count} words"):
        str(Line(("x",) * count))
    assert str(Line(("x",) * MAX_WORDS))


def test_a_line_that_is_too_long_is_refused() -> None:
    assert len(str(Line(("x" * MAX_LINE_CHARS,)))) == MAX_LINE_CHARS
    with pytest.raises(WordError, match="2049 characters"):
        str(Line(("x" * (MAX_LINE_CHARS + 1),)))


@pytest.mark.parametrize("name", ["a b", "a/b", "a\nb", "é", "'"])
def test_a_section_name_is_never_quoted_but_refused(name: str) -> None:
    with pytest.raises(WordError):
        to_bytes([Section("backend", name, ())])
    with pytest.raises(WordError):
        to_bytes([Section("backend", "x", (), base=name)])


def test_sections_become_text_that_ends_with_a_line_feed() -> None:
    sections = [
        Section("global", "", (line("maxconn 10"),)),
        Section("backend", "acme_http", (line("server p0", "10.0.0.5:4000"),), base="web"),
        Section("backend", "none", ()),
    ]
    assert to_bytes(sections) == (
        b"global\n    maxconn 10\n\nbackend acme_http from web\n    server p0 10.0.0.5:4000\n\nbackend none\n"
    )
