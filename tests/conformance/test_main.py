"""python -m conformance: its lines, its exit status, its JSON."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest

from conformance import __main__ as command
from conformance import host_build
from conformance.case import Case
from conformance.compare import elementwise_error
from conformance.golden_models import rand_model
from conformance.machines import kernel_hash
from conformance.model_shapes import model_cases
from conformance.report import RESULTS, result_lines, source_hash
from conformance.suite import target_ops
from ref.rmsnorm import add_rmsnorm

LINE = re.compile(r"\S+ \S+ (\S+ \S+ (ok|FAIL)|- - skip\(.+\))")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    status = command.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """rmsnorm is off by a thousandth in its third row, and raises in a case of no rows."""
    ops = target_ops("cpu")

    def wrong(x: Any, weight: Any, eps: float) -> Any:
        out = ops.rmsnorm(x, weight, eps)
        out[2 % len(out)] *= np.float32(1.001)
        return out

    monkeypatch.setattr(command, "target_ops", lambda target: replace(ops, rmsnorm=wrong))


def test_passing(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "cpu", "--op", "rmsnorm")
    assert status == 0
    assert lines[-1] == "28 passed, 0 failed, 0 skipped"
    assert all(LINE.fullmatch(line) for line in lines[:-1])
    assert {line.split()[0] for line in lines[:-1]} == {"rmsnorm"}
    assert all(float(line.split()[2]) <= float(line.split()[3]) for line in lines[:-1])


def test_golden(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "golden", "--op", "llama", "--case", "llama3-logits1")
    assert status == 0
    assert lines[0].startswith("llama llama3-logits1 ")
    assert lines[1:] == ["1 passed, 0 failed, 0 skipped"]


def test_a_list_needs_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    """It is that of the host, where all can look."""
    _, listed, _ = run(capsys, "--list", "--op", "rmsnorm")
    assert listed == run(capsys, "--target", "host", "--list", "--op", "rmsnorm")[1]
    assert any(line.startswith("rmsnorm add-ordered-wide") for line in listed)


@pytest.mark.usefixtures("broken")
def test_failing(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "cpu", "--op", "rmsnorm")
    assert status == 1
    assert re.fullmatch(r"19 passed, 9 failed, 0 skipped", lines[-1])
    place = next(i for i, line in enumerate(lines) if line.startswith("rmsnorm odd "))
    assert lines[place].endswith(" FAIL")
    assert "at [2, " in lines[place + 1]
    assert lines[place + 2] == "    again: python -m conformance --target cpu --op rmsnorm --case odd"
    assert "    raised ZeroDivisionError: integer modulo by zero" in lines


@pytest.mark.usefixtures("broken")
def test_the_printed_command_runs_the_failing_case_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run(capsys, "--target", "cpu", "--op", "rmsnorm", "--seed", "7")
    again = next(line for line in lines if "again: " in line and "many" in line)
    status, lines, _ = run(capsys, *again.split()[4:])
    assert status == 1
    assert "--seed 7" in again
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"


def test_skipping(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "cpu", "--op", "embedding")
    assert status == 0
    assert lines[0] == "embedding none - - skip(the CPU's op table holds ref.embedding itself)"
    assert lines[-1] == "0 passed, 0 failed, 14 skipped"


def test_no_gpu_is_no_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, lines, error = run(capsys, "--target", "gpu", "--op", "rmsnorm")
    assert (status, lines) == (2, [])
    assert error.startswith("python -m conformance: --target gpu: looked for CuPy, which the extras cuda12 and cuda13")
    assert error.count("\n") == 1


def test_no_compiler_is_no_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_build.shutil, "which", lambda name: None)
    host_build.gxx.cache_clear()
    host_build._compiler_version.cache_clear()
    status, lines, error = run(capsys, "--target", "host", "--op", "rmsnorm")
    host_build.gxx.cache_clear()
    assert (status, lines) == (2, [])
    assert "there is no g++ in the PATH" in error


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """What runs, what is skipped and why, and by name what has no kernel."""
    status, lines, _ = run(capsys, "--target", "host", "--list")
    assert status == 0
    assert "rmsnorm odd-bfloat16" in lines
    assert "attention decode-dim10-float16 skip(there are kernels for head_dim 64, 80, 96, 128 and 256 only)" in lines
    assert {line.split()[0] for line in lines if line.endswith(" left out(there is no kernel for it yet)")} == {
        "mla",
        "moe",
        "moe_routing",
        "attention_biased",
    }


def test_kernels_on_this_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--target host, its JSON with the hash of the .cu, and JUnit's XML."""
    files = [tmp_path / "results.json", tmp_path / "results.xml"]
    options = ["--op", "embedding", "--json", str(files[0]), "--junit", str(files[1])]
    status, lines, _ = run(capsys, "--target", "host", *options)
    assert (status, lines[-1]) == (0, "42 passed, 0 failed, 0 skipped")
    report = json.loads(files[0].read_text())
    assert report["kernels"] == {"embedding": kernel_hash("embedding")}
    assert (report["gpu"], len(report["cases"])) == (None, 42)
    suite = ElementTree.parse(files[1]).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("42", "0")
    assert suite[0].attrib.items() >= {"classname": "embedding", "name": "none-bfloat16"}.items()


