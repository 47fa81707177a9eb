"""Text out of tokens: whole characters only, the same text as at once, cut at stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.server.detokenize import LONG_WINDOW, Detokenizer, StopStrings
from tests.fake_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENS = st.lists(st.integers(0, 257), max_size=3 * LONG_WINDOW)


def pieces_of(tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]
    assert detokenizer.length == sum(map(len, pieces))
    return pieces


@given(TOKENS)
def test_pieces_join_to_the_whole_decode_of_any_bytes(tokens: list[int]):
    assert "".join(pieces_of(tokens)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.sampled_from([*"€😀A".encode(), 256]), max_size=120))
def test_pieces_join_to_the_whole_decode_where_characters_keep_breaking(tokens: list[int]):
    assert "".join(pieces_of(tokens)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_a_character_comes_whole_with_its_last_byte(text: str):
    text = text.replace("\ufffd", "")
    tokens = list(text.encode())
    pieces = pieces_of(tokens)
    expected = [""] * (len(tokens) + 1)
    end = 0
    for character in text:
        end += len(character.encode())
        expected[end - 1] = character
    assert pieces == expected


def test_a_window_of_invalid_bytes_stays_short():
    detokenizer = Detokenizer(TOKENIZER)
    for _ in range(1000):
        detokenizer.push(0xFF)
    assert len(detokenizer._window) <= LONG_WINDOW
    assert detokenizer.length >= 1000 - 3


def test_without_a_tokenizer_there_is_no_text():
    detokenizer = Detokenizer(None)
    assert detokenizer.push(5) == detokenizer.finish() == ""


def cut(text: str, stops: tuple[str, ...], sizes: list[int]) -> tuple[str, bool]:
    finder, out, position = StopStrings(stops), "", 0
    for size in [*sizes, len(text)]:
        out += finder.push(text[position : position + size])
        position += size
    return out + finder.finish(), finder.found


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=20),
)
def test_the_cut_does_not_depend_on_how_the_text_arrives(text, stops, sizes):
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    shown, found = cut(text, tuple(stops), sizes)
    assert found == bool(ends)
    if not ends:
        assert shown == text
        return
    longest = max(len(stop) for stop in stops if text[: min(ends)].endswith(stop))
    assert shown == text[: min(ends) - longest]


@pytest.mark.parametrize("text", ["one END two", "END", "one END"])
def test_nothing_of_a_stop_string_is_shown_early(text: str):
    finder, shown = StopStrings(("END",)), ""
    for character in text:
        shown += finder.push(character)
        assert text.split("END")[0].startswith(shown)
    assert finder.found and shown == text.split("END")[0]
