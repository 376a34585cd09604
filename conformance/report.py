"""What a run leaves behind: results as JSON, and as JUnit's XML."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from conformance.case import Result
from conformance.host_build import CUDA
from conformance.machines import kernel_hash
from engine.kernels.device import Instance

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"  # reports of runs on GPUs
# where a stem's file is; what is spread over several is known by its cases
SOURCES = {"cpu": ("engine/cpu", "engine/models", "engine", "ref", "conformance"), "golden": ("ref/model",)}


def report(
    target: str, results: Sequence[Result], about: Mapping[str, str], kernels: Sequence[Instance]
) -> dict[str, Any]:
    """What --json writes: where it ran (Machine's about and kernels), the sources that were checked, and all cases but
    the skipped.

    "kernels" is by stem: of a .cu, the hash of the file and its headers. error is null where it is not finite: JSON
    has no infinity.
    """
    ran = [result for result in results if result.status != "skip"]
    if target in SOURCES:
        hashes = {stem: source_hash(target, stem) for stem in dict.fromkeys(result.stem for result in ran)}
    else:
        hashes = {stem: kernel_hash(stem) for stem in sorted({instance.stem for instance in kernels})}
    return {
        "target": target,
        **dict.fromkeys(("gpu", "driver", "cuda", "cupy")),
        **about,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kernels": hashes,
        "cases": [
            {
                "stem": result.stem,
                "case": result.case,
                "status": result.status,
                "error": result.error if result.error < float("inf") else None,
                "tolerance": result.tolerance,
            }
            for result in ran
        ],
    }


def result_lines(folder: Path = RESULTS) -> list[str]:
    """A line a stored run: where and when, how it went, and which kernels have changed since."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text("utf-8"))
        parts = [f"{path.name}: {stored['gpu'] or stored['target']}, {stored['date']}, {_outcome(stored)}"]
        if "kernels" in stored:
            changed = changed_kernels(stored)
            parts.append(f"changed since: {', '.join(changed)}" if changed else "no kernel has changed since")
        lines.append("; ".join(parts))
    return lines


def _outcome(stored: Mapping[str, Any]) -> str:
    """Of a run of cases, of the benchmark (rows), or of kernels of others (runs)."""
    if "rows" in stored:
        verdicts = [row["verdict"] for row in stored["rows"]]
        return ", ".join(f"{verdicts.count(name)} {name}" for name in ("met", "short", "BEHIND", "WRONG"))
    if "runs" in stored:
        passed, failed = sum(run["passed"] for run in stored["runs"]), sum(len(run["failed"]) for run in stored["runs"])
    else:
        statuses = [case["status"] for case in stored["cases"]]
        passed, failed = statuses.count("ok"), statuses.count("FAIL")
    return f"{passed} passed, {failed} failed"


def changed_kernels(stored: Mapping[str, Any], folder: Path = CUDA) -> list[str]:
    """Stems of a report whose .cu or headers are not what they were, or that are no more."""
    return [
        stem
        for stem, digest in stored["kernels"].items()
        if not (folder / f"{stem}.cu").is_file() or kernel_hash(stem, folder) != digest
    ]


def source_hash(target: str, stem: str) -> str:
    """sha256 of the file that was checked: that of the stem, or of the operation that its name begins with."""
    names = (stem, stem.rpartition("_")[0])
    files = [ROOT / folder / f"{name}.py" for name in names for folder in SOURCES[target]]
    return hashlib.sha256(next(file for file in files if file.exists()).read_bytes()).hexdigest()


def junit(target: str, results: Sequence[Result], seconds: Mapping[tuple[str, str], float]) -> str:
    """The XML that CI systems read: a test case a case, its class the stem."""
    suite = ElementTree.Element("testsuite", name=f"conformance-{target}", tests=str(len(results)))
    suite.set("failures", str(sum(result.status == "FAIL" for result in results)))
    suite.set("skipped", str(sum(result.status == "skip" for result in results)))
    for result in results:
        time = f"{seconds.get((result.stem, result.case), 0.0):.3f}"
        case = ElementTree.SubElement(suite, "testcase", classname=result.stem, name=result.case, time=time)
        if result.status == "FAIL":
            ElementTree.SubElement(case, "failure", message=result.problems[0]).text = "\n".join(result.problems)
        if result.status == "skip":
            ElementTree.SubElement(case, "skipped", message=result.problems[0])
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
