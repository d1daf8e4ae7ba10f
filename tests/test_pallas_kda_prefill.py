"""The KDA prefill kernels against the recurrence in float64; on a CPU they are interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INTERPRET, relative_error

from k3jax.pallas import kda_prefill as kda

GATES = {  # z of each token and channel, for g = -5 sigmoid(z)
    "mixed": lambda r, shape: 3 * r.standard_normal(shape),
    "0": lambda r, shape: np.full(shape, -200.0),
    "-1e-6": lambda r, shape: np.full(shape, np.log(2e-7)),
    "-2.5": lambda r, shape: np.zeros(shape),
    "-4.99": lambda r, shape: np.full(shape, np.log(499.0)),
    "-5": lambda r, shape: np.full(shape, 200.0),
    "channels at 0 or -5": lambda r, shape: np.broadcast_to(r.choice([-200.0, 200.0], (1, *shape[1:])), shape),
    "tokens at 0 or -5": lambda r, shape: np.broadcast_to(r.choice([-200.0, 200.0], (shape[0], 1, 1)), shape),
}
LENGTHS = [1, 0, 2, 3, 15, 16, 17, 63, 64, 65, 100]
NOWHERE = 2**31 - 1


def draw(lengths, *, H=2, K=16, V=24, gate="mixed", correlation=0.0, beta=None, dtype=jnp.float32, padding=0, seed=0):
    """Inputs of packed rows, NaN after the last; `correlation` is that of any two keys of a head."""
    r = np.random.default_rng(seed)
    T = sum(lengths)
    shape = (T, H, K)
    k = np.sqrt(1 - correlation) * r.standard_normal(shape) + np.sqrt(correlation) * r.standard_normal((1, H, K))
    q, v = r.standard_normal(shape), r.standard_normal((T, H, V))
    b = r.standard_normal((T, H)) if beta is None else np.full((T, H), beta)
    A_log, bias = r.uniform(-1, 1, H), r.uniform(-1, 1, (H, K))
    f = GATES[gate](r, shape) / np.exp(A_log)[:, None] - bias
    padded = (np.concatenate([a, np.full((padding, *a.shape[1:]), np.nan)]) for a in (q, k, v, f, b))
    return kda.Raw(*(jnp.asarray(a, dtype) for a in padded), jnp.float32(A_log), jnp.float32(bias))


def memory(lengths, x, *, begun, seed=1):
    """A pool whose unused slots hold NaN, and rows in any order; every other row goes on from its slot, or every one begins."""
    r = np.random.default_rng(seed)
    B, H, K, V = len(lengths), *x.q.shape[1:], x.v.shape[-1]
    slots = r.permutation(B + 3)[:B]
    computed = np.where(np.arange(B) % 2 == 0, 7, 0) if begun else np.zeros(B)
    pool = np.full((B + 3, H, V, K), np.nan, np.float32)
    for slot, n in zip(slots, computed, strict=True):
        if n:
            pool[slot] = r.standard_normal((H, V, K))
    rows = kda.Rows(*(jnp.asarray(a, jnp.int32) for a in (np.cumsum([0, *lengths]), slots, computed)))
    return jnp.asarray(pool), rows


def recurrence(pool, x, rows, bound=-5.0, snapshots=()):
    """The definition, token by token: outputs, each row's state at its end, and those after so many tokens of a row."""
    q, k, v, f, b, A_log, bias = (np.asarray(a, np.float64) for a in x)
    starts = np.asarray(rows.starts)
    with np.errstate(over="ignore", invalid="ignore"):
        if bound is None:
            g = -np.exp(A_log)[:, None] * np.logaddexp(0, f + bias)
        else:
            g = bound / (1 + np.exp(-np.exp(A_log)[:, None] * (f + bias)))
        beta = 1 / (1 + np.exp(-b))
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    o, states, kept = np.zeros(v.shape), [], {}
    for row, slot in enumerate(np.asarray(rows.slots)):
        begun = rows.num_computed[row] > 0
        S = np.asarray(pool[slot], np.float64) if begun else np.zeros(pool.shape[1:])
        for n, t in enumerate(range(starts[row], starts[row + 1]), 1):
            S = S * np.exp(g[t])[:, None, :]
            u = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", S, k[t]))
            S = S + u[..., None] * k[t][:, None, :]
            o[t] = np.einsum("hvk,hk->hv", S, q[t]) * q.shape[-1] ** -0.5
            if (row, n) in snapshots:
                kept[row, n] = S
        states.append(S)
    return o, states, kept


