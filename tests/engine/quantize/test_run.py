"""Runs of the quantizer: killed and taken up again, repeated, refused; and how much memory they take."""

import errno
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import write_checkpoint
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.errors import CheckpointError, ConfigError
from engine.quantize.methods import METHODS
from engine.quantize.run import quantize
from engine.quantize.source_model import open_model
from engine.quantize.writer import JOURNAL, Output
from tests.engine.quantize.small import content, make, settings_for, small_model, windows

SHARDS = 40_000  # bytes: several files


class Killed(BaseException):
    """Nobody catches it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, num_units: int, said: bool) -> None:
    """The next run ends after so many units; said: the journal has the last one."""
    commit, left = Output.commit, [num_units]

    def commit_or_die(output: Output, unit: str) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        commit(output, unit)

    monkeypatch.setattr(Output, "commit", commit_or_die)
    monkeypatch.setattr("engine.quantize.writer.SYNC_S", 0.0 if said else 1e9)
    if not said:  # as if the machine had gone off: what was written since the last line is not known
        monkeypatch.setattr(Output, "_sync", lambda output: None)


@pytest.mark.parametrize("method", ["int8", "fp8-block", "smoothquant", "fp8-static", "int4-gptq", "awq-rtn"])
def test_a_killed_run_goes_on_and_ends_the_same(method: str, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    whole = content(make(model, tmp_path / "whole", method, shard_bytes=SHARDS))
    assert sum(name.endswith(".safetensors") for name in whole) >= 2
    out = tmp_path / "out"
    for num_units, said in ((0, True), (2, True), (1, False), (3, True), (5, True)):
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, num_units, said)
            with pytest.raises(Killed):
                make(model, out, method, shard_bytes=SHARDS)
        assert not (out / "config.json").exists()
        with pytest.raises(ConfigError, match=r"no config\.json"):
            load_model_config(resolve(str(out)))
    make(model, out, method, shard_bytes=SHARDS)
    assert content(out) == whole


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(tmp_path / "model")
    kill_after(monkeypatch, 9, said=True)
    with pytest.raises(Killed):
        make(model, tmp_path / "out", "int8")
    monkeypatch.undo()
    written: list[str] = []
    write = Output.write

    def record(output: Output, name: str, pieces: Any) -> None:
        written.append(name)
        write(output, name, pieces)

    monkeypatch.setattr(Output, "write", record)
    make(model, tmp_path / "out", "int8")
    modules = [name.removesuffix(".weight_scale") for name in written if name.endswith(".weight_scale")]
    assert len(modules) == 14 - 9


def test_a_journal_that_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line says nothing, and half a first line means that nothing has begun."""
    model = small_model(tmp_path / "model")
    whole = content(make(model, tmp_path / "whole", "int8"))
    kill_after(monkeypatch, 4, said=True)
    with pytest.raises(Killed):
        make(model, tmp_path / "out", "int8")
    monkeypatch.undo()
    journal = tmp_path / "out" / JOURNAL
    text = journal.read_text()
    for cut in (text + "model.layers.1.self", text[:-3], text[:20], ""):
        journal.write_text(cut)
        folder = make(model, tmp_path / "out", "int8")
        assert content(folder) == whole
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "model.safetensors.part")


