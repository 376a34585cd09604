"""python -m tests.serve.crowd: a real server on few blocks of KV, under a crowd of clients for as long as is said."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench.__main__ import main as bench
from tests.serve.servers import running, text_model

FLAGS = ["--known", "8", "--prompt-tokens", "40", "--output-tokens", "24", "--vocab-size", "200", "--tolerance", "1e-4"]


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many clients ask for some seconds, which is a round, with so many sequences at once on so many blocks."""

    clients: int
    seconds: int
    max_num_seqs: int
    num_blocks: int

    def rounds(self, folder: Path) -> Generator[dict[str, Any], None, None]:
        """The reports of `python -m engine.bench soak` on one server, round after round for ever."""
        model = text_model(folder / "model", max_position_embeddings=512)
        blocks = ("--block-size", "4", "--num-gpu-blocks-override", str(self.num_blocks))
        size, file = ["--clients", str(self.clients), "--seconds", str(self.seconds)], folder / "report.json"
        with running(model, "--max-num-seqs", str(self.max_num_seqs), *blocks) as server:
            number = 0
            while True:
                status = bench(["soak", "--url", server.url, *size, *FLAGS, "--seed", str(number), "--json", str(file)])
                found: dict[str, Any] = json.loads(file.read_text("utf-8"))
                assert (status == 0) == (found["failures"] == [])
                assert server.is_idle()
                yield found
                number += 1


LARGE = Crowd(clients=64, seconds=10, max_num_seqs=32, num_blocks=40)


def main() -> int:
    """0 if nothing was wrong in any round."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.crowd", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="in all (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of each round there")
    args = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        rounds = LARGE.rounds(Path(folder))
        for number in range(-(-args.seconds // LARGE.seconds)):
            found = next(rounds)
            names = ("failures", "compared_tokens", "compared_logprobs", "worst_logprob_difference", "counters")
            status = "FAIL" if found["failures"] else "ok"
            cases.append({"stem": "crowd", "case": f"round-{number}", "status": status, **{n: found[n] for n in names}})
        rounds.close()
    if args.json is not None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        report = {"target": "crowd", "gpu": None, "date": date, "seconds": args.seconds, "cases": cases}
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return int(any(case["failures"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