def test_a_quick_run_has_some_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run(capsys, "--target", "gpu", "--list", "--quick")
    stems = {case.stem for case in command.cases("gpu")}
    assert {line.split()[0] for line in lines if "left out" not in line} == stems
    assert len(lines) < 300


def test_the_sizes_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--model DIR: its norms, projections, activation, rope and attention, each window once."""
    sizes = {"head_dim": 64, "num_attention_heads": 7, "num_key_value_heads": 1, "sliding_window": 9}
    rand_model(tmp_path, **sizes, architectures=["MistralForCausalLM"], model_type="mistral")
    _, lines, _ = run(capsys, "--target", "host", "--model", str(tmp_path), "--list")
    assert len(lines) == 44
    assert "linear model-gate-up-17-bfloat16" in lines
    found = {case.name: case for case in command.in_storages(model_cases(tmp_path))}
    assert found["decode-model-window-9-bfloat16"].axes["n_heads"] == 7
    assert found["model-down-1-bfloat16"].axes["in_features"] == 256
    status, lines, _ = run(capsys, "--target", "host", "--model", str(tmp_path), "--op", "rope")
    assert (status, lines[-1]) == (0, "6 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize(("target", "message"), [("cpu", "is for --target host or gpu"), ("host", "no such file")])
def test_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, message: str) -> None:
    status, lines, error = run(capsys, "--target", target, "--model", str(tmp_path / "none"))
    assert (status, lines) == (2, [])
    assert message in error


def test_a_model_whose_heads_have_no_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rand_model(tmp_path, head_dim=72)
    status, lines, error = run(capsys, "--target", "host", "--model", str(tmp_path), "--list")
    assert (status, lines) == (2, [])
    assert "there are no kernels for its head_dim 72, only for 64, 80, 96, 128, 256" in error


def test_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is written is enough to judge an answer by."""
    status, lines, _ = run(capsys, "export", str(tmp_path), "--op", "rmsnorm", "--case", "add-odd-bfloat16")
    assert (status, lines) == (0, [f"1 cases written to {tmp_path}"])
    assert json.loads((tmp_path / "cases.json").read_text()) == ["rmsnorm/add-odd-bfloat16"]
    folder = tmp_path / "rmsnorm" / "add-odd-bfloat16"
    about = json.loads((folder / "case.json").read_text())
    inputs = {
        name: np.load(folder / entry["file"]).view(getattr(ml_dtypes, entry["dtype"])).astype(np.float32)
        for name, entry in about["inputs"].items()
    }
    assert (about["changes"], about["parameters"]) == (["residual"], {"eps": 1e-5})
    normed, new_residual = add_rmsnorm(**inputs, **about["parameters"], storage="bfloat16")
    for name, answer in (("normed", normed), ("new_residual", new_residual)):
        golden = np.load(folder / about["outputs"][name]["file"])
        assert golden.dtype == np.float64
        errors = elementwise_error(answer, golden)
        assert np.sqrt(np.mean(errors**2)) <= about["outputs"][name]["limit"]
        assert errors.max() <= about["outputs"][name]["worst_limit"] < 0.1


