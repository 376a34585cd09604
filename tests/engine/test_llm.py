"""engine.llm: offline generation, told with a model whose every next token is scripted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.golden_models import chain_model
from engine.api import SamplingParams
from engine.errors import ConfigError, RequestError, RequestFailedError
from engine.faults import Faults
from engine.llm import LLM
from tests.engine.engines import assert_idle
from tests.engine.tiny_tokenizers import byte_id, byte_ids, byte_level_tokenizer, write_tokenizer

ENDING = "abcdefg."  # the model says the alphabet up to g, a full stop, and ends
EOS = 2
LIMITS: dict[str, Any] = {"num_threads": 1, "num_gpu_blocks_override": 40, "block_size": 4, "max_model_len": 100}
GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


def script() -> dict[int, int]:
    ids = byte_ids(ENDING)
    return dict(zip(ids, [*ids[1:], EOS], strict=True)) | {byte_id(ord("x")): byte_id(ord("x"))}  # x goes on for ever


def write_model(folder: Path, with_tokenizer: bool = True) -> Path:
    tokenizer = byte_level_tokenizer()
    chain_model(folder, script(), vocab_size=tokenizer.get_vocab_size() + 5, eos_token_id=EOS)
    if with_tokenizer:
        write_tokenizer(folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return LLM(str(folder), **LIMITS)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Idle before and after every test."""
    assert_idle(shared_llm.engine)
    yield shared_llm
    assert_idle(shared_llm.engine)


def test_a_text_prompt_is_completed(llm: LLM) -> None:
    (output,) = llm.generate("Say: a", GREEDY)
    assert output.text == "bcdefg."
    assert output.token_ids == (*byte_ids("bcdefg."), EOS), "the end is a token, but no text"
    assert output.prompt_ids == tuple(byte_ids("Say: a"))
    completion = output.completions[0]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "stop", None)
    assert (completion.logprobs, output.prompt_logprobs) == (None, None)


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    outputs = llm.generate(["x", "f", "c", byte_ids("g")], SamplingParams(temperature=0, max_tokens=5))
    assert [output.text for output in outputs] == ["xxxxx", "g.", "defg.", "."]
    assert [output.completions[0].finish_reason for output in outputs] == ["length", "stop", "length", "stop"]


def test_ids_alone_are_one_prompt_and_no_prompts_give_nothing(llm: LLM) -> None:
    assert [output.text for output in llm.generate(byte_ids("ef"), GREEDY)] == ["g."]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    many = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)]
    assert [output.text for output in llm.generate(["a", "a"], many)] == ["b", "bcd"]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["a"], many)


def test_a_stop_string_ends_a_choice_and_its_blocks_are_free(llm: LLM) -> None:
    stop = SamplingParams(temperature=0, max_tokens=50, stop=("ef", "zz"))
    (output,) = llm.generate("a", stop)
    assert (output.text, output.completions[0].finish_reason, output.completions[0].stop_reason) == (
        "bcd",
        "stop",
        "ef",
    )
    assert output.token_ids == tuple(byte_ids("bcdef"))
    (output,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=60, stop=("xxx",)))
    assert (output.text, len(output.token_ids)) == ("", 3)


def test_choices_and_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=1, max_tokens=4, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("xa", sampling)
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    for completion in output.completions:
        assert completion.text == "bcde"
        assert completion.logprobs is not None
        assert [entry.token for entry in completion.logprobs] == ["b", "c", "d", "e"]
        # logit 20 at one token and 0 at the others: the reported logprob is of the model itself
        assert all(abs(entry.logprob) < 1e-4 for entry in completion.logprobs)
        assert all(len(entry.top) == 2 for entry in completion.logprobs)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    second = output.prompt_logprobs[1]
    assert second is not None
    assert (second.token, second.logprob) == ("a", pytest.approx(-20, abs=0.01))


def test_a_second_prompt_reads_the_prefix_of_the_first(llm: LLM) -> None:
    prompt = "the same beginning of eleven: "
    first, second = (llm.generate(prompt + last, GREEDY)[0] for last in "ab")
    assert second.num_cached_tokens == len(first.prompt_ids) // 4 * 4
    assert (first.text, second.text) == ("bcdefg.", "cdefg.")


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    one = llm.chat(conversation, GREEDY)
    two = llm.chat([conversation, conversation], GREEDY)
    assert len(one) == 1
    assert [output.prompt_ids for output in two] == [one[0].prompt_ids] * 2
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(one[0].prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert "assistant" not in llm.tokenizer.decode(llm.chat(conversation, GREEDY, False)[0].prompt_ids)


def test_a_bad_prompt_or_parameter_computes_nothing(folder: Path) -> None:
    """Also one that only the pool is too small for, at the end of more prompts than may wait."""
    llm = LLM(str(folder), **(LIMITS | {"max_waiting": 2, "num_gpu_blocks_override": 10}))
    for prompts, params, match in (
        (["a", ""], GREEDY, "empty"),
        (["a", [5, 10_000]], GREEDY, "token id 10000"),
        (["a", "x" * 100], GREEDY, "maximum context length is 100"),
        (["a", "b", "c", "d", "x" * 41], GREEDY, "KV cache holds 40"),
        (["a"], SamplingParams(temperature=-1.0), "temperature"),
    ):
        with pytest.raises(RequestError, match=match):
            llm.generate(prompts, params)
        assert llm.engine.stats().steps == 0
        assert_idle(llm.engine)


def test_a_forked_process_has_no_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """DST-09: it is told so at once, as CUDA, ranks and threads do not come along."""
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: 12345)
        with pytest.raises(ConfigError, match=r"belongs to process \d+, which 12345 was forked from: make one in each"):
            llm.generate([[1]])
    assert_idle(llm.engine)
    assert llm.generate([[1]], SamplingParams(max_tokens=1, temperature=0))[0].token_ids


