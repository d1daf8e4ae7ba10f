"""One request to a small model, step by step, for the tests that audit its life.

A prompt of four tokens A, B, C, D passes the model and E is sampled; E is the next input, and F is sampled, then G.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import K3_FIELDS, QUICK, Row, assert_state, checkpoint, get_state, module, pack, small, stored

from k3jax import generate as generation
from k3jax.carry import Carry, empty
from k3jax.engine import batching
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, Output, forward
from k3jax.probe import Probe, sites
from k3jax.reference import Reference, greedy
from k3jax.sampling import SamplingParams, by_row, sample

LOGITS = 1e-4  # logits have a standard deviation of about 1
STATE = 3e-5  # relative to the largest element

PROMPT = (17, 3, 26, 9)  # A, B, C, D
OTHER = (5, 22, 11)
PAD = 30  # a token that nobody has
PAGE, PAGES, SLOTS = 4, 7, 3  # of the pools here: E is the first token of its request's second page
ROWS, TOKENS, WIDTH = 2, 8, 2  # of every batch here
HOME = dict(slot=1, pages=(5, 2))  # of the request in such a pool

# Two layers of each kind, in depth blocks of two; and one of each.
CONFIG = small(**K3_FIELDS | dict(kda_layers=(0, 2)))
SHORT = small(**K3_FIELDS | dict(num_hidden_layers=2, kda_layers=(0,)))


# The package as the tests use it.

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
DRAWN = [SamplingParams(max_tokens=8, temperature=2.0, seed=seed, ignore_eos=True) for seed in range(8)]


class Moment(NamedTuple):
    """After a step of a request: its input, all tokens with the one just sampled, and the carry."""

    inputs: tuple[int, ...]
    tokens: tuple[int, ...]
    carry: Carry


class Engine:
    """A model and its programs, traced when first called from the package's functions as they then are."""

    def __init__(self, config):
        self.config = config
        self.tensors = stored(config, checkpoint(config, seed=1))
        self.model, self.reference = module(config, self.tensors), Reference(config, self.tensors)
        self.after = lru_cache(lambda *ids: self.reference.forward(ids))  # logits, state and trace
        kernels, everything = Kernels("chunk", "dense"), Probe(frozenset(sites(config)))

        def compiled(function, ctx):
            return jax.jit(lambda *args: function(*args, ctx), compiler_options=QUICK)

        self.programs = {
            "mixed": compiled(forward, Context(kernels, 0, everything)),
            "decoding": compiled(forward, Context(kernels, ROWS, everything)),
            "step": compiled(generation.step.__wrapped__, Context(kernels)),
            "decode": compiled(generation.decode.__wrapped__, Context(kernels)),
        }

    def pool(self):
        carry = empty(self.config, slots=SLOTS, pages=PAGES, page=PAGE, dtype="float32")
        return poisoned(carry)

    def run(self, rows, carry, decode=False) -> Output:
        """One step of up to ROWS rows, every site tapped and the logits of every token."""
        filler = Row([PAD]) if decode else Row([])
        rows = [*rows, *[filler] * (ROWS - len(rows))]
        name, tokens = ("decoding", ROWS) if decode else ("mixed", TOKENS)
        return self.programs[name](self.model, pack(rows, tokens, WIDTH, PAD), carry)

    @cached_property
    def prefilled(self) -> Output:
        """The prompt's pass, in a pool of NaN."""
        return self.run([Row(PROMPT, 0, **HOME)], self.pool())

    def decoded(self, token, carry=None) -> Output:
        """The pass of a token that follows the prompt."""
        return self.run([Row([token], 4, **HOME)], carry or self.prefilled.carry, decode=True)

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        """E, F and G as they should be: the most likely tokens, by the float64 reference."""
        return tuple(greedy(self.config, self.tensors, PROMPT, 3))

    def request(self, params=GREEDY, steps=3) -> list[Moment]:
        """A request by the steps that users run, in a pool of NaN: the moment after its prefill and each decode step."""
        state = begun(self.model, params)
        state = state._replace(carry=poisoned(state.carry))
        packed, slots = packing([PROMPT]), np.zeros(1, np.int32)
        moments, tokens, inputs = [], PROMPT, PROMPT
        for step in range(steps):
            if step == 0:
                state = self.programs["step"](self.model, state, packed.batch, packed.sampled)[0]
            else:
                state = self.programs["decode"](self.model, state, slots, slots[None], np.int32(1))[0]
            tokens = (*tokens, int(state.last[0]))
            moments.append(Moment(inputs, tokens, state.carry))
            inputs = tokens[-1:]
        return moments

    def history(self, layer, *ids):
        """The reference's history of a layer's convolution in the carry's layout."""
        q_k_v = self.after(*ids)[1].conv[layer]
        return np.concatenate(q_k_v.reshape(*q_k_v.shape[:2], self.config.kda_num_heads, -1), axis=-1)

    @cached_property
    def moments(self) -> list[Moment]:
        return self.request()

    def draw(self, logits, params, position) -> int:
        """The token that is sampled from these logits for this place of the request."""
        size = self.config.vocab_size
        rows, counts = by_row([params], [PROMPT], (), 1, size), jnp.zeros((1, size), jnp.int32)
        return int(sample(jnp.asarray(logits, jnp.float32)[None], jnp.array([position]), counts, rows).token[0])


