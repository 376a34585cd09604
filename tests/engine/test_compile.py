"""The module layer: every kernel compiles for the GPUs that are served, and each launch fits on them.

What is launched is known from a dry run of the conformance cases and of the models in engine.kernels.shapes.
"""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conformance.machines import dry_run
from conformance.suite import cases, quick
from engine.config import CUDA_ARCHES, ModelConfig
from engine.errors import KernelError
from engine.kernels import compile as compiler
from engine.kernels.__main__ import main
from engine.kernels.arches import ARCHES
from engine.kernels.compile import Compiled, arch_of, compile_all, compile_kernel
from engine.kernels.device import Instance
from engine.kernels.dry_run import run_dry
from engine.kernels.notes import Launch
from engine.kernels.resources import DTYPES, LIMITS, launches_of, notes_for, problem, uses
from engine.kernels.shapes import MODEL_SHAPES
from engine.model_config.read import model_config_from_hf

RMSNORM = Instance("rmsnorm", "rmsnorm<bf16, 1>")
STEMS = {path.stem for path in compiler.CUDA.glob("*.cu")}
FEW_MODELS = (
    "llama-3.1-8b",
    "command-r-plus",
    "qwen-7b",
    "cpm-1",
    "qwen2-72b-gptq",
)  # that together need every kernel of a model
SPILLS = {  # entry → most bytes, stores and loads, and why
    r"sample_rows": 16,  # of sm_80, 86 and 89: 1024 threads leave 64 registers
    r"rope_kv_write<\w+, false, 1>": 16,  # heads of 16 or less, which only tests have
    r"attention_decode<\w+, 256, 2, 2, signed char, 1>": 16,  # of sm_120; no model that is served has such heads
    r"attention_decode<\w+, 128, 4, 3, .*, 1>": 20,  # of sm_100, where the compiler leaves room for four blocks an SM
    r"all_reduce_add_rmsnorm<\w+, 2, 1>": 20,  # of sm_90, with 64 registers: it waits, and must find room beside others
    r"linear_w4_sm90<.*>": 96,  # what is needed between two tiles
    r"attention_prefill_sm90<\w+, 256, 64, 2>": 80,  # what is needed between two items
}


def config_of(name: str) -> ModelConfig:
    return model_config_from_hf(MODEL_SHAPES[name], None, name)


@cache
def launches_on(arch: str, every: bool) -> tuple[Launch, ...]:
    """Of all cases and models, or of those that are quick to go through."""
    notes = notes_for(arch)
    for case in cases("gpu") if every else quick(cases("gpu")):
        if every or case.stem != "llama":
            dry_run(case, notes)
    models, dtypes = (MODEL_SHAPES, DTYPES) if every else (FEW_MODELS, DTYPES[:1])
    of_models = launches_of(map(config_of, models), arch, dtypes)
    return tuple(dict.fromkeys((*notes.launches, *of_models)))


def spills(launches: tuple[Launch, ...], compiled: Mapping[Instance, Compiled], arch: str) -> list[str]:
    """Kernels that keep more of a thread in memory than SPILLS allows."""
    found = []
    for use in uses(launches, compiled, arch):
        allowed = max((most for entry, most in SPILLS.items() if re.fullmatch(entry, use.entry)), default=0)
        if use.spill_bytes > allowed:
            found.append(f"{use.entry}: {use.spill_bytes} bytes, of which {allowed} are known")
    return found


def check(launches: tuple[Launch, ...], arch: str, folder: Path) -> None:
    compiled = compile_all([launch.instance for launch in launches], arch, folder, progress=False)
    too_large = [f"{use.entry}: {why}" for use in uses(launches, compiled, arch) if (why := problem(use, arch))]
    assert too_large == []
    assert spills(launches, compiled, arch) == []


