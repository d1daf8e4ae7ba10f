"""Mosaic's form of the depth mixture against float64 at the roundings that are promised, and the choice between the forms.

A CPU runs it in an interpreter, which has its sums over threads and its widening in other words than a GPU has.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INTERPRET, relative_error, same_bits
from test_pallas_attnres import EPS, compiled, draw, exact, plain_mix_norm

from k3jax.pallas import attnres, cannot_compile
from k3jax.pallas import attnres_mosaic as mosaic
from k3jax.pallas.attnres_mosaic import Tuning

runs = pytest.mark.skipif(cannot_compile() is not None, reason="jax 0.10 has not what the kernel needs")
draw = functools.partial(draw, dtype=jnp.bfloat16)


def kernel(*args, weights=True, tuning=None):
    """By the door with the tuning of its choice, or with one of ours."""
    if tuning is None:
        return compiled(attnres.mix_norm, eps=EPS, weights=weights, form="mosaic", interpret=INTERPRET)(*args)
    return compiled(mosaic.mix_norm, eps=EPS, weights=weights, tuning=tuning, interpret=INTERPRET)(*args)


def at_roundings(running, pending, blocks, norm, query, gain):
    """float64, rounded to bfloat16 where the kernel promises to."""
    if pending is not None:
        running = (running.astype(jnp.float32) + pending.astype(jnp.float32)).astype(running.dtype)
    weights = exact(running, jnp.zeros_like(running), blocks, norm, query, gain)[2]
    m = sum(w[:, None] * np.asarray(s, np.float64) for w, s in zip(weights.T, (*blocks, running), strict=True))
    m = m.astype(jnp.bfloat16).astype(np.float64)
    y = (m / np.sqrt((m * m).mean(-1, keepdims=True) + EPS)).astype(jnp.bfloat16)
    return running, (np.asarray(gain, np.float64) * y.astype(np.float64)).astype(jnp.bfloat16), weights


def assert_as_promised(got, want):
    """One rounding more or less changes a third of the elements; another order of a float32 sum changes few."""
    (running, x, weights), (want_running, want, want_weights) = got, want
    assert x.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    assert same_bits(running, want_running)
    assert relative_error(weights, want_weights) < 1e-6
    assert (np.asarray(x) != np.asarray(want)).mean() < 0.01
    assert relative_error(x, want) < 1e-3


@runs
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(
    ("R", "T", "D", "tuning"),
    [
        (1, 5, 512, Tuning(2, 1, 1)),
        (2, 33, 512, Tuning(2, 7, 2)),
        (2, 1, 1024, None),
        (5, 5, 1024, None),
        (9, 1, 512, None),
        (9, 5, 7168, Tuning(2, 15, 5)),
    ],
)
def test_it_equals_the_equation_needs_jax_0_11(R, T, D, tuning, pending):
    """Also where a block has more tokens than one, and the ring is gone through again and again."""
    running, added, *rest = draw(R, T=T, D=D)
    args = running, added if pending else None, *rest
    assert_as_promised(kernel(*args, tuning=tuning), at_roundings(*args))


@runs
def test_tunings_change_nothing_needs_jax_0_11():
    """Not a bit: from a ring that holds one token, filled after every source, to one for several tokens."""
    R = 3
    args = draw(R, T=7, D=512)
    want = kernel(*args)
    for tuning in itertools.starmap(Tuning, ((1, 1, 1), (2, R + 2, 2), (3, 2 * R + 3, 1), (7, 40, R))):
        for got, other in zip(kernel(*args, tuning=tuning), want, strict=True):
            assert same_bits(got, other), tuning


@runs
def test_what_is_not_asked_for_needs_jax_0_11():
    running, pending, *rest, query, gain = draw(2, T=5, D=512)
    same, x, none = kernel(running, None, *rest, query[None], gain, weights=False)
    assert none is None and same_bits(same, running)
    want = kernel(running, jnp.zeros_like(pending), *rest, query, gain)
    assert same_bits(x, want[1])


@runs
def test_vectors_of_a_layer_in_float32_needs_jax_0_11():
    """The gain is rounded, as the plain form does; the others are not."""
    *args, norm, query, gain = draw(2, T=5, D=512)
    norm, query, gain = (a.astype(jnp.float32) * 1.001 for a in (norm, query, gain))
    got = kernel(*args, norm, query, gain)
    assert_as_promised(got, at_roundings(*args, norm, query, gain.astype(jnp.bfloat16)))


@runs
def test_scores_that_exp_does_not_hold_needs_jax_0_11():
    """±1,000: weights are 0 and 1, and the mixture is that source."""
    D = 512
    s = jnp.stack([jnp.full((2, D), v, jnp.bfloat16) for v in (-1.0, 2.0, -3.0)])
    one = jnp.ones(D, jnp.bfloat16)
    _, x, weights = kernel(s[2], None, (s[0], s[1]), one, 2 * one, one)
    assert np.asarray(weights).tolist() == [[0, 1, 0]] * 2
    assert same_bits(x, jnp.ones_like(s[0]))


@runs
def test_a_token_does_not_see_its_neighbours_needs_jax_0_11():
    """Nor one that was before it in its block, its places in the ring or in memory."""
    running, pending, blocks, *rest = draw(3, T=9, D=512)
    tuning = Tuning(2, 5, 2)
    want = kernel(running, pending, blocks, *rest, tuning=tuning)
    poisoned = [a.at[2:4].set(jnp.nan) for a in (running, pending, *blocks)]
    got = kernel(*poisoned[:2], tuple(poisoned[2:]), *rest, tuning=tuning)
    for a, b in zip(got, want, strict=True):
        assert same_bits(np.delete(a, [2, 3], 0), np.delete(b, [2, 3], 0)) and np.isnan(a[2:4]).all()


@runs
@pytest.mark.skipif(not INTERPRET, reason="the interpreter tells of races")
@pytest.mark.parametrize("left_out", [False, True])
def test_threads_meet_where_they_must_needs_jax_0_11(left_out, monkeypatch, capfd):
    """At the refill, at the scores, and at the mean square, which is left out to see that it would be told."""
    calls, meet = itertools.count(), mosaic._Sums.meet
    monkeypatch.setattr(mosaic._Sums, "meet", lambda self: (left_out and next(calls) % 3 == 2) or meet(self))
    params = functools.partial(mosaic.plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic.plgpu, "InterpretGPUParams", params)
    mosaic_once = functools.partial(mosaic.mix_norm, eps=EPS, weights=True, tuning=Tuning(2, 5, 2), interpret=True)
    jax.block_until_ready(mosaic_once(*draw(3, T=9, D=512)))
    assert ("RACE" in capfd.readouterr().out) is left_out


@runs
@pytest.mark.skipif(INTERPRET, reason="many tokens of the true width")
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("R", [1, 2, 5, 9])
def test_the_form_that_many_tokens_get_needs_jax_0_11(R, pending):
    running, added, *rest = draw(R, T=1025, D=7168)
    args = running, added if pending else None, *rest
    got = compiled(attnres.mix_norm, eps=EPS, weights=True)(*args)
    assert_as_promised(got, plain_mix_norm(*args))
    for a, b in zip(got, kernel(*args), strict=True):
        assert same_bits(a, b)


def test_tunings_by_sources():
    few = {1: Tuning(264, 7, 1), 2: Tuning(264, 7, 2), 3: Tuning(132, 10, 3), 5: Tuning(132, 10, 5)}
    many = {R: Tuning(132, 15, 5) for R in (6, 9, 16)}
    assert {R: mosaic.choose(R) for R in few | many} == few | many


# The choice between the forms.


def arguments(R=9, T=1024, D=512, dtype=jnp.bfloat16):
    row, vector = jax.ShapeDtypeStruct((T, D), dtype), jax.ShapeDtypeStruct((D,), jnp.float32)
    return row, row, (row,) * (R - 1), vector, vector, vector


@pytest.fixture
def taken(monkeypatch):
    """Which form a call of the door takes."""

    def by_mosaic(running, *_, **__):
        calls.append("mosaic")
        return running, running, None

    calls = []
    monkeypatch.setattr(mosaic, "mix_norm", by_mosaic)

    def form_of(args, **options):
        calls.clear()
        jax.eval_shape(functools.partial(attnres.mix_norm, eps=EPS, **options), *args)
        return (*calls, "triton")[0]

    return form_of


def test_the_choice(taken):
    many = "triton" if cannot_compile() else "mosaic"
    wide = functools.partial(arguments, D=4096)
    assert taken(wide()) == many
    assert taken(wide(T=511)) == taken(arguments(D=3584)) == "triton"
    for other in (dict(R=17), dict(D=4100), dict(dtype=jnp.float32)):
        assert taken(wide(**other)) == "triton", "what Mosaic's form refuses"
    for option in (dict(interpret=True), dict(form="triton"), dict(tuning=attnres.Tuning(4, 3))):
        assert taken(wide(), **option) == "triton"
    assert taken(arguments(T=1), form="mosaic", interpret=True) == "mosaic"


def test_what_it_refuses():
    running, _, blocks, *_ = arguments()
    assert mosaic.refuse(running, blocks) == cannot_compile()
    cases = {
        "running=float32: allowed is bfloat16": dict(dtype=jnp.float32),
        "D=768: allowed are multiples of 512 up to 18432": dict(R=1, D=768),
        "D=18944: allowed are multiples of 512 up to 18432": dict(R=1, D=18944),
        "R=17 D=512: allowed is R from 1 to 16": dict(R=17),
        "R=10 D=7168: allowed is R from 1 to 9": dict(R=10, D=7168),
    }
    for reason, case in cases.items():
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(functools.partial(attnres.mix_norm, eps=EPS, form="mosaic"), *arguments(**case))
    options = {
        "form='cuda': allowed are 'auto', 'triton', 'mosaic'": dict(form="cuda"),
        r"tuning=Tuning\(warps=4, group=3\): allowed with form='mosaic' is None": dict(
            form="mosaic", tuning=attnres.Tuning(4, 3)
        ),
    }
    for reason, option in options.items():
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(functools.partial(attnres.mix_norm, eps=EPS, **option), *arguments())


@pytest.mark.skipif(cannot_compile() is None, reason="of jax 0.10")
def test_jax_0_10_is_told():
    with pytest.raises(ValueError, match=r"jax=0\.10\.\d+: allowed are 0\.11 and newer"):
        jax.eval_shape(functools.partial(attnres.mix_norm, eps=EPS, form="mosaic"), *arguments())