def test_more_prompts_than_may_wait_all_come_through(folder: Path) -> None:
    llm = LLM(str(folder), **(LIMITS | {"max_waiting": 3, "max_num_seqs": 2}))
    outputs = llm.generate(["abcdefg"[i % 7 :] for i in range(20)], SamplingParams(n=2, seed=1, max_tokens=2, top_k=1))
    assert [output.text for output in outputs] == [".", *["."] * 19]
    assert all(len(output.completions) == 2 for output in outputs)


def test_a_request_that_fails_raises_and_leaves_nothing_behind(folder: Path) -> None:
    llm = LLM(str(folder), **LIMITS)
    llm.engine._faults = Faults(nan_at={"offline-1": 2})
    with pytest.raises(RequestFailedError, match="NaN"):
        llm.generate(["x", "a", "b"], GREEDY)
    assert_idle(llm.engine)
    assert llm.generate("a", GREEDY)[0].text == "bcdefg."


def test_a_full_pool_ends_with_length(folder: Path) -> None:
    llm = LLM(str(folder), **(LIMITS | {"num_gpu_blocks_override": 2}))
    (output,) = llm.generate("xxxxxx", GREEDY)
    assert (output.completions[0].finish_reason, output.text) == ("length", "xxx")


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path, with_tokenizer=False)), **LIMITS)
    (output,) = llm.generate(byte_ids("f"), SamplingParams(temperature=0, logprobs=0))
    assert (output.text, output.token_ids) == (None, (*byte_ids("g."), EOS))
    assert output.completions[0].logprobs is not None
    for call, match in (
        (lambda: llm.generate("f"), "no tokenizer: pass token ids"),
        (lambda: llm.chat([{"role": "user", "content": "hi"}]), "no tokenizer: chat needs one"),
        (lambda: llm.generate([5], SamplingParams(stop=("a",))), "stop_token_ids"),
        (lambda: llm.generate([5], SamplingParams(bad_words=("a",))), "bad_words"),
    ):
        with pytest.raises(RequestError, match=match):
            call()
        assert_idle(llm.engine)


def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    write_model(tmp_path, with_tokenizer=False)
    write_tokenizer(tmp_path, byte_level_tokenizer(), chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        LLM(str(tmp_path), **LIMITS).chat([{"role": "user", "content": "hi"}])


def test_without_sampling_the_models_own_defaults_hold(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1, "eos_token_id": EOS}))
    llm = LLM(str(tmp_path), **LIMITS)
    assert llm.generate("e")[0].text == "fg."


def test_wrong_options_are_all_told() -> None:
    with pytest.raises(ConfigError, match=r"--block-size[\s\S]*--max-num-seqs"):
        LLM("nowhere", block_size=0, max_num_seqs=0)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[5.0]], "5.0"),
        ([[5, True]], "True"),
        ([["a"]], "'a'"),
        (None, "NoneType"),
        (5, "int"),
        (b"ab", "bytes"),
        ([None], "NoneType"),
        ([5, "a"], "'a'"),
    ],
)
def test_prompts_of_a_wrong_kind_are_refused_by_name(llm: LLM, prompts: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("conversations", "param"),
    [
        (5, "messages"),
        ("hello", "messages"),
        ([], "messages"),
        ([[]], "messages"),
        (["hello"], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"content": "a"}], "messages[0].role"),
        ([[{"role": "user", "content": "a"}, 5]], "messages[1]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
def test_conversations_of_a_wrong_kind_are_refused_by_name(llm: LLM, conversations: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(conversations, GREEDY)
    assert caught.value.param == param


WRONG_PARAMS: list[dict[str, Any]] = [
    {"stop": "zq "},
    {"stop": (1,)},
    {"stop": None},
    {"stop_token_ids": 5},
    {"stop_token_ids": "5"},
    {"stop_token_ids": (5.0,)},
    {"allowed_token_ids": 5},
    {"bad_words": "abc"},
    {"bad_words": (1,)},
    {"bad_words_ids": (5,)},
    {"bad_words_ids": 5},
    {"logit_bias": [1]},
    {"ignore_eos": "no"},
    {"skip_special_tokens": "x"},
    {"include_stop_str_in_output": 1},
    {"top_k": 10**30},
    {"max_tokens": 10**30},
    {"min_tokens": 10**30},
    {"temperature": 10**400},
    {"temperature": float("nan")},
    {"logprobs": "1"},
]


@pytest.mark.parametrize(
    "wrong", WRONG_PARAMS, ids=lambda wrong: f"{next(iter(wrong))}={str(next(iter(wrong.values())))[:9]}"
)
def test_parameters_of_a_wrong_kind_are_refused_by_name(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("a", SamplingParams(**wrong))
    assert (caught.value.param or "").removesuffix("_ids") == next(iter(wrong)).removesuffix("_ids")


def test_sampling_of_a_wrong_kind_is_refused_by_name(llm: LLM) -> None:
    for wrong in (5, "greedy", [{"temperature": 0}]):
        with pytest.raises(RequestError, match="sampling must be"):
            llm.generate(["a"], wrong)  # type: ignore[arg-type]
