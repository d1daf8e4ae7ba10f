"""The pool against lists: the books balance after every step, nothing has two owners, and misuse changes nothing."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3jax.engine.pool import Pool


class Books(RuleBasedStateMachine):
    @initialize(slots=st.integers(0, 4), pages=st.integers(0, 7))
    def start(self, slots, pages):
        self.pool = Pool(slots, pages)
        self.slots: list[int] = []  # in use
        self.wrote: list[int] = []
        self.uses: list[int] = []  # a page once for each of its users

    def refuses(self, call, *args):
        """The call raises and says why; `balance` then finds that nothing has changed."""
        with pytest.raises(AssertionError, match="not in use|that many users"):
            call(*args)

    @rule()
    def take_slot(self):
        slot = self.pool.take_slot()
        if slot is None:
            assert len(self.slots) == self.pool.slots
        else:
            assert slot not in self.slots and not self.pool.written(slot)
            self.slots.append(slot)

    @rule(count=st.integers(0, 8))
    def take_pages(self, count):
        idle = self.pool.pages - len(set(self.uses))
        taken = self.pool.take_pages(count)
        if count > idle:
            assert taken is None
        else:
            assert taken is not None and len(set(taken)) == len(taken) == count and not set(taken) & set(self.uses)
            self.uses += taken

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.uses), max_size=5))
        self.pool.share(iter(pages))
        self.uses += pages

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def give_pages(self, data):
        order = data.draw(st.permutations(self.uses))
        count = data.draw(st.integers(0, len(order)))
        self.pool.give_pages(iter(order[:count]))
        self.uses = order[count:]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def give_slot(self, data):
        slot = data.draw(st.sampled_from(self.slots))
        self.pool.give_slot(slot)
        self.slots.remove(slot)
        self.wrote = [other for other in self.wrote if other != slot]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def write(self, data):
        slot = data.draw(st.sampled_from(self.slots))
        self.pool.wrote(slot)
        self.wrote.append(slot)

    @rule(slot=st.integers(-1, 4))
    def misuse_a_slot(self, slot):
        if slot not in self.slots:
            assert not self.pool.written(slot)
            self.refuses(self.pool.give_slot, slot)
            self.refuses(self.pool.wrote, slot)

    @rule(page=st.integers(-1, 7))
    def misuse_pages(self, page):
        others = sorted(set(self.uses) - {page})
        self.refuses(self.pool.give_pages, [*others, *[page] * (self.uses.count(page) + 1)])
        if page not in self.uses:
            self.refuses(self.pool.share, [*others, page])

    @invariant()
    def balance(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        users = Counter(self.uses)
        assert self.pool.free_slots == self.pool.slots - len(self.slots)
        assert self.pool.free_pages == self.pool.pages - len(users)
        assert [self.pool.users(page) for page in range(self.pool.pages)] == [users[p] for p in range(self.pool.pages)]
        assert {slot for slot in range(self.pool.slots) if self.pool.written(slot)} == set(self.wrote)

    def teardown(self):
        """All that was taken can be given back, and then all of it is free."""
        if hasattr(self, "pool"):
            for slot in self.slots:
                self.pool.give_slot(slot)
            self.pool.give_pages(self.uses)
            self.pool.check()
            assert (self.pool.free_slots, self.pool.free_pages) == (self.pool.slots, self.pool.pages)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool._free_slots.append(pool._free_slots[0]),  # free twice
        lambda pool: pool._free_slots.append(0),  # free and in use
        lambda pool: pool._written.clear(),  # lost
        lambda pool: pool._free_pages.pop(),
        lambda pool: pool._users.update({0: 0}),  # in use by nobody
    ],
)
def test_check_finds_books_that_do_not_balance(spoil):
    pool = Pool(3, 3)
    assert (pool.take_slot(), pool.take_pages(1)) == (0, [0])
    pool.check()
    spoil(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_what_cannot_be():
    with pytest.raises(AssertionError, match="slots=-1, pages=2: allowed are 0 or more"):
        Pool(-1, 2)
    with pytest.raises(AssertionError, match="count=-1: allowed is 0 or more"):
        Pool(1, 2).take_pages(-1)