def test_a_finished_output_is_left_alone(tmp_path: Path) -> None:
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    make(model, out, "int8", shard_bytes=SHARDS)
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    settings = settings_for("int8")
    assert not quantize(open_model(str(model)), out, settings, shard_bytes=SHARDS, progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.parametrize("changed", ["method", "settings", "model", "text", "shards"])
def test_an_unfinished_output_of_another_run(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    kill_after(monkeypatch, 3, said=True)
    with pytest.raises(Killed):
        make(model, out, "int4-gptq")
    monkeypatch.undo()
    other = {
        "method": lambda: make(model, out, "int8"),
        "settings": lambda: make(model, out, "int4-gptq", {"group_size": 16}),
        "model": lambda: make(small_model(tmp_path / "model", rms_norm_eps=1e-6), out, "int4-gptq"),
        "text": lambda: make(model, out, "int4-gptq", windows=windows(seed=1)),
        "shards": lambda: make(model, out, "int4-gptq", shard_bytes=SHARDS),
    }[changed]
    before = content(out)
    with pytest.raises(ConfigError, match="unfinished run with other settings"):
        other()
    assert content(out) == before


def test_out_is_something_else(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"holds config\.json, and is nothing that this command"):
        make(model, model, "int8")
    make(model, tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match=r"holds config\.json"):
        make(model, tmp_path / "out", "fp8")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        make(model, tmp_path / "file", "int8")


def test_two_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    commit, tried = Output.commit, []

    def commit_and_try(output: Output, unit: str) -> None:
        commit(output, unit)
        if not tried:
            tried.append(unit)
            with pytest.raises(ConfigError, match="another run is writing there"):
                make(model, out, "int8")

    monkeypatch.setattr(Output, "commit", commit_and_try)
    make(model, out, "int8")
    assert tried


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed before anything is computed; once there is room the command goes on."""
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with pytest.raises(ConfigError, match=r"model\.safetensors takes 0 MB, and 0 MB are free; make room"):
            make(model, out, "int8")

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left on device .* the same command goes on"):
        make(model, out, "int8")
    monkeypatch.undo()
    make(model, out, "int8")


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.calibration])
def test_a_method_that_needs_a_text(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --calibration FILE"):
        make(small_model(tmp_path / "model"), tmp_path / "out", method, windows=None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "settings", "sizes", "says"),
    [
        (
            "int4-rtn",
            {"group_size": 48},
            {},
            r"q_proj has 64 inputs, which groups of 48 do not divide; .* are 64, 32, -1",
        ),
        (
            "int4-gptq",
            {},
            {"hidden_size": 64, "intermediate_size": 104},
            r"down_proj has 104 inputs, which groups of 32",
        ),
        (
            "int4-gptq",
            {"group_size": -1},
            {"intermediate_size": 100},
            r"has 100 outputs, no multiple of 8, which GPTQ's",
        ),
        ("awq-rtn", {"group_size": -1}, {"intermediate_size": 100}, r"has 100 outputs, no multiple of 8, which AWQ's"),
    ],
)
def test_sizes_that_do_not_fit(method: str, settings: Any, sizes: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make(small_model(tmp_path / "model", **sizes), tmp_path / "out", method, settings)
    assert not (tmp_path / "out").exists()


def test_models_that_are_refused(tmp_path: Path) -> None:
    quantized = make(small_model(tmp_path / "model"), tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="is quantized already"):
        open_model(str(quantized))
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        open_model(str(tmp_path / "nowhere"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[160, 64\], wanted \[96, 64\] and 5 more"):
        open_model(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="no linear module of the model has this name"):
        make(small_model(tmp_path / "model"), tmp_path / "other", "int8", ignore=("model.layers.7.mlp.down_proj",))
    with pytest.raises(ConfigError, match="leaves no module to quantize"):
        make(small_model(tmp_path / "model"), tmp_path / "other", "int8", ignore=("re:.*",))


@pytest.mark.parametrize(("family", "lacks"), [("mixtral", "experts"), ("minicpm3", "latent attention")])
def test_families_that_cannot_be_calibrated(family: str, lacks: str, tmp_path: Path) -> None:
    """They are said so, with what is possible: and that is."""
    config = FAMILY_GOLDENS[family]
    model = write_checkpoint(tmp_path / "model", config, family_tensors(config, 1))
    with pytest.raises(ConfigError, match=f"a model with .*{lacks}.* methods without a text are bf16, int8"):
        make(model, tmp_path / "out", "smoothquant")
    folder = make(model, tmp_path / "out", "int8")
    words = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert any(name.endswith(".gate") for name in words["ignore"]) == (family == "mixtral")


@pytest.mark.parametrize("method", ["bf16", "int8", "fp8-block", "int4-rtn", "awq-rtn", "smoothquant", "int4-gptq"])
def test_peak_memory_is_about_one_layer(method: str, tmp_path: Path) -> None:
    """However many layers there are: the widest weight, gates and what they are multiplied by, a few times over."""
    widest = 4 * 640 * 128
    peaks = [peak_of(method, num_layers, tmp_path / str(num_layers)) for num_layers in (2, 6)]
    assert peaks[1] - peaks[0] < widest / 4
    assert peaks[1] < (16 if method == "int4-gptq" else 6) * widest  # GPTQ has it in float64


def peak_of(method: str, num_layers: int, folder: Path) -> int:
    """Bytes, of a model with a large embedding."""
    sizes = {"num_hidden_layers": num_layers, "vocab_size": 4000, "hidden_size": 128, "intermediate_size": 320}
    model = open_model(str(small_model(folder / "model", **sizes)))
    quantize(model, folder / "warm", settings_for(method), windows(1, 8), progress=False)
    tracemalloc.start()
    try:
        quantize(model, folder / "out", settings_for(method), windows(2, 32), progress=False)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