@functools.lru_cache
def program(bound, **options):
    return jax.jit(functools.partial(kda.prefill, lower_bound=bound, interpret=INTERPRET, **options))


def run(pool, x, rows, bound=-5.0, snapshots=None, **options):
    pool, o = program(bound, **options)(pool, x, rows, snapshots=snapshots)
    return np.asarray(pool), np.asarray(o, np.float64)


def check(lengths, x, pool, rows, tolerance, bound=-5.0, of_states=None, **options):
    """Outputs, states (`of_states`: their tolerance if another), padding, and slots of nobody and of empty rows to the bit."""
    got, o = run(pool, x, rows, bound, **options)
    want, states, _ = recurrence(pool, x, rows, bound)
    T = sum(lengths)
    assert relative_error(o[:T], want[:T]) < tolerance
    assert (o[T:] == 0).all()
    slots = np.asarray(rows.slots)
    for row, n in enumerate(lengths):
        if n:
            assert relative_error(got[slots[row]], states[row]) < (of_states or tolerance), row
    others = [s for s in range(len(pool)) if s not in slots or not lengths[list(slots).index(s)]]
    assert got[others].tobytes() == np.asarray(pool)[others].tobytes()


EXACT = {"precision": "highest"}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_prefill_equals_the_recurrence(gate, begun):
    x = draw(LENGTHS, gate=gate, padding=9)
    check(LENGTHS, x, *memory(LENGTHS, x, begun=begun), 2e-5, **EXACT)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 6e-3)])
def test_long_rows(dtype, tolerance):
    lengths = [200, 1000]
    x = draw(lengths, correlation=0.5, dtype=dtype)
    options = EXACT if dtype == "float32" else {}
    check(lengths, x, *memory(lengths, x, begun=True), tolerance, **options)


@pytest.mark.parametrize("correlation", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("gate", ["mixed", "0"])
def test_correlated_and_identical_keys(gate, correlation):
    """With betas near 1 and nothing forgotten, a product of powers would lose everything."""
    x = draw(LENGTHS, gate=gate, correlation=correlation, beta=8.0)
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), 2e-5, **EXACT)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, 1.0])
def test_bfloat16_operands(gate, correlation):
    x = draw(LENGTHS, gate=gate, correlation=correlation, dtype=jnp.bfloat16)
    remembered = gate in ("0", "-1e-6", "channels at 0 or -5", "tokens at 0 or -5")
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), 3e-2 if correlation > 0.5 and remembered else 6e-3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, 1.0])
def test_bfloat16_operands_at_high_precision(gate, correlation):
    """Products of bfloat16 leave 3e-3 and more in a state of every case; outputs are rounded to bfloat16."""
    x = draw(LENGTHS, gate=gate, correlation=correlation, dtype=jnp.bfloat16)
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), 2.5e-3, of_states=1e-3, precision="high")


def near_one(gate, correlation):
    """What an error may be with betas near 1 and bfloat16 operands."""
    return 3e-2 if gate == "0" and correlation > 0.5 else 6e-3


