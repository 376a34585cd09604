"""Captured graphs and their padding, over a stand-in for CuPy: hard cases KVM-02 and KVM-07."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import rand_model
from engine.batch import StepPlan
from engine.halves import Halving
from engine.models import decoder
from tests.engine import gpu_stand_in as stand_in
from tests.engine.gpu_stand_in import gpu_forward
from tests.engine.stand_in_engine import FAMILIES, WHOLE, make_engine, model_folder

__all__ = ["gpu_forward"]  # a fixture

NUM_BLOCKS, BLOCK_SIZE = 12, 4


def plan_of(blocks: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> StepPlan:
    """counts[i] tokens of sequence i from position starts[i] on, which has these blocks; decoding ones come first."""
    num_seqs = len(blocks)
    table = np.full((num_seqs, max(map(len, blocks))), -1, np.int32)
    for row, owned in enumerate(blocks):
        table[row, : len(owned)] = owned
    num_tokens = sum(counts)
    return StepPlan(
        step=0,
        slots=np.arange(num_seqs, dtype=np.int32),
        starts=np.array(starts, np.int32),
        cu_seqlens_q=np.cumsum([0, *counts], dtype=np.int32),
        token_ids=(7 * np.arange(num_tokens, dtype=np.int32) + 5) % 60,
        block_table=table,
        num_logits=np.ones(num_seqs, np.int32),
        samples=np.ones(num_seqs, np.bool_),
        rope_lens=np.zeros(num_seqs, np.int32),
        two_way_lens=np.zeros(num_seqs, np.int32),
        num_decodes=sum(count == 1 for count in counts),
    )


class Pair:
    """A forward pass of graphs and an eager one over equal caches, whose blocks are NaN until they are written."""

    def __init__(self, folder: Path, module: ModuleType, halving: Halving = WHOLE) -> None:
        settings = {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": 40}
        halvings = {module: halving, None: WHOLE}
        self.runners = [make_engine(folder, kind, how, **settings).runner for kind, how in halvings.items()]
        self.forward: Any = self.runners[0].forward
        for runner in self.runners:
            for cache in (*runner.cache.k_cache.values(), *runner.cache.v_cache.values()):
                cache[...] = np.float32(np.nan)

    def caches(self) -> list[np.ndarray]:
        """Keys and values of all layers, [2, num_layers, num_blocks, …], of both."""
        return [
            np.stack([stand_in.to_host(array) for array in (*cache.k_cache.values(), *cache.v_cache.values())])
            for cache in (runner.cache for runner in self.runners)
        ]

    def check(self, plan: StepPlan, graphs: int = 0) -> None:
        """The same hidden states and caches to the bit, by so many launches of graphs at least."""
        before = stand_in.STREAM.num_graphs
        batches = [runner.forward.batch(plan) for runner in self.runners]
        hidden, expected = (runner.forward(batch) for runner, batch in zip(self.runners, batches, strict=True))
        assert stand_in.STREAM.num_graphs - before >= graphs
        np.testing.assert_array_equal(stand_in.to_host(hidden)[: plan.num_tokens], expected, strict=True)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(*self.caches())


@pytest.fixture
def pair(gpu_forward: ModuleType, tmp_path: Path) -> Pair:
    return Pair(model_folder(tmp_path, "llama"), gpu_forward)


EIGHT = [[0], [NUM_BLOCKS - 1], *([block] for block in range(1, 7))]  # 0 and the last one are live; 7 … 10 nobody's


def test_kvm_02_padding_of_a_decoding_graph(pair: Pair) -> None:
    """3 rows in a graph of 4 and 5 in one of 8 after a step of 8, whose block table is still there."""
    pair.check(plan_of(EIGHT, [0] * 8, [3] * 8), graphs=3)
    pair.check(plan_of(EIGHT, [3] * 8, [1] * 8), graphs=1)
    before = pair.caches()[0]
    three = plan_of([EIGHT[1], EIGHT[0], EIGHT[4]], [3, 3, 2], [1] * 3)
    pair.check(three, graphs=1)
    padded = pair.forward.batch(three)
    assert stand_in.to_host(padded.seq_lens).tolist() == [4, 4, 3, 0], "no key is looked for"
    pair.check(plan_of([EIGHT[i] for i in (7, 0, 5, 1, 2)], [3] * 5, [1] * 5), graphs=1)
    after = pair.caches()[0]
    others = [EIGHT[3][0], EIGHT[6][0], 7, 8, 9, 10]
    np.testing.assert_array_equal(before[:, others], after[:, others])


def test_kvm_02_padding_of_a_step_in_pieces(pair: Pair) -> None:
    """Decoding rows, chunks and padding in each size, after a step that left its integers in the padding's place."""
    pair.check(plan_of([[0, 1, 2], [NUM_BLOCKS - 1, 5, 6]], [0, 0], [11, 12]), graphs=3)
    before = pair.caches()[0]
    pair.check(plan_of([[0, 1, 2], [NUM_BLOCKS - 1, 5, 6, 3]], [11, 12], [1, 2]), graphs=3)
    pair.check(plan_of([[0, 1, 2, 4], [NUM_BLOCKS - 1, 5, 6, 3]], [12, 14], [3, 2]), graphs=3)
    after = pair.caches()[0]
    nobodys = [7, 8, 9, 10]
    assert np.isnan(after[:, nobodys]).all()
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    pair.check(plan_of([[7, 8, 9, 10, 1, 2, 3, 4]], [0], [30]))  # larger than all pieces: eager
    with pytest.raises(AssertionError):
        pair.check(plan_of([[7, 8, 9, 10, 1, 2, 3, 4]], [0], [30]), graphs=1)


