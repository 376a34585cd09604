"""What is quantized of families with layers of their own kind is loaded again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import write_checkpoint
from engine.ops import cpu_ops
from engine.quantize.methods import METHODS
from tests.engine.checkpoint.test_quantized import load
from tests.engine.quantize.small import make

IDS = list(range(3, 12))
MOST = {"int8": 0.02, "fp8": 0.05, "fp8_tensor": 0.06, "fp8_block": 0.05, "plain": 0.01}  # of packings, of the weight
MOST_INT4 = 0.4


def logits_of(folder: Path, packed: bool) -> np.ndarray[Any, Any]:
    return run_chunks(make_runner(folder, cpu_ops(), [IDS], packed=packed), [IDS], [len(IDS)])[0]


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"smoothquant"}))  # which changes weights on purpose
def test_layers_whose_floating_point_lies_the_other_way(method: str, tmp_path: Path) -> None:
    """GPT-2's are stored [in, out]; quantized they are [out, in] in every format."""
    config = FAMILY_GOLDENS["cpm1"]
    model = write_checkpoint(str(tmp_path / "model"), config, family_tensors(config, 5))
    settings = {"group_size": 16} if METHODS[method].has_groups else {}
    folder = make(Path(model), tmp_path / "out", method, settings)
    before, after = load(Path(model)), load(folder, packed=False)
    most = MOST.get(METHODS[method].packing, MOST_INT4)
    for dest, weight in before.linears.items():
        wanted, found = weight.tensors["weight"], after.linears[dest].tensors["weight"]
        assert np.linalg.norm(found - wanted) < most * np.linalg.norm(wanted), dest
    np.testing.assert_allclose(logits_of(folder, True), logits_of(folder, False), atol=1e-3)
