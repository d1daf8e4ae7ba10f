"""The prefix cache: snapshots of requests' memory after some of their tokens, for requests that begin the same.

A snapshot is a KDA state in a slot of its own and the pages with the latents of the same tokens. They live and die
together, so that neither can be found without the other. This is host bookkeeping: the engine copies the states.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from k3jax.engine.pool import Pool


class Prefix(NamedTuple):
    """One snapshot. Who goes on from it copies the state and, where it is partly filled, the last page: others read them."""

    length: int  # tokens, 1 or more
    slot: int  # the state after these tokens
    pages: tuple[int, ...]  # their latents, in order; none in a model without MLA layers


class PrefixCache:
    """At most `limit` snapshots, the least recently used ones evicted first; with limit 0 it holds nothing.

    Keys are hashes of the salt and of the tokens, and nothing but the hash is compared (256 bits: two prefixes of one hash
    are not to be found). Prefixes of different salts never meet.
    """

    def __init__(self, pool: Pool, limit: int) -> None:
        assert limit >= 0, f"limit={limit}: allowed is 0 or more"
        self.limit = limit
        self._pool = pool
        self._held: OrderedDict[bytes, Prefix] = OrderedDict()  # by key, the least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def find(self, tokens: Sequence[int], salt: str, most: int) -> Prefix | None:
        """The longest held prefix of at most `most` of the tokens, which counts as a use of it; None where there is none.

        The snapshot stays the cache's: it may be evicted. Until the state is copied and the pages are shared, name it in `keep`.
        """
        most = max(0, min(most, len(tokens)))
        lengths = sorted({prefix.length for prefix in self._held.values() if prefix.length <= most})
        key = next((key for key in reversed(list(_keys(tokens, salt, lengths))) if key in self._held), None)
        if key is None:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def holds(self, tokens: Sequence[int], salt: str, length: int) -> bool:
        """Whether there is a snapshot after the first `length` tokens. Not a use."""
        return 1 <= length <= len(tokens) and _key(tokens, salt, length) in self._held

    def insert(self, tokens: Sequence[int], salt: str, length: int, slot: int, pages: Sequence[int]) -> None:
        """Hold a snapshot after the first `length` tokens: the slot is the cache's now, and the pages have one more user.

        Evicts what is beyond the limit. AssertionError, and nothing changed, if it holds one of the same tokens already, or
        if the slot has not been written: that would be found for ever, and be wrong.
        """
        assert 1 <= length <= len(tokens), f"length={length}: allowed are 1 to {len(tokens)} (the tokens)"
        key = _key(tokens, salt, length)
        assert key not in self._held, f"the prefix of length {length} is held already"
        assert all(slot != prefix.slot for prefix in self._held.values()), f"slot {slot} is another snapshot's"
        assert self._pool.written(slot), f"slot {slot} has not been written since it was taken"
        self._pool.share(pages)
        self._held[key] = Prefix(length, slot, tuple(pages))
        while len(self._held) > self.limit:
            self.evict()

    def evict(self, keep: Container[Prefix] = ()) -> bool:
        """Give the least recently used snapshot back to the pool, of those that are not in `keep`; False where there is none.

        Pages that a request shares stay in use.
        """
        key = next((key for key, prefix in self._held.items() if prefix not in keep), None)
        if key is None:
            return False
        self._give(key)
        return True

    def drop(self, prefix: Prefix) -> None:
        """Give back this snapshot, because what it holds is bad; nothing happens if it is gone already."""
        for key in [key for key, held in self._held.items() if held == prefix]:
            self._give(key)

    def clear(self) -> None:
        """Give back all of them."""
        for key in list(self._held):
            self._give(key)

    def forget(self) -> None:
        """Hold nothing, where the pool has been reset."""
        self._held.clear()

    def _give(self, key: bytes) -> None:
        prefix = self._held.pop(key)
        self._pool.give_slot(prefix.slot)
        self._pool.give_pages(prefix.pages)


def _key(tokens: Sequence[int], salt: str, length: int) -> bytes:
    return next(_keys(tokens, salt, [length]))


def _keys(tokens: Sequence[int], salt: str, lengths: Iterable[int]) -> Iterator[bytes]:
    """The keys of the first tokens, for rising lengths, in one pass. No salt and tokens spell another salt and tokens."""
    running = blake2b(f"{len(salt)}:{salt}".encode("utf-8", "surrogatepass"), digest_size=32)
    done = 0
    for length in lengths:
        running.update(array("i", tokens[done:length]))
        done = length
        yield running.copy().digest()
