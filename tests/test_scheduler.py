"""The scheduler with its pool and its prefix cache, without a device: a loop that counts tokens where the engine computes them."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.engine.pool import Pool
from k3jax.engine.prefix import PrefixCache
from k3jax.engine.scheduler import Job, Scheduler


class Loop:
    """Does with a plan what the engine does, and looks at every plan."""

    def __init__(self, rows, pages, page, snapshots, budget, chunk_rows):
        self.pool = Pool(rows + snapshots, pages)
        self.cache = PrefixCache(self.pool, snapshots)
        self.scheduler = Scheduler(
            self.pool, self.cache, rows=rows, budget=budget, page=page, chunk_rows=chunk_rows, snapshot=snapshots > 0
        )
        self.finished = []

    @property
    def jobs(self):
        return self.scheduler.running + self.scheduler.waiting

    def step(self, look, random):
        """One step; `random` says which requests end before their last token."""
        s = self.scheduler
        before, decodes = [*s.running], [job for job in s.running if job.is_decode]
        had = {job: (job.computed, len(job.pages)) for job in before}
        waiting = [*s.waiting]
        plan = s.schedule(look)
        self.check_plan(plan, look, before, decodes, had, waiting)
        self.check_books()
        for job in plan.admitted:
            if job.found:
                self.pool.wrote(job.slot)
        only_decodes = all(job.is_decode for job, _ in plan.shares)
        for job, count in plan.shares:
            assert job.computed == 0 or self.pool.written(job.slot) or job.held, "goes on from what nobody wrote"
            self.pool.wrote(job.slot)
            made = min(plan.steps, job.most - len(job.tokens)) if only_decodes else int(count == job.left)
            job.computed += made if only_decodes else count
            job.tokens += [random.randrange(2) for _ in range(made)]
            if len(job.tokens) == job.most or (made and random.random() < 0.05):
                s.remove(job)
                self.finished.append(job)
            else:
                s.keep(job)
        self.check_books()

    def check_plan(self, plan, look, before, decodes, had, waiting):
        s, shares = self.scheduler, dict(plan.shares)
        assert len(shares) == len(plan.shares), "a request has one share"
        if before:
            assert before[0] in shares, "the first in the order goes on, whatever else happens"
        assert {job for job in decodes if job not in plan.preempted} <= shares.keys(), "no decode waits for a prompt"
        prompts = {job: count for job, count in shares.items() if not job.is_decode}
        assert sum(prompts.values()) <= s.budget and len(prompts) <= s.chunk_rows
        for job, count in shares.items():
            end = job.computed + count
            assert 1 <= count <= job.left and job in s.running
            assert len(job.pages) >= s.pages_for(end), "there is a place for each new latent"
            whole = end == len(job.tokens) or end in job.cuts or end % s.page == 0
            assert whole or end // s.page * s.page <= job.computed, "a chunk ends with a page, where it reaches one"
        for job in plan.admitted:
            assert job.slot is not None and len(job.pages) >= s.pages_for(len(job.tokens)) and job in shares
            assert not job.leader or job.leader.ended or job.leader.computed >= job.leader.prompt - 1
            overtaken = [other for other in s.waiting if other in waiting and other.order < job.order]
            assert all(other.leader and not other.leader.ended for other in overtaken), "first come, first served"
        if plan.admitted and plan.steps == 1 and not plan.admitted[-1].found:
            others = [job for job in s.running if job is not plan.admitted[-1]]
            growing = sum(s.pages_for(job.most - 1) > len(job.pages) for job in others)
            assert self.pool.free_pages >= growing or not plan.admitted[-1].pages, "each that may grow has a page left"
        for job in plan.preempted:
            assert job in s.waiting and all(other.order < job.order for other in s.running)
        assert 1 <= plan.steps <= max(look, 1) and (plan.steps == 1 or shares.keys() <= {*decodes, *plan.admitted})
        for job in s.running:  # what is taken ahead is used, unless the request ends before
            ahead = job.computed + min(plan.steps, job.most - len(job.tokens)) if job.is_decode else 0
            least = had[job][1] if job in had else s.pages_for(len(job.tokens))
            assert len(job.pages) == max(least, s.pages_for(ahead)) <= s.pages_for(job.most - 1)

    def check_books(self):
        """Who has what is what the pool says; who waits has nothing."""
        s = self.scheduler
        self.pool.check()
        users = Counter(page for job in s.running for page in job.pages)
        users.update(page for prefix in self.cache._held.values() for page in prefix.pages)
        assert users == Counter(
            {page: self.pool.users(page) for page in range(self.pool.pages) if self.pool.users(page)}
        )
        slots = [job.slot for job in s.running] + [prefix.slot for prefix in self.cache._held.values()]
        assert len({*slots}) == len(slots) == self.pool.slots - self.pool.free_slots
        assert all(job.slot is None and not job.pages and job.computed == 0 for job in s.waiting)
        assert len(s.running) <= s.rows
        for jobs in (s.running, s.waiting):
            assert jobs == sorted(jobs, key=lambda job: job.order)


@st.composite
def pools(draw):
    """Sizes of a Loop, and the most tokens that a request may come to."""
    page, rows, snapshots = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 3))
    pages = draw(st.one_of(st.just(0), st.integers(1, 12), st.integers(1, 40)))
    sizes = dict(rows=rows, pages=pages, page=page, snapshots=snapshots)
    sizes |= dict(budget=draw(st.integers(1, 40)), chunk_rows=draw(st.integers(1, 4)))
    return sizes, pages * page + 1 if pages else 24


@st.composite
def arrivals(draw, longest):
    """Samples of one prompt: (tokens, fields of the jobs, how many)."""
    most = draw(st.one_of(st.just(longest), st.integers(2, longest), st.integers(2, min(longest, 12))))
    prompt = draw(st.one_of(st.just(most - 1), st.integers(1, most - 1)))
    tokens = [draw(st.integers(0, 1)), *[0] * (prompt - 1)]  # two texts, so that prefixes meet
    held = draw(st.sampled_from((0, 0, 0, prompt - 1)))
    priority, salt, reuse = draw(st.sampled_from((0, 0, 1))), draw(st.sampled_from(("", "", "a"))), draw(st.booleans())
    fields = dict(most=most, priority=priority, salt=salt, reuse=reuse, held=held)
    return tokens, fields, draw(st.sampled_from((1, 1, 3))) if reuse and not held else 1


@settings(max_examples=250, deadline=None)
@given(pools(), st.data(), st.randoms(use_true_random=False))
def test_any_schedule_comes_to_its_end(pool, data, random):
    """Every request that is not aborted finishes, whatever the order, and everything is free afterwards."""
    sizes, longest = pool
    loop, added, aborted = Loop(**sizes), [], []
    for _ in range(data.draw(st.integers(1, 6))):
        for tokens, fields, n in data.draw(st.lists(arrivals(longest), max_size=3)):
            samples = [Job(len(added) + i, [*tokens], len(tokens), **fields) for i in range(n)]
            for job in samples[1:] if sizes["snapshots"] else []:
                job.leader, samples[0].leads = samples[0], True
            for job in samples:
                loop.scheduler.add(job)
            added += samples
        event = random.choice(("", "", "abort", "preempt"))
        if event == "abort" and loop.jobs:
            aborted.append(random.choice(loop.jobs))
            loop.scheduler.remove(aborted[-1])
        if event == "preempt" and loop.scheduler.running:
            loop.scheduler.preempt(random.choice(loop.scheduler.running))
        loop.check_books()
        loop.step(random.choice((1, 2, 7, 32)), random)
    # The first in the order goes on in every step. What runs below it may be preempted, once for each that comes before it.
    steps = (1 + len(added)) * (1 + sum(job.most for job in added))
    while loop.jobs and steps:
        loop.step(random.choice((1, 2, 7, 32)), random)
        steps -= 1
    assert not loop.jobs, "no request waits for ever"
    assert {job.number for job in loop.finished + aborted} == {job.number for job in added}
    assert len(loop.finished) + len(aborted) == len(added), "each ends once"
    loop.cache.clear()
    loop.check_books()
    assert loop.pool.free_slots == loop.pool.slots and loop.pool.free_pages == loop.pool.pages


def alone(pages=4, page=2, rows=2, snapshots=2, budget=8):
    return Loop(rows=rows, pages=pages, page=page, snapshots=snapshots, budget=budget, chunk_rows=4)


class Never:
    """No request ends early."""

    def random(self):
        return 1

    def randrange(self, _):
        return 0


def test_a_request_of_the_whole_pool_runs_beside_others_snapshots():
    loop = alone()
    first, whole = Job(0, [0, 0, 0], 3, most=4), Job(1, [0] * 8, 8, most=9)
    for job in (first, whole):
        loop.scheduler.add(job)
        while loop.jobs:
            loop.step(32, Never())
    assert loop.finished == [first, whole] and whole.reused == 2 and whole.ended


def test_the_last_in_the_order_gives_way_and_comes_back():
    """Two requests that both grow: there are pages for one of them."""
    loop = alone(pages=5, snapshots=0, rows=2)
    jobs = [Job(i, [i, i], 2, most=9) for i in range(2)]
    for job in jobs:
        loop.scheduler.add(job)
    preempted = []
    for _ in range(40):
        if loop.jobs:
            had = [*loop.scheduler.running]
            loop.step(1, Never())
            preempted += [job for job in had if job in loop.scheduler.waiting]
    assert loop.finished == jobs and preempted == jobs[1:]


def test_a_short_request_overtakes_none_of_its_priority():
    """The one that waits for pages is first, though a shorter one behind it would fit."""
    loop = alone(pages=4, snapshots=0, rows=3)
    running, long, short = Job(0, [0] * 3, 3, most=6), Job(1, [1] * 7, 7, most=8), Job(2, [0], 1, most=2)
    urgent = Job(3, [1], 1, most=2, priority=-1)
    for job in (running, long, short):
        loop.scheduler.add(job)
    loop.step(1, Never())
    assert loop.scheduler.running == [running] and loop.scheduler.waiting == [long, short]
    loop.scheduler.add(urgent)
    while loop.jobs:
        loop.step(1, Never())
    assert loop.finished == [urgent, running, long, short]


def test_samples_go_on_from_their_leader():
    loop = alone(pages=12, rows=4, snapshots=2)
    leader = Job(0, [0] * 5, 5, most=9, leads=True)
    others = [Job(i, [0] * 5, 5, most=9, leader=leader) for i in (1, 2)]
    for job in (leader, *others):
        loop.scheduler.add(job)
    while loop.jobs:
        loop.step(1, Never())
    assert [job.reused for job in (leader, *others)] == [0, 4, 4]
