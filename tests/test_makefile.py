"""The Makefile against stand-ins for Python, pip and the NVIDIA driver: what is installed when, and what is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")

# `python -m venv` copies it into the new environment, as the real one would; every other call is written down
PYTHON = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in
  --version) echo "Python 3.${MINOR:-12}.1" ;;
  *version_info*) test "${MINOR:-12}" -ge 11 ;;
  "-m venv --clear "*) test -z "$NO_VENV" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip install"*) echo "Collecting a"; echo "  Downloading a.whl (1 MB)"; exit "${PIP_FAILS:-0}" ;;
esac
"""

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


class Checkout:
    """A folder, with a space in its name, that holds the Makefile and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.bin = folder / "bin"
        self.root.mkdir()
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        for name in ("python3", "python3.13", "python3.12", "python3.11", "python"):
            self.program(name, PYTHON)
        self.program("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs make; NVIDIA's file is a missing one unless arguments name another."""
        assert MAKE is not None
        self.log.unlink(missing_ok=True)
        inherited = {
            k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
        }
        path = {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "LOG": str(self.log)}
        command = [MAKE, "DRIVER_FILE=missing", *arguments]
        return subprocess.run(
            command, cwd=self.root, env=inherited | path | environment, capture_output=True, text=True, check=False
        )

    @property
    def log(self) -> Path:
        return self.root.parent / "log"

    def calls(self, start: str) -> list[str]:
        """What Python was called with, where it begins so."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(start)]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_first_serve_makes_the_environment_installs_and_serves(checkout: Checkout) -> None:
    done = checkout.make("serve", "ARGS=--port 1")
    assert done.returncode == 0, done.stderr
    assert checkout.calls("-m venv") == ["-m venv --clear .venv"]
    assert checkout.calls("-m pip install") == ["-m pip install --editable ."]
    assert checkout.calls("-m engine") == ["-m engine.serve --port 1"]
    assert "a.whl (1 MB)" in done.stdout
    assert "Collecting" not in done.stdout


def test_second_serve_installs_nothing_until_pyproject_changes(checkout: Checkout) -> None:
    checkout.make("serve")
    checkout.make("serve")
    assert checkout.calls("-m venv") == checkout.calls("-m pip") == []
    assert checkout.calls("-m engine") == ["-m engine.serve"]
    later = max(path.stat().st_mtime for path in checkout.root.rglob(".installed*")) + 1
    os.utime(checkout.root / "pyproject.toml", (later, later))
    checkout.make("serve")
    assert checkout.calls("-m venv") == []
    assert checkout.calls("-m pip install") == ["-m pip install --editable ."]


def test_failed_install_stops_and_is_tried_again(checkout: Checkout) -> None:
    done = checkout.make("serve", PIP_FAILS="1")
    assert done.returncode != 0
    assert "the install failed" in done.stderr
    assert checkout.calls("-m engine") == []
    assert list(checkout.root.rglob(".installed*")) == []
    assert checkout.make("serve").returncode == 0
    assert checkout.calls("-m pip install") == ["-m pip install --editable ."]


def test_failed_reinstall_leaves_no_old_stamp(checkout: Checkout) -> None:
    checkout.make("serve")
    later = max(path.stat().st_mtime for path in checkout.root.rglob(".installed*")) + 1
    os.utime(checkout.root / "pyproject.toml", (later, later))
    assert checkout.make("serve", PIP_FAILS="1").returncode != 0
    assert list(checkout.root.rglob(".installed*")) == []


@pytest.mark.parametrize(
    ("target", "command"),
    [("test", "-m pytest -m not slow -k x"), ("test-full", "-m pytest -k x")],
)
def test_tests_get_the_test_extra_and_arguments(checkout: Checkout, target: str, command: str) -> None:
    done = checkout.make(target, "ARGS=-k x")
    assert done.returncode == 0, done.stderr
    assert checkout.calls("-m pip install") == ["-m pip install --editable .[test,nvrtc]"]
    assert checkout.calls("-m pytest") == [command]


NIGHT = ["-m pytest", "-m conformance --target host", "-m tests.serve.crowd", "-m tests.cuda.mutation"]


def test_nightly_does_all_even_if_something_fails(checkout: Checkout) -> None:
    def parts() -> list[int]:
        return [[call.startswith(command) for command in NIGHT].index(True) for call in checkout.calls("-m")[-4:]]

    assert checkout.make("nightly").returncode == 0
    assert parts() == [0, 1, 2, 3]
    checkout.program("python3", PYTHON.replace('"-m pip', '"-m pytest"*) exit 1 ;;\n  "-m pip'))
    shutil.rmtree(checkout.root / ".venv")
    done = checkout.make("nightly")
    assert done.returncode != 0
    assert "glint: not all is well in: tests" in done.stderr
    assert parts() == [0, 1, 2, 3]


def test_parts_of_the_night(checkout: Checkout) -> None:
    checkout.make("serve")
    assert checkout.make("nightly", "PARTS=faults crowd", "CROWD_S=5", "FAULTS_S=7").returncode == 0
    crowd, faults = sorted(checkout.calls("-m tests"), reverse=True)
    assert crowd == "-m tests.serve.crowd --seconds 5 --json conformance/results/nightly-crowd.json"
    assert faults == "-m tests.cuda.mutation --quiet --seconds 7 --json conformance/results/nightly.json"
    assert checkout.calls("-m pytest") == checkout.calls("-m conformance") == []
    wrong = checkout.make("nightly", "PARTS=soaks")
    assert wrong.returncode != 0
    assert "has no part soaks; it has tests threads crowd faults" in wrong.stderr


def test_lint_runs_ruff_twice_and_mypy(checkout: Checkout) -> None:
    checkout.make("lint")
    assert checkout.calls("-m ruff") == ["-m ruff check .", "-m ruff format --check ."]
    assert checkout.calls("-m mypy") == ["-m mypy"]


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:10:24 UTC 2025", "cuda13"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.9  Release Build  (a@b12-34.5)", "cuda13"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  579.99  Mon", "cuda12"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Mon\nGCC version:  gcc 12.3.0", "cuda12"),
    ],
)
def test_driver_file_chooses_the_cuda_extra(checkout: Checkout, driver: str, extra: str) -> None:
    (checkout.root / "driver").write_text(driver + "\n")
    checkout.make("serve", "DRIVER_FILE=driver")
    assert checkout.calls("-m pip install") == [f"-m pip install --editable .[{extra}]"]
    checkout.make("test", "DRIVER_FILE=driver")
    assert checkout.calls("-m pip install") == [f"-m pip install --editable .[test,{extra}]"]


@pytest.mark.parametrize(
    ("script", "requirement"),
    [
        ("echo 580.82.07; echo 580.82.07", ".[cuda13]"),
        ("echo 550.54.15", ".[cuda12]"),
        ("echo 'NVIDIA-SMI has failed: could not communicate with driver 580.1'; exit 9", "."),
        ("exit 0", "."),
    ],
)
def test_nvidia_smi_chooses_where_there_is_no_file(checkout: Checkout, script: str, requirement: str) -> None:
    checkout.program("nvidia-smi", f"#!/bin/sh\n{script}\n")
    checkout.make("serve")
    assert checkout.calls("-m pip install") == [f"-m pip install --editable {requirement}"]


def test_cuda_can_be_said(checkout: Checkout) -> None:
    checkout.make("serve", "CUDA=12")
    assert checkout.calls("-m pip install") == ["-m pip install --editable .[cuda12]"]
    (checkout.root / "driver").write_text("Kernel Module  580.1\n")
    checkout.make("serve", "CUDA=none", "DRIVER_FILE=driver")
    assert checkout.calls("-m pip install") == ["-m pip install --editable ."]
    wrong = checkout.make("serve", "CUDA=11")
    assert wrong.returncode != 0
    assert "expected 12, 13 or none" in wrong.stderr


def test_another_cuda_release_replaces_the_first(checkout: Checkout) -> None:
    checkout.make("serve", "CUDA=12")
    checkout.make("serve", "CUDA=13")
    assert checkout.calls("-m pip uninstall") == ["-m pip uninstall --quiet --yes cupy-cuda12x"]
    checkout.make("serve", "CUDA=12")
    assert checkout.calls("-m pip uninstall") == ["-m pip uninstall --quiet --yes cupy-cuda13x"]
    assert checkout.calls("-m pip install") == ["-m pip install --editable .[cuda12]"]


def test_old_python_is_refused_by_version(checkout: Checkout) -> None:
    done = checkout.make("serve", MINOR="10")
    assert done.returncode != 0
    assert "no Python 3.11 or later" in done.stderr
    assert "python3.12 is Python 3.10.1" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_a_python_that_runs_but_is_too_old_is_passed_over(checkout: Checkout) -> None:
    checkout.program("python3", "#!/bin/sh\nexit 1\n")
    done = checkout.make("serve")
    assert done.returncode == 0, done.stderr
    assert checkout.calls("-m venv") == ["-m venv --clear .venv"]


def test_python_can_be_said(checkout: Checkout) -> None:
    checkout.program("mine", PYTHON)
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python"):
        checkout.program(name, "#!/bin/sh\nexit 1\n")
    assert checkout.make("serve").returncode != 0
    assert checkout.make("serve", "PYTHON=mine").returncode == 0


def test_python_without_venv_says_which_package_is_missing(checkout: Checkout) -> None:
    done = checkout.make("serve", NO_VENV="1")
    assert done.returncode != 0
    assert "install python3-venv" in done.stderr


def test_clean_removes_the_environment_and_caches_alone(checkout: Checkout) -> None:
    checkout.make("serve")
    for name in (".mypy_cache", "engine/__pycache__", "x.egg-info"):
        (checkout.root / name).mkdir(parents=True)
    (checkout.root / "engine/serve.py").write_text("")
    assert checkout.make("clean").returncode == 0
    left = {str(path.relative_to(checkout.root)) for path in checkout.root.rglob("*")}
    assert left == {"Makefile", "pyproject.toml", "engine", "engine/serve.py"}


def test_help_is_the_default_and_names_every_target_and_variable(checkout: Checkout) -> None:
    done = checkout.make()
    assert done.returncode == 0
    assert done.stdout == checkout.make("help").stdout
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()) - {"help"}  # type: ignore[index]
    assert targets == set(re.findall(r"^make ([\w-]+)  ", done.stdout, re.M))
    for variable in ("ARGS", "PARTS", "CROWD_S", "FAULTS_S", "PYTHON", "CUDA"):
        assert re.search(rf"^{variable} :=", text, re.M)
        assert re.search(rf"^(\w+=… )?{variable}=", done.stdout, re.M)
    assert not checkout.log.exists(), "help installs nothing"
