"""Proof that the harness can fail: faults planted in copies of the CPU twins, each of which the cases must catch."""

import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import conformance.engine_run
import conformance.golden
import conformance.rope_table
import engine.models.decoder
import engine.models.llama
from conformance.case import Case
from conformance.check import check
from conformance.suite import CPU_THREADS, cases, target_ops
from engine.cpu import linear
from engine.cpu.team import Team
from engine.models.registry import Architecture
from engine.ops import OpTable
from tests.conformance.mla_mutants import MLA_MUTANTS
from tests.conformance.moe_mutants import MOE_MUTANTS
from tests.conformance.mutants import MUTANTS, Mutant

CPU = cases("cpu")
OPS = target_ops("cpu")
ALL_MUTANTS = [*MUTANTS, *MLA_MUTANTS, *MOE_MUTANTS]
REF_OPS = ("moe_routing",)  # stems of which the CPU's op table holds ref itself; the cases must catch their faults too


def mutated(module: str, old: str, new: str) -> types.ModuleType:
    """A copy of a module with one piece of its text replaced."""
    original = import_module(module)
    assert original.__file__ is not None
    text = Path(original.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{module} has {text.count(old)} times {old!r}: the mutant is out of date"
    copy = types.ModuleType(f"mutant_of_{original.__name__}")
    with patch.dict(sys.modules, {copy.__name__: copy}):  # dataclasses look their module up
        exec(compile(text.replace(old, new), f"{original.__file__} (mutant)", "exec", dont_inherit=True), vars(copy))
    return copy


def table_of(mutant: Mutant) -> OpTable:
    """The CPU's op table with the mutant in it."""
    package = "ref" if mutant.stem in REF_OPS else "engine.cpu"
    module = mutated(f"{package}.{mutant.stem}", mutant.old, mutant.new)
    if mutant.stem == "team":
        return replace(OPS, linear=partial(linear.linear, team=module.Team(CPU_THREADS)))
    if mutant.stem == "linear":
        return replace(OPS, linear=partial(module.linear, team=Team(CPU_THREADS)), prepare=module.prepare_dense)
    if mutant.stem == "sampling":
        return replace(OPS, sampling=module)
    functions = {op: getattr(module, op) for op in mutant.ops}
    for op, function in functions.items():
        if "team" in signature(function).parameters:
            functions[op] = partial(function, team=Team(CPU_THREADS))
    return replace(OPS, **functions)


def caught(found: list[Case], ops: OpTable) -> str | None:
    """What the first case says in which wrong numbers come out; None if there is none.

    A fault that only raises, or warns, would be caught too, but it proves nothing of the comparison.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for case in found:
            if "cpu" in case.skip:
                continue
            problems = "; ".join(check(case, ops).problems)
            if problems and not problems.startswith("raised"):
                return f"{case.name}: {problems}"
    return None


def cases_of(stem: str, prefix: str = "") -> list[Case]:
    found = [case for case in CPU if case.stem == stem and case.name.startswith(prefix)]
    assert found
    return found


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: f"{mutant.stem}: {mutant.fault} ({mutant.ops[0]})")
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    prefix = mutant.ops[0].removeprefix("attention_") if mutant.stem in ("attention", "sampling") else ""
    stem = "linear" if mutant.stem == "team" else mutant.stem
    assert caught(cases_of(stem, prefix), table_of(mutant)) is not None


def test_there_are_enough_mutants_and_each_twin_has_some() -> None:
    stems = {file.stem for file in Path(import_module("engine.cpu").__file__ or "").parent.glob("[!_]*.py")}
    assert {mutant.stem for mutant in ALL_MUTANTS} == stems | set(REF_OPS)
    assert len(MUTANTS) >= 12


def wrong_now_and_then() -> Callable[..., Any]:
    """Equal but for one bit in every second call."""
    calls = [0]

    def gate_up_act(gate_up: Any, activation: str) -> Any:
        out = OPS.gate_up_act(gate_up, activation)
        calls[0] += 1
        out[:1, :1] = np.nextafter(out[:1, :1], np.float32(9)) if calls[0] % 2 else out[:1, :1]
        return out

    return gate_up_act


def lucky(gate_up: Any, activation: str) -> Any:
    """Never writes its last row, which by luck holds the right numbers, unless the memory is poisoned."""
    right = OPS.gate_up_act(gate_up, activation)
    out = np.empty_like(right)
    out[: None if not np.isnan(out).all() else -1] = right[: None if not np.isnan(out).all() else -1]
    return out


def one_row_short(gate_up: Any, activation: str) -> Any:
    return OPS.gate_up_act(gate_up, activation)[:-1]


def nosy(gate_up: Any, activation: str) -> Any:
    """A rounding that depends on the rows around: within tolerance, but not the same bits."""
    out = OPS.gate_up_act(gate_up, activation)
    return np.nextafter(out, np.float32(9)) if gate_up.sum() > 0 else out


@pytest.mark.parametrize(
    ("gate_up_act", "problem"),
    [
        (wrong_now_and_then(), "other bits on a second run"),
        (lucky, "other bits when fresh memory holds NaN"),
        (nosy, "other bits with other content in other rows"),
        (one_row_short, "has shape"),
    ],
)
def test_a_broken_property_is_caught(gate_up_act: Callable[..., Any], problem: str) -> None:
    found = [case for case in cases_of("activation") if case.name in ("odd", "many")]
    assert problem in str(caught(found, replace(OPS, gate_up_act=gate_up_act)))


def test_whatever_a_candidate_raises_is_its_failure() -> None:
    def gate_up_act(gate_up: Any, activation: str) -> Any:
        raise MemoryError("no room")

    result = check(cases_of("activation", "odd")[0], replace(OPS, gate_up_act=gate_up_act))
    assert (result.status, result.problems) == ("FAIL", ("raised MemoryError: no room",))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("growth ** (head_dim / (head_dim - 2))", "growth"),
        ("return freq / rope.factor", "return freq * rope.factor"),
        ("(turns - rope.low_freq_factor)", "(turns - rope.high_freq_factor)"),
        ('{"dynamic": num_prompt,', '{"dynamic": 0,'),
        ('"longrope": original + 1', '"longrope": original'),
        ("rope.long_factor if is_long", "rope.short_factor if is_long"),
        ("math.floor(low), math.ceil(high)", "math.ceil(low), math.floor(high)"),
        ("min(high, 2.0 * len(freq) - 1.0)", "min(high, len(freq) - 1.0)"),
        ("freq / rope.factor * slow", "freq * slow"),
        ("np.arange(max_model_len)", "np.arange(1, max_model_len + 1)"),
        ("rows[mine] = self._cos_sin(positions[mine]", "rows[mine] = self._cos_sin(positions[:1]"),
        ("[np.cos(angles), np.sin(angles)]", "[np.sin(angles), np.cos(angles)]"),
        (
            "positions[:, None].astype(np.float64) * freq",
            "positions[:, None].astype(np.float32) * freq.astype(np.float32)",
        ),
    ],
)
def test_a_fault_in_the_rope_table_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated("engine.rope_table", old, new)
    monkeypatch.setattr(conformance.rope_table, "inv_freq", module.inv_freq)
    monkeypatch.setattr(conformance.rope_table, "RopeTable", module.RopeTable)
    assert caught(cases_of("rope_table"), OPS) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("config.windows[layer], ops)", "None, ops)"),
        ("head_dim**-0.5", "config.hidden_size**-0.5"),
        ("table[num_decodes:],", "table[: len(table) - num_decodes],"),
    ],
)
def test_a_fault_in_the_model_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated("engine.models.llama", old, new)
    architecture = Architecture(module.weight_map, module.build)
    names = ("LlamaForCausalLM", "MistralForCausalLM")
    monkeypatch.setattr(conformance.engine_run, "ARCHITECTURES", dict.fromkeys(names, architecture))
    assert "logits" in str(caught(cases_of("llama", "forward-mistral"), OPS))


def test_a_fault_around_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = 'mlp_norm = _norm(config, weights, f"{dest}.'
    module = mutated("engine.models.decoder", f"{norm}post_attention", f"{norm}input")
    monkeypatch.setattr(engine.models.llama, "decoder", module.decoder)
    assert "logits" in str(caught(cases_of("llama", "forward-mistral-chunks"), OPS))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("out += ops.moe_shared_expert", "ops.moe_shared_expert"),
        ("if moe.shared_gate else None", "if False else None"),
        ("renormalize=moe.renormalize", "renormalize=True"),
        ("scaling_factor=moe.scaling_factor", "scaling_factor=2.0"),
        ("ops.moe_route(\n        ops.linear(hidden", "ops.moe_route(\n        ops.linear(hidden * 0"),
    ],
)
def test_a_fault_in_a_layer_with_experts_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated("engine.models.moe", old, new)
    monkeypatch.setattr(engine.models.decoder, "feed_forward", module.feed_forward)
    assert "logits" in str(caught(cases_of("llama", "forward-qwen2_moe"), OPS))


@pytest.mark.parametrize("fault", ["blocks in order of number", "past of a chunk forgotten", "turns the other way"])
def test_a_fault_in_an_op_is_seen_in_the_whole_model(fault: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.fault == fault)
    assert "logits" in str(caught(cases_of("llama", "forward-mistral-chunks"), table_of(mutant)))


def test_a_wrong_golden_is_caught() -> None:
    """One stored logit off by a thousandth of its row, and one greedy id."""

    def off(case: Case, change: Callable[[Any], None]) -> Case:
        def candidate(ops: OpTable, **inputs: Any) -> Any:
            outputs = case.candidate(ops, **inputs)
            change(next(iter(outputs.values())))
            return outputs

        return replace(case, candidate=candidate)

    def by_a_thousandth(logits: Any) -> None:
        logits[3, 7] += 1e-3 * logits[3].std()

    def by_one(token_ids: Any) -> None:
        token_ids[5] += 1

    by_name = {case.name: case for case in conformance.golden.cases()}
    assert "output logits" in str(caught([off(by_name["llama3-logits0"], by_a_thousandth)], OPS))
    assert "output greedy" in str(caught([off(by_name["llama3-greedy0"], by_one)], OPS))
