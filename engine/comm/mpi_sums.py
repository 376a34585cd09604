"""Sums over CPU ranks, with MPI as the wire: in rank order, in float32, the same bits on every rank.

Defined by ref.collectives.all_reduce, ref.int8_all_reduce and ref.int8_feedback. In one shot every rank sends all to
all and adds; in two each adds a piece and sends its sum round, which for many ranks and large arrays is less to send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.comm.communicator import StepSum
from ref.collectives import split_ranges
from ref.int8_all_reduce import (
    GROUP,
    GROUP_BYTES,
    dequantize_groups,
    from_groups,
    quantize_groups,
    sum_slice,
    to_groups,
)
from ref.int8_feedback import CARRIED
from ref.numerics import round_to

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
WireFormat = Literal["float32", "bfloat16", "int8", "int8-plain"]
# what this rank brings [num_tokens, hidden_size], and to which sum → the sum over ranks
Sum = Callable[[Float32, StepSum], Float32]

# Bytes that a rank may receive in one shot. Of 4 ranks on two cores one shot takes 5.4 ms where two take 7.4 for
# 256 KiB, 15.1 and 16.7 for 1 MiB, 39.8 and 38.9 for 4 MiB; with 2 ranks it is never slower.
ONE_SHOT_BYTES = 8 << 20
# A rank that waits longer leaves its core to others: 4 ranks on two cores take 1.0 ms for 1 KiB so, and 3.7 spinning.
SPIN_S, NAP_S = 50e-6, 20e-6


class Request(Protocol):
    """As mpi4py.MPI.Request."""

    def Test(self) -> bool: ...


class MpiComm(Protocol):
    """What is used of mpi4py.MPI.Intracomm."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def Split(self, color: int, key: int, /) -> MpiComm: ...
    def allgather(self, sendobj: Any, /) -> list[Any]: ...
    def Iallgather(self, sendbuf: Any, recvbuf: Any, /) -> Request: ...
    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, /) -> Request: ...
    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, /) -> Request: ...
    def Igather(self, sendbuf: Any, recvbuf: Any, root: int, /) -> Request: ...
    def Ibcast(self, buf: Any, root: int, /) -> Request: ...
    def Isend(self, buf: Any, dest: int, /) -> Request: ...
    def Irecv(self, buf: Any, source: int, /) -> Request: ...


def wait(request: Request) -> None:
    """Until it is done."""
    spin_until = time.perf_counter() + SPIN_S
    while not request.Test():
        if time.perf_counter() > spin_until:
            time.sleep(NAP_S)


def make_sum(comm: MpiComm, wire: WireFormat) -> Sum:
    """The sum over the ranks of comm. bfloat16: what is sent, and the sum, is rounded to it. int8: see FeedbackSum.
    int8-plain: as ref.int8_all_reduce does without rotation."""
    if comm.size == 1:
        return lambda partial, which: partial
    if wire == "int8":
        return FeedbackSum(comm)
    if wire == "int8-plain":
        return partial(plain_int8_sum, comm)
    dtype = np.dtype(np.float32 if wire == "float32" else ml_dtypes.bfloat16)
    return partial(float_sum, comm, dtype)


def float_sum(comm: MpiComm, dtype: np.dtype[Any], shard: Float32, which: StepSum) -> Float32:
    """What ref.collectives.all_reduce gives of shards in dtype."""
    sent = np.ascontiguousarray(shard, dtype)
    if (comm.size - 1) * sent.nbytes <= ONE_SHOT_BYTES:
        arrived = np.empty((comm.size, *sent.shape), dtype)
        wait(comm.Iallgather(_bytes(sent), _bytes(arrived)))
        return _add(arrived).astype(dtype).astype(np.float32, copy=False)
    pieces = [dtype.itemsize * len(piece) for piece in split_ranges(sent.size, comm.size)]
    total = _add(_exchange(comm, _bytes(sent), pieces).view(dtype)).astype(dtype)
    return _spread(comm, _bytes(total), pieces).view(dtype).reshape(shard.shape).astype(np.float32, copy=False)


