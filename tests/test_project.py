"""The project around the code: dependencies, version, README, and what may stand in the tree."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTION = "glint-llm"
RUNTIME = ("engine", "server", "ref")
OURS = {*RUNTIME, "conformance", "tests"}
# never in a default install: GPU and MPI come with an extra, torch and its kin are for the oracle alone
EXTRA_ONLY = re.compile(r"(torch|jax|jaxlib|cupy|mpi4py|mpich|openmpi|transformers|nvidia|cuda)\b.*", re.I)
TOOLS = {"mpich", "mypy", "ruff"}  # of make lint
MAX_FILE_BYTES = 1_000_000
# hosts that a reader may be sent to; example names, names without a dot, and this machine itself
HOSTS = re.compile(
    r"[\w-]+|(.*\.)?(example(\.com|\.org|\.net)?|test|invalid|github\.com|github\.io|huggingface\.co|arxiv\.org|"
    r"apache\.org|keepachangelog\.com|semver\.org|openai\.com|json-schema\.org|unicode\.org|ietf\.org|rfc-editor\.org|"
    r"python\.org|nvidia\.com|wikipedia\.org|doi\.org|w3\.org)|127\.0\.0\.1|0\.0\.0\.0|\[::1?\]|\{.*",
    re.I,
)
# folders of one machine, save the home of nobody that examples use; the pattern does not match its own text
MACHINE_PATH = re.compile(r"(?<![\w.*~})-])/(?:root|home|work|tmp|opt|mnt|Users)/(?!me\b|\.\.\.)\w")


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(requirements: list[str]) -> set[str]:
    """Their names, without versions and markers."""
    return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


def imported(*folders: str) -> dict[str, str]:
    """Top-level names that the Python files below the folders import, each with one file that does."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                found |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return found


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def tracked_lines() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every line of every text file."""
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def test_default_install_pulls_no_gpu_mpi_or_torch_package() -> None:
    """Walks from the installed distribution through everything that it requires without an extra."""
    seen: set[str] = set()
    todo = [DISTRIBUTION]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        todo += distributions([line for line in requires if "extra ==" not in line])
    assert {"numpy", "starlette", "anyio"} <= seen, "the walk went nowhere"
    assert [name for name in sorted(seen) if EXTRA_ONLY.fullmatch(name)] == []


NOT_INSTALLED = {"cupy": ["cupy-cuda13x"], "cuda": ["cuda-bindings"]}  # on a machine without a GPU


def check_imports(folders: tuple[str, ...], declared: set[str], allowed: set[str]) -> None:
    """Each declared distribution is imported below the folders, and each import is of an allowed one."""
    owners = {**NOT_INSTALLED, **importlib.metadata.packages_distributions()}
    used = {
        name: ({normal(dist) for dist in owners.get(name, [name])}, path)
        for name, path in imported(*folders).items()
        if name not in OURS and name not in sys.stdlib_module_names
    }
    assert declared - set[str]().union(*(dists for dists, _ in used.values())) == set(), "declared, imported nowhere"
    undeclared = {name: path for name, (dists, path) in used.items() if not dists & allowed}
    assert undeclared == {}, "imported, not declared in pyproject.toml"


def test_runtime_dependencies_are_those_that_are_imported() -> None:
    dependencies = distributions(pyproject()["project"]["dependencies"])
    extras = pyproject()["project"]["optional-dependencies"]
    on_demand = distributions([*extras["cuda12"], *extras["cuda13"], *extras["mpi"]])
    check_imports(RUNTIME, dependencies, dependencies | on_demand)


COMMANDS = ("engine.serve", "engine.generate", "engine.quantize.__main__", "engine.bench.__main__", "ref.__main__")
WITHOUT_EXTRAS = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for name in {commands!r}:
    importlib.import_module(name)
"""


def test_commands_start_without_any_extra() -> None:
    """What a default install lacks is not there for them: a serving machine has no test packages and maybe no GPU."""
    extras = pyproject()["project"]["optional-dependencies"]
    of_extras = distributions([line for name, lines in extras.items() if name != "oracle" for line in lines])
    of_extras -= distributions(pyproject()["project"]["dependencies"])
    blocked = {
        name for name, dists in importlib.metadata.packages_distributions().items() if {*map(normal, dists)} & of_extras
    }
    assert {"pytest", "cuda"} <= blocked
    code = WITHOUT_EXTRAS.format(blocked=blocked, commands=COMMANDS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_test_dependencies_are_those_that_tests_import() -> None:
    tests = distributions(pyproject()["project"]["optional-dependencies"]["test"])
    dependencies = distributions(pyproject()["project"]["dependencies"])
    assert tests & dependencies == set(), "in both lists"
    oracle = {"torch", "transformers", "compressed-tensors", "triton"}  # the last comes with torch where there is a GPU
    check_imports(("tests", "conformance"), tests - TOOLS, tests | dependencies | oracle)


def test_extras_are_those_that_the_makefile_and_readme_name() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    assert set(extras) == {"cuda12", "cuda13", "mpi", "nvrtc", "test", "oracle"}
    for release in ("12", "13"):
        assert f"cupy-cuda{release}x" in distributions(extras[f"cuda{release}"])
    assert distributions(extras["nvrtc"]) < distributions(extras["cuda13"])


def test_version_is_written_in_one_place() -> None:
    version = pyproject()["project"]["version"]
    assert importlib.metadata.version(DISTRIBUTION) == version, "installed from another state: run make test"
    literal = re.compile(r"""^\s*(__version__|VERSION|version)\s*(:\s*\w+)?\s*=\s*["']\d""")
    copies = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in (*RUNTIME, "conformance")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if literal.match(line)
    ]
    assert copies == []