def test_the_help_of_export(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own, not that of everything."""
    for arguments, status in ((["export", "--help"], "0"), (["export"], "2")):
        with pytest.raises(SystemExit, match=status):
            command.main(arguments)
    said = capsys.readouterr()
    assert said.out.startswith("usage: python -m conformance export [-h]")
    assert "--exercise" not in said.out
    assert "python -m conformance export: error: the following arguments are required: DIR" in said.err


def test_export_where_something_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither a README of somebody's is lost, nor are cases of another seed taken for part of it."""
    (tmp_path / "README.txt").write_text("mine")
    for place, reason in ((tmp_path, "it is not empty"), (tmp_path / "README.txt", "File exists")):
        status, lines, error = run(capsys, "export", str(place), "--op", "rmsnorm")
        assert (status, lines) == (2, [])
        assert error == f"python -m conformance: export {place}: {reason}; give a new folder\n"
    assert (tmp_path / "README.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "cpu", "--arch", "sm_80"), "--arch is for --target gpu, found --target cpu"),
        (("--target", "gpu", "--schedule", "random"), "--schedule is for --target host, found --target gpu"),
        (("--target", "cpu", "--sanitizer", "thread"), "--sanitizer is for --target host, found --target cpu"),
        (("export", "DIR", "--target", "golden"), "export is for --target cpu or host or gpu, found --target golden"),
        (("--results", "--ids", "1"), "--ids is for --layers"),
        (("--target", "cpu", "--timeout", "nan"), "--timeout nan: it must be a number of seconds above 0"),
        (("--target", "cpu", "--json", "{}/none/file"), "it cannot be written: No such file or directory"),
        (("--target", "cpu", "--junit", "{}"), "it cannot be written: Is a directory"),
        (
            ("--target", "cpu", "--op", "rmsnorm", "--case", "x"),
            "no case of --target cpu has --op rmsnorm --case x; its",
        ),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """Before anything runs, in one line; nothing that was asked for is passed over in silence."""
    status, lines, error = run(capsys, *(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert message in error


def test_a_seed_below_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--target", "cpu", "--op", "rmsnorm", "--seed", "-1"])
    assert "--seed: -1 is not within 0 to" in capsys.readouterr().err


@pytest.mark.usefixtures("broken")
def test_the_printed_command_has_all_that_matters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--schedule too, which a fault may depend on."""
    machine = command.Machine(command.target_ops("cpu"), command.NumpyMemory())
    monkeypatch.setattr(command, "host_machine", lambda cases, **options: machine)
    options = ("--schedule", "random", "--quick")
    _, lines, _ = run(capsys, "--target", "host", "--op", "rmsnorm", "--case", "odd-float32", *options)
    again = next(line for line in lines if "again: " in line)
    assert again.split()[4:] == ["--target", "host", "--op", "rmsnorm", "--case", "odd-float32", *options]


def test_stored_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run of a GPU passed when it was stored, and the kernels that have changed since are named."""
    for path in RESULTS.glob("*.json"):
        stored = json.loads(path.read_text())
        if stored.get("target") != "gpu":
            continue
        assert {case["status"] for case in stored["cases"]} == {"ok"}, path.name
        assert stored["gpu"]
        assert stored["kernels"].keys() >= {"rmsnorm", "attention_decode", "linear"}
    kernels = {"embedding": kernel_hash("embedding"), "rmsnorm": "0" * 64, "gone": "1" * 64}
    cases = [{"status": "ok"}, {"status": "FAIL"}]
    stored = {"gpu": "Some GPU", "target": "gpu", "date": "2026-11-30", "kernels": kernels, "cases": cases}
    (tmp_path / "some.json").write_text(json.dumps(stored))
    assert result_lines(tmp_path) == [
        "some.json: Some GPU, 2026-11-30, 1 passed, 1 failed; changed since: rmsnorm, gone"
    ]
    status, lines, _ = run(capsys, "--results")
    assert status == 0
    assert lines


def test_a_hash_of_a_kernel_covers_its_headers(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "include" / "b.cuh").write_text('#include "c.cuh"\n')
    header = tmp_path / "include" / "c.cuh"
    header.write_text("// one\n")
    (tmp_path / "include" / "other.cuh").write_text("// not included\n")
    before = kernel_hash("a", tmp_path)
    (tmp_path / "include" / "other.cuh").write_text("// changed\n")
    assert kernel_hash("a", tmp_path) == before
    header.write_text("// two\n")
    assert kernel_hash("a", tmp_path) != before


def test_nothing_to_run_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, error = run(capsys, "--target", "cpu", "--op", "atention")
    assert (status, lines) == (2, [])
    assert "--op atention" in error
    assert "attention" in error


@pytest.mark.usefixtures("broken")
def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The fields of a results file; no skipped case, no infinity."""
    file = tmp_path / "results.json"
    run(capsys, "--target", "cpu", "--op", "rmsnorm", "--json", str(file))
    report = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report.keys() == {"target", "gpu", "driver", "cuda", "cupy", "date", "kernels", "cases"}
    assert re.fullmatch("[0-9a-f]{64}", report["kernels"]["rmsnorm"])
    by_name = {case["case"]: case for case in report["cases"]}
    assert by_name["odd"]["status"] == "FAIL"
    assert by_name["odd"]["error"] > by_name["odd"]["tolerance"] > 0
    assert by_name["no-tokens"]["error"] is None
    assert by_name["add-odd"] == {
        "stem": "rmsnorm",
        "case": "add-odd",
        "status": "ok",
        "error": by_name["add-odd"]["error"],
        "tolerance": by_name["add-odd"]["tolerance"],
    }


def test_json_has_no_skipped_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run(capsys, "--target", "cpu", "--op", "embedding", "--json", str(file))
    assert json.loads(file.read_text())["cases"] == []


@pytest.mark.parametrize("target", ["cpu", "golden"])
def test_every_stem_has_a_source(target: str) -> None:
    cases: list[Case] = command.cases(target)
    assert all(source_hash(target, stem) for stem in {case.stem for case in cases})
