"""engine.blocks: who owns which block, and which full blocks can be used again. Stories without a model."""

import subprocess
import sys
from typing import Any

import pytest

from engine.api import GenerationRequest, SamplingParams
from engine.blocks import BlockManager, chain_hash
from engine.sequence import Sequence

SIZE = 4


def sequence(token_ids: list[int], salt: str | None = None, rope_len: int = 0, **sampling: Any) -> Sequence:
    request = GenerationRequest("r", tuple(token_ids), SamplingParams(**sampling), salt)
    return Sequence(request, index=0, seed=0, max_len=1000, stop_ids={}, rope_len=rope_len)


def start(blocks: BlockManager, seq: Sequence) -> Sequence:
    """Admits seq, which must fit."""
    matched = blocks.match_prefix(seq)
    assert blocks.num_blocks_to_admit(seq, matched) <= blocks.num_free
    blocks.admit(seq, matched)
    return seq


def compute(blocks: BlockManager, seq: Sequence) -> Sequence:
    """As if a step had computed the KV of all tokens."""
    seq.num_computed = len(seq.token_ids)
    blocks.commit(seq)
    return seq


def text(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def used(blocks: BlockManager) -> int:
    return blocks.num_blocks - blocks.num_free


def test_blocks_are_taken_and_given_back() -> None:
    blocks = BlockManager(5, SIZE)
    seq = start(blocks, sequence(text(0, 9)))
    assert len(seq.block_ids) == 3
    assert used(blocks) == 3
    blocks.audit([seq])
    blocks.free(seq)
    assert used(blocks) == 0
    assert (seq.block_ids, seq.num_computed) == ([], 0)
    blocks.audit([])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(1, SIZE).blocks_for(num_tokens) == num_blocks


def test_a_sequence_grows_when_its_tokens_no_longer_fit() -> None:
    blocks = BlockManager(5, SIZE)
    seq = start(blocks, sequence(text(0, 3)))
    assert not blocks.needs_block(seq)
    seq.token_ids.append(3)
    assert not blocks.needs_block(seq), "four tokens fit one block"
    seq.token_ids.append(4)
    assert blocks.needs_block(seq)
    assert blocks.grow(seq) == seq.block_ids[-1]
    assert not blocks.needs_block(seq)
    blocks.audit([seq])


def test_a_prefix_is_shared_with_a_count() -> None:
    """PFX-04: each live block has one owner or is shared with a count; who ends first takes nothing from the other."""
    blocks = BlockManager(8, SIZE)
    first = compute(blocks, start(blocks, sequence(text(0, 10))))
    second = start(blocks, sequence([*text(0, 8), 99, 98]))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.num_computed == 8
    assert used(blocks) == 4
    blocks.audit([first, second])
    blocks.free(first)
    assert used(blocks) == 3
    blocks.audit([second])
    third = start(blocks, sequence(text(50, 20)))
    assert not set(third.block_ids) & set(second.block_ids)
    blocks.audit([second, third])


def test_two_that_fill_the_same_prefix_at_once_keep_their_own_blocks() -> None:
    """PFX-04: nothing is merged, so no table can point to a freed block; one of the two is registered."""
    blocks = BlockManager(8, SIZE)
    first, second = (start(blocks, sequence(text(0, 9))) for _ in range(2))
    compute(blocks, first)
    compute(blocks, second)
    assert not set(first.block_ids) & set(second.block_ids)
    assert blocks.num_cached == 2
    blocks.free(first)
    third = start(blocks, sequence(text(0, 9)))
    assert third.num_computed == 8
    blocks.audit([second, third])


@pytest.mark.parametrize("num_prompt", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 8 * SIZE])
def test_pfx_01_at_least_one_token_is_left_to_compute(num_prompt: int) -> None:
    blocks = BlockManager(20, SIZE)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, num_prompt)))))
    again = start(blocks, sequence(text(0, num_prompt)))
    assert again.num_remaining >= 1
    assert again.num_computed == (num_prompt - 1) // SIZE * SIZE
    blocks.audit([again])


def test_a_block_can_be_found_only_after_its_kv_is_computed() -> None:
    """PFX-05: a prefill that is dropped half-way leaves behind what was computed, and nothing else."""
    blocks = BlockManager(8, SIZE)
    seq = start(blocks, sequence(text(0, 16)))
    assert blocks.match_prefix(sequence(text(0, 16))) == []
    seq.num_computed = 7
    blocks.commit(seq)
    computed = seq.block_ids[:1]
    assert blocks.match_prefix(sequence(text(0, 16))) == computed
    blocks.free(seq)
    assert blocks.match_prefix(sequence(text(0, 16))) == computed