def test_python_version_is_the_same_for_pip_ruff_and_mypy() -> None:
    requires = pyproject()["project"]["requires-python"]
    tool = pyproject()["tool"]
    assert requires == f">={tool['mypy']['python_version']}"
    assert tool["ruff"]["target-version"] == "py" + requires.removeprefix(">=").replace(".", "")


def test_license_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert pyproject()["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "9. Accepting Warranty or Additional Liability." in text
    assert "limitations under the License." in text


def test_changelog_has_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased = text.split("## [Unreleased]")[1].split("\n## ")[0]
    assert re.search(r"^### (Added|Changed|Deprecated|Removed|Fixed|Security)$", unreleased, re.M)


@pytest.mark.parametrize(
    "command", ["make serve", "make test", "python -m engine.serve", "mpirun -n 8 python -m engine.serve --model"]
)
def test_readme_names_the_command(command: str) -> None:
    assert command in (ROOT / "README.md").read_text()


def test_readme_names_only_commands_and_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)(?=[`\s\"]*(?:[A-Z]+=|$|`|#))", text, re.M)) <= targets
    for module in set(re.findall(r"python3? -m ((?:engine|ref|conformance)[\w.]*)", text)):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"python -m {module}"
    for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", text):
        assert (ROOT / link).exists(), f"README links to {link}"


def test_every_test_in_the_works_table_exists() -> None:
    """Rows `| what | test path |` between the markers; a path may end in ::test_name."""
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- works -->") == text.count("<!-- /works -->") <= 1
    if "<!-- works -->" not in text:
        return
    table = text.split("<!-- works -->")[1].split("<!-- /works -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert rows, "the table between the markers has no rows"
    for row in rows:
        tests = re.findall(r"tests(?:/[\w.-]+)+(?:::\w+)*", row.strip().strip("|").split("|")[-1])
        assert tests, f"no test in the last column of {row}"
        for test in tests:
            path, *names = test.split("::")
            assert (ROOT / path).exists(), f"{test}, in the row {row}"
            for name in names:
                assert re.search(rf"^\s*(async )?(def|class) {name}\b", (ROOT / path).read_text(), re.M), test


def test_the_table_of_cases_has_those_that_are_tested() -> None:
    """tests/README.md says what DST-05 and its like stand for."""
    told = set(re.findall(r"^\| ([A-Z]{3}-\d\d) \|", (ROOT / "tests/README.md").read_text(), re.M))
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "conformance").rglob("*.py")]
    areas = "|".join(sorted({code[:3] for code in told}))
    named = {code for file in files for code in re.findall(rf"\b(?:{areas})-\d\d\b", file.read_text())}
    assert told == named


def test_no_large_file_is_in_the_tree() -> None:
    large = {str(path.relative_to(ROOT)): size for path in tracked() if (size := path.stat().st_size) > MAX_FILE_BYTES}
    assert large == {}, f"over {MAX_FILE_BYTES} bytes"


def test_tree_names_no_hosts_but_public_pages() -> None:
    """Package registries and mirrors are the user's setting: pip's, not the project's."""
    url = re.compile(r"(?:https?|ftp|wss?)://(?:[^/@\s]*@)?(\[[^\]]*\]|[^\s/:\"'`<>)\]]+)")
    strange = {
        where: host for where, line in tracked_lines() for host in url.findall(line) if not HOSTS.fullmatch(host)
    }
    assert strange == {}


def test_tree_names_no_folder_of_one_machine() -> None:
    found = {where: line.strip()[:100] for where, line in tracked_lines() if MACHINE_PATH.search(line)}
    assert found == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open('/" + "root/model')", True),
        ("cd /" + "home/someone/x", True),
        ("cd /" + "home/me/x", False),
        ("tests/" + "work/x", False),
        ("https://host/" + "home/x", False),
        ("{folder}/" + "tmp/x", False),
    ],
)
def test_machine_path_pattern(text: str, found: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is found
