"""QNT-07: a layer whose output passes float16's range, over the kernels, with quantized weights."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance import golden_formats
from conformance.engine_run import LikeStore, make_runner, run_chunks
from conformance.format_models import FAMILIES
from conformance.golden_families import family_tensors
from conformance.host_device import HostDevice
from engine.api import SamplingParams
from engine.kernels.sampling import KernelSampling
from engine.kernels.table import kernel_ops
from engine.ops import OpTable
from engine.sampler import NO_TOKEN

CHANNEL, TIMES = 5, 4e6  # of the output of down_proj, which is near 1e5 then
PROMPT = [3, 14, 15, 9, 2]


@pytest.fixture(scope="module")
def ops() -> OpTable:
    device = HostDevice()
    return kernel_ops(device, KernelSampling(device, 8, 64))


@pytest.fixture(
    params=["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ct_int8", "ct_fp8_channel"))]
)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def with_a_loud_channel(config: dict[str, Any], seed: int) -> dict[str, Any]:
        tensors = family_tensors(config, seed)
        tensors["model.layers.0.mlp.down_proj.weight"][CHANNEL] *= TIMES
        return tensors

    monkeypatch.setattr(golden_formats, "family_tensors", with_a_loud_channel)
    return golden_formats.format_folder(tmp_path, FAMILIES["llama"][0], request.param)


def logits_of(folder: Path, ops: OpTable, dtype: Any) -> tuple[Any, Any]:
    runner = make_runner(folder, ops, [PROMPT], store=LikeStore(np.zeros(0, dtype)), packed=True)
    return runner, run_chunks(runner, [PROMPT], [len(PROMPT)])[0]


def test_qnt_07_float16_overflows_aloud(folder: Path, ops: OpTable) -> None:
    """Every row is bad: the request ends with an error, and no id 0 is given again and again."""
    runner, logits = logits_of(folder, ops, np.float16)
    assert not np.isfinite(logits).all(axis=-1).any()
    runner.sampler.add(0, SamplingParams(temperature=0.0), 0, PROMPT)
    result = runner.sampler.sample(logits[-1:].copy(), np.zeros(1, np.int32))
    assert result.bad_rows.all()
    assert result.token_ids.tolist() == [NO_TOKEN]
    assert "NaN or infinite" in result.errors[0]


def test_qnt_07_bfloat16_holds_it(folder: Path, ops: OpTable) -> None:
    _, logits = logits_of(folder, ops, np.dtype(ml_dtypes.bfloat16))
    assert np.isfinite(logits).all()
