"""attention_decode where blocks share a sequence: the last one adds up the parts, in one order; planted faults."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.host import KernelFault
from conformance.host_build import CUDA
from conformance.host_device import HostDevice
from engine.kernels.attention import attention_decode
from engine.kernels.notes import Notes
from ref import attention
from tests.cuda.conftest import Verdict
from tests.cuda.isolated import planted

Array = NDArray[Any]

N_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 64, 16, 40
SEQ_LENS = (590, 3)  # the second has tokens for one split only
NUM_SMS = 8  # two blocks for each sequence and KV head
SM_SCALE = 0.125
ORDERS = (("in_step", 0), ("greedy", 0), ("random", 1))


MANY_SMS, MANY_HEADS = (
    80,
    32,
)  # 20 splits: more than are added up at once; of a block, more heads times splits than threads


@cache
def inputs(n_heads: int = N_HEADS) -> dict[str, Array]:
    """With other heads the first sequence is twice as long."""
    rng = np.random.default_rng(3)
    times = 1 if n_heads == N_HEADS else 2
    num_blocks, seq_lens = times * NUM_BLOCKS, (times * SEQ_LENS[0], SEQ_LENS[1])

    def numbers(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    return {
        "q": numbers(2, n_heads, HEAD_DIM),
        "k_cache": numbers(num_blocks, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM),
        "v_cache": numbers(num_blocks, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM),
        "block_table": np.stack([rng.permutation(num_blocks)] * 2).astype(np.int32),
        "seq_lens": np.array(seq_lens, np.int32),
    }


def decode(device: HostDevice, n_heads: int = N_HEADS) -> Array:
    given = inputs(n_heads)
    caches = given["k_cache"], given["v_cache"]
    answer: Array = attention_decode(
        given["q"], *caches, given["block_table"], given["seq_lens"], SM_SCALE, device=device
    )
    return answer


def problem(device: HostDevice, n_heads: int = N_HEADS) -> str:
    """What is wrong with two launches in a row; "" if nothing is."""
    found = [decode(device, n_heads) for _ in range(2)]
    given = inputs(n_heads).items()
    wide = {name: array.astype(np.float64) if array.dtype.kind != "i" else array for name, array in given}
    with np.errstate(invalid="ignore"):  # of what no block has written
        error = np.abs(found[0].astype(np.float64) - attention.attention_decode(**wide, sm_scale=SM_SCALE)).max()
    if not error <= 4 * 2**-8:
        return f"error {error}"
    if not np.array_equal(found[0].view(np.uint16), found[1].view(np.uint16)):
        return "another answer the second time"
    return "a counter that is not zero" if device.counters.any() else ""


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_splits_add_up(order: tuple[str, int]) -> None:
    assert problem(HostDevice(*order, num_sms=NUM_SMS)) == ""


def test_many_splits_add_up() -> None:
    assert problem(HostDevice("greedy", num_sms=MANY_SMS), MANY_HEADS) == ""


def test_the_order_of_blocks_does_not_matter() -> None:
    """Whichever block comes last, the bits are the same."""
    answers = [decode(HostDevice(*order, num_sms=NUM_SMS)) for order in ORDERS]
    assert all(np.array_equal(answers[0], answer) for answer in answers[1:])


FAULTS = {  # fault: text found once in attention_decode.cu, what replaces it
    "added up by the first that comes": ("== static_cast<unsigned>(num_splits - 1);", "== 0;"),
    "counter not brought back": ("blockIdx.y, num_splits - 1)", "blockIdx.y, num_splits)"),
    "counter of another sequence": ("counters + seq * gridDim.y +", "counters +"),
    "a split lost": ("split < num_splits; ++split) {", "split < num_splits - 1; ++split) {"),
    "weights of other splits": (
        "const float* const exponents = all + head",
        "const float* const exponents = all + 0 * head",
    ),
    "empty split counted": (
        "weight > 0.0f ? top + log2f(weight) : -kInfinity",
        "weight > 0.0f ? top + log2f(weight) : 0.0f",
    ),
    "newest tokens never read": (
        "      copy(slots[stage], stage);\n      cp_async_commit();",
        "      cp_async_commit();",
    ),
    "slots of the chunk before": ("next_slot = slot_of(chunk + kStages * kWarps)", "next_slot = slot_of(chunk)"),
    "parts read before they are there": (
        "__ldcg(lse + first_row * num_splits + i);\n  __syncthreads();",
        "__ldcg(lse + first_row * num_splits + i);",
    ),
}


MANY_FAULTS = {
    "splits behind the eighth lost": ("split < num_splits; ++split) {", "split < min(num_splits, 8); ++split) {"),
    "only as many weights as threads": (
        "i < num_heads * num_splits; i += 32 * kWarps) all[i] =",
        "i < min(num_heads * num_splits, 32 * kWarps); i += 32 * kWarps) all[i] =",
    ),
}


def judge(fault: str, folder: Path) -> str:
    text, replacement = (FAULTS | MANY_FAULTS)[fault]
    num_sms, n_heads = (MANY_SMS, MANY_HEADS) if fault in MANY_FAULTS else (NUM_SMS, N_HEADS)
    shutil.copytree(CUDA / "include", folder / "include")
    (folder / "host").symlink_to(CUDA / "host")
    source = planted((CUDA / "attention_decode.cu").read_text("utf-8"), text, replacement)
    (folder / "attention_decode.cu").write_text(source, "utf-8")
    for order in ORDERS:
        try:
            if found := problem(HostDevice(*order, folder=folder, num_sms=num_sms), n_heads):
                return found
        except KernelFault as fault_:
            return str(fault_)
    return ""


@pytest.mark.parametrize("fault", [*FAULTS, *MANY_FAULTS])
def test_planted_fault_is_seen(fault: str, verdict: Verdict) -> None:
    assert verdict(judge), "nothing is noticed"


@pytest.mark.parametrize(
    ("num_seqs", "longest", "warps"),  # in 16, 4, 2, 1 and 1 splits; 17 sequences are 136 blocks
    [(1, 16384, 4), (1, 32784, 8), (4, 16384, 4), (4, 65536, 8), (8, 65536, 4), (16, 16384, 8), (17, 16384, 4)],
)
def test_warps_of_a_block(num_seqs: int, longest: int, warps: int) -> None:
    """Of 132 SMs: twice as many where a block has an SM for itself, and a whole sequence or a part that may be long."""
    notes = Notes(num_sms=132, max_shared_bytes=227 << 10)
    cache_ = np.zeros((1, 16, 8, 128), ml_dtypes.bfloat16)
    q, table = np.zeros((num_seqs, 32, 128), ml_dtypes.bfloat16), np.zeros((num_seqs, longest // 16), np.int32)
    attention_decode(q, cache_, cache_, table, np.zeros(num_seqs, np.int32), SM_SCALE, device=notes)
    (launch,) = notes.launches
    assert launch.instance.entry == f"attention_decode<bf16, 128, {warps}, 3>"
    assert launch.threads == 32 * warps
