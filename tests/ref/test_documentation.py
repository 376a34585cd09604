"""The tables of ref's pages, its files and its docstrings agree; and what holds them to each other can fail."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.ref.docstrings import REF, Function, called, files, functions, problems

PUBLIC = [function for function in functions().values() if function.is_public]
OPS = (REF / "OPS.md").read_text(encoding="utf-8")
README = (REF / "README.md").read_text(encoding="utf-8")
OP_TABLES, OTHER_TABLE = OPS.split("## What is no op")


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables, headings left out; a bar within a cell is written \\|."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in cells if "](" in "".join(row)]


def links(text: str) -> list[str]:
    """What the rows of the tables link to, without the part behind #."""
    return [target.partition("#")[0] for row in rows(text) for target in re.findall(r"\]\(([^)]+)\)", " ".join(row))]


def ops() -> list[tuple[str, list[str], str, list[str]]]:
    """(file, functions, in short, composed of) of each row of the op tables."""
    found = []
    for row in rows(OP_TABLES):
        assert len(row) == 4, row
        file, names, short, composed = row
        found.append((links(f"|{file}|")[0], re.findall(r"`(\w+)`", names), short, re.findall(r"`(\w+)`", composed)))
    return found


def test_every_file_is_in_the_tables() -> None:
    """Of README.md or OPS.md; a file of ref/model is a family of the one or a part of the other."""
    assert set(files()) - {*links(README), *links(OPS)} == set()
    families = links(README.split("## The families")[1].split("\n## ")[0])
    assert {file for file in files() if file.startswith("model/")} - {*links(OTHER_TABLE), *families} == set()
    assert {file for file in files() if not file.startswith("model/")} - {*links(OPS)} == set()


@pytest.mark.parametrize("page", ["README.md", "OPS.md", "EXERCISES.md"])
def test_every_link_leads_to_a_file(page: str) -> None:
    text = (REF / page).read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert targets
    assert [target for target in targets if target and "://" not in target and not (REF / target).exists()] == []


def test_every_file_has_a_place_of_one_kind() -> None:
    """A file is an op file or it is not."""
    op_files, others = {file for file, *_ in ops()}, links(OTHER_TABLE)
    assert op_files & set(others) == set()
    assert [name for name, count in Counter(others).items() if count > 1] == []
    assert [file for file in op_files if file.startswith("model/")] == []


def test_the_op_table_names_every_function_once() -> None:
    named = Counter((file, name) for file, names, *_ in ops() for name in names)
    assert [key for key, count in named.items() if count > 1] == []
    op_files = {file for file, *_ in ops()}
    existing = {(function.file, function.name) for function in PUBLIC if function.file in op_files}
    assert existing - named.keys() == set(), "add these to ref/OPS.md"
    assert named.keys() - existing == set(), "these are in ref/OPS.md only"


def test_the_op_table_says_what_is_composed_of_what() -> None:
    """What stands in the last column is called by a function of the row."""
    wrong = []
    for file, names, _, composed in ops():
        reached = {other.name for name in names for other in called(functions()[file, name])}
        wrong += [f"{', '.join(names)} of {file} call no {name}" for name in composed if name not in reached]
    assert wrong == []
    assert all(short for _, _, short, _ in ops())


@pytest.mark.parametrize("file", files())
def test_docstrings(file: str) -> None:
    """Shapes, dtypes, errors, source of each public function; see tests/ref/docstrings.py."""
    found = {function.name: problems(function) for function in PUBLIC if function.file == file}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_records_say_the_shapes_of_their_arrays() -> None:
    """Each field of a dataclass that is an array has a comment with a shape behind it."""
    silent = []
    for file, module in files().items():
        lines = (REF / file).read_text(encoding="utf-8").splitlines()
        for record in (node for node in module.body if isinstance(node, ast.ClassDef)):
            for field in (node for node in record.body if isinstance(node, ast.AnnAssign)):
                annotation = ast.unparse(field.annotation)
                comment = lines[field.lineno - 1].partition("#")[2]
                is_array = re.match(r"(NDArray|Array|Ints|Floats|Codes|Words|Bytes|Int8)\b", annotation)
                if is_array and not re.search(r"\[|shape", comment + (ast.get_docstring(record) or "")):
                    silent.append(f"{file}: {record.name}.{ast.unparse(field.target)}")
    assert silent == []


GOOD = '''
    """y = x + b.

    Args:
        x: [num_tokens, n].
        b: [n].
    Returns:
        [num_tokens, n], dtype of x.
    Raises:
        ValueError: b is too short.

    Source: nobody.
    """
'''


def problems_of(docstring: str, body: str = 'raise ValueError("b")') -> list[str]:
    """What a function with this docstring lacks."""
    module = ast.parse(f"Array = NDArray[Any]\ndef f(x: Array, b: Array) -> Array:{docstring}    {body}\n")
    node = module.body[1]
    assert isinstance(node, ast.FunctionDef)
    return problems(Function("f.py", node, module))


def test_a_good_docstring_has_no_problem() -> None:
    assert problems_of(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("x: [num_tokens, n].", "x: the input.", "x: no shape"),
        ("b: [n].", "", "b: no shape"),
        ("b: [n].", "b: as in no_such_function.", "b: no shape"),
        ("[num_tokens, n], dtype of x", "the sum, dtype of x", "returns: no shape"),
        (", dtype of x", "", "returns: no dtype"),
        ("ValueError: b is too short.", "IndexError: b is too short.", "raises: ValueError of itself is not named"),
        ("Source: nobody.", "", "no source"),
        ("Source: nobody.", "Composed of: rope.", "composed of rope, which it does not call"),
    ],
)
def test_what_is_missing_is_found(old: str, new: str, found: str) -> None:
    assert GOOD.count(old) == 1
    assert problems_of(GOOD.replace(old, new)) == [found]


def test_errors_of_what_is_called_count() -> None:
    """moe_mlp itself raises nothing; moe_sort, which it calls, does."""
    moe_mlp = functions()["moe.py", "moe_mlp"]
    without = ast.parse(ast.unparse(moe_mlp.module).replace("an id that is no expert", "").replace("ValueError:", ":"))
    node = next(n for n in without.body if isinstance(n, ast.FunctionDef) and n.name == "moe_mlp")
    assert problems(Function("moe.py", node, without)) == ["raises: ValueError of moe_sort is not named"]
