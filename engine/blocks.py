"""Paged KV memory: which block belongs to whom, and which full blocks can be used again.

A block is free (no owner) or owned (a count of sequences). A free block may still be *cached*: its KV stays
valid, and a sequence with the same leading tokens takes it back. Cached blocks are evicted least recently used
first, the tail of a chain before its head. Takes sequences; knows nothing of arrays or devices.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.sequence import BlockKey, PrefixNode, Sequence

ChainHash = Callable[[bytes, bytes], bytes]


def chain_hash(parent_digest: bytes, content: bytes) -> bytes:
    """Digest of a block and all blocks before it: BLAKE2b-128 of the parent's digest and the block's own ids."""
    return hashlib.blake2b(parent_digest + content, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A registered block. Digests only find it; parent and content prove it, so a collision is never a hit."""

    node: PrefixNode
    parent_serial: int
    content: bytes


class BlockManager:
    """Allocates blocks to sequences and keeps the prefix cache.

    Invariants (checked by `audit`): every block is free xor owned; the counts equal the owners; digest → block
    and block → digest agree; a block is registered only after its KV has been computed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: ChainHash = chain_hash,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hash = hash_function
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused first
        self._cached: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, int] = {}
        self._next_serial = 1
        self.num_withheld = 0  # free blocks that nobody may have for now: a fault on purpose (see faults)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_free(self) -> int:
        """Blocks without an owner, cached ones included."""
        return len(self._free) - self.num_withheld

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- admission

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks that hold the leading tokens of seq, in order; at least one token is left to compute."""
        if not self.enable_prefix_caching or seq.wants_prompt_logprobs:
            return []
        found: list[int] = []
        parent = self._root(seq)
        for position in range((len(seq.token_ids) - 1) // self.block_size):
            block = self._find(parent, self._key(seq, position))
            if block is None:
                break
            found.append(block)
            parent = self._cached[block].node
        return found

    def num_blocks_to_admit(self, seq: Sequence, matched: list[int]) -> int:
        """Free blocks that admission takes: new ones, and matched ones that nobody owns at the moment."""
        unowned = sum(1 for block in matched if self._ref_counts[block] == 0)
        return self.blocks_for(len(seq.token_ids)) - len(matched) + unowned

    def admit(self, seq: Sequence, matched: list[int]) -> None:
        """Gives seq the matched blocks and new ones for all of its tokens; the caller has checked that they fit."""
        assert not seq.block_ids, "a waiting sequence owns no block"
        for block in matched:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
            seq.block_ids.append(block)
            seq.prefix.append(self._cached[block].node)
        seq.num_computed = len(matched) * self.block_size
        if self.enable_prefix_caching:
            self.num_queried_tokens += len(seq.token_ids)
            self.num_hit_tokens += seq.num_computed
        for _ in range(self.blocks_for(len(seq.token_ids)) - len(matched)):
            seq.block_ids.append(self._take())

    # ---- growth

    def needs_block(self, seq: Sequence) -> bool:
        """True if the tokens of seq no longer fit its blocks."""
        return len(seq.token_ids) > len(seq.block_ids) * self.block_size

    def grow(self, seq: Sequence) -> int:
        """Adds one block to seq and returns it; the caller has checked num_free."""
        block = self._take()
        seq.block_ids.append(block)
        return block

    def commit(self, seq: Sequence) -> None:
        """Registers the blocks of seq that have become full; call it only when their KV is in memory."""
        if not self.enable_prefix_caching:
            return
        num_full = seq.num_computed // self.block_size
        for position in range(len(seq.prefix), num_full):
            parent = seq.prefix[-1] if seq.prefix else self._root(seq)
            seq.prefix.append(self._register(seq.block_ids[position], parent, self._key(seq, position)))

    @property
    def mark(self) -> int:
        """For forget_since: blocks that are registered from now on."""
        return self._next_serial

    def forget_since(self, mark: int) -> None:
        """Nobody finds the blocks that were registered since: a step that should have written their KV has failed."""
        for block in [block for block, cached in self._cached.items() if cached.node.serial >= mark]:
            self._unregister(block)

    # ---- release

    def free(self, seq: Sequence, discard: bool = False) -> None:
        """Takes all blocks from seq. With discard their KV is not trusted and leaves the prefix cache."""
        for block in reversed(seq.block_ids):  # the tail becomes the oldest, so chains are evicted from their end
            self._ref_counts[block] -= 1
            if discard:
                self._unregister(block)
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)
        seq.block_ids.clear()
        seq.prefix.clear()
        seq.num_computed = 0

    def audit(self, owners: list[Sequence]) -> None:
        """Raises AssertionError if the books do not balance; for tests and the debug mode."""
        counts = [0] * self.num_blocks
        for seq in owners:
            assert len(set(seq.block_ids)) == len(seq.block_ids), "a sequence holds a block twice"
            for block in seq.block_ids:
                counts[block] += 1
        assert counts == self._ref_counts, "counts differ from owners"
        assert set(self._free) == {block for block, count in enumerate(counts) if count == 0}, "free differs"
        assert len(self._by_digest) == len(self._cached), "digest and block maps differ"
        for digest, block in self._by_digest.items():
            assert self._cached[block].node.digest == digest, "digest and block maps disagree"

    # ---- inside

    def _root(self, seq: Sequence) -> PrefixNode:
        """Everything besides the tokens that the KV depends on: the salt, and the rope table if it varies."""
        salt = "" if seq.request.cache_salt is None else f"salt:{seq.request.cache_salt}"
        return PrefixNode(f"rope:{seq.rope_len} {salt}".encode("utf-8", "surrogatepass"), 0)

    def _key(self, seq: Sequence, position: int) -> BlockKey:
        """Key of a full block of seq. Each is made once, as a sequence that waits is looked up at every step."""
        keys = seq.block_keys
        while len(keys) <= position:
            start = len(keys) * self.block_size
            content = np.array(seq.token_ids[start : start + self.block_size], np.int32).tobytes()
            digest = keys[-1].digest if keys else self._root(seq).digest
            keys.append(BlockKey(self._hash(digest, content), content))
        return keys[position]

    def _find(self, parent: PrefixNode, key: BlockKey) -> int | None:
        block = self._by_digest.get(key.digest)
        if block is None:
            return None
        cached = self._cached[block]
        return block if (cached.parent_serial, cached.content) == self._identity(parent, key.content) else None

    def _register(self, block: int, parent: PrefixNode, key: BlockKey) -> PrefixNode:
        """Makes block findable, unless an equal one already is: then seq goes on from that one's identity."""
        twin = self._find(parent, key)
        if twin is not None:
            return self._cached[twin].node
        node = PrefixNode(key.digest, self._next_serial)
        self._next_serial += 1
        if node.digest in self._by_digest:  # a stale or colliding entry: the newer one is the more useful
            self._unregister(self._by_digest[node.digest])
        self._cached[block] = CachedBlock(node, *self._identity(parent, key.content))
        self._by_digest[node.digest] = block
        return node

    def _identity(self, parent: PrefixNode, content: bytes) -> tuple[int, bytes]:
        """What proves a block: its parent's serial and its ids, with the whole key in place of a root's parent."""
        return (parent.serial, content) if parent.serial else (0, parent.digest + content)

    def _unregister(self, block: int) -> None:
        cached = self._cached.pop(block, None)
        if cached is not None:
            del self._by_digest[cached.node.digest]
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._unregister(block)
        self._ref_counts[block] = 1
        return block
