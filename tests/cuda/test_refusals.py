"""A kernel that is given arrays of a wrong form is never launched: a KernelError names the argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.case import Case
from conformance.check import is_floating, stored_dtype, stored_inputs
from conformance.memory import BorderedDevice, DeviceMemory, host_view
from conformance.suite import cases
from engine.cpu import sampling
from engine.errors import KernelError
from engine.kernels.check import is_aligned
from engine.kernels.linear import choose
from engine.kernels.notes import Notes
from engine.kernels.table import kernel_ops
from engine.weights import LinearWeight

Array = NDArray[Any]

NAMES = {  # a case of every op, by stem
    "rmsnorm": ("odd", "add-odd", "ordered-one-token", "add-ordered-many"),
    "layernorm": ("odd-bias", "add-wide", "heads"),
    "activation": ("odd", "plain-silu"),
    "embedding": ("odd", "positions-odd"),
    "rope": ("gqa", "qk-norm-gqa"),
    "kv_cache": ("many", "copy-odd", "swap-odd"),
    "attention_logn": ("odd",),
    "attention": ("decode-gqa7-dim80", "prefill-chunks"),
    "linear": ("one-token-bias", "sixteen-tokens-bias", "many-tokens-bias", "logits-splits"),
}
CASES = [case for case in cases("host") if case.name.removesuffix("-bfloat16") in NAMES.get(case.stem, ())]


def placed(case: Case, notes: Notes) -> dict[str, Any]:
    """A case's inputs as its candidate gets them."""
    inputs = stored_inputs(case, 0)
    dtypes = {name: stored_dtype(case, name) for name, value in inputs.items() if is_floating(value)}
    return DeviceMemory(BorderedDevice(notes), np.copy, np.copy, host_view).place(inputs, dtypes, 0)


def wrong_forms(array: Array) -> Iterator[tuple[str, Array]]:
    yield "another type", array.astype(np.float64 if array.dtype.kind in "fV" else np.int64)
    yield "an axis more", array[None]
    if array.ndim > 1:
        yield "an axis less", array[0]
    if array.shape[-1] > 1:
        yield "gaps in the last axis", np.repeat(array, 2, axis=-1)[..., ::2]


def refusals() -> list[Any]:
    found = []
    for case in CASES:
        for name, value in placed(case, Notes()).items():
            for what, form in wrong_forms(value) if isinstance(value, np.ndarray) else ():
                if (case.stem, name) != ("linear", "weight") or "axis" not in what or "gaps" in what:
                    found.append(pytest.param(case, name, form, id=f"{case.stem}-{case.name}-{name}-{what}"))
    return found


@pytest.mark.parametrize(("case", "name", "form"), refusals())
def test_a_wrong_form_is_refused(case: Case, name: str, form: Array) -> None:
    """The message begins with the op; it names the argument, or the one whose form this one contradicts."""
    notes = Notes()
    with pytest.raises(KernelError) as caught:
        case.candidate(kernel_ops(BorderedDevice(notes), sampling), **(placed(case, notes) | {name: form}))
    op, _, problem = str(caught.value).partition(": ")
    assert op.isidentifier()
    assert any(argument in problem.split() for argument in case.make_inputs(0)), problem
    assert not notes.instances


def one_more(array: Array, axis: int) -> Array:
    return np.concatenate([array, np.take(array, [0], axis)], axis)


