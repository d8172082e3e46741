"""Stop strings over pieces (pub_086): the same text however it is cut, nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InputError
from triptych.serve.engine.stops import StopText


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    text = StopText(stops)
    found = "".join(text.add(piece) for piece in pieces)
    return found + text.finish(), text.is_stopped


def cut_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule over the whole text: the stop that is complete first, of several the longest."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    if not ends:
        return text, False
    end, negative_size = min(ends)
    return text[: end + negative_size], True


WORDS = st.text("ab c", min_size=1, max_size=4)


@given(st.lists(st.text("ab c", max_size=4), max_size=8), st.lists(WORDS, max_size=3))
def test_a_text_in_pieces_ends_where_the_whole_text_does(
    pieces: list[str], stops: list[str]
) -> None:
    assert shown(pieces, stops) == cut_whole("".join(pieces), stops)


@given(st.lists(st.text("ab", max_size=3), max_size=6), WORDS)
def test_nothing_of_a_stop_string_is_shown_before_it_is_decided(
    pieces: list[str], stop: str
) -> None:
    text, found = StopText([stop]), ""
    whole, _ = cut_whole("".join(pieces), [stop])
    for piece in pieces:
        found += text.add(piece)
        assert whole.startswith(found)


def test_what_is_held_back_is_shown_when_the_text_ends_otherwise() -> None:
    text = StopText(["ab cd"])
    assert text.add("x ab") == "x "
    assert text.add(" c") == ""
    assert text.finish() == "ab c" and not text.is_stopped


def test_a_stop_of_several_bytes_is_found() -> None:
    assert shown(["日", "本", "語"], ["本語"]) == ("日", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        StopText(["a", ""])