# (I + A)^-1 of keys that are alike and that nothing forgets has rows 1, -1, whose sums vanish: in bfloat16 each is off by up to
# 2^-8, and the 32 tokens of a chunk may all be to the same side. Seen: 7.1e-3 at correlation 0.5, 5.4e-2 at 1.
misses = pytest.mark.xfail(strict=INTERPRET, reason="X is handed on in bfloat16")
OVERWRITTEN = [
    *(("mixed", c) for c in (0.5, 0.9, 1.0)), ("0", 0.9),
    *(pytest.param("0", c, marks=misses, id=f"0-{c}-misses since X is bfloat16") for c in (0.5, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize("gate, correlation", OVERWRITTEN)
def test_betas_near_one_in_bfloat16(gate, correlation):
    x = draw(LENGTHS, gate=gate, correlation=correlation, beta=8.0, dtype=jnp.bfloat16)
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), near_one(gate, correlation))


@pytest.mark.parametrize(
    "segments, bound",
    [(1, -5.0), (3, None), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, None), (3, -5.0)))],
)
def test_a_row_of_nan_reaches_no_other(segments, bound):
    lengths = [40, 100, 54]
    x = draw(lengths, padding=3)
    pool, rows = memory(lengths, x, begun=True)
    bad = x._replace(**{name: getattr(x, name).at[40:140].set(jnp.nan) for name in ("q", "k", "v", "f", "b")})
    tuning = kda.Tuning(rows=16, segments=segments)
    (S, o), (T, p) = (run(pool, a, rows, bound, tuning=tuning, **EXACT) for a in (x, bad))
    whole, slots = np.r_[0:40, 140:194], np.asarray(rows.slots)[[0, 2]]
    assert np.isfinite(o[whole]).all() and o[whole].tobytes() == p[whole].tobytes()
    assert np.isfinite(S[slots]).all() and S[slots].tobytes() == T[slots].tobytes()


@pytest.mark.parametrize(
    "gate, correlation, bound",
    [("mixed", 0.0, None), ("mixed", 0.0, -5.0), *((g, c, -5.0) for g in ("0", "-5", "mixed") for c in (0.9, 1.0))],
)
def test_true_sizes(gate, correlation, bound):
    lengths = [70, 33]
    x = draw(lengths, H=1, K=128, V=128, gate=gate, correlation=correlation, dtype=jnp.bfloat16)
    of_states = 3e-2 if gate == "0" else 6e-3
    check(lengths, x, *memory(lengths, x, begun=True), 6e-3, bound, of_states=of_states)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_an_unbounded_gate(scale, correlation):
    """Decays of exp(-100) a token and more beside none: no factor may overflow, none may cut its neighbours off."""
    x = draw(LENGTHS, gate="mixed", correlation=correlation)
    x = x._replace(A_log=jnp.log(scale * jnp.exp(x.A_log)))
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), 2e-5, None, **EXACT)


def test_an_unbounded_gate_that_jumps():
    x = draw(LENGTHS, gate="tokens at 0 or -5")  # f of +-200: g near 0 or -200 and below
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), 2e-5, None, **EXACT)


@pytest.mark.parametrize("lengths", [[200], [1], [0, 130, 64], [65, 0]])
@pytest.mark.parametrize(
    "segments, bound", [(3, None), *(pytest.param(n, -5.0, marks=pytest.mark.slow) for n in (2, 8))]
)
def test_segments_change_nothing(lengths, segments, bound):
    x = draw(lengths, padding=3, correlation=0.5)
    tuning = kda.Tuning(rows=16, segments=segments)
    check(lengths, x, *memory(lengths, x, begun=True), 3e-5, bound, tuning=tuning, **EXACT)


@pytest.mark.parametrize("segments", [1, 2])
def test_snapshots(segments):
    """The state after so many tokens, in slots of the same pool; what no chunk ends with, and slots nowhere, are not kept."""
    lengths, wanted = [100, 31, 64, 0], {(0, 32): 9, (0, 96): 11, (2, 64): 10}
    x = draw(lengths)
    pool, rows = memory(lengths, x, begun=True)
    pool = jnp.concatenate([pool[rows.slots], jnp.full((8, *pool.shape[1:]), jnp.nan)])
    rows = rows._replace(slots=jnp.arange(4, dtype=jnp.int32))
    table = [[0, 32, 96], [32, 0, 0], [33, 64, 96], [32, 64, 96]]
    slots = [[8, 9, 11], [8, 8, 8], [8, 10, 8], [8, 8, NOWHERE]]
    snapshots = kda.Snapshots(jnp.int32(table), jnp.int32(slots))
    tuning = kda.Tuning(rows=16, segments=segments)
    got, _ = run(pool, x, rows, snapshots=snapshots, tuning=tuning, **EXACT)
    _, _, kept = recurrence(pool, x, rows, snapshots=wanted)
    for at, slot in wanted.items():
        assert relative_error(got[slot], kept[at]) < 2e-5, at
    assert np.isnan(got[[4, 5, 6, 7, 8]]).all()


