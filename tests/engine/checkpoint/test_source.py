"""engine.checkpoint.source: what --model may be, and what is said when it is nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from engine.checkpoint.source import REPO_FILES, REPO_FILES_LEFT_OUT, ModelSource, resolve
from engine.errors import ConfigError


def refusal(model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(model)
    assert "--model DIR" in str(caught.value)
    assert "--model FILE.gguf" in str(caught.value)
    return str(caught.value)


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve(str(folder)) == ModelSource("folder", folder, "my-model")
    assert resolve(f"{folder}/") == ModelSource("folder", folder, "my-model")
    monkeypatch.chdir(folder)
    assert resolve(".").name == "my-model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/my-model") == ModelSource("folder", folder, "my-model")


def test_gguf_file(tmp_path: Path):
    file = tmp_path / "small.Q8_0.gguf"
    file.touch()
    assert resolve(str(file)) == ModelSource("gguf", file, "small.Q8_0")


def test_a_folder_is_taken_before_a_repository_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == ModelSource("folder", Path("org/model"), "model")


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./no", "../no", "~/no", "no.gguf", "org/no.gguf", "a/b/c", "a b"]
)
def test_what_looks_like_a_path_and_is_not_there(model: str):
    assert f"--model {model}: there is no such file or folder" in refusal(model)


def test_neither_gguf_nor_folder(tmp_path: Path):
    file = tmp_path / "model.bin"
    file.touch()
    assert "is a file that does not end in .gguf" in refusal(str(file))
    assert "--model is empty" in refusal("")


def run_offline(model: str, hub: Path) -> str:
    """resolve in a process of its own: the hub's library reads its environment once, at import."""
    code = "import sys\nfrom engine.checkpoint.source import resolve\nprint(resolve(sys.argv[1]))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub)}
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def test_repository_that_cannot_be_fetched(tmp_path: Path):
    said = run_offline("some-org/some-model", tmp_path)
    assert "ConfigError: --model some-org/some-model: there is no such folder, and the repository cannot be" in said
    assert "--model FILE.gguf" in said


def test_repository_in_the_local_cache_needs_no_network(tmp_path: Path):
    """The cache's layout: refs/main names a commit, snapshots/COMMIT holds the files."""
    repo = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    said = run_offline("some-org/some-model", tmp_path)
    assert f"ModelSource(kind='folder', path=PosixPath('{snapshot}'), name='some-org/some-model')" in said


def test_files_of_a_repository_that_are_fetched():
    """By the hub's own rule for patterns: an allowed one matches and no ignored one does."""
    from_repo = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model",
        "qwen.tiktoken", "additional_chat_templates/tools.jinja",
    }  # fmt: skip
    left = {"pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md", "flax_model.msgpack",
            "onnx/model.onnx", "original/model.safetensors", "model.gguf"}  # fmt: skip
    chosen = filter_repo_objects(from_repo | left, allow_patterns=REPO_FILES, ignore_patterns=REPO_FILES_LEFT_OUT)
    assert set(chosen) == from_repo


def test_a_name_that_no_file_can_have():
    with pytest.raises(ConfigError, match="no file can have this name"):
        resolve("x" * 300)