def test_pfx_06_a_recycled_block_forgets_its_text() -> None:
    blocks = BlockManager(3, SIZE)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, 9)))))
    assert len(blocks.match_prefix(sequence(text(0, 9)))) == 2
    other = start(blocks, sequence(text(50, 12)))
    assert blocks.match_prefix(sequence(text(0, 9))) == []
    blocks.audit([other])
    blocks.free(compute(blocks, other))
    assert blocks.match_prefix(sequence(text(0, 9))) == []
    blocks.audit([])


def test_blocks_without_a_text_are_reused_before_cached_ones() -> None:
    blocks = BlockManager(4, SIZE)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, 6)))))  # one cached, one half full
    blocks.free(start(blocks, sequence(text(50, 12))))  # never computed
    assert len(blocks.match_prefix(sequence(text(0, 6)))) == 1


def test_the_tail_of_a_chain_is_evicted_before_its_head_and_old_chains_before_new_ones() -> None:
    blocks = BlockManager(6, SIZE)
    for first in (0, 50):
        blocks.free(compute(blocks, start(blocks, sequence(text(first, 12)))))
    assert blocks.num_cached == 6
    blocks.free(start(blocks, sequence(text(90, 8))))
    assert len(blocks.match_prefix(sequence(text(0, 13)))) == 1, "the older chain lost its tail"
    assert len(blocks.match_prefix(sequence(text(50, 13)))) == 3, "the newer one lost nothing"


def test_a_hit_makes_a_chain_young_again() -> None:
    blocks = BlockManager(6, SIZE)
    for first in (0, 50):
        blocks.free(compute(blocks, start(blocks, sequence(text(first, 8)))))
    blocks.free(start(blocks, sequence(text(0, 9))))
    blocks.free(start(blocks, sequence(text(90, 16))))  # two unused blocks, then the oldest chain
    assert len(blocks.match_prefix(sequence(text(0, 9)))) == 2
    assert blocks.match_prefix(sequence(text(50, 9))) == []


def test_pfx_02_admission_counts_matched_blocks_that_nobody_owns() -> None:
    """PFX-02: a matched block is taken out of the free ones before new ones are, so it is not evicted for them."""
    blocks = BlockManager(4, SIZE)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, 12)))))
    seq = sequence([*text(0, 12), 77])
    matched = blocks.match_prefix(seq)
    assert blocks.num_blocks_to_admit(seq, matched) == 4, "three matched and free, one new"
    blocks.admit(seq, matched)
    assert seq.block_ids[:3] == matched
    assert seq.block_ids[3] not in matched
    blocks.audit([seq])
    twin = sequence([*text(0, 12), 78])
    assert blocks.num_blocks_to_admit(twin, blocks.match_prefix(twin)) == 1, "owned ones cost nothing"


@pytest.mark.parametrize("changed_at", [0, 5, 11])
@pytest.mark.parametrize("hash_name", ["constant", "4 bits"])
def test_pfx_03_a_collision_is_never_a_hit(changed_at: int, hash_name: str) -> None:
    """PFX-03: with a hash that says nothing, ids and parents decide."""

    def weak_hash(parent: bytes, content: bytes) -> bytes:
        return b"" if hash_name == "constant" else bytes([chain_hash(parent, content)[0] & 15])

    blocks = BlockManager(32, SIZE, hash_function=weak_hash)
    theirs = text(0, 12)
    blocks.free(compute(blocks, start(blocks, sequence(theirs))))
    ours = [*theirs[:changed_at], 99, *theirs[changed_at + 1 :], 7]
    assert len(blocks.match_prefix(sequence(ours))) <= changed_at // SIZE
    blocks.audit([])
    for first in range(40):  # whatever the digests do to each other, the books balance
        blocks.free(compute(blocks, start(blocks, sequence(text(first, 13)))))
        blocks.audit([])


def test_pfx_03_a_parent_is_part_of_the_proof() -> None:
    """The same block content after another beginning is another block, whatever the hash says."""
    blocks = BlockManager(16, SIZE, hash_function=lambda parent, content: content)  # forgets the parent
    blocks.free(compute(blocks, start(blocks, sequence([1, 1, 1, 1, 5, 6, 7, 8, 9]))))
    assert len(blocks.match_prefix(sequence([1, 1, 1, 1, 5, 6, 7, 8, 9]))) == 2
    compute(blocks, start(blocks, sequence([2, 2, 2, 2, 3])))
    assert len(blocks.match_prefix(sequence([2, 2, 2, 2, 5, 6, 7, 8, 9]))) == 1


def test_pfx_03_the_chain_hash_covers_parent_and_content_and_no_process_state() -> None:
    assert chain_hash(b"a", b"b") != chain_hash(b"a", b"c")
    assert chain_hash(b"a", b"b") != chain_hash(b"x", b"b")
    seq = sequence(text(0, 13))
    blocks = BlockManager(4, SIZE)
    compute(blocks, start(blocks, seq))
    digests = [key.digest for key in seq.block_keys]
    contents = [key.content for key in seq.block_keys]
    assert digests[1:] == [chain_hash(digests[0], contents[1]), chain_hash(digests[1], contents[2])]
    code = "from engine.blocks import chain_hash; print(chain_hash(b'a', b'b').hex())"
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == chain_hash(b"a", b"b").hex()


