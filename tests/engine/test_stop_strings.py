"""engine/detokenizer.py: stop strings, text held back and given back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import FinishReason, OutputDelta, SamplingParams, TokenLogprob
from engine.detokenizer import StopMatcher, StopTable, TextStream
from engine.tokenizer import Tokenizer
from tests.engine.text_events import BOTH, BYTE_LEVEL, EOS, PROMPT, event, one_by_one, rome_id, run, text_of
from tests.engine.tiny_tokenizers import byte_id, byte_ids

LETTERS = "ABCDEFGHIJKLMNOP"


@BOTH
@pytest.mark.parametrize(
    ("stop", "before", "num_tokens", "matched"),
    [
        (("GHIJKL",), "ABCDEF", 12, "GHIJKL"),
        (("G", "GHI"), "ABCDEF", 7, "G"),
        (("XY", "CDE"), "AB", 5, "CDE"),
        (("CDE", "D"), "ABC", 4, "D"),
        (("BCDE", "CDE", "DE"), "A", 5, "BCDE"),
    ],
)
def test_str_02_no_prefix_leaks(
    tokenizer: Tokenizer, stop: tuple[str, ...], before: str, num_tokens: int, matched: str
) -> None:
    """STR-02: one letter a token; nothing of the stop word, all of what stands before it, and only so many tokens."""
    stream = TextStream(tokenizer, SamplingParams(stop=stop), PROMPT)
    shown, num_taken = "", 0
    longest = max(map(len, stop))
    for index, token_id in enumerate(byte_ids(LETTERS)):
        delta = stream.push(event([token_id]))
        shown += delta.text or ""
        num_taken += len(delta.token_ids)
        if stream.finished:
            break
        assert LETTERS.startswith(shown)
        assert index + 1 - len(shown) <= longest - 1, "held back more than a stop string can need"
    assert (shown, num_taken) == (before, num_tokens)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", matched)


@BOTH
def test_str_02_events_after_the_stop_are_ignored(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("B",)), PROMPT)
    assert stream.push(event(byte_ids("AB"))).finish_reason == "stop"
    for late in (event(byte_ids("CD")), event([], "abort"), event(byte_ids("E"), "length")):
        assert stream.push(late) == OutputDelta(0, "")


@BOTH
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [("ome", False, " R"), ("ome", True, " Rome"), (" R", False, ""), (" R", True, " R"), ("Rome", False, " ")],
)
def test_str_03_stop_inside_a_token(tokenizer: Tokenizer, stop: str, include: bool, text: str) -> None:
    """STR-03: cut by characters; the token that completes the stop keeps its entry and counts."""
    rome = rome_id(tokenizer)
    logprobs = (TokenLogprob(rome, -0.1, ((rome, -0.1),)), TokenLogprob(EOS, -0.1))
    [delta] = run(
        tokenizer, [event([rome, EOS], "stop", logprobs=logprobs)], stop=(stop,), include_stop_str_in_output=include
    )
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (text, "stop", stop)
    assert delta.token_ids == (rome,)
    assert delta.logprobs is not None
    assert [(entry.token, entry.bytes) for entry in delta.logprobs] == [(" Rome", b" Rome")]
    assert delta.logprobs[0].top[0].token == " Rome"


@BOTH
def test_str_03_begins_in_one_token_and_ends_in_another(tokenizer: Tokenizer) -> None:
    ids = [rome_id(tokenizer), *byte_ids(" is")]
    for events in (one_by_one(ids, "length"), [event(ids, "length")]):
        assert text_of(run(tokenizer, events, stop=("me i",))) == " Ro"
        assert text_of(run(tokenizer, events, stop=("me i",), include_stop_str_in_output=True)) == " Rome i"


@BOTH
def test_str_03_stop_words_of_the_prompt_do_not_stop(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, one_by_one(byte_ids("DE"), "length"), byte_ids("ABC"), stop=("ABC", "CD", "C"))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("DE", "length")


@BOTH
@pytest.mark.parametrize(
    ("letters", "finish", "text"),
    [("ABC", "stop", "ABC"), ("ABC", "length", "ABC"), ("CDEX", "length", "CDEX"), ("ABC", "abort", "ABC")],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_str_04_held_text_is_given_back(
    tokenizer: Tokenizer, letters: str, finish: FinishReason, text: str, at_once: bool
) -> None:
    """STR-04: at end of sequence, at the length limit, at an abort; nothing is held once it cannot match."""
    ids = byte_ids(letters) + ([EOS] if finish == "stop" else [])
    events = [event(ids, finish)] if at_once else one_by_one(ids, finish)
    deltas = run(tokenizer, events, stop=("CDEFG",))
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == (text, finish, None)
    if letters == "CDEX" and not at_once:
        assert [delta.text for delta in deltas] == ["", "", "", "CDEX"]


@BOTH
def test_str_04_an_end_without_tokens_gives_held_text_and_half_characters_back(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids("CD"), byte_id(0xE6)]
    deltas = run(tokenizer, [*(event([token_id]) for token_id in ids), event([], "abort")], stop=("CDEFG",))
    assert [delta.text for delta in deltas] == ["", "", "", "CD\ufffd"]


@BOTH
def test_str_11_any_grouping_of_events_gives_the_same(tokenizer: Tokenizer) -> None:
    """STR-11: many tokens in one event or one a token: same text, same number of ids and logprobs, same end."""
    rng = random.Random(4)
    text = "héllo 😀 ABCXDEF zzzz tail"
    for stop in ((), ("zzzzzzzz",), ("CXD", "Z"), ("😀 A",), ("é",)):
        ids = [*byte_ids(text), EOS]
        outcomes = set()
        for _ in range(20):
            cuts = sorted(rng.sample(range(1, len(ids)), rng.randrange(len(ids) // 2)))
            groups = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
            events = [
                event(
                    group,
                    "stop" if index == len(groups) - 1 else None,
                    logprobs=tuple(TokenLogprob(token_id, -1.0) for token_id in group),
                )
                for index, group in enumerate(groups)
            ]
            deltas = run(tokenizer, events, stop=stop)
            taken = tuple(token_id for delta in deltas for token_id in delta.token_ids)
            entries = tuple(entry.token_id for delta in deltas for entry in delta.logprobs or ())
            assert entries == taken
            outcomes.add((text_of(deltas), taken, deltas[-1].finish_reason, deltas[-1].stop_reason))
        assert len(outcomes) == 1


@BOTH
def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    """SAM-04 for text: a stop string that is complete too early does not count, a later one does."""
    deltas = run(tokenizer, one_by_one(byte_ids("ABABAB"), "length"), stop=("AB",), min_tokens=3)
    assert (text_of(deltas), sum(len(delta.token_ids) for delta in deltas)) == ("AB", 4)
    deltas = run(tokenizer, one_by_one(byte_ids("ABAB"), "length"), stop=("AB",), min_tokens=2)
    assert (text_of(deltas), sum(len(delta.token_ids) for delta in deltas)) == ("", 2)
    deltas = run(tokenizer, one_by_one(byte_ids("ABXX"), "length"), stop=("AB",), min_tokens=4)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("ABXX", "length")


def test_api_23_odd_stop_lists() -> None:
    """API-23: no stops; doubles; the first that is complete wins, of several the longest."""
    assert text_of(run(BYTE_LEVEL, [event(byte_ids("baab"), "length")], stop=())) == "baab"
    [delta] = run(BYTE_LEVEL, [event(byte_ids("baab"), "length")], stop=("a", "a", "aa", "ab"))
    assert (delta.text, delta.stop_reason) == ("b", "a")
    [delta] = run(BYTE_LEVEL, [event(byte_ids("xaab"), "length")], stop=("b", "aab", "ab"))
    assert (delta.text, delta.stop_reason) == ("x", "aab")


def _first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The documented rule, by trying every end: (where the match begins, the stop string)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab😀", max_size=40),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), max_size=6),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=10),
    include=st.booleans(),
)
def test_stop_matcher_follows_the_rule(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    """STR-02, STR-04, API-23: whatever the pieces, the outcome is the rule's, and never more is held than needed."""
    matcher = StopMatcher(StopTable(stops), include)
    shown, taken = "", 0
    pieces = iter([*sizes * (1 + len(text)), len(text)])
    while taken < len(text) and matcher.matched is None:
        size = max(next(pieces), taken == 0)
        seen = text[: taken + size]
        shown += matcher.push(text[taken : taken + size])
        taken += size
        if matcher.matched is None:
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
            needed = max((n for n in range(len(seen) + 1) if _begins_stop(seen[len(seen) - n :], stops)), default=0)
            assert len(held) == needed
    expected = _first_complete(text, stops)
    if expected is None:
        assert (shown + matcher.flush(), matcher.matched) == (text, None)
    else:
        start, stop = expected
        assert (shown, matcher.matched) == (text[:start] + (stop if include else ""), stop)


def test_choices_share_a_table_and_nothing_else() -> None:
    table = StopTable(("XYZ",))
    first, second = StopMatcher(table), StopMatcher(table, include_stop=True)
    assert [first.push("aXY"), second.push("bX"), first.push("Z"), second.push("Z")] == ["a", "b", "", "XZ"]
    assert (first.matched, second.matched) == ("XYZ", None)


def _begins_stop(ending: str, stops: Sequence[str]) -> bool:
    return any(len(ending) < len(stop) and stop.startswith(ending) for stop in stops)


def test_api_23_many_long_stop_strings_cost_little_a_token() -> None:
    """API-23: steps of the matcher, counted: at most two a character on average, with 64 stops of 256."""
    stops = [("ab" * 128)[: 232 + index % 24] + chr(0x100 + index) for index in range(64)]
    table = StopTable(stops)
    matcher = StopMatcher(table)
    text = "ab" * 20_000 + "x"
    counter = _CountingList(table._fail)
    table._fail = counter
    assert "".join(matcher.push(text[start : start + 4]) for start in range(0, len(text), 4)) == text
    assert counter.num_reads <= len(text)


class _CountingList(list[int]):
    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)
