"""engine.text: what every front end does around the engine."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.api import ModelInfo, SamplingParams, TokenEvent, TokenLogprob
from engine.errors import RequestError
from engine.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_STOP_STRINGS
from engine.text import (
    LONG_TEXT,
    MAX_KEPT_RESULTS,
    KeptResults,
    check_fits,
    default_sampling,
    merge_events,
    require_tokenizer,
    size_of,
    with_bad_words,
)
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), {}, "tiny")


def entry(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -1.0)


def test_events_of_a_choice_become_one_in_order_of_first_arrival() -> None:
    events = [
        TokenEvent("r", 1, (10,), num_cached_tokens=4),
        TokenEvent("r", 0, (20,), num_cached_tokens=8),
        TokenEvent("r", 1, (11,), num_cached_tokens=4),
        TokenEvent("r", 1, (12,), finish_reason="stop", stop_reason=12, num_cached_tokens=4),
    ]
    assert merge_events(events) == [
        TokenEvent("r", 1, (10, 11, 12), finish_reason="stop", stop_reason=12, num_cached_tokens=4),
        TokenEvent("r", 0, (20,), num_cached_tokens=8),
    ]


def test_logprobs_are_joined_and_prompt_logprobs_kept() -> None:
    prompt = (None, entry(1))
    first = TokenEvent("r", 0, (10,), (entry(10),), prompt_logprobs=prompt)
    merged = merge_events([first, TokenEvent("r", 0, (11,), (entry(11),))])
    assert merged == [TokenEvent("r", 0, (10, 11), (entry(10), entry(11)), prompt_logprobs=prompt)]


def test_an_end_without_a_token_and_an_error_lose_nothing() -> None:
    first = TokenEvent("r", 0, (10,), (entry(10),), num_cached_tokens=4)
    end = TokenEvent("r", 0, finish_reason="error", error="why")
    assert merge_events([first, end]) == [
        TokenEvent("r", 0, (10,), (entry(10),), "error", num_cached_tokens=4, error="why")
    ]
    assert merge_events([end]) == [end]
    assert merge_events([]) == []


def test_bad_words_are_banned_as_they_stand_and_after_a_space(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(bad_words=("cat", " dog"), bad_words_ids=((7, 8),))
    ids = with_bad_words(sampling, tokenizer).bad_words_ids
    assert ids[0] == (7, 8), "what was given as ids stays"
    assert tuple(tokenizer.encode("cat", add_special_tokens=False)) in ids
    assert tuple(tokenizer.encode(" cat", add_special_tokens=False)) in ids
    assert tuple(tokenizer.encode(" dog", add_special_tokens=False)) in ids
    assert len(ids) == len(set(ids)) == 4, "' dog' in both forms is one phrase"


def test_without_bad_words_nothing_changes_and_no_tokenizer_is_needed() -> None:
    sampling = SamplingParams(bad_words_ids=((7,),))
    assert with_bad_words(sampling, None) is sampling


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="no tokenizer, so bad_words cannot be used") as error:
        with_bad_words(SamplingParams(bad_words=("x",)), None)
    assert error.value.param == "bad_words"


def test_require_tokenizer_says_what_cannot_be_done(tokenizer: Tokenizer) -> None:
    assert require_tokenizer(tokenizer, "") is tokenizer
    with pytest.raises(RequestError, match="this model has no tokenizer: pass token ids"):
        require_tokenizer(None, "pass token ids")


def test_default_sampling_is_the_models_own() -> None:
    info = ModelInfo(("m",), "m", 0, 10, 10, True, True, default_sampling={"temperature": 0.6, "top_k": 20})
    assert default_sampling(info) == SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    "words", [("ab",) * (MAX_BAD_WORDS + 1), ("a" * (MAX_BAD_WORD_CHARS + 1),), ("",)], ids=["many", "long", "empty"]
)
def test_bad_words_have_limits(tokenizer: Tokenizer, words: tuple[str, ...]) -> None:
    """They hold where words are encoded and where parameters are checked; what is just inside passes."""
    sampling = SamplingParams(bad_words=words)
    for refuse in (lambda: with_bad_words(sampling, tokenizer), lambda: sampling.validate(100)):
        with pytest.raises(RequestError, match="are allowed") as error:
            refuse()
        assert error.value.param == "bad_words"
    inside = SamplingParams(bad_words=("a" * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORDS)
    inside.validate(100)
    assert len(with_bad_words(inside, tokenizer).bad_words_ids) == 2


def test_many_strings_are_counted_before_they_are_looked_at() -> None:
    for name, most in (("bad_words", MAX_BAD_WORDS), ("stop", MAX_STOP_STRINGS)):
        fields: dict[str, Any] = {name: ("a",) * most + (5,)}
        with pytest.raises(RequestError, match=f"{name} has {most + 1} entries; at most {most} are allowed"):
            SamplingParams(**fields).validate(100)


def test_a_normalizer_that_may_shorten_a_text_widens_the_limit(tokenizer: Tokenizer) -> None:
    """Longest tokens: <|endoftext|> with 13 bytes; " hello" and its like with 6, times 4 for a normalizer."""
    assert tokenizer.longest_token_bytes == 13
    normalizing = Tokenizer(byte_fallback_tokenizer(), {}, "tiny")
    assert normalizing.longest_token_bytes == 24
    check_fits("a" * 240, normalizing, 10, "prompt")
    with pytest.raises(RequestError, match="at least 11 tokens"):
        check_fits("a" * 241, normalizing, 10, "prompt")


def test_size_of_counts_characters_and_parts_and_stops_early() -> None:
    assert size_of("abc") == 4
    assert size_of([{"role": "user", "content": "abc"}, None]) == 1 + (1 + 4 + 7 + 5 + 4) + 1
    assert size_of({"tools": [1] * 100, "text": "x" * 50}) > 150
    assert LONG_TEXT < size_of([["x"] * LONG_TEXT] * 1000) < 2 * LONG_TEXT + 2000


def test_results_are_kept_failures_are_not() -> None:
    calls: list[tuple[str, ...]] = []

    def joined(key: tuple[str, ...]) -> str:
        calls.append(key)
        if "bad" in key:
            raise RequestError("no", "stop")
        return "".join(key)

    async def scenario() -> None:
        with ThreadPoolExecutor(2) as executor:
            kept = KeptResults(joined, executor)
            assert await asyncio.gather(*(kept.get(("a", "b")) for _ in range(5))) == ["ab"] * 5
            for _ in range(2):
                with pytest.raises(RequestError):
                    await kept.get(("bad",))
            assert calls == [("a", "b"), ("bad",), ("bad",)]
            for number in range(MAX_KEPT_RESULTS):
                await kept.get((str(number),))
                if number < MAX_KEPT_RESULTS - 1:
                    await kept.get(("a", "b"))  # the one used last is not the one to go
            assert calls.count(("a", "b")) == 1
            await kept.get(("0",))
            assert calls.count(("0",)) == 2

    asyncio.run(scenario())
