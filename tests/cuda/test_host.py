"""Builds and launches: what is refused before anything runs, and what the message says."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance import host_build
from conformance.host import Library, Strided
from conformance.host_build import BuildError, build

SOURCE = """
#include "vec.cuh"
__global__ void scale(const bf16* x, float* y, int n, float factor, const long long* unused) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = to_float(x[i]) * factor + (unused == nullptr ? 0.0f : 1.0f);
}
"""
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = tmp_path_factory.mktemp("kernels") / "scale.cu"
    path.write_text(SOURCE)
    return Library(path, ["scale"])


def good() -> list[Any]:
    return [np.ones(8, BF16), np.zeros(8, np.float32), np.int32(8), np.float32(3), None]


def test_launch(library: Library) -> None:
    arguments = good()
    library.launch("scale", (1,), (32,), arguments)
    assert arguments[1].tolist() == [3.0] * 8
    x = np.arange(16, dtype=np.float32).astype(BF16)[::2]
    library.launch("scale", (1,), (32,), [Strided(x), *arguments[1:4], np.zeros(1, np.int64)])
    assert arguments[1].tolist() == [3.0 * i + 1 for i in range(8)], "a strided view is the address of its first"


def read_only() -> np.ndarray:
    y = np.zeros(8, np.float32)
    y.flags.writeable = False
    return y


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, np.ones(8, np.float32), r"argument 0 \(const bf16\*\) must be an array of bfloat16, found float32"),
        (0, [1.0], "must be an array or None, found list"),
        (0, np.ones((8, 2), BF16)[:, 0], r"must be contiguous, found strides \(4,\) for shape \(8,\)"),
        (1, read_only(), r"argument 1 \(float\*\) is written by the kernel, but the array is read-only"),
        (2, 8, r"argument 2 \(int\) must be a NumPy int32, found int"),
        (2, np.int64(8), r"argument 2 \(int\) must be a NumPy int32, found int64"),
        (2, np.ones(1, np.int32), r"must be a NumPy int32, found ndarray"),
        (3, 3.0, r"argument 3 \(float\) must be a NumPy float32, found float"),
        (4, np.zeros(1, np.int32), r"argument 4 \(const long long\*\) must be an array of int64, found int32"),
    ],
)
def test_refused_arguments(library: Library, place: int, value: Any, message: str) -> None:
    arguments = good()
    arguments[place] = value
    with pytest.raises((TypeError, ValueError), match=message):
        library.launch("scale", (1,), (32,), arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0,)}, "grid is"),
        ({"grid": (1, 1, 1, 1)}, "grid is"),
        ({"block": (2048,)}, "at most 1024"),
        ({"shared_bytes": 101377}, "at most 101376"),
        ({"arguments": []}, "0 arguments; it has 5 parameters"),
    ],
)
def test_refused_launches(library: Library, change: dict[str, Any], message: str) -> None:
    launch = {"grid": (1,), "block": (32,), "arguments": good()} | change
    with pytest.raises((TypeError, ValueError), match=message):
        library.launch("scale", **launch)


def test_a_compile_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.cu"
    path.write_text(SOURCE.replace("factor +", "faktor +"))
    with pytest.raises(BuildError, match=r"wrong\.cu:4:\d+: error: .faktor. was not declared") as caught:
        Library(path, ["scale"])
    assert len(str(caught.value).splitlines()) < 12


def test_what_only_a_gpu_has_says_why(tmp_path: Path) -> None:
    path = tmp_path / "gpu_only.cu"
    path.write_text('#include "vec.cuh"\n__global__ void lanes(unsigned* y) { y[threadIdx.x] = __activemask(); }\n')
    with pytest.raises(BuildError, match="GPU-only: the answer depends on how the hardware happens to diverge"):
        build(path, ["lanes"])


@pytest.fixture
def own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A .cu with a header of its own and one that it does not include; nothing is built, files are only touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_build, "_compile_and_link", lambda *args: args[5].touch())
    monkeypatch.setattr(host_build, "_run", lambda command: "")
    monkeypatch.setattr(host_build, "_keep", lambda made, path: path.touch())
    monkeypatch.setattr(host_build, "_shared_variables", lambda path: ())
    (tmp_path / "cache" / "glint" / "host").mkdir(parents=True)
    tree = tmp_path / "tree"
    shutil.copytree(host_build.CUDA / "host", tree / "host")
    (tree / "include").mkdir()
    (tree / "include" / "own.cuh").write_text('#include "deep.cuh"')
    (tree / "include" / "deep.cuh").write_text("")
    (tree / "include" / "other.cuh").write_text("")
    (tree / "scale.cu").write_text('#include "own.cuh"\n' + SOURCE)
    return tree


def test_a_library_is_built_once(own_tree: Path, tmp_path: Path) -> None:
    """And again when the source, a header that it includes, the shim, an option or the kernels change."""
    source = own_tree / "scale.cu"
    first = build(source, ["scale"])
    assert build(source, ["scale"]).path == first.path

    moved = Path(shutil.copytree(own_tree, tmp_path / "elsewhere"))
    assert build(moved / "scale.cu", ["scale"]).path == first.path, "where the tree lies is no difference"
    (own_tree / "include" / "other.cuh").write_text("// changed")
    assert build(source, ["scale"]).path == first.path

    paths = {first.path, build(source, ["scale"], defines=["A=1"]).path, build(source, ["scale", "scale"]).path}
    paths |= {build(source, ["scale"], sanitizer).path for sanitizer in ("address", "thread")}
    assert len(paths) == 5
    for changed in ("include/deep.cuh", "host/runtime.cpp", "host/ptx.h", "scale.cu"):
        (own_tree / changed).write_text((own_tree / changed).read_text() + "\n// changed\n")
        paths.add(build(source, ["scale"]).path)
    assert len(paths) == 9


def test_what_is_not_used_goes(own_tree: Path, tmp_path: Path) -> None:
    source = own_tree / "scale.cu"
    old = build(source, ["scale"]).path
    young = build(source, ["scale"], defines=["YOUNG"]).path
    os.utime(old, (0, 0))
    build(source, ["scale"], defines=["NEW"])
    assert not old.exists()
    assert young.exists()
    os.utime(young, (0, 0))
    build(source, ["scale"], defines=["YOUNG"])
    build(source, ["scale"], defines=["NEWER"])
    assert young.exists(), "what is asked for is young again"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_build.shutil, "which", lambda name: None)
    host_build.gxx.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"g\+\+ 12 or later, and there is no g\+\+ in the PATH; install it"):
            host_build.gxx()
    finally:
        host_build.gxx.cache_clear()


def test_the_two_halves_of_ptx_have_the_same_functions() -> None:
    """include/ptx.cuh for a GPU and host/ptx.h for a CPU, which has nothing of what GPUs have from sm_89 on."""
    names = [
        set(re.findall(pattern, (host_build.CUDA / file).read_text("utf-8").split("}  // namespace host")[-1]))
        for file, pattern in (
            ("include/ptx.cuh", r"__forceinline__ [\w*]+ (\w+)\("),
            ("host/ptx.h", r"(?m)(?:^inline [\w*]+ |^HOST_\w+\()(\w+)(?:\(|,)"),
        )
    ]
    assert names[0] - {"shared_address", "halves_of_e4m3"} == names[1]


def test_a_library_cut_short_is_built_again(tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SOURCE + f"// {tmp_path}\n")  # nobody else has loaded it
    first = build(tmp_path / "scale.cu", ["scale"])
    whole = first.path.stat().st_size
    os.truncate(first.path, 3000)
    assert build(tmp_path / "scale.cu", ["scale"]) == first
    assert first.path.stat().st_size == whole


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "glint").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "scale.cu").write_text(SOURCE)
    with pytest.raises(
        BuildError, match=r"cannot be kept in .*glint/host: Not a directory; make room, or set XDG_CACHE"
    ):
        build(tmp_path / "scale.cu", ["scale"])


def test_threads_that_build_the_same(tmp_path: Path) -> None:
    """Each has a file of its own until it is whole; the shim's parts are wanted by all builds that begin together."""
    made, kept = tmp_path / "made.o", tmp_path / "cache" / "kept.o"
    made.write_bytes(b"x" * 1_000_000)
    with ThreadPoolExecutor(8) as team:
        for keeping in [team.submit(host_build._keep, made, kept) for _ in range(64)]:
            keeping.result()
    assert kept.read_bytes() == made.read_bytes()
    assert list(kept.parent.iterdir()) == [kept]