def largest(arch: str) -> dict[str, Launch]:
    """By file: the launch with the most shared memory and threads, and the longest name."""

    def size(launch: Launch) -> tuple[int, int, int, str]:
        return launch.shared_bytes, launch.threads, len(launch.instance.entry), launch.instance.entry

    return {launch.instance.stem: launch for launch in sorted(launches_on(arch, every=False), key=size)}


def test_every_file_is_launched() -> None:
    """On one of two kinds of GPU, if not on both."""
    assert {*largest("sm_80"), *largest("sm_90")} == STEMS


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_of_every_file(arch: str, tmp_path: Path) -> None:
    """sm_90 includes sm_90a."""
    check(tuple(largest(arch).values()), arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_for_every_arch(arch: str, tmp_path: Path) -> None:
    check(launches_on(arch, every=True), arch, tmp_path)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_no_launch_asks_for_more_than_a_block_has(arch: str) -> None:
    """Whatever the compiler adds. Wrappers choose their sizes by the device's max_shared_bytes."""
    for launch in launches_on(arch, every=False):
        assert 0 < launch.threads <= 1024, launch
        assert launch.shared_bytes <= ARCHES[arch].block_shared_bytes, launch


def test_arches_are_those_of_the_flag() -> None:
    assert set(CUDA_ARCHES) == {"auto", *ARCHES}


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((256, 32, 0), 6),  # 1536 threads
        ((32, 16, 0), 16),  # the most blocks
        ((128, 255, 512), 2),  # 256 registers x 128 threads: half of the 65536
        ((1024, 64, 0), 1),
        ((1024, 65, 0), 0),  # 72 registers x 1024 threads are 73728
        ((128, 32, 48 << 10), 2),  # 49 KiB with what the system takes, of 100
        ((128, 32, 50 << 10), 1),
        ((128, 32, 99 << 10), 1),
        ((128, 32, (99 << 10) + 1), 0),
        ((1025, 8, 0), 0),
    ],
)
def test_blocks_of_an_sm(sizes: tuple[int, int, int], blocks: int) -> None:
    assert ARCHES["sm_86"].blocks_per_sm(*sizes) == blocks


@pytest.mark.parametrize(
    ("launch", "registers", "message"),
    [
        (Launch(RMSNORM, 1056, 0), 32, "1056 threads a block; there can be 1024"),
        (Launch(RMSNORM, 256, 99 << 10), 32, "101504 bytes of shared memory a block; sm_86 has 101376"),
        (Launch(RMSNORM, 1024, 0), 66, "66 registers x 1024 threads are more than an SM has"),
    ],
)
def test_what_does_not_fit_is_said(launch: Launch, registers: int, message: str) -> None:
    code = Compiled(Path(), "", num_registers=registers, spill_bytes=0, static_shared_bytes=128)
    fitting = Launch(RMSNORM, 32, 0)  # the worst of a kernel's launches counts
    (use,) = uses([fitting, launch, fitting], {RMSNORM: code}, "sm_86")
    assert problem(use, "sm_86") == message


def test_spills_are_found() -> None:
    code = Compiled(Path(), "", num_registers=32, spill_bytes=8, static_shared_bytes=0)
    launch = Launch(RMSNORM, 32, 0)
    assert spills((launch,), {RMSNORM: code}, "sm_86") == ["rmsnorm<bf16, 1>: 8 bytes, of which 0 are known"]


def test_a_file_is_made_once_for_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(RMSNORM, "sm_86", tmp_path)
    assert first.path.read_bytes()[:4] == b"\x7fELF"
    assert first.num_registers > 0
    assert first.symbol.encode() in first.path.read_bytes()
    monkeypatch.setattr(compiler, "_compile", lambda *args: pytest.fail("compiled again"))
    assert compile_kernel(RMSNORM, "sm_86", tmp_path) == first