def begun(model, params):
    """Pools of one slot and one page, with the prompt's request in them."""
    state = generation.empty(model, slots=1, pages=1)
    new = generation.rows([params], [PROMPT], [0], (), 1, model.config.vocab_size)
    return generation.place(state, np.zeros(1, np.int32), new)


def packing(prompts):
    """The first step of these prompts: slots and pages are their numbers."""
    rows = [batching.Row(prompt, 0, i, [i]) for i, prompt in enumerate(prompts)]
    packed = batching.fill(rows, batching.Bucket(TOKENS, 0, len(rows), 1))
    return packed._replace(batch=jax.tree.map(jnp.asarray, packed.batch))


def poisoned(carry):
    return jax.tree.map(lambda a: jnp.full_like(a, np.nan) if a.dtype == jnp.float32 else a, carry)


def memories(carry):
    """The carry's arrays of numbers: conv, S and latents."""
    return jax.tree.leaves(carry[:2])


def assert_stands_for(engine, carry, ids, slot=0, pages=(0,)):
    """The carry is the reference's memory of exactly these tokens, in this slot and these pages, and NaN everywhere else."""
    assert_state(get_state(engine.config, carry, Row(ids, 0, slot, pages)), engine.after(*ids)[1], STATE)
    for state in carry.kda:
        for pool in state:
            assert np.argwhere(np.isfinite(pool).reshape(len(pool), -1).any(-1)).tolist() == [[slot]]
    for pool in carry.mla:
        size = pool.shape[1]
        places = sorted([pages[position // size], position % size] for position in range(len(ids)))
        assert np.argwhere(np.isfinite(pool).any(-1)).tolist() == places


def assert_matters(engine, token, changed):
    """The next logits are others when the prompt's carry is `changed`."""
    want, got = engine.decoded(token).logits[0], engine.decoded(token, changed).logits[0]
    assert np.abs(got - want).max() > 10 * LOGITS


def equations(jaxpr, scope=""):
    """Every equation of a program with its named scope, those of inner programs included."""
    for equation in jaxpr.eqns:
        name = f"{scope}/{equation.source_info.name_stack}"
        yield name, equation
        for inner in jax.tree.leaves(equation.params):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, name)


def shapes(jaxpr):
    """What a program computes on the way."""
    return {out.aval.shape for _, equation in equations(jaxpr) for out in equation.outvars}


def traced(config, row, pages, kernels=Kernels()):  # noqa: B008
    """The program of one step of a model of shapes alone, and the shapes that come out; the last token's logits."""
    model = jax.eval_shape(lambda model: model.absorb(), K3.abstract(config))
    carry = jax.eval_shape(lambda: empty(config, slots=1, pages=pages))
    ctx = Context(kernels, int(len(row.ids) == 1), Probe(frozenset(sites(config))))
    batch = pack([row], len(row.ids), pages)._replace(logits_indices=jnp.array([len(row.ids) - 1]))
    step = jax.make_jaxpr(lambda model, carry: forward(model, batch, carry, ctx), return_shape=True)
    program, out = step(model, carry)
    return program.jaxpr, out
