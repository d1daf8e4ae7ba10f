"""Who gets what of the next step: tokens, slots and pages.

Every step first serves the requests that decode, one token each; what is left of the token budget goes to prompts, those
under way first. Requests wait in order of priority, then of arrival. One that begins takes a slot and the pages of all its
tokens at once, or nothing. Where a decode finds no page, snapshots are given up, least recently used first, and then the
request that is last in the order is preempted: it gives everything back and begins anew, its output kept as if it were prompt.
The first in the order can always go on, because each request alone fits the pool; so no request waits for ever.

Host bookkeeping: no arrays.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from k3jax.engine.pool import Pool
from k3jax.engine.prefix import Prefix, PrefixCache


@dataclasses.dataclass(eq=False)
class Job:
    """A request under way. The carry stands for its first `computed` tokens; once its prompt is done that is all but one."""

    number: int
    tokens: list[int]  # prompt and output
    prompt: int  # tokens of the prompt
    most: int  # tokens at most, the last of which is never computed
    priority: int = 0  # lower goes first
    salt: str = ""  # prefixes of different salts never meet
    reuse: bool = True  # whether it may go on from another's snapshot
    held: int = 0  # tokens that the memory it brings stands for
    leader: Job | None = None  # computes the same prompt and comes first
    leads: bool = False  # others wait for its prompt
    cuts: tuple[int, ...] = ()  # lengths at which the prompt is cut, for a snapshot
    computed: int = 0
    reused: int = 0  # tokens that were computed by another, when it last began
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    found: Prefix | None = None  # what it went on from
    ended: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.number

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def is_decode(self) -> bool:
        return self.left == 1 and self.computed > 0


class Share(NamedTuple):
    """A job's part of a step: this many new tokens."""

    job: Job
    count: int


class Plan(NamedTuple):
    """One step. `admitted` have slots and pages now; `steps` decode steps at once where nothing but decodes is in it."""

    shares: list[Share]
    admitted: list[Job]
    preempted: list[Job]
    steps: int


