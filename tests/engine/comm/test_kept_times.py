"""Times of ways that are kept from one start to the next: only under the same facts, and only whole files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.comm.kept_times import digest_of, keep_times, load_times
from engine.comm.ways import Trial

FACTS = {"gpus": [("H", "0:1"), ("H", "0:2")], "cuda": (13000, 12090), "sources": "abc"}
TRIALS = [Trial("window", 4096, 4.5), Trial("nccl", 65536, 16.25)]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert load_times(folder, FACTS) is None
    keep_times(folder, FACTS, TRIALS)
    assert load_times(folder, FACTS) == TRIALS
    keep_times(folder, FACTS, TRIALS[:1])
    assert load_times(folder, FACTS) == TRIALS[:1]


@pytest.mark.parametrize("change", [{"sources": "abd"}, {"cuda": (13010, 12090)}, {"gpus": [("H", "0:1")]}, {"x": 1}])
def test_other_facts_find_nothing(change: dict[str, object], tmp_path: Path) -> None:
    keep_times(tmp_path, FACTS, TRIALS)
    assert load_times(tmp_path, FACTS | change) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"facts": 1}', '{"facts": {}, "trials": [{"way": "window"}]}'])
def test_a_file_that_is_not_as_it_was_written_is_not_believed(text: str, tmp_path: Path) -> None:
    keep_times(tmp_path, FACTS, TRIALS)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert load_times(tmp_path, FACTS) is None


def test_times_of_another_machine_under_the_same_name_are_not_believed(tmp_path: Path) -> None:
    keep_times(tmp_path, FACTS, TRIALS)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"abc"', '"abd"'))
    assert load_times(tmp_path, FACTS) is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        keep_times(tmp_path / "file", FACTS, TRIALS)
    assert "are not kept in" in caplog.text


def test_a_digest_knows_names_and_texts(tmp_path: Path) -> None:
    first, second = tmp_path / "a.cu", tmp_path / "b.cu"
    first.write_text("1"), second.write_text("2")
    found = digest_of([second, first])
    assert found == digest_of([first, second])
    second.write_text("3")
    assert digest_of([first, second]) != found
    assert digest_of([first]) != digest_of([second])