def test_pieces_in_halves(gpu_forward: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Decoding rows, chunks and padding; cut within a sequence, between two, and where the second half is padding."""
    pair = Pair(model_folder(tmp_path, "llama"), gpu_forward, Halving(2, 2))
    num_graphs = 2 * 2 + 1  # two layers, twice cut
    assert {len(pieces.graphs) for pieces in pair.forward._pieces.values()} == {num_graphs}
    pair.check(plan_of([[0, 1, 2], [NUM_BLOCKS - 1, 5, 6]], [0, 0], [11, 12]), graphs=num_graphs)
    pair.check(plan_of([[0, 1, 2], [NUM_BLOCKS - 1, 5, 6, 3]], [11, 12], [1, 2]), graphs=num_graphs)
    pair.check(plan_of([[0, 1, 2, 4], [NUM_BLOCKS - 1, 5, 6, 3]], [12, 14], [1, 2]), graphs=num_graphs)
    for count in (2, 4, 5, 8, 9, 16, 17, 24):
        pair.check(plan_of([[7, 8, 9, 10, 0, 1]], [0], [count]), graphs=num_graphs)
    churn(pair)
    pair.check(plan_of([[7, 8, 9, 10, 0, 1]], [0], [24]), graphs=num_graphs)
    assert caplog.records == [], "each could be captured"


def test_pieces_are_cut_anew(gpu_forward: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another size on; what cannot be captured then is no graph any more."""
    pair = Pair(model_folder(tmp_path, "llama"), gpu_forward)
    before = dict(pair.forward._pieces)
    pair.forward.halve(Halving(min_tokens=16))
    assert {size for size, pieces in pair.forward._pieces.items() if pieces is not before[size]} == {16, 24}
    plans = [plan_of([[0, 1, 2, 3, 4, 5]], [0], [count]) for count in (24, 13, 8, 3)]
    for plan in plans:
        pair.check(plan, graphs=3)

    usual = stand_in.Stream.end_capture

    def fails(stream: stand_in.Stream) -> None:
        usual(stream)
        raise stand_in.CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    monkeypatch.setattr(stand_in.Stream, "end_capture", fails)
    pair.forward.halve(WHOLE)
    assert set(pair.forward._pieces) == {4, 8}
    for plan in plans:
        pair.check(plan)


def test_halves_of_which_nobody_comes_back_cannot_be_captured(
    gpu_forward: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side: Any = sys.modules["engine.kernels.side_stream"]
    monkeypatch.setattr(side.SideStream, "catch_up", lambda self: None)
    pair = Pair(model_folder(tmp_path, "llama"), gpu_forward, Halving(2, 2))
    assert pair.forward._pieces == {}
    assert "cudaErrorStreamCaptureUnjoined" in caplog.text


def test_a_prompt_in_pieces_is_tried(gpu_forward: ModuleType, tmp_path: Path) -> None:
    pair = Pair(model_folder(tmp_path, "llama"), gpu_forward)
    eager = stand_in.to_host(pair.forward.try_prompt(16))
    for num_first in (0, 8, 5):
        before = stand_in.STREAM.num_graphs
        run = pair.forward.pieces_of_prompt(16, num_first)
        np.testing.assert_array_equal(stand_in.to_host(run()), eager)
        assert stand_in.STREAM.num_graphs - before == (5 if num_first else 3)


def churn(pair: Pair) -> None:
    """Arrays of many sizes come and go, and all that nobody holds is collected."""
    for size in range(1, 4000, 97):
        stand_in.zeros((size,))
    gc.collect()


def test_kvm_07_what_a_graph_computes_in_stays_its_own(pair: Pair) -> None:
    """All sizes, before and after arrays of other work have come and gone."""
    plans = [plan_of([[0, 1, 2, 3, 4, 5]], [0], [count]) for count in (24, 16, 9, 3)]
    plans += [plan_of(EIGHT[:count], [1] * count, [1] * count) for count in (8, 4, 2, 1)]
    pair.check(plan_of(EIGHT, [0] * 8, [1] * 8))  # the first token of each
    for _ in range(2):
        for plan in plans:
            pair.check(plan, graphs=1)
        churn(pair)


def test_kvm_07_can_fail(gpu_forward: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs over memory of the common pool compute in what other work has got since."""
    common = stand_in.POOLS[0].malloc
    monkeypatch.setattr("cupy.cuda.using_allocator", lambda malloc: stand_in.using_allocator(common))
    pair = Pair(model_folder(tmp_path, "llama"), gpu_forward)
    held = [stand_in.zeros(shape) for shape in ((16, 1, 24), (16, 2, 8), (16, 16), (16, 24)) for _ in range(20)]
    pair.forward(pair.forward.batch(plan_of([[0, 1, 2]], [0], [11])))
    assert any(stand_in.to_host(array).any() for array in held)


def test_pieces_hold_the_memory_of_one_layer(gpu_forward: ModuleType, tmp_path: Path) -> None:
    """A model of more layers computes in as much, and fewer tokens in what more have left."""
    sizes = []
    for num_layers in (2, 6):
        folder = rand_model(tmp_path / str(num_layers), **FAMILIES["llama"], num_hidden_layers=num_layers)
        forward: Any = make_engine(folder, gpu_forward).runner.forward
        sizes.append(forward._recorder._pool.num_bytes)
    assert sizes[0] == sizes[1]


def test_kvm_07_a_capture_that_fails(
    gpu_forward: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such steps are launched kernel by kernel, and the log says so."""
    begin = stand_in.Stream.begin_capture

    def fails_at_first(stream: stand_in.Stream) -> None:
        begin(stream)
        if not caplog.records:
            raise stand_in.CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    monkeypatch.setattr(stand_in.Stream, "begin_capture", fails_at_first)
    with caplog.at_level(logging.WARNING):
        pair = Pair(model_folder(tmp_path, "llama"), gpu_forward)
    assert [record.getMessage() for record in caplog.records] == [
        "steps of 24 tokens are launched kernel by kernel: no graph of them could be made "
        "(cudaErrorStreamCaptureUnsupported)"
    ]
    pair.check(plan_of([[0, 1, 2, 3, 4, 5]], [0], [20]))
    pair.check(plan_of([[0, 1, 2, 3]], [0], [16]), graphs=3)


def test_steps_that_wait_for_nobody(pair: Pair) -> None:
    """Many steps are launched before the first runs: none overwrites the integers of those that still wait."""
    plans = [plan_of([[2 * i, 2 * i + 1]], [0], [5 + i % 3]) for i in range(6)]
    hidden = [stand_in.asarray(np.zeros(0, np.float32))]
    for plan in plans:
        hidden.append(pair.forward(pair.forward.batch(plan))[: plan.num_tokens] + np.float32(0))
    eager = pair.runners[1].forward
    for plan, found in zip(plans, hidden[1:], strict=True):
        np.testing.assert_array_equal(stand_in.to_host(found), eager(eager.batch(plan)))


def test_the_last_mlp_of_a_large_step_is_for_what_is_wanted(
    pair: Pair, gpu_forward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts and a decoding sequence in a step beyond all graphs: three rows, and keys and values of all."""
    monkeypatch.setattr(gpu_forward, "MOST_IN_PIECES", 24)
    rows: list[int] = []
    for runner in pair.runners:
        run = getattr(runner.forward, "_run", runner.forward)
        *others, last = run._model.pieces

        def watched(hidden: Any, *others: Any, forward: Any = last.forward) -> Any:
            rows.append(hidden.shape[0])
            return forward(hidden, *others)

        run._model = replace(run._model, pieces=(*others, replace(last, forward=watched)))
    pair.check(plan_of([[0]], [0], [1]))  # keys for what decodes then
    rows.clear()
    plan = plan_of([[0], [1, 2, 3, 4], [5, 6, 7, 8]], [1, 0, 0], [1, 14, 14])
    hidden, expected = (runner.forward(runner.forward.batch(plan)) for runner in pair.runners)
    assert rows == [3, 29]
    wanted = [0, 14, 28]
    np.testing.assert_allclose(stand_in.to_host(hidden)[wanted], expected[wanted], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(*pair.caches())


def test_rows_of_codes_are_not_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a norm gives as codes is no array of rows."""
    folder = model_folder(tmp_path, "llama")
    assert [piece.is_by_token for piece in make_engine(folder, None).runner.model.pieces[-2:]] == [False, True]
    usual = decoder._norm
    monkeypatch.setattr(decoder, "_norm", lambda *given: replace(usual(*given), into=given[0]))  # all layers take codes
    assert not any(piece.is_by_token for piece in make_engine(folder, None).runner.model.pieces)


def test_what_is_wanted_of_half_of_the_tokens_is_not_taken_out(
    pair: Pair, gpu_forward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_forward, "MOST_IN_PIECES", 24)
    plan = plan_of([[0, 1, 2, 3], [5, 6, 7, 8]], [0, 0], [14, 14])
    pair.check(replace(plan, num_logits=np.array([7, 1], np.int32)))


def test_the_shortest_sequences(gpu_forward: ModuleType, tmp_path: Path) -> None:
    """Two tokens in blocks of one: a step that is tried has a sequence for every two of its tokens."""
    engine = make_engine(model_folder(tmp_path, "llama"), gpu_forward, block_size=1, max_model_len=2, max_num_seqs=2)
    forward: Any = engine.runner.forward
    assert np.isfinite(stand_in.to_host(forward.try_prompt(32))).all()


def test_sizes(gpu_forward: ModuleType) -> None:
    """Each number up to the limit has a graph that is not much larger, and none is larger than a step may be."""
    for limit in (1, 7, 8, 9, 100, 256, 1000):
        sizes = gpu_forward.graph_sizes(limit)
        assert (sizes[-1], sizes == sorted(set(sizes))) == (limit, True)
    for limit in (1, 5, 8, 100, 600, 2048, 8192):
        sizes = gpu_forward.piece_sizes(limit)
        assert (sizes[-1], sizes == sorted(set(sizes))) == (min(limit, 512), True)
        assert all(size - before <= max(8, before) for before, size in pairwise(sizes))


@pytest.mark.parametrize("limit", [256, 300, 511, 512, 8192])
def test_a_second_half_is_never_all_padding(limit: int, gpu_forward: ModuleType) -> None:
    """Of graphs in pieces: a step is taken by the first that it fits in."""
    halving = Halving(min_tokens=1, row_multiple=128)
    sizes = gpu_forward.piece_sizes(limit)
    assert all(halving.num_first_prompts(size) <= before for before, size in pairwise(sizes))
    assert halving.num_first_prompts(sizes[-1]) == 128 * round(sizes[-1] / 256)
