"""engine.text: what every front end does around the engine."""

import pytest

from engine.api import ModelInfo, SamplingParams, TokenEvent, TokenLogprob
from engine.errors import RequestError
from engine.text import default_sampling, merge_events, require_tokenizer, with_bad_words
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_level_tokenizer


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