def test_a_block_is_hashed_once_however_often_its_sequence_is_looked_up() -> None:
    """A sequence that waits is looked up at every step, and a long prompt has hundreds of blocks."""
    calls = []

    def counted(parent: bytes, content: bytes) -> bytes:
        calls.append(content)
        return chain_hash(parent, content)

    blocks = BlockManager(40, SIZE, hash_function=counted)
    owner = compute(blocks, start(blocks, sequence(text(0, 41))))
    assert len(calls) == 10
    waiting = sequence(text(0, 42))
    for _ in range(5):
        assert len(blocks.match_prefix(waiting)) == 10
    assert len(calls) == 20
    start(blocks, waiting)
    waiting.token_ids += text(42, 2)
    compute(blocks, waiting)
    assert len(calls) == 21, "the one that has become full"
    blocks.free(waiting)
    assert len(blocks.match_prefix(waiting)) == 10, "the last token is left to compute"
    assert len(calls) == 21
    blocks.audit([owner])


def test_pfx_07_salt_and_rope_table_are_part_of_the_key() -> None:
    blocks = BlockManager(40, SIZE)
    kinds = [(None, 0), ("s1", 0), ("s2", 0), ("", 0), (None, 9), ("s1", 9), ("0 salt:s1", 0)]
    for salt, rope_len in kinds:
        seq = sequence(text(0, 9), salt, rope_len)
        assert blocks.match_prefix(seq) == [], f"salt {salt!r}, rope table {rope_len}"
        blocks.free(compute(blocks, start(blocks, seq)))
    for salt, rope_len in kinds:
        assert len(blocks.match_prefix(sequence(text(0, 9), salt, rope_len))) == 2


def test_a_salt_may_be_any_text() -> None:
    """A half of a surrogate pair, which JSON can spell, has no UTF-8 form."""
    blocks = BlockManager(4, SIZE)
    seq = sequence(text(0, 5), "\ud83d")
    blocks.free(compute(blocks, start(blocks, seq)))
    assert len(blocks.match_prefix(sequence(text(0, 5), "\ud83d"))) == 1
    assert blocks.match_prefix(sequence(text(0, 5), "?")) == []


def test_discarded_blocks_leave_the_cache() -> None:
    """SAM-05: the KV of a request with bad logits is not used again, also not the part that it shared."""
    blocks = BlockManager(8, SIZE)
    healthy = compute(blocks, start(blocks, sequence(text(0, 9))))
    bad = compute(blocks, start(blocks, sequence([*text(0, 8), 90, 91, 92, 93, 94])))
    blocks.free(bad, discard=True)
    assert blocks.num_cached == 0
    assert blocks.match_prefix(sequence(text(0, 9))) == []
    blocks.audit([healthy])
    healthy.token_ids += text(9, 4)
    blocks.grow(healthy)
    compute(blocks, healthy)
    blocks.audit([healthy])
    blocks.free(healthy)
    blocks.audit([])
    again = compute(blocks, start(blocks, sequence(text(0, 13))))
    assert len(blocks.match_prefix(sequence(text(0, 13)))) == 3, "computed anew, they can be found again"
    blocks.audit([again])


def test_prompt_logprobs_read_nothing_from_the_cache_until_they_are_complete() -> None:
    """PFX-08: every prompt position must be computed for them; a resumed sequence that has them reads the cache."""
    blocks = BlockManager(8, SIZE)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, 9)))))
    seq = sequence(text(0, 9), prompt_logprobs=1)
    assert blocks.match_prefix(seq) == []
    seq.prompt_logprobs = [None] * 9
    assert len(blocks.match_prefix(seq)) == 2


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = BlockManager(8, SIZE, enable_prefix_caching=False)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, 9)))))
    assert blocks.match_prefix(sequence(text(0, 9))) == []
    assert (blocks.num_cached, blocks.num_queried_tokens, blocks.num_hit_tokens) == (0, 0, 0)


def test_hits_are_counted() -> None:
    blocks = BlockManager(8, SIZE)
    blocks.free(compute(blocks, start(blocks, sequence(text(0, 9)))))
    start(blocks, sequence(text(0, 9)))
    assert (blocks.num_queried_tokens, blocks.num_hit_tokens) == (18, 8)


def test_the_audit_finds_wrong_books() -> None:
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, start(blocks, sequence(text(0, 9))))
    with pytest.raises(AssertionError, match="counts differ"):
        blocks.audit([])
    seq.block_ids.append(seq.block_ids[0])
    with pytest.raises(AssertionError, match="twice"):
        blocks.audit([seq])
