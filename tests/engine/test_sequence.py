"""engine.sequence: what a sequence says of itself."""

from engine.api import GenerationRequest, SamplingParams
from engine.sequence import Sequence, SequenceState


def sequence(prompt: tuple[int, ...] = (4, 5, 6), prompt_logprobs: int | None = None) -> Sequence:
    request = GenerationRequest("r", prompt, SamplingParams(prompt_logprobs=prompt_logprobs))
    return Sequence(request, index=0, seed=0, max_len=9, stop_ids={})


def test_a_new_sequence_holds_its_prompt() -> None:
    seq = sequence()
    assert (seq.token_ids, seq.num_prompt, seq.num_output) == ([4, 5, 6], 3, 0)
    assert (seq.num_computed, seq.num_remaining, seq.state) == (0, 3, SequenceState.WAITING)
    seq.token_ids.append(7)
    assert seq.request.prompt_ids == (4, 5, 6), "the request is not touched"


def test_output_and_what_is_left_to_compute() -> None:
    seq = sequence()
    seq.num_computed = 3
    seq.token_ids.append(7)
    assert (seq.num_output, seq.num_remaining) == (1, 1), "it decodes"
    seq.num_computed = 0
    assert (seq.num_output, seq.num_remaining) == (1, 4), "preempted, it prefills prompt and output"


def test_prompt_logprobs_are_wanted_until_each_position_has_its_entry() -> None:
    seq = sequence(prompt_logprobs=0)
    assert seq.wants_prompt_logprobs
    seq.prompt_logprobs = [None, None]
    assert seq.wants_prompt_logprobs
    seq.prompt_logprobs = [None, None, None]
    assert not seq.wants_prompt_logprobs
    assert not sequence().wants_prompt_logprobs
