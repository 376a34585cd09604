"""The hostile inputs are as hostile as they say."""

import numpy as np
import pytest

from conformance.check import is_floating, stored_dtype, stored_inputs
from conformance.inputs import GARBAGE, disturb_paged_kv, guarded, normal, paged_kv, poisoned_allocations
from conformance.memory import BorderedDevice, DeviceMemory, host_view
from conformance.suite import cases
from engine.kernels.notes import Notes
from ref.kv_cache import kv_cache_gather

SEQ_LENS = (1, 4, 6, 13)


def test_guarded_has_poison_on_all_sides() -> None:
    view = guarded(np.ones((2, 3), np.float32))
    assert view.base is not None
    assert view.base.shape == (4, 5)
    assert np.isnan(view.base).sum() == 20 - 6
    assert not view.flags.c_contiguous
    assert view.tolist() == [[1.0] * 3] * 2


def test_every_input_of_a_kernel_is_met_at_16_bytes() -> None:
    """As in a model: else a kernel's loads of 16 bytes run in no case. By stem and input, if a row has 16 bytes."""
    memory = DeviceMemory(BorderedDevice(Notes()), np.copy, np.copy, host_view)
    met: dict[tuple[str, str], bool] = {}
    for case in cases("host"):
        if case.storage != "bfloat16" or case.stem == "llama" or "host" in case.skip:
            continue
        inputs = stored_inputs(case, 0)
        dtypes = {name: stored_dtype(case, name) for name, value in inputs.items() if is_floating(value)}
        placed = memory.place(inputs, dtypes, 0)
        for name in dtypes:
            array = placed[name]
            if array.size and array.shape[-1] * array.itemsize >= 16:
                rows = (array[place].ctypes.data for place in np.ndindex(array.shape[:-1]))
                met[case.stem, name] = met.get((case.stem, name), False) or any(row % 16 == 0 for row in rows)
    assert len(met) > 30
    assert [key for key, is_aligned in met.items() if not is_aligned] == []


def test_guarded_along_the_first_axis_is_contiguous() -> None:
    view = guarded(np.ones((2, 3), np.int32), num_axes=1)
    assert view.base is not None
    assert view.base[[0, -1]].tolist() == [[-(2**31)] * 3] * 2
    assert view.flags.c_contiguous


def test_fresh_memory_is_poisoned_for_a_while() -> None:
    with poisoned_allocations():
        assert np.isnan(np.empty((2, 3), np.float32)).all()
        assert np.isnan(np.empty_like(np.ones(3))).all()
        assert np.empty(2, np.int64).tolist() == [-(2**63)] * 2
        assert np.empty(2, np.bool_).all()
    with pytest.raises(ZeroDivisionError), poisoned_allocations():
        _ = 1 / 0
    assert np.empty.__name__ == "empty"


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_kv(block_size: int) -> None:
    """Owned slots are finite, all others NaN; no block twice; order shuffled; −1 reads nobody's block."""
    kv = paged_kv(np.random.default_rng(0), SEQ_LENS, block_size, n_kv_heads=2, head_dim=6)
    owned = [block for row in kv["block_table"] for block in row.tolist() if block >= 0]
    num_blocks = len(kv["k_cache"])
    assert len(set(owned)) == len(owned) == sum(-(-n // block_size) for n in SEQ_LENS) == num_blocks - 3
    assert {0, num_blocks - 1}.isdisjoint(owned)
    assert (kv["block_table"][:, -1] == -1).all()
    if block_size == 1:
        assert owned != sorted(owned)
    for cache in (kv["k_cache"], kv["v_cache"]):
        assert np.isfinite(cache).sum() == sum(SEQ_LENS) * 2 * 6
        for row, seq_len in zip(kv["block_table"], SEQ_LENS, strict=True):
            assert np.isfinite(kv_cache_gather(cache, row, seq_len)).all()


def test_disturb_paged_kv_keeps_one_sequence_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    kv = paged_kv(rng, SEQ_LENS, 4, n_kv_heads=2, head_dim=6)
    before = [kv_cache_gather(kv["k_cache"], kv["block_table"][i], n) for i, n in enumerate(SEQ_LENS)]
    disturb_paged_kv(rng, **kv, seq_lens=np.array(SEQ_LENS), keep=3, first_visible=5)
    after = [kv_cache_gather(kv["k_cache"], kv["block_table"][i], n) for i, n in enumerate(SEQ_LENS)]
    assert np.array_equal(after[3][5:], before[3][5:])
    assert (after[3][:5] != before[3][:5]).all()
    assert all((a != b).all() for a, b in zip(after[:3], before[:3], strict=True))
    num_unowned = kv["k_cache"].shape[0] * 4 - sum(SEQ_LENS)
    assert (kv["v_cache"] == GARBAGE).sum() == num_unowned * 2 * 6


def test_normal_is_float32() -> None:
    assert normal(np.random.default_rng(0), 3, 2, scale=2.0).dtype == np.float32
