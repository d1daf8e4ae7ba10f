"""The kernels of the depth mixture and of the gated norm against float64 and at the plain forms' roundings; on a CPU they are
interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INTERPRET, QUICK, relative_error, same_bits

from k3jax.ops import attnres as plain
from k3jax.ops.linear import gated_rms_norm as plain_gated
from k3jax.ops.linear import rms_norm
from k3jax.pallas.attnres import Bank, Tuning, choose, mix_norm
from k3jax.pallas.attnres import refuse as refuse_mix
from k3jax.pallas.gated_norm import Tuning as GatedTuning
from k3jax.pallas.gated_norm import gated_rms_norm
from k3jax.pallas.gated_norm import refuse as refuse_gated

EPS = 1e-5
T, D = 3, 48


@functools.cache
def compiled(f, **fixed):
    """XLA, which interprets, must not leave out roundings between two operations in float32."""
    return jax.jit(functools.partial(f, **fixed), compiler_options=QUICK | {"xla_allow_excess_precision": False})


def kernel(*args, weights=True, tuning=None):
    return compiled(mix_norm, eps=EPS, weights=weights, tuning=tuning, interpret=INTERPRET)(*args)


@functools.partial(compiled, eps=EPS)
def plain_mix_norm(running, pending, blocks, norm, query, gain, eps):
    running = running if pending is None else running + pending
    mixed, weights = plain.mix((*blocks, running), norm, query.reshape(1, -1), eps)
    return running, rms_norm(mixed, gain, eps), weights


def exact(running, pending, blocks, norm, query, gain):
    args = [np.asarray(a, np.float64) for a in (norm, query, gain)]
    running, blocks = np.asarray(running, np.float64), [np.asarray(b, np.float64) for b in blocks]
    running = running + np.asarray(pending, np.float64)
    s = np.stack([*blocks, running])
    score = (s * args[0] * args[1].ravel()).sum(-1) / np.sqrt((s * s).mean(-1) + EPS)
    pi = np.exp(score - score.max(0))
    pi /= pi.sum(0)
    m = (pi[..., None] * s).sum(0)
    return running, args[2] * m / np.sqrt((m * m).mean(-1, keepdims=True) + EPS), pi.T


def draw(R, T=T, D=D, dtype=np.float32, seed=0, sharpness=2.0):
    """Scores have a standard deviation of `sharpness`; the sources are of different sizes, as sums over depth are."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-3, 4, R + 1))
    *blocks, running, pending = (jnp.asarray(size * rng.normal(size=(T, D)), dtype) for size in sizes)
    norm, gain = (jnp.asarray(1 + rng.random(D), dtype) for _ in range(2))
    query = jnp.asarray(sharpness * D**-0.5 * rng.normal(size=D) / np.asarray(norm, np.float64), dtype)
    return running, pending, tuple(blocks), norm, query, gain


# The mixture over depth.


