"""Cases that a quick build is enough for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from conformance.case import Case
from engine.kernels.device import Instance


def usual(launched: Sequence[tuple[Case, Collection[Instance]]]) -> list[Case]:
    """Those cases that need but one instance of each kernel, the one that most of them need.

    Args:
        launched: cases, each with the kernels that it launches.
    """
    counts = Counter(one for _, kernels in launched for one in sorted(set(kernels), key=str))
    chosen: dict[tuple[str, str], Instance] = {}
    for instance, _ in counts.most_common():
        chosen.setdefault((instance.stem, instance.entry.partition("<")[0]), instance)
    return [case for case, kernels in launched if set(kernels) <= set(chosen.values())]