class Scheduler:
    """Requests that wait and that run, and the pool they run in."""

    def __init__(
        self, pool: Pool, cache: PrefixCache, *, rows: int, budget: int, page: int, chunk_rows: int, snapshot: bool
    ) -> None:
        self.pool, self.cache, self.rows, self.budget, self.page = pool, cache, rows, budget, page
        self.chunk_rows = chunk_rows  # prompts that a step computes at most
        self.snapshot = snapshot  # whether to keep prefixes for requests to come
        self.waiting: list[Job] = []  # in order
        self.running: list[Job] = []  # in order

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page) if self.pool.pages else 0

    def add(self, job: Job) -> None:
        bisect.insort(self.waiting, job, key=lambda j: j.order)

    def remove(self, job: Job) -> None:
        """The job has ended, whatever it was doing."""
        job.ended = True
        if job in self.running:
            self.running.remove(job)
            self._give_back(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def preempt(self, job: Job) -> None:
        """Everything it holds goes back; it waits, and will compute its tokens anew."""
        self.running.remove(job)
        self._give_back(job)
        self.add(job)

    def restart(self, jobs: Iterable[Job]) -> None:
        """Nothing is held any more; all of these wait, and compute their tokens anew."""
        self.pool.reset()
        self.cache.forget()
        self.running, self.waiting = [], sorted(jobs, key=lambda job: job.order)
        for job in self.waiting:
            job.slot, job.pages, job.computed, job.found, job.ended = None, [], 0, None, False

    def _give_back(self, job: Job) -> None:
        assert job.slot is not None
        self.pool.give_slot(job.slot)
        self.pool.give_pages(job.pages)
        job.slot, job.pages, job.computed, job.found = None, [], 0, None

    # -- a step --------------------------------------------------------------------------------------------------------
    def schedule(self, look: int = 1) -> Plan:
        """The next step; decodes alone may take up to `look` steps at once."""
        preempted: list[Job] = []
        decodes = self._decodes(preempted)
        shares, left = [Share(job, 1) for job in decodes], self.budget
        for job in self.running:
            if not job.is_decode and len(shares) - len(decodes) < self.chunk_rows:
                count = self._chunk(job, left)
                shares += [Share(job, count)] if count else []
                left -= count
        admitted = [] if preempted else self._admit(shares, len(shares) - len(decodes), left)
        steps = self._lookahead(shares, look) if all(job.is_decode for job, _ in shares) else 1
        assert shares or not (self.waiting or self.running), "no request can go on"
        return Plan(shares, admitted, preempted, steps)

    def _decodes(self, preempted: list[Job]) -> list[Job]:
        """Jobs whose next token has a place, the last in order giving way to the first."""
        for job in [job for job in self.running if job.is_decode]:
            while job in self.running and not self._grow(job, job.computed + 1):
                if not self.cache.evict():
                    last = self.running[-1]
                    self.preempt(last)
                    preempted.append(last)
        return [job for job in self.running if job.is_decode]

    def _grow(self, job: Job, tokens: int) -> bool:
        """Pages for so many tokens."""
        more = self.pool.take_pages(max(0, self.pages_for(tokens) - len(job.pages)))
        job.pages += more or []
        return more is not None

    def _chunk(self, job: Job, left: int) -> int:
        """Tokens of the prompt in this step: up to where it is cut, and else in whole pages."""
        end = min(len(job.tokens), job.computed + left, *(cut for cut in job.cuts if cut > job.computed))
        if end < len(job.tokens) and end not in job.cuts:
            aligned = end // self.page * self.page
            end = aligned if aligned > job.computed else end
        return end - job.computed

    def _admit(self, shares: list[Share], chunks: int, left: int) -> list[Job]:
        admitted: list[Job] = []
        for job in [*self.waiting]:
            if len(self.running) >= self.rows or left <= 0 or chunks >= self.chunk_rows:
                break
            if job.leader and not job.leader.ended and job.leader.computed < job.leader.prompt - 1:
                continue  # its prompt is being computed, or will be before it
            if not self._begin(job):
                break
            self.waiting.remove(job)
            bisect.insort(self.running, job, key=lambda j: j.order)
            admitted.append(job)
            count = 1 if job.is_decode else self._chunk(job, left)
            shares.append(Share(job, count))
            left, chunks = left - count, chunks + (not job.is_decode)
        return admitted

    def _begin(self, job: Job) -> bool:
        """Slot and pages for all its tokens, or nothing. A page is left for each one that may grow."""
        found = None
        if job.reuse and not job.held:
            found = self.cache.find(job.tokens, job.salt, len(job.tokens) - 1)
        shared = list(found.pages[: found.length // self.page]) if found else []
        self.pool.share(shared)
        wanted = self.pages_for(len(job.tokens)) - len(shared)
        growing = sum(self.pages_for(other.most - 1) > len(other.pages) for other in self.running)
        room = wanted + (growing if wanted else 0)
        while self.pool.free_pages < room and self.cache.evict((found,) if found else ()):
            pass
        slot = self.pool.take_slot() if self.pool.free_pages >= room else None
        if slot is None:
            self.pool.give_pages(shared)
            if found and not self.running:  # what it wants to go on from takes the room
                self.cache.drop(found)
                return self._begin(job)
            return False
        job.slot, job.pages, job.found = slot, shared + (self.pool.take_pages(wanted) or []), found
        job.reused = found.length if found else 0
        job.computed = job.reused or job.held
        job.cuts = self._cuts(job)
        return True

    def _cuts(self, job: Job) -> tuple[int, ...]:
        """Where a snapshot is wanted: the last whole page that another request of these tokens could go on from, and, for
        further samples of the prompt, all of it but the token that the first new one depends on."""
        cuts = {(len(job.tokens) - 1) // self.page * self.page} if self.snapshot else set()
        if job.leads and len(job.tokens) == job.prompt:
            cuts.add(job.prompt - 1)
        return tuple(
            sorted(cut for cut in cuts if cut > job.computed and not self.cache.holds(job.tokens, job.salt, cut))
        )

    def _lookahead(self, shares: list[Share], look: int) -> int:
        """Decode steps that all of them have pages for; the pages are theirs then."""

        def pages(job: Job, steps: int) -> int:
            return self.pages_for(job.computed + min(steps, job.most - len(job.tokens))) - len(job.pages)

        steps = max(1, min(look, max((job.most - len(job.tokens) for job, _ in shares), default=1)))
        while steps > 1 and sum(max(0, pages(job, steps)) for job, _ in shares) > self.pool.free_pages:
            steps //= 2
        for job, _ in shares:
            self._grow(job, job.computed + min(steps, job.most - len(job.tokens)))
        return steps

    # -- after a step --------------------------------------------------------------------------------------------------
    def keep(self, job: Job) -> int | None:
        """A slot to copy the job's state to where it should be kept for others; its pages are held from now on."""
        aligned = self.snapshot and job.computed % self.page == 0 and job.computed < len(job.tokens)
        if not (aligned or job.computed in job.cuts) or not self.cache.limit:
            return None
        if self.cache.holds(job.tokens, job.salt, job.computed):
            return None
        while len(self.cache) >= self.cache.limit:
            self.cache.evict()
        slot = self.pool.take_slot()
        assert slot is not None, "there are as many slots as rows and snapshots"
        self.pool.wrote(slot)
        self.cache.insert(job.tokens, job.salt, job.computed, slot, job.pages[: self.pages_for(job.computed)])
        return slot