@pytest.mark.parametrize(("R", "size"), [(1, D), (2, 1), (5, D), (9, 300)])
def test_mixture_and_norm_equal_the_equation(R, size):
    """float32: sums of at most 300 products, and scores of a few units."""
    args = draw(R, D=size)
    for got, want in zip(kernel(*args), exact(*args), strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("R", [1, 2, 5, 9])
def test_bfloat16_is_rounded_where_the_plain_form_is(R):
    """One rounding more or less changes a third of the elements; another order of a float32 sum changes few."""
    args = draw(R, T=8, D=300, dtype=jnp.bfloat16)
    (running, x, weights), (want_running, want, want_weights) = kernel(*args), plain_mix_norm(*args)
    assert x.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    assert same_bits(running, want_running)
    assert relative_error(weights, want_weights) < 1e-6
    assert (np.asarray(x) != np.asarray(want)).mean() < 0.01
    assert relative_error(x, want) < 1e-3
    if R == 1:
        assert same_bits(x, want), "one source is the mixture"


@pytest.mark.parametrize("tokens", [2, 129, 1025])
def test_at_the_width_of_k3(tokens):
    """The tunings that tokens choose between, by hand for two tokens."""
    args = draw(9, T=2, D=7168, dtype=jnp.bfloat16)
    x, want = kernel(*args, tuning=choose(tokens, 7168, 9))[1], plain_mix_norm(*args)[1]
    assert (np.asarray(x) != np.asarray(want)).mean() < 0.01
    assert relative_error(x, want) < 1e-3


@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_change_nothing(group):
    """Whatever is rescaled: the highest score comes first, last or in between."""
    for seed in range(4):
        args = draw(9, seed=seed, sharpness=8.0)
        for got, want in zip(kernel(*args, tuning=Tuning(4, group)), exact(*args), strict=True):
            assert relative_error(got, want) < 4e-6


def test_tunings_by_tokens_and_sources():
    few = {1: Tuning(8, 9), 128: Tuning(8, 9), 129: Tuning(8, 2), 1024: Tuning(8, 2)}
    assert {tokens: choose(tokens, 7168, 9) for tokens in few} == few
    many = {1: Tuning(4, 1), 2: Tuning(4, 2), 3: Tuning(8, 2), 6: Tuning(8, 2), 7: Tuning(4, 3), 9: Tuning(4, 3)}
    assert {R: choose(1025, 7168, R) for R in many} == many
    assert [choose(tokens, 7168, 9, bank=True) for tokens in (128, 129)] == [Tuning(8, 8), Tuning(4, 2)]
    assert choose(1, 7168, 9, item=4) == Tuning(8, 4), "registers for half as many in float32"
    assert [choose(1, 65536, 9).warps, choose(1025, 65536, 9).warps] == [32, 16], "wider rows take more"


def test_scores_that_exp_does_not_hold():
    """±1,000: weights are 0 and 1, and the mixture is that source."""
    s = jnp.stack([jnp.full((2, D), v, jnp.float32) for v in (-1.0, 2.0, -3.0)])
    query = jnp.full(D, 1000 / D, jnp.float32)
    for tuning in (Tuning(4, 1), Tuning(4, 3)):
        one = jnp.ones(D, jnp.float32)
        _, x, weights = kernel(s[2], None, (s[0], s[1]), one, query, one, tuning=tuning)
        assert np.asarray(weights).tolist() == [[0, 1, 0]] * 2
        assert relative_error(x, np.ones((2, D))) < 2e-6  # eps


def test_without_a_pending_addition():
    running, pending, *rest = draw(5, dtype=jnp.bfloat16)
    same, x, weights = kernel(running, None, *rest)
    assert same_bits(same, running)
    for got, want in zip((x, weights), kernel(running, jnp.zeros_like(pending), *rest)[1:], strict=True):
        assert same_bits(got, want)
    assert kernel(running, None, *rest, weights=False)[2] is None


def test_a_query_as_stored():
    *args, query, gain = draw(2)
    for got, want in zip(kernel(*args, query[None], gain), kernel(*args, query, gain), strict=True):
        assert same_bits(got, want)


def test_a_token_does_not_see_its_neighbours():
    running, pending, blocks, *rest = draw(5)
    want = kernel(running, pending, blocks, *rest)
    poisoned = [a.at[1].set(jnp.nan) for a in (running, pending, *blocks)]
    got = kernel(*poisoned[:2], tuple(poisoned[2:]), *rest)
    for a, b in zip(got, want, strict=True):
        assert same_bits(np.delete(a, 1, 0), np.delete(b, 1, 0)) and np.isnan(a[1]).all()


def test_what_the_mixture_refuses():
    running, pending, blocks, norm, query, gain = args = draw(2)
    assert refuse_mix(*args) is None
    cases = {
        r"running=\[48\]: allowed is \[T, D\]": (running[0], pending, blocks, norm, query, gain),
        "running=int32: allowed are float32 and bfloat16": (running.astype(int), None, (), norm, query, gain),
        r"pending=bfloat16\[3, 48\]: allowed is float32\[3, 48\]": (
            running, pending.astype(jnp.bfloat16), blocks, norm, query, gain,
        ),
        r"blocks\[0\]=float32\[2, 48\]: allowed is float32\[3, 48\]": (
            running, pending, (blocks[0][1:],), norm, query, gain,
        ),
        r"norm=\[1, 48\]: allowed is \[48\]": (running, pending, blocks, norm[None], query, gain),
        r"query=\[47\]: allowed is \[48\] or \[1, 48\]": (running, pending, blocks, norm, query[1:], gain),
        "gain=int32: allowed are float32 and bfloat16": (running, pending, blocks, norm, query, gain.astype(int)),
    }  # fmt: skip
    for reason, case in cases.items():
        with pytest.raises(ValueError, match=reason):
            mix_norm(*case, EPS, interpret=INTERPRET)


# The mixture over the blocks of a bank.


def bank_of(blocks, count):
    """The blocks from `count` on are NaN."""
    held = jnp.stack(blocks)
    there = jnp.arange(len(blocks))[:, None, None] < count
    return Bank(jnp.where(there, held, jnp.asarray(jnp.nan, held.dtype)), jnp.int32(count))


def there_of(weights, count):
    """Without those of blocks that are not there, which are 0."""
    absent = slice(count, weights.shape[1] - 1)
    assert not np.asarray(weights)[:, absent].any()
    return np.delete(weights, absent, axis=1)


@pytest.mark.parametrize(
    ("N", "tokens", "size", "tuning"),
    [
        (1, 1, D, None),
        (5, 3, 300, Tuning(4, 1)),
        (5, 3, D, Tuning(4, 2)),
        (8, 2, 1100, Tuning(4, 3)),
        (7, 1, 257, None),
    ],
)
def test_one_program_takes_every_count(N, tokens, size, tuning):
    """Groups that come out even and that do not; highest scores that come early and late."""
    running, pending, blocks, *rest = draw(N + 1, T=tokens, D=size, sharpness=4.0)
    traced = []

    @functools.partial(compiled, eps=EPS)
    def program(*args, eps):
        traced.append(args)
        return mix_norm(*args, eps, weights=True, tuning=tuning, interpret=INTERPRET)

    for count in range(N + 1):
        *got, weights = program(running, pending, bank_of(blocks, count), *rest)
        assert weights.shape == (tokens, N + 1)
        wanted = exact(running, pending, blocks[:count], *rest)
        for a, b in zip((*got, there_of(weights, count)), wanted, strict=True):
            assert relative_error(a, b) < 2e-6
    assert len(traced) == 1


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_pending", [False, True])
def test_a_bank_gives_what_listed_blocks_give(with_pending, dtype):
    """But for the order of sums: in float32 a few units in the last place, in bfloat16 a few roundings the other way."""
    running, pending, blocks, *rest = draw(6, T=8, D=300, dtype=dtype)
    pending = pending if with_pending else None
    for count in (0, 3):
        got, x, weights = kernel(running, pending, bank_of(blocks, count), *rest, tuning=Tuning(4, 2))
        want, want_x, want_weights = kernel(running, pending, blocks[:count], *rest)
        assert x.dtype == dtype and weights.dtype == jnp.float32
        assert same_bits(got, want)
        assert relative_error(there_of(weights, count), want_weights) < 1e-6
        if dtype == jnp.bfloat16:
            assert (np.asarray(x) != np.asarray(want_x)).mean() < 0.01
        assert relative_error(x, want_x) < (1e-3 if dtype == jnp.bfloat16 else 1e-6)
    assert kernel(running, pending, bank_of(blocks, 2), *rest, weights=False)[2] is None


@pytest.mark.slow
def test_a_bank_at_the_width_of_k3():
    running, pending, blocks, *rest = draw(9, T=2, D=7168, dtype=jnp.bfloat16)
    want = plain_mix_norm(running, pending, blocks[:7], *rest)[1]
    for tokens in (2, 1025):
        x = kernel(running, pending, bank_of(blocks, 7), *rest, tuning=choose(tokens, 7168, 9, bank=True))[1]
        assert (np.asarray(x) != np.asarray(want)).mean() < 0.01
        assert relative_error(x, want) < 1e-3


@pytest.mark.parametrize(("count", "taken"), [(-1, 0), (-(2**31), 0), (6, 5), (2**31 - 1, 5)])
def test_a_count_outside_the_bank(count, taken):
    running, pending, blocks, *rest = draw(6)
    bank = bank_of(blocks, taken)
    want = kernel(running, pending, bank, *rest)
    for got, other in zip(kernel(running, pending, Bank(bank.blocks, jnp.int32(count)), *rest), want, strict=True):
        assert same_bits(got, other)


def test_a_bank_where_integers_have_64_bits():
    running, pending, blocks, *rest = draw(4)
    want = kernel(running, pending, bank_of(blocks, 2), *rest)
    with jax.enable_x64(True):
        for got, other in zip(kernel(running, pending, bank_of(blocks, 2), *rest), want, strict=True):
            assert relative_error(got, other) < 1e-6


@pytest.mark.parametrize(
    "there", [jnp.ones(2, bool), jnp.ones(1, bool), jnp.ones(3)], ids=["two", "one", "no booleans"]
)
def test_a_mask_of_another_shape_or_dtype_is_refused(there):
    _, _, blocks, norm, query, _ = draw(4)
    with pytest.raises(ValueError, match=r"there=\w+\[\d\]: allowed is bool\[3\]"):
        plain.mix(blocks, norm, query[None], EPS, there)


@pytest.mark.parametrize("tuning", [Tuning(4, 0), Tuning(3, 2), Tuning(0, 1), Tuning(64, 1)])
def test_tunings_that_are_refused(tuning):
    with pytest.raises(ValueError, match=r"tuning=Tuning\(.*\): allowed are warps that are a power of two up to 32"):
        kernel(*draw(2), tuning=tuning)


def test_a_bank_through_the_operation_and_by_the_plain_form():
    running, pending, blocks, norm, query, gain = draw(6)
    bank = bank_of(blocks, 3)
    want = exact(running, pending, blocks[:3], norm, query, gain)
    *got, weights = plain.mix_norm(running, pending, bank, norm, query[None], gain, EPS, True, INTERPRET)
    for a, b in zip((*got, there_of(weights, 3)), want, strict=True):
        assert relative_error(a, b) < 1e-6
    there = jnp.asarray([True] * 3 + [False] * 2 + [True])
    mixed, weights = plain.mix((*bank.blocks, running + pending), norm, query[None], EPS, there)
    assert relative_error(rms_norm(mixed, gain, EPS), want[1]) < 1e-6
    assert relative_error(there_of(weights, 3), want[2]) < 1e-6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b._replace(blocks=b.blocks[0]), r"blocks.blocks=float32\[3, 48\]: allowed is float32\[N, 3, 48\]"),
        (lambda b: b._replace(blocks=b.blocks[:0]), r"blocks.blocks=float32\[0, 3, 48\]: .* with N from 1"),
        (lambda b: b._replace(blocks=b.blocks[:, 1:]), r"blocks.blocks=float32\[2, 2, 48\]: allowed is float32\[N, 3, 48\]"),
        (lambda b: b._replace(blocks=b.blocks.astype(jnp.bfloat16)), r"blocks.blocks=bfloat16\[2, 3, 48\]: allowed is float32"),
        (lambda b: b._replace(count=b.count[None]), r"blocks.count=int32\[1\]: allowed is int32\[\]"),
        (lambda b: b._replace(count=b.count.astype(float)), r"blocks.count=float32\[\]: allowed is int32\[\]"),
        (lambda b: b._replace(count=2), r"blocks.count=2: allowed is an array, int32\[\]"),
    ],
    ids=["rank", "none", "tokens", "dtype", "counts", "no integer", "no array"],
)  # fmt: skip
def test_what_is_refused_of_a_bank(change, reason):
    running, pending, blocks, *rest = draw(3)
    bank = bank_of(blocks, 2)
    assert refuse_mix(running, pending, bank, *rest) is None
    with pytest.raises(ValueError, match=reason):
        mix_norm(running, pending, change(bank), *rest, EPS, interpret=INTERPRET)


