"""Which KDA slots and which latent pages are in use: numbers alone, the arrays are the engine's.

A slot has one user. A page may have many, a request and the snapshots of its prefixes, and is free when the last has given
it back. A misuse is a fault of the program, so it is an AssertionError, raised before anything has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Pool:
    """Slots 0 to slots-1 and pages 0 to pages-1, all free at first. What was given back last is taken first."""

    def __init__(self, slots: int, pages: int) -> None:
        assert slots >= 0 and pages >= 0, f"slots={slots}, pages={pages}: allowed are 0 or more"
        self.slots, self.pages = slots, pages  # in all
        self.reset()

    def reset(self) -> None:
        """Nothing is in use."""
        slots, pages = self.slots, self.pages
        self._free_slots, self._free_pages = list(range(slots))[::-1], list(range(pages))[::-1]
        self._written: dict[int, bool] = {}  # by slot in use
        self._users: dict[int, int] = {}  # by page in use

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def take_slot(self) -> int | None:
        """A slot that nobody uses, not written yet; None where there is none."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._written[slot] = False
        return slot

    def take_pages(self, count: int) -> list[int] | None:
        """`count` pages that nobody uses, each with one user now; None, and nothing taken, where there are fewer."""
        assert count >= 0, f"count={count}: allowed is 0 or more"
        if count > self.free_pages:
            return None
        taken = [self._free_pages.pop() for _ in range(count)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each of these pages, which are in use."""
        more = Counter(pages)
        idle = more.keys() - self._users.keys()
        assert not idle, f"pages {sorted(idle)} are not in use, so they cannot be shared"
        for page, count in more.items():
            self._users[page] += count

    def give_slot(self, slot: int) -> None:
        """The slot is free again, and what it holds counts as never written."""
        assert slot in self._written, f"slot {slot} is not in use, so it cannot be given back"
        del self._written[slot]
        self._free_slots.append(slot)

    def give_pages(self, pages: Iterable[int]) -> None:
        """One user less of each of these pages; free where it was the last."""
        less = Counter(pages)
        wrong = sorted(page for page, count in less.items() if count > self.users(page))
        assert not wrong, f"pages {wrong} do not have that many users, so they cannot be given back"
        for page, count in less.items():
            self._users[page] -= count
            if not self._users[page]:
                del self._users[page]
                self._free_pages.append(page)

    def users(self, page: int) -> int:
        """0: the page is free."""
        return self._users.get(page, 0)

    def wrote(self, slot: int) -> None:
        """The slot, which is in use, holds a state of its user from now on."""
        assert slot in self._written, f"slot {slot} is not in use, so it cannot be written"
        self._written[slot] = True

    def written(self, slot: int) -> bool:
        """Whether the slot has been written since it was taken: one that goes on from a state reads it."""
        return self._written.get(slot, False)

    def check(self) -> None:
        """AssertionError unless every slot and page is either free or in use, once."""
        for what, size, free, used in (
            ("slots", self.slots, self._free_slots, self._written),
            ("pages", self.pages, self._free_pages, self._users),
        ):
            assert sorted([*free, *used]) == list(range(size)), f"{what}: free {free}, in use {used}, in all {size}"
        assert all(count >= 1 for count in self._users.values()), f"a page in use without a user: {self._users}"
