"""Verdicts on mutants: kept as JSON, counted, and set against the list of those that change nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.machines import kernel_hash
from tests.cuda.mutation.operators import Mutant
from tests.cuda.mutation.suites import stems_of
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


@dataclass(slots=True)
class Record:
    """Verdicts by id, on the mutants of the files as they are."""

    mutants: dict[str, Mutant]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def load(path: Path | None, mutants: Iterable[Mutant]) -> Record:
        """What a stored run says of mutants of files that have not changed since; headers too."""
        record = Record({mutant.id: mutant for mutant in mutants})
        record.explained = explanations(EQUIVALENT.read_text("utf-8"))
        if path is not None and path.exists():
            stored = json.loads(path.read_text("utf-8"))
            same = {stem for stem, digest in stored["kernels"].items() if kernel_hash(stem) == digest}
            back = {status: name for name, status in STATUS.items()} | {"equivalent": SURVIVED}
            for case in stored["cases"]:
                mutant = record.mutants.get(case["case"])
                if mutant is not None and same.issuperset(stems_of(mutant.file)):
                    record.add(Verdict(mutant.id, back[case["status"]], case["found"], case["seconds"]))
        return record

    def knows(self, mutant: Mutant) -> bool:
        return mutant.id in self.verdicts

    def add(self, verdict: Verdict) -> None:
        self.verdicts[verdict.mutant] = verdict

    def write(self, path: Path) -> None:
        stems = sorted({stem for name in self.verdicts for stem in stems_of(self.mutants[name].file)})
        head = {
            "target": "mutants",
            "gpu": None,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kernels": {stem: kernel_hash(stem) for stem in stems},
        }
        cases = ",\n".join(json.dumps(self._case(name)) for name in sorted(self.verdicts) if self._status(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{cases}\n]}}\n', "utf-8")

    def _case(self, name: str) -> dict[str, Any]:
        verdict, mutant = self.verdicts[name], self.mutants[name]
        found = verdict.found[:40] if verdict.status == KILLED else ""
        stem = mutant.file.rpartition("/")[2]
        return {"stem": stem, "case": name, "status": self._status(name), "found": found, "seconds": verdict.seconds}

    def _status(self, name: str) -> str:
        """ "" for what was not judged."""
        status = self.verdicts[name].status
        if status == SURVIVED and self.mutants[name].hunk in self.explained:
            return "equivalent"
        return STATUS.get(status, "")

    def _named(self, status: str) -> list[str]:
        return [name for name in self.verdicts if self._status(name) == status]

    @property
    def unexplained(self) -> list[str]:
        return self._named("FAIL")

    @property
    def raw_rate(self) -> float:
        """Found, of all that compile."""
        num_found = len(self._named("ok"))
        return num_found / max(1, num_found + len(self._named("FAIL")) + len(self._named("equivalent")))

    def survivors(self) -> list[str]:
        """The hunks of those that nothing explains, ready for the list; and what went wrong with the judging."""
        lines = [f"{verdict.mutant}: {verdict.found}" for verdict in self.verdicts.values() if verdict.status == BROKEN]
        for name in sorted(self.unexplained, key=lambda name: (self.mutants[name].file, self.mutants[name].line)):
            lines += [f"# {name}, line {self.mutants[name].line}", self.mutants[name].hunk, "= ", ""]
        return lines

    def table(self) -> list[str]:
        """A line a file, and one for all: mutants judged, and shares found of those that compile."""
        names: dict[str, list[str]] = {}
        for name in self.verdicts:
            names.setdefault(self.mutants[name].file.rpartition("/")[2], []).append(name)
        lines = [
            f"{'file':<24}{'judged':>7}{'no build':>9}{'killed':>7}{'equal':>6}{'left':>5}{'raw':>7}{'of others':>10}"
        ]
        for file, some in [*sorted(names.items()), ("all", list(self.verdicts))]:
            counts = dict.fromkeys(("no build", "ok", "equivalent", "FAIL"), 0)
            for name in some:
                counts[self._status(name)] = counts.get(self._status(name), 0) + 1
            no_build, killed, equal, left = list(counts.values())[:4]
            raw, rate = killed / max(1, killed + equal + left), killed / max(1, killed + left)
            numbers = "".join(f"{number:>10}" for number in (len(some), no_build, killed, equal, left))
            lines.append(f"{file:<24}{numbers}{raw:>10.1%}{rate:>10.1%}")
        return lines