@pytest.mark.parametrize("damaged", ["code cut short", "no code", "code of another", "no facts", "facts of nothing"])
def test_a_damaged_file_is_made_again(damaged: str, tmp_path: Path) -> None:
    """As a full disk or a power cut leaves it; the driver would only say that the image is invalid."""
    first = compile_kernel(RMSNORM, "sm_86", tmp_path)
    code, facts = first.path.read_bytes(), first.path.with_suffix(".json")
    if damaged == "no facts":
        facts.unlink()
    elif damaged == "facts of nothing":
        facts.write_text("[]")
    else:
        first.path.write_bytes(
            {"code cut short": code[:-100], "no code": b""}.get(damaged, b"\x7fELF" + code[5:] + b"0")
        )
    assert compile_kernel(RMSNORM, "sm_86", tmp_path) == first
    assert first.path.read_bytes() == code
    assert {path.suffix for path in tmp_path.iterdir()} == {".cubin", ".json"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *args: (b"", {"symbol": ""}))
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match=r"cannot be kept in .*file: .*; make room, or set XDG_CACHE_HOME to a"):
        compile_kernel(RMSNORM, "sm_86", tmp_path / "file")

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(KernelError, match=r"cannot be kept in .*cache: No space left on device; make room"):
        compile_kernel(RMSNORM, "sm_86", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half done is left"


def test_headers_beside_another_source(tmp_path: Path) -> None:
    """A kernel of the user's own and what it includes, also through others: a change of any is compiled anew."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "mine.cu").write_text('#include "one.cuh"\n__global__ void mine(int* y) { y[0] = kValue; }\n')
    (tmp_path / "one.cuh").write_text('# include "deep/two.h"\n')
    (tmp_path / "deep" / "two.h").write_text('#include "three.h"\n')
    paths = []
    for value in (1, 2):
        (tmp_path / "deep" / "three.h").write_text(f"constexpr int kValue = {value};\n")
        paths.append(compile_kernel(Instance(str(tmp_path / "mine"), "mine"), "sm_86", tmp_path / "cache").path)
    assert paths[0] != paths[1]
    assert paths[0].read_bytes() != paths[1].read_bytes()


@pytest.mark.parametrize("changed", ["source", "header", "options", "compiler", "target"])
def test_a_change_is_compiled_anew(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *args: (b"", {"symbol": ""} | compiler._resources("", "")))
    before = compile_kernel(RMSNORM, "sm_86", tmp_path).path
    source, headers = compiler._source("rmsnorm"), compiler._headers()
    if changed == "source":
        monkeypatch.setattr(compiler, "_source", lambda stem: source + "\n")
    elif changed == "header":
        monkeypatch.setattr(compiler, "_headers", lambda: (*headers[:-1], headers[-1] + "\n"))
    elif changed == "options":
        monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-G"))
    elif changed == "compiler":
        monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.0")
    after = compile_kernel(RMSNORM, "sm_89" if changed == "target" else "sm_86", tmp_path).path
    assert after != before


def test_ptx_of_an_arch(tmp_path: Path) -> None:
    """What the driver of a later GPU runs in place of a card that is not here; it is text that ends with a zero."""
    compiled = compile_kernel(RMSNORM, "compute_86", tmp_path)
    text = compiled.path.read_bytes()
    assert compiled.path.suffix == ".ptx"
    assert b".target sm_86" in text
    assert compiled.symbol.encode() in text
    assert text.endswith(b"\0")


@pytest.mark.parametrize(
    ("instance", "target", "message"),
    [
        (
            Instance("rmsnorm", "rmsnorm<int8>"),
            "sm_80",
            r"cuda/rmsnorm.cu: rmsnorm<int8> does not compile for sm_80:\n",
        ),
        (Instance("nothing", "f"), "sm_80", "nothing.cu: cannot be read"),
        (
            RMSNORM,
            "sm_52",
            r"does not compile for sm_52, only for sm_\d+ to sm_\d+; .*pip install --upgrade nvidia-cuda",
        ),
    ],
)
def test_refusals(instance: Instance, target: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=message):
        compile_all([instance], target, tmp_path, progress=False)


def test_a_compiler_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = compiler.nvrtc.nvrtcResult.NVRTC_SUCCESS, [80, 86, 89, 90]
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "12.4")
    monkeypatch.setattr(compiler.nvrtc, "nvrtcGetSupportedArchs", lambda: old)
    with pytest.raises(KernelError, match=r"NVRTC 12.4 does not compile for sm_120.* sm_120 needs CUDA 12.8 or later"):
        compile_kernel(RMSNORM, "sm_120", tmp_path)


def test_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nand a long story')

    monkeypatch.setattr(compiler.nvrtc, "nvrtcVersion", missing)
    with pytest.raises(
        KernelError, match=r'NVRTC is not there \(Failure finding "libnvrtc.so.13"\); .*pip install nvidia'
    ):
        compiler.nvrtc_version.__wrapped__()


def test_gpus_that_are_served() -> None:
    assert arch_of("80") == "sm_80"
    assert arch_of("120") == "sm_120"
    with pytest.raises(KernelError, match=r"compute capability 7.5; the kernels need 8.0"):
        arch_of("75")


def test_a_dry_run_of_a_model() -> None:
    """All kernels of a step are there, in the model's type and for its sizes."""
    notes = notes_for("sm_90")
    run_dry(config_of("llama-3.1-8b"), np.dtype(ml_dtypes.bfloat16), LIMITS, notes)
    entries = {instance.entry for instance in notes.instances}
    wanted = {"embedding<bf16>", "embedding<float>", "rmsnorm<bf16, 1>", "rope_kv_write<bf16, false, 8>", "greedy"}
    assert entries >= {*wanted, "sample_rows", "edit_logits", "token_logprobs"}
    stems = {instance.stem for instance in notes.instances}
    assert stems >= {"linear", "activation", "attention_decode", "attention_prefill_sm90"}
    assert not any("fp16" in entry for entry in entries)


def test_a_model_without_kernels_is_refused() -> None:
    config = model_config_from_hf({**MODEL_SHAPES["llama-3.1-8b"], "head_dim": 48}, None, "x")
    with pytest.raises(KernelError, match="head_dim 48"):
        run_dry(config, DTYPES[0], LIMITS, notes_for("sm_90"))


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = Compiled(Path(), "", num_registers=40, spill_bytes=4, static_shared_bytes=16)
    monkeypatch.setattr("engine.kernels.__main__.compile_all", lambda wanted, *args: dict.fromkeys(wanted, code))
    monkeypatch.setattr("engine.kernels.__main__.MODEL_SHAPES", {"8b": MODEL_SHAPES["llama-3.1-8b"]})
    file = tmp_path / "report.json"
    assert main(["--arch", "sm_86", "--json", str(file)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("edit_logits"))
    assert line.split() == ["edit_logits", "1024", "40", "4", "16", str(4 * 128256 // 32), "1"]
    assert '"arch": "sm_86"' in file.read_text()
    many = replace(code, num_registers=66)
    monkeypatch.setattr("engine.kernels.__main__.compile_all", lambda wanted, *args: dict.fromkeys(wanted, many))
    assert main(["--arch", "sm_86"]) == 1
    assert "66 registers x 1024 threads are more than an SM has" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.kernels.__main__.compile_all", None)  # nothing may be compiled
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(tmp_path / "nowhere" / "report.json")])
    assert "report.json: cannot be written: No such file or directory" in capsys.readouterr().err


def test_without_nvrtc_it_is_said_what_brings_it() -> None:
    """Python's import finds the folder cuda of this tree first, which says nothing to anybody."""
    lines = (
        "import sys, runpy",
        "sys.modules['cuda.bindings'] = None",
        "runpy.run_module('engine.kernels', run_name='__main__')",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("python -m engine.kernels: ")
    assert done.stderr.endswith("it needs NVRTC: python -m pip install -e '.[nvrtc]', or make test\n")
