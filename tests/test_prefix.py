"""The prefix cache against a list of all that was inserted: the longest prefix, the order of use, salts, and the pool's books."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3jax.engine import prefix
from k3jax.engine.pool import Pool
from k3jax.engine.prefix import Prefix, PrefixCache

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=6)
SALTS = st.sampled_from(["", "a", "b"])


class Held(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 5), pages=st.integers(0, 12), limit=st.integers(0, 4))
    def start(self, slots, pages, limit):
        self.pool = Pool(slots, pages)
        self.cache = PrefixCache(self.pool, limit)
        self.held: list[tuple[str, tuple[int, ...], Prefix]] = []  # the least recently used first
        self.running: list[list[int]] = []  # pages of requests
        self.found: list[Prefix] = []  # ever, gone ones too

    def forget(self, entry):
        self.held.remove(entry)

    @rule(tokens=TOKENS.filter(bool), salt=SALTS, data=st.data())
    def insert(self, tokens, salt, data):
        length = data.draw(st.integers(1, len(tokens)))
        slot, pages = self.pool.take_slot(), self.pool.take_pages(-(-length // PAGE))
        if slot is None or pages is None:
            if slot is not None:
                self.pool.give_slot(slot)
            self.pool.give_pages(pages or [])
            return
        self.running.append(pages)
        self.pool.wrote(slot)
        if any((s, t) == (salt, tuple(tokens[:length])) for s, t, _ in self.held):
            with pytest.raises(AssertionError, match="held already"):
                self.cache.insert(tokens, salt, length, slot, pages)
            self.pool.give_slot(slot)
            return
        self.cache.insert(tokens, salt, length, slot, pages)
        self.held.append((salt, tuple(tokens[:length]), Prefix(length, slot, tuple(pages))))
        while len(self.held) > self.cache.limit:
            self.forget(self.held[0])

    @rule(tokens=TOKENS, salt=SALTS, most=st.integers(-1, 7))
    def find(self, tokens, salt, most):
        fits = [e for e in self.held if e[0] == salt and len(e[1]) <= most and e[1] == tuple(tokens[: len(e[1])])]
        best = max(fits, key=lambda entry: len(entry[1]), default=None)
        found = self.cache.find(tokens, salt, most)
        assert found == (best and best[2])
        if best is not None:
            self.held.remove(best)
            self.held.append(best)
            self.found.append(best[2])

    @rule(tokens=TOKENS, salt=SALTS, length=st.integers(-1, 7))
    def holds(self, tokens, salt, length):
        wanted = (salt, tuple(tokens[:length])) in [entry[:2] for entry in self.held] and 0 < length <= len(tokens)
        assert self.cache.holds(tokens, salt, length) == wanted

    @rule(data=st.data())
    def evict(self, data):
        keep = data.draw(st.lists(st.sampled_from(self.held), max_size=2)) if self.held else []
        goes = next((entry for entry in self.held if entry not in keep), None)
        assert self.cache.evict([entry[2] for entry in keep]) == (goes is not None)
        if goes:
            self.forget(goes)

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def drop(self, data):
        bad = data.draw(st.sampled_from(self.found))
        self.cache.drop(bad)
        for entry in [entry for entry in self.held if entry[2] == bad]:
            self.forget(entry)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        """A request ends; snapshots of it stay whole."""
        pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.give_pages(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go_on(self, data):
        """A request shares what it found, and keeps it whatever is evicted."""
        pages = data.draw(st.sampled_from(self.held))[2].pages
        self.pool.share(pages)
        self.running.append(list(pages))

    @rule()
    def clear(self):
        self.cache.clear()
        self.held = []

    @invariant()
    def books(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        prefixes = [entry[2] for entry in self.held]
        uses = [page for pages in [*self.running, *(p.pages for p in prefixes)] for page in pages]
        assert [self.pool.users(page) for page in range(self.pool.pages)] == [*map(uses.count, range(self.pool.pages))]
        assert len({p.slot for p in prefixes}) == len(prefixes) == self.pool.slots - self.pool.free_slots
        assert len(self.cache) == len(self.held) <= self.cache.limit


Held.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestHeld = Held.TestCase


def cached(pool, cache, tokens, length, salt=""):
    """Insert a snapshot of a request that ends at once."""
    slot, pages = pool.take_slot(), pool.take_pages(-(-length // PAGE))
    pool.wrote(slot)
    cache.insert(tokens, salt, length, slot, pages)
    pool.give_pages(pages)


def test_no_salt_and_tokens_spell_another():
    pool = Pool(9, 20)
    cache = PrefixCache(pool, 9)
    texts = [("", [97, 98]), ("a\0\0\0", [98]), ("a\0\0\0b\0\0\0", [5]), ("1:", [5]), ("\ud800", [5])]
    for salt, tokens in texts:
        assert not cache.holds(tokens, salt, len(tokens))
        cached(pool, cache, tokens, len(tokens), salt)
    assert len({cache.find(tokens, salt, 9) for salt, tokens in texts}) == len(texts)


def test_any_kind_of_sequence_is_the_same_prefix():
    pool = Pool(1, 4)
    cache = PrefixCache(pool, 1)
    cached(pool, cache, (2**31 - 1, 0, 7), 3)
    for kind in (list, tuple, np.int32, lambda t: np.array(t, np.int64), lambda t: np.array([t, t]).T[:, 0]):
        assert cache.holds(kind([2**31 - 1, 0, 7]), "", 3)
    assert not cache.holds([2**31 - 1, 0, 8], "", 3)


def test_a_lookup_hashes_no_more_than_the_longest_candidate_once(monkeypatch):
    pool = Pool(40, 2000)
    cache = PrefixCache(pool, 40)
    tokens = list(range(100))
    for length in range(2, 82, 2):
        cached(pool, cache, tokens, length)
    hashed = []

    class Counting:
        def __init__(self, data, **kwargs):
            self.inner = blake2b(data, **kwargs)
            self.copy = self.inner.copy

        def update(self, data):
            hashed.append(memoryview(data).nbytes)
            self.inner.update(data)

    blake2b = prefix.blake2b
    monkeypatch.setattr(prefix, "blake2b", Counting)
    found = cache.find(tokens, "", 99)
    assert found and found.length == 80 and sum(hashed) == 80 * 4


def test_an_evicted_prefix_leaves_its_pages_to_the_request_that_shares_them():
    pool = Pool(2, 3)
    cache = PrefixCache(pool, 1)
    cached(pool, cache, [1, 2, 3, 4], 4)
    found = cache.find([1, 2, 3, 4, 5], "", 4)
    assert found is not None and not cache.evict([found])  # nothing else to give up
    pool.share(found.pages)
    assert cache.evict() and not cache.evict()
    assert pool.take_pages(2) is None and not set(pool.take_pages(1) or ()) & set(found.pages)
    cache.drop(found)  # gone already
    pool.give_pages(found.pages)
    pool.check()
    assert (pool.free_slots, pool.free_pages) == (2, 2)


def test_a_holds_b_then_a_again():
    """Two snapshots and three prompts: the one in use stays, the other goes, and each is found as itself."""
    pool = Pool(2, 8)
    cache = PrefixCache(pool, 2)
    a, b, c = [1, 1, 1], [2, 2, 2], [1, 1, 2]
    cached(pool, cache, a, 2)
    cached(pool, cache, b, 2)
    first = cache.find(a, "", 2)
    assert cache.evict()
    cached(pool, cache, c, 3)
    assert cache.find(a, "", 2) == first and cache.find(b, "", 2) is None
    assert cache.find(c, "", 3).length == 3 and cache.find(c, "", 2) == first


@pytest.mark.parametrize("length", [0, -1, 4])
def test_a_length_that_cannot_be(length):
    pool = Pool(1, 2)
    cache = PrefixCache(pool, 1)
    with pytest.raises(AssertionError, match=f"length={length}: allowed are 1 to 3"):
        cache.insert([1, 2, 3], "", length, pool.take_slot(), [])
    for held in (2, 3):
        cache = PrefixCache(Pool(1, 2), 1)
        cached(cache._pool, cache, [1, 2, 3], held)
        assert not cache.holds([1, 2, 3], "", length)


def test_a_slot_or_page_that_is_not_the_requests():
    pool = Pool(2, 4)
    cache = PrefixCache(pool, 2)
    cached(pool, cache, [1, 2, 3], 2)
    held = cache.find([1, 2, 3], "", 2)
    with pytest.raises(AssertionError, match="another snapshot's"):
        cache.insert([1, 2, 3], "", 3, held.slot, held.pages)
    slot = pool.take_slot()
    with pytest.raises(AssertionError, match="has not been written"):
        cache.insert([1, 2, 3], "", 3, slot, held.pages)
    pool.wrote(slot)
    with pytest.raises(AssertionError, match="not in use"):
        cache.insert([1, 2, 3], "", 3, slot, [*held.pages, 3])
    assert len(cache) == 1 and pool.users(held.pages[0]) == 1
    with pytest.raises(AssertionError, match="limit=-1: allowed is 0 or more"):
        PrefixCache(pool, -1)