def test_rows_without_a_slot_leave_nothing():
    lengths = [40, 20]
    x = draw(lengths)
    pool, rows = memory(lengths, x, begun=True)
    free = rows._replace(slots=jnp.int32([NOWHERE, -1]))
    got, o = run(pool, x, free, **EXACT)
    want, _, _ = recurrence(pool, x, rows._replace(num_computed=jnp.zeros(2, jnp.int32)))
    assert relative_error(o, want) < 2e-5
    assert got.tobytes() == np.asarray(pool).tobytes()


@pytest.mark.parametrize("gate", ["-5", "tokens at 0 or -5", "mixed"])
def test_decays_that_leave_almost_nothing_of_128_channels(gate):
    """The smallest factors of a chunk are e^-80: what they multiply must not be lost below what float32 holds."""
    lengths = [64, 33]
    x = draw(lengths, H=1, K=128, V=32, gate=gate)
    check(lengths, x, *memory(lengths, x, begun=True), 2e-5, **EXACT)


@pytest.mark.parametrize("gate", ["-5", "0", "mixed"])
def test_tokens_without_a_key_or_a_query(gate):
    x = draw(LENGTHS, gate=gate)
    x = x._replace(k=x.k.at[::3].set(0), q=x.q.at[1::4].set(0))
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), 5e-5, **EXACT)


@pytest.mark.parametrize("A_log", [-200.0, -70.0])
def test_a_head_whose_gate_does_not_look(A_log):
    """Nor does it decay where there is no token."""
    lengths = [40, 33]
    x = draw(lengths)._replace(A_log=jnp.full(2, A_log))
    check(lengths, x, *memory(lengths, x, begun=True), 2e-5, **EXACT)


def test_what_is_refused():
    x = draw([5])
    pool, rows = memory([5], x, begun=False)
    cases = {
        "lower_bound=-5.1: allowed are -5.0 to 0, or None": {"bound": -5.1},
        "lower_bound=0.5": {"bound": 0.5},
        "precision='low'": {"precision": "low"},
        "tuning.rows=24: allowed are powers of two from 16": {"tuning": kda.Tuning(rows=24)},
        "tuning.segments=0: allowed are numbers from 1": {"tuning": kda.Tuning(segments=0)},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            run(pool, x, rows, **options)
    with pytest.raises(ValueError, match=r"S_pool=bfloat16\[4, 2, 24, 16\]: allowed is float32"):
        run(pool.astype(jnp.bfloat16), x, rows)
    with pytest.raises(ValueError, match=r"S_pool=\[0, 2, 24, 16\]: allowed is \[slots, H, V, K\] with slots from 1"):
        run(pool[:0], x, rows)
    with pytest.raises(ValueError, match=r"K=12: allowed are powers of two"):
        run(pool, draw([5], K=12), rows)
    with pytest.raises(ValueError, match=r"K=256: allowed are powers of two from 16 to 128"):
        run(pool, draw([5], K=256), rows)
    with pytest.raises(ValueError, match=r"v=int32\[5, 2, 24\]: allowed is float32 or bfloat16\[5, 2, 24\]"):
        run(pool, x._replace(v=x.v.astype(jnp.int32)), rows)
    with pytest.raises(ValueError, match=r"A_log=bfloat16\[2\]: allowed is float32\[2\]"):
        run(pool, x._replace(A_log=x.A_log.astype(jnp.bfloat16)), rows)
    with pytest.raises(ValueError, match=r"q=\[0, 2, 16\]"):
        run(pool, draw([]), rows)
    one = jnp.ones((2, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"snapshots.after=int32\[2, 1\]: allowed is int32\[1, 1\]"):
        run(pool, x, rows, snapshots=kda.Snapshots(one, one))
    with pytest.raises(ValueError, match=r"starts=int32\[2\]: allowed is int32\[3\]"):
        run(pool, x, rows._replace(slots=jnp.int32([0, 1])))
