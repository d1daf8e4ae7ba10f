"""A small model and one engine over it for the tests of faults, and what they are held to: the float64 reference."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import K3_FIELDS, Row, assert_state, checkpoint, get_state, log_softmax, module, small, stored

import k3jax
from k3jax import generate as generation
from k3jax.carry import empty
from k3jax.engine.batching import Buckets
from k3jax.engine.engine import Engine
from k3jax.kernels import Kernels
from k3jax.reference import Reference
from k3jax.sampling import SamplingParams

LOGITS = 1e-4  # logits have a standard deviation of about 1
STATE = 3e-5  # relative to the largest element
PAD = 30  # a token that no prompt has
# Of the engine. Its three programs: a chunk alone, a chunk beside decodes, decodes.
PAGE, PAGES, ROWS, CHUNK, LOOK, SNAPSHOTS = 8, 16, 8, 16, 4, 4
BUCKETS = Buckets(rows=(ROWS,), tokens=(CHUNK,), pages=(PAGES,))


class Model:
    """Two layers, KDA and MLA, no two widths alike, over random weights; and the reference over the same."""

    def __init__(self, **changes):
        self.config = small(**K3_FIELDS | dict(num_hidden_layers=2, kda_layers=(0,)) | changes)
        self.tensors = stored(self.config, checkpoint(self.config, seed=1))
        self.module = module(self.config, self.tensors)
        self.lm = k3jax.LM(self.module, self.config, None, Kernels("chunk", "dense"))
        reference = Reference(self.config, self.tensors)
        self.after = functools.lru_cache(None)(lambda *ids: reference.forward(ids))  # logits, state and trace

    def pool(self, slots, pages, fill=np.nan):
        carry = empty(self.config, slots=slots, pages=pages, page=PAGE, dtype="float32")
        return jax.tree.map(lambda a: jnp.full_like(a, fill) if a.dtype == jnp.float32 else a, carry)

    def assert_alone(self, completion, what=""):
        """A greedy request gave what one pass gives: the same tokens, the same log-probabilities."""
        ids, made = completion.prompt_token_ids + completion.token_ids, len(completion.token_ids)
        assert completion.error is None and made, (what, completion)
        want = log_softmax(self.after(*ids[:-1])[0][-made:])
        best = want.argmax(-1).tolist()
        if completion.token_ids != best:
            first = next(i for i in range(made) if completion.token_ids[i] != best[i])
            gap = want[first, best[first]] - want[first, completion.token_ids[first]]
            raise AssertionError(f"{what}: another token at {first}, by a gap of {gap}")
        for row, top in zip(want, completion.logprobs.top, strict=True):
            assert len(top) == 4 and all(abs(value - row[token]) <= LOGITS for token, value in top.items()), what

    def assert_memory(self, carry, ids, slot=0, pages=None):
        """The slot and the pages, None for all of the carry's, stand for these tokens."""
        pages = range(carry.mla[0].shape[0]) if pages is None else pages
        assert_state(get_state(self.config, carry, Row(ids, 0, slot, pages)), self.after(*ids)[1], STATE)


@functools.cache
def toy():
    return Model()


def greedy(most, **more):
    return SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, logprobs=4, **more)


def prompt(length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, PAD, length).tolist()


def small_engine():
    sizes = dict(rows=ROWS, tokens=CHUNK, page=PAGE, pages=PAGES, snapshots=SNAPSHOTS)
    return Engine(toy().lm, **sizes, buckets=BUCKETS, look=LOOK)


@contextlib.contextmanager
def emptied(engine):
    """The engine with NaN in every slot and page and its limits as they were made. Afterwards nothing may have leaked."""
    for number in [*engine._names]:
        engine.abort(number)
    engine.cache.clear()
    scheduler = engine.scheduler
    scheduler.rows, scheduler.budget, scheduler.snapshot = ROWS, CHUNK, True
    engine.cache.limit, engine.look = SNAPSHOTS, LOOK
    fill(engine, np.nan)
    yield engine
    assert_free(engine)


def fill(engine, value):
    """Everything that slots and pages hold, sampling included: floats get `value`, other numbers something as bad."""

    def filled(a):
        bad = value if jnp.issubdtype(a.dtype, jnp.floating) else True if a.dtype == bool else 0x3E3E3E3E
        return jax.device_put(np.full(a.shape, bad, a.dtype), a.sharding)

    engine.runner.state = jax.tree.map(filled, engine.runner.state)


def assert_free(engine):
    """Nothing is under way, and all is free once the cache is empty."""
    assert not engine.has_work and not engine._leaders and not engine._names
    engine.cache.clear()
    engine.pool.check()
    assert (engine.pool.free_slots, engine.pool.free_pages) == (engine.pool.slots, engine.pool.pages)


def step(engine, ends):
    """One step; what ended in it goes to `ends`, by number."""
    for output in engine.step():
        if output.result:
            ends[output.request] = output.result
    engine.pool.check()


def step_until(engine, true, ends=None, steps=600):
    """Up to the moment when `true()` holds; too many steps are a livelock. Ends by number."""
    ends = {} if ends is None else ends
    for _ in range(steps):
        if true():
            return ends
        step(engine, ends)
    raise AssertionError(f"no progress in {steps} steps: {engine}")


def finish(engine, ends=None):
    return step_until(engine, lambda: not engine.has_work, ends)


def serve(engine, prompts, params):
    """These requests together."""
    numbers = [engine.add_request(ids, params) for ids in prompts]
    ends = finish(engine)
    return [ends[number] for number in numbers]


def job_of(engine, number):
    """What the scheduler knows of a request of one sample."""
    [job] = [live.job for live in engine._live.values() if live.name[0] == number]
    return job


def compiled():
    """Programs of steps so far."""
    return generation.step._cache_size() + generation.decode._cache_size()
