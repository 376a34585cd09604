"""In which order ranks copy an array to each other through places in memory that all of them reach.

A word of each place, sender and receiver says whether it is free or full. It is as it was once all have what they want,
so the same work can be done again, by a graph too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

FREE, FULL = 0, 1
NUM_PLACES = 16  # of a rank
PLACE_BYTES, LEAST_BYTES = 2 << 20, 512 << 10  # of a place; of a piece
NUM_LANES = 2  # each way: what lies between two copies of one is hidden under a copy of the other
PIECES = 16  # of an array, if its pieces may be so large: the first goes out and the last comes in alone


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, begin + size) of an array, and where every rank puts its own."""

    begin: int
    size: int
    place: int


class Lane(Protocol):
    """Does one thing after another. A word is of a sender, a receiver and a place of the sender."""

    def wait(self, sender: int, receiver: int, place: int, value: int) -> None: ...

    def write(self, sender: int, receiver: int, place: int, value: int) -> None: ...

    def put(self, piece: Piece) -> None:
        """Into this rank's place."""
        ...

    def take(self, sender: int, piece: Piece) -> None:
        """Out of the sender's place."""
        ...


def cut(num_bytes: int) -> list[Piece]:
    """An array in pieces."""
    size = min(max(-(-num_bytes // PIECES), LEAST_BYTES), PLACE_BYTES)
    begins = range(0, num_bytes, size)
    return [Piece(begin, min(size, num_bytes - begin), i % NUM_PLACES) for i, begin in enumerate(begins)]


def exchange(pieces: Sequence[Piece], outward: Sequence[Lane], inward: Sequence[Lane], rank: int, size: int) -> None:
    """All that a rank's lanes do so that every rank of `size` has the arrays of all."""
    others = [other for other in range(size) if other != rank]
    for i, piece in enumerate(pieces):
        lane, place = outward[i % len(outward)], piece.place
        for receiver in others:
            lane.wait(rank, receiver, place, FREE)
        lane.put(piece)
        for receiver in others:
            lane.write(rank, receiver, place, FULL)
        lane = inward[i % len(inward)]
        for sender in others:
            lane.wait(sender, rank, place, FULL)
            lane.take(sender, piece)
            lane.write(sender, rank, place, FREE)
