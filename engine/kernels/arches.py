"""What an SM and a block of each kind of GPU have. Source: the CUDA C++ Programming Guide, "Compute Capabilities"."""

from __future__ import annotations

from dataclasses import dataclass

MAX_THREADS = 1024  # of a block
REGISTERS = 65536  # of an SM, and of a block
RESERVED_BYTES = 1 << 10  # of shared memory, that the system takes of every block


@dataclass(frozen=True, slots=True)
class Arch:
    """Sizes of a kind of GPU."""

    num_sms: int  # of a common card
    block_shared_bytes: int  # that a block can have, static and dynamic
    sm_shared_bytes: int
    sm_threads: int
    sm_blocks: int
    has_fp8: bool  # tensor cores for it

    def blocks_per_sm(self, threads: int, num_registers: int, shared_bytes: int) -> int:
        """How many blocks of this size an SM holds at once; 0: not even one.

        Registers are given out by the 256 a warp, shared memory by the 128 bytes.
        """
        warps = -(-threads // 32)
        of_warp = max(-(-32 * num_registers // 256), 1) * 256
        of_block = -(-(shared_bytes + RESERVED_BYTES) // 128) * 128
        if threads > MAX_THREADS or shared_bytes > self.block_shared_bytes:
            return 0
        return min(
            self.sm_blocks,
            self.sm_threads // (32 * warps),
            REGISTERS // of_warp // warps,
            self.sm_shared_bytes // of_block,
        )


ARCHES = {
    "sm_80": Arch(108, 163 << 10, 164 << 10, 2048, 32, False),  # A100
    "sm_86": Arch(82, 99 << 10, 100 << 10, 1536, 16, False),  # RTX 3090
    "sm_89": Arch(128, 99 << 10, 100 << 10, 1536, 24, True),  # RTX 4090
    "sm_90": Arch(132, 227 << 10, 228 << 10, 2048, 32, True),  # H100, H200
    "sm_100": Arch(148, 227 << 10, 228 << 10, 2048, 32, True),  # B200
    "sm_120": Arch(170, 99 << 10, 100 << 10, 1536, 24, True),  # RTX 5090
}
