"""Which way is chosen for which size, and what must be loaded before ways are tried."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.comm.ways import Trial, choose, kernels_of
from engine.errors import ConfigError
from engine.kernels.channel import Slots, alarm_words, make_channel, make_exchange, slots_bytes

KIB = 1024


def trials(**ways: dict[int, float]) -> list[Trial]:
    return [Trial(name.replace("_", "-"), kib * KIB, us) for name, times in ways.items() for kib, us in times.items()]


def everything(way: str) -> bool:
    return True


def test_between_two_sizes_a_way_takes_what_lies_between() -> None:
    """At 32 KiB quick takes 5 + (20 − 5) / 3 = 10, slow 8 + (9 − 8) / 3; at 8 KiB 4.33 and 8."""
    plan = choose(trials(quick={4: 4, 16: 5, 64: 20}, slow={4: 8, 16: 8, 64: 9}), everything, 64)
    assert plan.sizes == tuple(kib * KIB for kib in (4, 8, 16, 32, 64))
    assert plan.names == ("quick", "quick", "quick", "slow", "slow")
    assert plan.way(1) == "quick"
    assert plan.way(16 * KIB + 1) == plan.way(1 << 30) == "slow"
    assert plan.text() == "quick to 16 KiB, slow beyond"


def test_a_way_is_for_sizes_that_it_took() -> None:
    plan = choose(trials(small={4: 1, 16: 1}, large={16: 9, 64: 9}), everything, 64)
    assert plan.names == ("small", "small", "small", "large", "large")
    alone = choose(trials(large={16: 9, 64: 9}), everything, 64)
    assert alone.sizes[0] == 16 * KIB
    assert alone.way(4) == "large"


def test_what_is_broken_or_not_allowed_or_does_not_fit_is_left_out() -> None:
    found = trials(a={4: 1}, b={4: 2}, c_int8={4: 0.5}, d={4: 3})
    broken = [*found, Trial("a", 16 * KIB, float("inf"), "3 numbers of 4 are wrong")]
    assert choose(broken, everything, 64).names == ("c-int8",)
    assert choose(broken, everything, 48).names == ("b",)
    assert choose(broken, lambda way: way == "d", 48).names == ("d",)
    with pytest.raises(ConfigError, match="a: 3 numbers of 4 are wrong"):
        choose(broken, lambda way: way == "a", 48)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_kernels_of_all_ways_are_named(world_size: int) -> None:
    """Two ranks have kernels of their own; one to add up what was copied is always there."""

    def zeros(size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    size, owners = slots_bytes(world_size, 1 << 16), world_size > 2
    alarm = np.zeros(alarm_words(world_size), np.uint32)
    shared: dict[str, Any] = {"state": np.zeros(4, np.uint32), "alarm": alarm}
    channel = make_channel(0, world_size, outboxes=[zeros(size)], inbox=zeros(size), **shared)
    slots = Slots() if owners else Slots(4, 8, 34816)
    inboxes = [zeros(slots.inbox_bytes(world_size, True, owners))] * world_size
    exchange = make_exchange(0, world_size, inboxes=inboxes, is_window=True, slots=slots, has_owners=owners, **shared)
    found = kernels_of({"window": channel}, {"window": exchange}, np.dtype(ml_dtypes.bfloat16))
    stems = {instance.stem for instance in found}
    if owners:
        assert stems == {"all_reduce", "int8_all_reduce", "all_reduce_pieces", "sum_parts", "int8_codes"}
    else:
        assert stems == {"all_reduce", "int8_all_reduce_pair", "all_reduce_pair", "sum_parts", "int8_codes"}


def test_copies_are_for_sums_beside_other_rows() -> None:
    """Unless they take half as long again."""
    tried = trials(**{"window-copies": {4: 14, 8: 8, 16: 9}, "window": {4: 9, 8: 6, 16: 10}})
    assert choose(tried, everything, 64).names == ("window", "window", "window-copies")
    assert choose(tried, everything, 64, is_beside=True).names == ("window", "window-copies", "window-copies")