def test_a_bank_is_not_for_mosaic():
    running, pending, blocks, *rest = draw(3)
    with pytest.raises(ValueError, match="form='mosaic': allowed with a Bank are 'auto' and 'triton'"):
        mix_norm(running, pending, bank_of(blocks, 2), *rest, EPS, form="mosaic", interpret=INTERPRET)


# The gated norm.


def draw_gated(shape, dtype=np.float32):
    rng = np.random.default_rng(1)
    o, gate = (jnp.asarray(scale * rng.normal(size=shape), dtype) for scale in (0.2, 3.0))
    return o, gate, jnp.asarray(1 + rng.random(shape[-1]), jnp.float32)


def exact_gated(*args):
    o, gate, gain = (np.asarray(a, np.float64) for a in args)
    return o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * gain / (1 + np.exp(-gate))


def gated(*args, elements=4096):
    return compiled(gated_rms_norm, eps=EPS, tuning=GatedTuning(elements), interpret=INTERPRET)(*args)


@pytest.mark.parametrize("shape", [(5, 3, 24), (7, 2, 128), (1, 1, 1)])
@pytest.mark.parametrize("elements", [64, 4096])
def test_gated_norm_equals_the_equation(shape, elements):
    """Programs of less than a row, of rows that do not come out even, and of more rows than there are."""
    args = draw_gated(shape)
    assert relative_error(gated(*args, elements=elements), exact_gated(*args)) < 3e-7


