"""python -m conformance --layers: the engine and ref side by side, and the first place where they part."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import __main__ as command
from conformance.golden_families import FAMILY_GOLDENS, family_model
from conformance.golden_models import golden_model
from conformance.layers import Place, compare_layers, prompt_for
from conformance.suite import target_ops
from engine.models.registry import ARCHITECTURES
from engine.ops import OpTable

SERVED = [name for name, config in FAMILY_GOLDENS.items() if config["architectures"][0] in ARCHITECTURES]
OPS = target_ops("cpu")


def places(folder: Path, ops: OpTable = OPS) -> list[Place]:
    return compare_layers(folder, ops, prompt_for(folder, seed=0))


def first_parting(folder: Path, ops: OpTable) -> str:
    return next(place.name for place in places(folder, ops) if place.problem)


@pytest.mark.parametrize("name", ["llama3", "dynamic", "mistral", *SERVED])
def test_every_family_agrees_at_every_place(name: str, tmp_path: Path) -> None:
    folder = (family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name)
    found = places(Path(folder))
    assert [place for place in found if place.problem] == []
    assert found[-1].name == "logits"
    assert all(0 < place.limit < 1e-4 for place in found if not place.name.endswith("expert_ids"))


def scaled(op: Callable[..., Any], factor: float) -> Callable[..., Any]:
    return lambda *args, **kwargs: op(*args, **kwargs) * np.float32(factor)


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        (replace(OPS, embedding=scaled(OPS.embedding, 1.01)), "layers.0.k_cached"),
        (replace(OPS, attention_prefill=scaled(OPS.attention_prefill, 1.01)), "layers.0.attn_out"),
        (replace(OPS, attention_decode=scaled(OPS.attention_decode, 1.01)), "layers.0.attn_out"),
        (replace(OPS, linear_gate_up_act=scaled(OPS.linear_gate_up_act, 1.01)), "layers.0.mlp_out"),
    ],
)
def test_the_first_place_is_named(ops: OpTable, name: str, tmp_path: Path) -> None:
    assert first_parting(golden_model(tmp_path, "llama3"), ops) == name


def test_a_wrong_choice_of_experts_is_named(tmp_path: Path) -> None:
    def route(router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        return OPS.moe_route(-router_logits, *args, **kwargs)

    assert first_parting(family_model(tmp_path, "mixtral"), replace(OPS, moe_route=route)) == "layers.0.expert_ids"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(golden_model(tmp_path, "llama3"))
    assert command.main(["--layers", folder, "--ids", "5,6,7,8,9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layers.0.k_cached ")
    assert lines[-1] == f"equal at all {len(lines) - 1} places"


def test_the_command_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(OPS, linear_gate_up_act=scaled(OPS.linear_gate_up_act, 1.01))
    monkeypatch.setattr(command, "target_ops", lambda target: broken)
    assert command.main(["--layers", str(golden_model(tmp_path, "llama3"))]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the engine and ref part at layers.0.mlp_out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--layers", "nowhere"],
            "--layers nowhere: the checkpoint must be a folder with config.json and *.safetensors; nowhere is none",
        ),
        (["--ids", "1,x"], "--ids must be integers separated by commas, such as 1,2,3; found '1,x'"),
        (["--ids", "99999999999999999999"], "--ids has 99999999999999999999; ids of this model are 0 to "),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(golden_model(tmp_path, "llama3"))
    assert command.main(["--layers", folder, *arguments]) == 2
    assert message in capsys.readouterr().err