@pytest.mark.parametrize(
    ("stem", "case", "name", "axis", "message"),
    [
        ("attention", "decode-gqa7-dim80", "q", 0, "seq_lens has shape [3]; expected [4]"),
        ("attention", "decode-gqa7-dim80", "v_cache", 0, "v_cache has shape"),
        ("attention", "decode-gqa7-dim80", "v_cache", 2, "v_cache has shape"),
        ("attention", "prefill-chunks", "block_table", 0, "block_table has shape [6, 13]; expected [5, any]"),
        ("attention", "prefill-chunks", "cu_seqlens_q", 0, "cu_seqlens_q has shape [7]; expected [6]"),
        ("attention", "prefill-chunks", "q", 1, "7 heads of q cannot share 2 KV heads evenly"),
        ("attention", "prefill-chunks", "q", 2, "head_dim 65 of q has no kernel; there are 64, 80, 96, 128, 256"),
        ("rope", "qk-norm-gqa", "q_weight", 0, "q_weight has shape [25]; expected [24]"),
        ("rope", "gqa", "cos_sin", 1, "cos_sin has 25 columns; expected an even number up to 24"),
        ("rope", "gqa", "v_cache", 1, "v_cache has shape"),
        ("rope", "gqa", "slot_mapping", 0, "slot_mapping has shape [38]; expected [37]"),
        ("layernorm", "add-wide", "bias", 0, "bias has shape [4097]; expected [4096]"),
        ("rmsnorm", "add-odd", "residual", 1, "residual has shape [7, 34]; expected [7, 33]"),
        ("rmsnorm", "add-ordered-many", "order", 0, "order has shape [97]; expected [96]"),
        ("linear", "sixteen-tokens-bias", "bias", 0, "bias has shape [18]; expected [17]"),
        ("linear", "sixteen-tokens-bias", "x", 1, "x has shape [16, 265]; expected [any, 264]"),
    ],
)
def test_a_wrong_size_is_refused(stem: str, case: str, name: str, axis: int, message: str) -> None:
    found = next(one for one in CASES if (one.stem, one.name) == (stem, f"{case}-bfloat16"))
    notes = Notes()
    inputs = placed(found, notes)
    with pytest.raises(KernelError) as caught:
        found.candidate(kernel_ops(BorderedDevice(notes), sampling), **(inputs | {name: one_more(inputs[name], axis)}))
    assert message in str(caught.value)
    assert not notes.instances


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [(np.float32, 64, "x is float32; expected bfloat16 or float16"), (np.float16, 36, "an order of 36 elements")],
)
def test_an_order_is_of_whole_pieces_of_16_bits(dtype: Any, size: int, message: str) -> None:
    x, weight, notes = np.zeros((2, size), dtype), np.zeros(size, dtype), Notes()
    with pytest.raises(KernelError, match=message):
        kernel_ops(notes, sampling).rmsnorm_ordered(x, weight, 1e-5, np.arange(size, dtype=np.uint16))
    assert not notes.instances


def test_a_weight_that_is_not_what_it_says() -> None:
    x = np.zeros((3, 16), np.float16)
    weight = LinearWeight("dense", 24, 16, {"weight": np.zeros((25, 16), np.float16)})
    notes = Notes()
    with pytest.raises(KernelError, match=r"linear: weight has shape \[25, 16\]; expected \[24, 16\]"):
        kernel_ops(BorderedDevice(notes), sampling).linear(x, weight)
    assert not notes.instances


def from_an_odd_element(array: Array) -> Array:
    """The same, at an address that is no multiple of 16."""
    room = np.zeros(array.size + 16, array.dtype)
    first = -room.ctypes.data % 16 // array.itemsize + 1
    moved = room[first : first + array.size].reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize(
    ("stem", "case", "name"),
    [
        *(
            ("attention", case, name)
            for case in ("decode-gqa7-dim80", "prefill-chunks")
            for name in ("q", "k_cache", "v_cache")
        ),
        ("linear", "sixteen-tokens-bias", "weight"),
    ],
)
def test_rows_that_loads_of_16_bytes_cannot_take(stem: str, case: str, name: str) -> None:
    found = next(one for one in CASES if (one.stem, one.name) == (stem, f"{case}-bfloat16"))
    notes = Notes()
    inputs = placed(found, notes)
    message = f"rows of {name} do not all begin at a multiple of 16 bytes"
    with pytest.raises(KernelError, match=message):
        found.candidate(
            kernel_ops(BorderedDevice(notes), sampling), **(inputs | {name: from_an_odd_element(inputs[name])})
        )
    assert not notes.instances


def test_what_lies_at_multiples_of_16_bytes() -> None:
    room = np.zeros(4096, np.float16)
    rows = room[-room.ctypes.data % 16 // 2 :][:2048].reshape(4, 512)
    assert is_aligned(rows)
    assert is_aligned(rows[:, 8:])
    assert is_aligned(rows[1:, :5])
    assert not is_aligned(rows[:, 4:])
    assert not is_aligned(rows.reshape(-1)[: 4 * 9].reshape(4, 9))
    assert is_aligned(rows.reshape(-1)[:9].reshape(1, 9))  # its stride leads nowhere
    assert not is_aligned(rows.reshape(-1)[: 2 * 27].reshape(2, 3, 9)[..., :8])


def test_tokens_from_an_odd_element_go_to_the_library() -> None:
    """Which takes them as they are."""
    weight = LinearWeight("dense", 32, 16, {"weight": np.zeros((32, 16), np.float16)})
    x, notes = np.zeros((3, 16), np.float16), Notes()
    assert choose(x, 32, notes) is not None
    assert choose(from_an_odd_element(x), 32, notes) is None
    assert kernel_ops(notes, sampling).linear(from_an_odd_element(x), weight).shape == (3, 32)
    assert not notes.instances