def test_gated_norm_is_rounded_once():
    """The nearest bfloat16, or its neighbour where two are equally near; the same as the plain form but for those."""
    args = draw_gated((5, 3, 24), jnp.bfloat16)
    y, want = np.asarray(gated(*args)), exact_gated(*args)
    assert y.dtype == jnp.bfloat16
    assert (np.abs(y.astype(np.float64) - want) <= 2**-9 * 1.0001 * np.exp2(np.ceil(np.log2(np.abs(want))))).all()
    assert (y != np.asarray(compiled(plain_gated, eps=EPS)(*args))).mean() < 0.01


def test_gated_norm_of_a_wide_output():
    """o in float32 beside a gate in bfloat16, as the recurrence and the projection give them."""
    o, gate, gain = draw_gated((5, 3, 24))
    gate = gate.astype(jnp.bfloat16)
    y = gated(o, gate, gain)
    assert y.dtype == jnp.float32
    assert relative_error(y, exact_gated(o, gate, gain)) < 3e-7


def test_gates_that_exp_does_not_hold():
    o, gate, gain = draw_gated((2, 3, 24))
    y = gated(o, jnp.where(gate > 0, 1e3, -1e3), gain)
    assert relative_error(y, exact_gated(o, jnp.where(gate > 0, 500.0, -500.0), gain)) < 3e-7


def test_a_head_does_not_see_its_neighbours():
    o, gate, gain = draw_gated((5, 3, 24))
    want, got = gated(o, gate, gain), gated(o.at[2, 1].set(jnp.nan), gate, gain)
    assert np.isnan(got[2, 1]).all()
    assert same_bits(got.at[2, 1].set(0), want.at[2, 1].set(0))


def test_what_the_gated_norm_refuses():
    o, gate, gain = args = draw_gated((5, 3, 24))
    assert refuse_gated(*args) is None
    cases = {
        r"o=\[5, 72\]: allowed is \[T, H, V\]": (o.reshape(5, 72), gate, gain),
        r"gate=\[5, 3, 23\]: allowed is \[5, 3, 24\]": (o, gate[..., 1:], gain),
        r"gain=\[1\]: allowed is \[24\]": (o, gate, gain[:1]),
        "o=float16: allowed are float32 and bfloat16": (o.astype(jnp.float16), gate, gain),
    }
    for reason, case in cases.items():
        with pytest.raises(ValueError, match=reason):
            gated_rms_norm(*case, EPS, interpret=INTERPRET)
