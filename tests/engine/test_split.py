"""A model on several ranks gives what it gives on one: families, formats, uneven sizes, stages."""

from pathlib import Path

import numpy as np
import pytest

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_families import FAMILY_GOLDENS, family_model, family_prompts
from conformance.golden_models import GOLDENS, golden_model
from engine.ops import cpu_ops
from tests.engine.split_ranks import ranks_as_one

OPS = cpu_ops()
CHUNKS = (3, 17)  # of two prompts: a step of both, then decodes beside chunks
TOLERANCE = 1e-5


def assert_as_one_rank(folder: Path, prompts: list[list[int]], tp: int, pp: int, **how: object) -> None:
    expected = run_chunks(make_runner(folder, OPS, prompts, **how), prompts, CHUNKS)
    found = run_chunks(ranks_as_one(folder, OPS, prompts, tp, pp, **how), prompts, CHUNKS)
    for one, other in zip(expected, found, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * max(1, np.abs(one).max()))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", [*GOLDENS, *FAMILY_GOLDENS])
def test_logits_are_those_of_one_rank(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    """DST-05: heads cut, KV heads copied where ranks outnumber them; latents, experts, biases by row and by column."""
    folder = (family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name)
    assert_as_one_rank(folder, family_prompts("qwen2"), tp, pp)
