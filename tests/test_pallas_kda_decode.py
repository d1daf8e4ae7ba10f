"""The KDA decode kernels against the equations in float64; on a CPU they are interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INTERPRET, relative_error, same_bits
from kda_equations import (
    BEGUN,
    COMPUTED,
    EPS,
    GATES,
    OWNED,
    PLACES,
    SLOTS,
    TOLERANCE,
    B,
    H,
    K,
    Pools,
    V,
    W,
    advance,
    definition,
    draw,
    memory,
    rows_of,
)

from k3jax.batch import NOWHERE
from k3jax.pallas.kda_decode import Tuning, choose, layer_step, refuse

HEAD, PART = Tuning(16, 4), Tuning(16, 4, split=True)  # a program a head, a program a part


@pytest.mark.parametrize("form", [HEAD, PART], ids=["head", "part"])
@pytest.mark.parametrize("correlation", [None, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("gate", GATES)
def test_a_chain_of_steps_is_the_recurrence(gate, correlation, form):
    """Keys apart, alike and the same; beta near 1. Slots of no row stay as they are, NaN and all."""
    common = None if correlation is None else np.random.default_rng(4).standard_normal((B, H, K))
    pools = truth = before = memory(PLACES, BEGUN)
    for t in range(5):
        x, gates = draw(t, B, gate=gate, common=common, correlation=correlation or 0.0, beta=8.0)
        rows = rows_of(PLACES, COMPUTED + t)
        pools, o = advance(pools, x, gates, rows, tuning=form)
        truth, expected, *_ = definition(truth, x, gates, rows, -5.0)
        assert relative_error(o, expected) < TOLERANCE
        assert relative_error(pools.S[PLACES[OWNED]], truth.S[PLACES[OWNED]]) < TOLERANCE
        assert (np.asarray(pools.conv)[PLACES[OWNED]] == truth.conv[PLACES[OWNED]]).all()
    others = np.setdiff1d(np.arange(SLOTS), PLACES)
    assert all(same_bits(a[others], b[others]) for a, b in zip(before, pools, strict=True))


def test_at_full_head_size():
    sizes = dict(k=128, v=128)
    pools = truth = memory(PLACES, BEGUN, **sizes)
    for t, tuning in enumerate(choose(programs, 128, "float32") for programs in (1, 101, 801)):
        x, gates = draw(t, B, **sizes)
        rows = rows_of(PLACES, COMPUTED + t)
        pools, o = advance(pools, x, gates, rows, tuning=tuning)
        truth, expected, *_ = definition(truth, x, gates, rows, -5.0)
        assert relative_error(o, expected) < TOLERANCE
        assert relative_error(pools.S[PLACES[OWNED]], truth.S[PLACES[OWNED]]) < TOLERANCE


def test_few_heads_are_split_and_many_take_smaller_parts():
    """By heads times rows; a state in bfloat16 is half as much to move."""
    single = {1: Tuning(16, 4, split=True), 100: Tuning(16, 4, split=True), 101: Tuning(32, 4), 801: Tuning(16, 4)}
    half = {1: Tuning(32, 4), 700: Tuning(32, 4), 701: Tuning(16, 4)}
    for state, by_programs in (("float32", single), ("bfloat16", half)):
        assert {n: choose(n, 128, state) for n in by_programs} == by_programs
    assert choose(200, 16, "float32") == Tuning(16, 4)


@pytest.mark.parametrize("form", [HEAD, PART], ids=["head", "part"])
def test_without_a_bound_the_gate_is_finite_everywhere(form):
    pools, rows = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED)
    x, gates = draw(1, B)
    f = gates.f.at[:, :, :4].set(jnp.asarray([1e4, -1e4, 100.0, -100.0]))
    # A slow head: its decay at f = 100 is exp(-5e-3), which exp(f) on the way would have made 0.
    gates = gates._replace(f=f.at[:, 0].set(-40.0), A_log=gates.A_log.at[1].set(-10.0))
    truth, expected, *_ = definition(pools, x, gates, rows, None)
    pools, o = advance(pools, x, gates, rows, bound=None, tuning=form)
    assert relative_error(o, expected) < TOLERANCE
    assert relative_error(pools.S[PLACES[OWNED]], truth.S[PLACES[OWNED]]) < TOLERANCE


def test_a_small_softplus_is_exact():
    """softplus = 1e-6 times a rate of 1,000: as log(1 + x) in float32 it would be wrong by 5 percent."""
    pools, rows = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED)
    x, gates = draw(1, B, gate="0.0")
    gates = gates._replace(f=jnp.full_like(gates.f, np.log(1e-6)), A_log=jnp.full_like(gates.A_log, np.log(1e3)))
    gates = gates._replace(b=gates.b - 200)  # beta is 0: decay alone acts
    kept = pools.S[PLACES[BEGUN]]
    pools, _ = advance(pools, x, gates, rows, bound=None)
    lost = 1 - np.asarray(pools.S[PLACES[BEGUN]] / kept, np.float64)
    assert np.abs(lost / -np.expm1(-1e-3) - 1).max() < 5e-4  # numbers near 1 have steps of 6e-8


@pytest.mark.parametrize("tuning", [Tuning(32, 1), Tuning(8, 4), PART, Tuning(8, 2, split=True), None])
def test_parts_do_not_matter(tuning):
    pools, rows = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED)
    x, gates = draw(1, B)
    (a, o), (b, p) = (advance(pools, x, gates, rows, tuning=t) for t in (HEAD, tuning))
    assert relative_error(p, o) < TOLERANCE
    assert relative_error(b.S[PLACES[OWNED]], a.S[PLACES[OWNED]]) < TOLERANCE
    assert same_bits(a.conv, b.conv)


@pytest.mark.parametrize("form", [HEAD, PART], ids=["head", "part"])
def test_a_row_without_a_slot_leaves_no_trace_whatever_it_holds(form):
    pools, before = memory(PLACES, BEGUN), memory(PLACES, BEGUN)
    x, gates = draw(1, B)
    x, gates = (jax.tree.map(lambda a: a.at[2].set(jnp.nan) if a.shape[:1] == (B,) else a, tree) for tree in (x, gates))
    for nowhere in (NOWHERE, SLOTS, -1):
        places = np.where(PLACES == NOWHERE, nowhere, PLACES)
        after, o = advance(pools, x, gates, rows_of(places, COMPUTED), tuning=form)
        assert same_bits(o[2], np.zeros((H, V), np.float32))
        assert np.isfinite(np.asarray(o)).all()
        others = np.setdiff1d(np.arange(SLOTS), PLACES)
        assert all(same_bits(a[others], b[others]) for a, b in zip(before, after, strict=True))


def test_the_order_of_rows_does_not_matter():
    pools, (x, gates) = memory(PLACES, BEGUN), draw(1, B)
    order = np.array([3, 0, 4, 2, 1])
    moved = (jax.tree.map(lambda a: a[order] if a.shape[:1] == (B,) else a, tree) for tree in (x, gates))
    a, o = advance(pools, x, gates, rows_of(PLACES, COMPUTED))
    b, p = advance(pools, *moved, rows_of(PLACES[order], COMPUTED[order]))
    assert same_bits(o[order], p)
    assert all(same_bits(m, n) for m, n in zip(a, b, strict=True))


@pytest.mark.parametrize("form", [HEAD, PART], ids=["head", "part"])
def test_bfloat16_inputs_round_where_the_layer_does(form):
    """Against float64 with the same roundings: one falls on the other side of a tie here and there, 2^-9 of one number."""

    def rounded(a):
        return np.asarray(a, jnp.bfloat16).astype(np.float64)

    pools, rows = memory(PLACES, BEGUN, dtype="bfloat16"), rows_of(PLACES, COMPUTED)
    x, gates = draw(1, B, dtype="bfloat16")
    truth, expected, *_ = definition(pools, x, gates, rows, -5.0, rounded)
    pools, o = advance(pools, x, gates, rows, tuning=form)
    assert o.dtype == jnp.bfloat16
    assert relative_error(o, rounded(expected)) < 2e-4
    assert relative_error(pools.S[PLACES[OWNED]], truth.S[PLACES[OWNED]]) < 2e-4
    assert (np.asarray(pools.conv, np.float64)[PLACES[OWNED]] == truth.conv[PLACES[OWNED]]).all()


@pytest.mark.parametrize("tuning", [HEAD, Tuning(8, 4), PART])
def test_a_bfloat16_state_is_the_float32_one_rounded_once(tuning):
    pools, rows, (x, gates) = memory(PLACES, BEGUN, state="bfloat16"), rows_of(PLACES, COMPUTED), draw(1, B)
    half, o = advance(pools, x, gates, rows, tuning=tuning)
    full, p = advance(pools._replace(S=pools.S.astype(jnp.float32)), x, gates, rows, tuning=tuning)
    assert half.S.dtype == jnp.bfloat16
    assert same_bits(half.S[PLACES[OWNED]], full.S[PLACES[OWNED]].astype(jnp.bfloat16))
    assert same_bits(o, p)


STEPS, LAST = 4000, 100


def drift(gate, state, rows=2, k=K, v=V):
    """Relative errors of the last 100 outputs and of the last state after 4,000 tokens, keys correlated by a half."""
    common = np.random.default_rng(9).standard_normal((rows, H, k))
    steps = [draw(t, rows, gate=gate, common=common, correlation=0.5, k=k, v=v) for t in range(STEPS)]
    per_step = [tuple(map(np.asarray, (x.q, x.k, x.v, x.out_gate, gates.f, gates.b))) for x, gates in steps]
    inputs, (layer, parameters) = tuple(map(np.stack, zip(*per_step, strict=True))), steps[0]
    where = np.arange(rows)

    def one(pools, inputs):
        t, (q, k, v, out_gate, f, b) = inputs
        x, gates = layer._replace(q=q, k=k, v=v, out_gate=out_gate), parameters._replace(f=f, b=b)
        conv_pool, S, o = layer_step(
            *pools, x, gates, rows_of(where, jnp.full(rows, t)), EPS, -5.0, interpret=INTERPRET
        )
        return Pools(conv_pool, S), o

    start = Pools(jnp.zeros((rows, W - 1, H, 2 * k + v)), jnp.zeros((rows, H, v, k), state))
    pools, o = jax.jit(lambda *a: jax.lax.scan(one, *a))(start, (np.arange(STEPS), inputs))
    truth, wanted = Pools(*(np.zeros(a.shape) for a in start)), []
    for t, step in enumerate(steps):
        truth, expected, *_ = definition(truth, *step, rows_of(where, np.full(rows, t)), -5.0)
        wanted.append(expected)
    return relative_error(o[-LAST:], wanted[-LAST:]), relative_error(pools.S, truth.S)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "bound"), [("mixed", 3e-3), ("-1e-06", 5e-2)])
def test_a_bfloat16_state_drifts_no_further(gate, bound):
    """Errors that decay are forgotten. Where nothing decays only the delta rule mends them, one direction a token."""
    for found in drift(gate, "bfloat16"):
        assert bound / 10 < found < bound
    # A GPU's exponential of one instruction is off by up to 2^-22 a token, always to the same side.
    for found in drift(gate, "float32"):
        assert found < (1e-5 if INTERPRET else 1e-4)


def test_what_it_cannot_take_it_refuses():
    pools, rows, (x, gates) = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED), draw(1, B)
    assert refuse(*pools, x, gates, rows, -5.0) is None

    def reason(**changes):
        fields = {"conv_pool": pools.conv, "S_pool": pools.S, "x": x, "gates": gates, "rows": rows, **changes}
        with pytest.raises(ValueError) as raised:
            layer_step(**{"eps": EPS, "lower_bound": -5.0} | fields)
        assert str(raised.value) == refuse(**{"lower_bound": -5.0} | fields)
        return str(raised.value)

    odd = memory(PLACES, BEGUN, v=24)
    odd_x, odd_gates = draw(1, B, v=24)
    assert reason(conv_pool=odd.conv, S_pool=odd.S, x=odd_x, gates=odd_gates) == (
        "V=24: allowed are powers of two from 16"
    )
    assert reason(S_pool=pools.S.astype(jnp.float16)) == "S_pool=float16: allowed is float32 or bfloat16"
    assert reason(S_pool=pools.S[..., :8]) == f"S_pool=[{SLOTS}, 3, 32, 8]: allowed is [{SLOTS}, 3, 32, 16]"
    assert reason(conv_pool=pools.conv[:, 1:]) == f"conv_pool=[{SLOTS}, 2, 3, 64]: allowed is [{SLOTS}, 3, 3, 64]"
    assert reason(conv_pool=pools.conv.astype(jnp.bfloat16)) == "conv_pool=bfloat16: allowed is float32"
    assert reason(x=x._replace(k=x.k.astype(jnp.bfloat16))) == "x.k=bfloat16: allowed is float32"
    assert reason(gates=gates._replace(b=gates.b[..., None])) == "gates.b=[5, 3, 1]: allowed is [5, 3]"
    assert reason(x=x._replace(q=x.q[:, None])) == "x.q=[5, 1, 3, 16]: allowed is [B, H, K]"
    assert reason(rows=rows._replace(slots=rows.slots[:2])) == "rows.slots=[2]: allowed is [5]"
    assert reason(lower_bound=0.0) == "lower_bound=0.0: allowed is a negative number or None"
    assert reason(tuning=Tuning(12, 4)) == "tuning.rows=12: allowed are divisors of V=32"
    assert reason(tuning=Tuning(8, 8)) == "tuning.warps=8: allowed are 1 to 4, one thread an element of the state"
