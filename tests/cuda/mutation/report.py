"""Verdicts on mutants: kept as JSON, counted, and set against the list of those that change nothing."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from conformance.host_build import CUDA
from conformance.machines import kernel_hash
from tests.cuda.mutation.operators import Mutant
from tests.cuda.mutation.suites import files
from tests.cuda.mutation.sweep import BROKEN, KILLED, NO_BUILD, SURVIVED, Verdict

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
STATUS = {KILLED: "ok", SURVIVED: "FAIL", NO_BUILD: "no build"}  # as conformance/results says it


def explanations(text: str) -> dict[str, str]:
    """hunk → why its mutant changes nothing that a CPU can show.

    The text is hunks as Mutant.hunk has them, each with lines behind it that begin with "=" and say why, and an empty
    line between two. Raises ValueError for a hunk without.
    """
    found = {}
    for paragraph in text.strip().split("\n\n"):
        lines = [line for line in paragraph.split("\n") if not line.startswith("#")]
        why = " ".join(line[1:].strip() for line in lines if line.startswith("="))
        hunk = "\n".join(line for line in lines if not line.startswith("="))
        if hunk:
            if not why:
                raise ValueError(f"nothing says why this changes nothing:\n{hunk}")
            found[hunk] = why
    return found


@cache
def _source(file: str) -> str:
    return hashlib.sha256((CUDA / file).read_bytes()).hexdigest()[:8]


@dataclass(slots=True)
class Record:
    """Verdicts by id. sources: of the files that they were given on. scope: what is counted, None = all."""

    mutants: dict[str, Mutant]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)
    scope: set[str] | None = None

    @staticmethod
    def load(path: Path | None, mutants: Iterable[Mutant], same_file: bool = True) -> Record:
        """What a stored run says of mutants that are still there.

        same_file: only where the whole file is as it was, not just the lines around.
        """
        record = Record({mutant.id: mutant for mutant in mutants})
        record.explained = explanations(EQUIVALENT.read_text("utf-8"))
        if path is not None and path.exists():
            back = {status: name for name, status in STATUS.items()} | {"equivalent": SURVIVED}
            for case in json.loads(path.read_text("utf-8"))["cases"]:
                mutant = record.mutants.get(case["case"])
                if mutant is not None and (not same_file or case["source"] == _source(mutant.file)):
                    record.sources[mutant.id] = case["source"]
                    record.verdicts[mutant.id] = Verdict(
                        mutant.id, back[case["status"]], case["found"], case["seconds"]
                    )
        return record

    def knows(self, mutant: Mutant) -> bool:
        return mutant.id in self.verdicts

    def add(self, verdict: Verdict) -> None:
        self.verdicts[verdict.mutant] = verdict
        self.sources[verdict.mutant] = _source(self.mutants[verdict.mutant].file)

    def write(self, path: Path) -> None:
        """As conformance/results has it. "kernels" holds what all verdicts of a file were given on."""
        names = sorted(name for name in self.verdicts if self._status(name))
        old = {self.mutants[name].file for name in names if self.sources[name] != _source(self.mutants[name].file)}
        kernels = {file: kernel_hash(file.removesuffix(".cu")) for file in files() if file.endswith(".cu")}
        head = {
            "target": "mutants",
            "gpu": None,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kernels": {file.removesuffix(".cu"): "" if file in old else digest for file, digest in kernels.items()},
        }
        cases = ",\n".join(json.dumps(self._case(name)) for name in names)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{cases}\n]}}\n', "utf-8")

    def _case(self, name: str) -> dict[str, Any]:
        verdict = self.verdicts[name]
        return {
            "stem": self.mutants[name].file.rpartition("/")[2],
            "case": name,
            "status": self._status(name),
            "found": verdict.found[:40] if verdict.status == KILLED else "",
            "seconds": verdict.seconds,
            "source": self.sources[name],
        }

    def _status(self, name: str) -> str:
        """ "" for what was not judged."""
        status = self.verdicts[name].status
        if status == SURVIVED and self.mutants[name].hunk in self.explained:
            return "equivalent"
        return STATUS.get(status, "")

    def _named(self, status: str) -> list[str]:
        return [name for name in self.judged if self._status(name) == status]

    @property
    def judged(self) -> list[str]:
        return [name for name in self.verdicts if self.scope is None or name in self.scope]

    @property
    def unexplained(self) -> list[str]:
        return self._named("FAIL")

    @property
    def broken(self) -> list[str]:
        """What could not be judged."""
        return [name for name in self.judged if self.verdicts[name].status == BROKEN]

    @property
    def raw_rate(self) -> float:
        """Found, of all that compile."""
        num_found = len(self._named("ok"))
        return num_found / max(1, num_found + len(self._named("FAIL")) + len(self._named("equivalent")))

    def survivors(self) -> list[str]:
        """The hunks of those that nothing explains, ready for the list; and what went wrong with the judging."""
        lines = [f"{name}: {self.verdicts[name].found}" for name in self.broken]
        for name in sorted(self.unexplained, key=lambda name: (self.mutants[name].file, self.mutants[name].line)):
            lines += [f"# {name}, line {self.mutants[name].line}", self.mutants[name].hunk, "= ", ""]
        return lines

    def table(self) -> list[str]:
        """A line a file, and one for all: mutants judged, and shares found of those that compile."""
        names: dict[str, list[str]] = {}
        for name in self.judged:
            names.setdefault(self.mutants[name].file.rpartition("/")[2], []).append(name)
        lines = [
            f"{'file':<24}{'judged':>7}{'no build':>9}{'killed':>7}{'equal':>6}{'left':>5}{'raw':>7}{'of others':>10}"
        ]
        for file, some in [*sorted(names.items()), ("all", self.judged)]:
            counts = dict.fromkeys(("no build", "ok", "equivalent", "FAIL"), 0)
            for name in some:
                counts[self._status(name)] = counts.get(self._status(name), 0) + 1
            no_build, killed, equal, left = list(counts.values())[:4]
            raw, rate = killed / max(1, killed + equal + left), killed / max(1, killed + left)
            numbers = "".join(f"{number:>10}" for number in (len(some), no_build, killed, equal, left))
            lines.append(f"{file:<24}{numbers}{raw:>10.1%}{rate:>10.1%}")
        return lines