def plain_int8_sum(comm: MpiComm, shard: Float32, which: StepSum) -> Float32:
    """What ref.int8_all_reduce.int8_all_reduce gives without rotation."""
    num_tokens, hidden_size = shard.shape
    summed, _ = _int8_sum(comm, to_groups(shard, rotate=False))
    return from_groups(summed, num_tokens, hidden_size, rotate=False)


class FeedbackSum:
    """What ref.int8_feedback.int8_feedback_all_reduce gives, sum after sum; the last one of a step is exact."""

    def __init__(self, comm: MpiComm) -> None:
        self._comm = comm
        self._carried: dict[int, Float32] = {}  # by StepSum.first_row

    def __call__(self, shard: Float32, which: StepSum) -> Float32:
        carried = self._carried.pop(which.first_row, None)
        if which.is_last:
            return float_sum(self._comm, np.dtype(np.float32), shard, which)
        num_tokens, hidden_size = shard.shape
        groups = to_groups(shard, rotate=True)
        if carried is not None and not which.is_first:
            groups = groups + carried
        summed, left_out = _int8_sum(self._comm, groups)
        self._carried[which.first_row] = round_to(left_out, CARRIED)
        return from_groups(summed, num_tokens, hidden_size, rotate=True)


def _int8_sum(comm: MpiComm, groups: Float32) -> tuple[Float32, Float32]:
    """The sum of all ranks' groups [num_groups, 32], and what this rank has left out of it: ref's sum_groups."""
    q, scale = quantize_groups(groups)
    with np.errstate(invalid="ignore"):  # inf less NaN
        left_out = groups - dequantize_groups(q, scale)
    if comm.size == 2:  # which need no owners
        sent = _pack(q, scale)
        both = np.empty((2, sent.size), np.uint8)
        wait(comm.Iallgather(sent, both))
        first, second = (dequantize_groups(*_unpack(part)) for part in both)
        return first + second, left_out
    owned = split_ranges(len(groups), comm.size)
    pieces = [GROUP_BYTES * len(part) for part in owned]
    own = slice(owned[comm.rank].start, owned[comm.rank].stop)
    packed = [_pack(q[part.start : part.stop], scale[part.start : part.stop]) for part in owned]
    arrived = [_unpack(row) for row in _exchange(comm, np.concatenate(packed), pieces)]
    total = sum_slice(comm.rank, slice(None), [groups[own]] * comm.size, arrived)
    parts = np.split(_spread(comm, _pack(*quantize_groups(total)), pieces), np.cumsum(pieces)[:-1])
    summed = np.concatenate([dequantize_groups(*_unpack(part)) for part in parts])
    with np.errstate(invalid="ignore"):
        left_out[own] = total - summed[own]
    return summed, left_out


def _add(arrived: NDArray[Any]) -> Float32:
    """Over the first axis, the ranks."""
    total: Float32 = arrived[0].astype(np.float32)
    for part in arrived[1:]:
        total += part
    return total


def _exchange(comm: MpiComm, sent: Bytes, pieces: list[int]) -> Bytes:
    """Piece i of what is sent goes to rank i: [size, pieces[rank]], what has come for this rank."""
    own = pieces[comm.rank]
    arrived = np.empty((comm.size, own), np.uint8)
    wait(comm.Ialltoallv([sent, pieces], [arrived, [own] * comm.size]))
    return arrived


def _spread(comm: MpiComm, sent: Bytes, pieces: list[int]) -> Bytes:
    """The pieces of all ranks one after another."""
    arrived = np.empty(sum(pieces), np.uint8)
    wait(comm.Iallgatherv(sent, [arrived, pieces]))
    return arrived


def _bytes(array: NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _pack(q: NDArray[np.int8], scale: NDArray[np.uint16]) -> Bytes:
    return np.concatenate([_bytes(q), _bytes(scale)])


def _unpack(packed: Bytes) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    num_groups = len(packed) // GROUP_BYTES
    cut = num_groups * GROUP
    return packed[:cut].view(np.int8).reshape(num_groups, GROUP), packed[cut:].view(np.uint16)
