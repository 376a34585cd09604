"""The course: every session and command on its pages gives what is printed there, and every link leads somewhere."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.golden_models import rand_model
from ref.roofline import LLAMA_3_1_8B

ROOT = Path(__file__).parents[2]
REF = ROOT / "ref"
COURSE = REF / "course"
PAGES = sorted(path.stem for path in COURSE.glob("*.md"))
TEXTS = [REF / "README.md", *sorted(COURSE.glob("*.md"))]
MAX_LINES = 110

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")
NUMBER = re.compile(r"(?<![\w.\-−^])\d+(?:\.\d+)?(?![\w^])")
CARDS = re.compile(r"RTX 4090|et al\. \d{4}")  # numbers that are names


def blocks(text: str, kind: str) -> list[str]:
    return [body for found, body in BLOCK.findall(text) if found == kind]


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command of the course, `python …`, that must succeed and say nothing else."""
    assert command[0] == "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def check_session(name: str, text: str) -> list[str]:
    """What a page's Python sessions print otherwise than the page says; they share their names."""
    said: list[str] = []
    names = {"__name__": name}
    runner = doctest.DocTestRunner(verbose=False)
    for body in blocks(text, "pycon"):
        test = doctest.DocTestParser().get_doctest(body, names, name, name, 0)
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
    return said


@pytest.mark.parametrize("page", PAGES)
def test_sessions(page: str) -> None:
    text = (COURSE / f"{page}.md").read_text("utf-8")
    assert blocks(text, "pycon"), "a page without a number that can be checked"
    assert "".join(check_session(page, text)) == ""


def test_a_wrong_number_is_seen() -> None:
    text = "```pycon\n>>> x = 2\n```\n\n```pycon\n>>> x + 2\n5\n```\n"
    assert "Expected:\n    5\nGot:\n    4" in "".join(check_session("wrong", text))
    assert check_session("right", text.replace("5", "4")) == []
    assert "NameError" in "".join(check_session("broken", text.replace("x = 2", "y = 2")))


@pytest.mark.parametrize("page", [page for page in PAGES if "```console" in (COURSE / f"{page}.md").read_text("utf-8")])
def test_commands(page: str, tmp_path: Path) -> None:
    for body in blocks((COURSE / f"{page}.md").read_text("utf-8"), "console"):
        printed = ""
        for line in body.splitlines():
            if line.startswith("$ "):
                printed += line + "\n" + run(shlex.split(line[2:]), tmp_path)
        assert printed == body
    for drawn in tmp_path.glob("*.svg"):
        assert (COURSE / drawn.name).exists(), f"{page} draws {drawn.name}, which is not in the course"


def readme_commands() -> list[str]:
    text = (REF / "README.md").read_text("utf-8").replace("\\\n", "")
    return [line for body in blocks(text, "") for line in body.splitlines() if line.startswith("python ")]


def test_commands_of_the_readme(tmp_path: Path) -> None:
    """In their order, DIR being a small model with a tokenizer that knows the prompt."""
    model = rand_model(tmp_path / "DIR")
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"?": 0, "Hello": 5}, "unk_token": "?"}}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    commands = readme_commands()
    assert len(commands) >= 9
    for line in commands:
        words = shlex.split(re.sub(r"(?<! ) {2,}(?! ).*", "", line))  # what stands two spaces further right explains
        output = run(words, tmp_path)
        assert output or "--out" in words or "rand_model" in line, f"{line} says nothing"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links(path: Path) -> None:
    links = LINK.findall(path.read_text("utf-8"))
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def numbers_in(text: str) -> list[tuple[str, float]]:
    return [(number, float(number)) for number in NUMBER.findall(text)]


def unfounded(text: str) -> list[str]:
    """Numbers of three digits and more in a page's prose that no session or command of the page reads or prints.

    A number is there too if one is that rounds to it.
    """
    code = "\n".join(body for kind in ("pycon", "console") for body in blocks(text, kind))
    known = [value for _, value in numbers_in(re.sub(r"#.*", "", code))]
    prose = CARDS.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", BLOCK.sub("", text)))
    missing = []
    for number, value in numbers_in(prose):
        half_a_digit = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
        if len(number.replace(".", "").lstrip("0")) >= 3 and not any(abs(value - one) <= half_a_digit for one in known):
            missing.append(number)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_numbers_in_the_prose_are_computed(page: str) -> None:
    assert unfounded((COURSE / f"{page}.md").read_text("utf-8")) == []


def test_an_unfounded_number_is_seen() -> None:
    code = "```pycon\n>>> 1 / 8  # 777\n0.125\n```\n"
    assert unfounded(f"{code}0.125, 0.12 and 12 of an RTX 4090") == []
    assert unfounded(f"{code}0.126, 1250 and 777") == ["0.126", "1250", "777"]


def test_the_readme_links_every_page_and_every_file() -> None:
    links = set(LINK.findall((REF / "README.md").read_text("utf-8")))
    files = {str(path.relative_to(REF)) for path in REF.rglob("*.py") if not path.stem.startswith("__")}
    pages = {f"course/{page}.md" for page in PAGES}
    assert (files | pages) - links == set()


def test_each_page_leads_to_the_next_of_the_readme() -> None:
    order = re.findall(r"\]\(course/(\w+)\.md\)", (REF / "README.md").read_text("utf-8"))
    following = [
        re.findall(r"^Next: .*?\]\((.*?)\)", (COURSE / f"{page}.md").read_text("utf-8"), re.M) for page in order
    ]
    assert following == [[f"{page}.md"] for page in order[1:]] + [["../EXERCISES.md"]]


def test_every_plot_stands_on_a_page() -> None:
    shown = {link for path in TEXTS for link in LINK.findall(path.read_text("utf-8")) if link.endswith(".svg")}
    assert shown == {path.name for path in COURSE.glob("*.svg")}


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short_and_name_their_files(page: str) -> None:
    text = (COURSE / f"{page}.md").read_text("utf-8")
    assert text.startswith("# ")
    assert len(text.splitlines()) <= MAX_LINES
    assert re.search(r"^Files?: \[", text, re.M)


def test_the_picture_of_a_layer_has_the_shapes_of_its_model() -> None:
    picture = blocks((REF / "README.md").read_text("utf-8"), "text")[0]
    model = LLAMA_3_1_8B
    table = [model.vocab_size, model.hidden_size]
    heads, kv_heads = (f"[t, {num}, {model.head_dim}]" for num in (model.n_heads, model.n_kv_heads))
    counts = {
        str(table): 2,
        heads: 1,
        kv_heads: 2,
        f"[t, {model.hidden_size}]": 3,
        f"[t, {model.intermediate_size}]": 2,
    }
    assert {shape: picture.count(shape) for shape in counts} == counts
