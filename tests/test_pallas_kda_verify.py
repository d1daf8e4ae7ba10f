"""The KDA kernels for speculation against the equations in float64 and single steps; on a CPU they are interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INTERPRET, relative_error, same_bits
from kda_equations import (
    BEGUN,
    COMPUTED,
    EPS,
    PLACES,
    SLOTS,
    TOLERANCE,
    B,
    Pools,
    advance,
    definition,
    draw,
    jitted,
    memory,
    rows_of,
    token,
)

from k3jax.batch import NOWHERE
from k3jax.pallas.kda_verify import refuse, replay, verify

N = 4
LENGTHS, ACCEPTED = np.array([4, 3, 2, 1, 4]), np.array([2, 3, 1, 0, 4])


def i32(a):
    return jnp.asarray(a, jnp.int32)


def drafted(lengths=LENGTHS, tokens=N, **case):
    """Inputs of several tokens a row; NaN after a row's last token and in the row without a slot."""
    x, gates = draw(1, B, tokens, **case)
    real = (np.arange(tokens) < lengths[:, None]) & (PLACES < SLOTS)[:, None]

    def poisoned(a):
        return jnp.where(real.reshape(B, tokens, *(1,) * (a.ndim - 2)), a, jnp.nan)

    fields = {name: poisoned(getattr(x, name)) for name in ("q", "k", "v", "out_gate")}
    return x._replace(**fields), gates._replace(f=poisoned(gates.f), b=poisoned(gates.b))


def after(pools, x, gates, counts, bound=-5.0):
    """The definition over each row's first `counts` tokens."""
    outputs = []
    for t in range(x.q.shape[1]):
        rows = rows_of(np.where(t < counts, PLACES, NOWHERE), COMPUTED + t)
        pools, *found = definition(pools, *token(x, gates, t), rows, bound)
        outputs.append(found)
    return pools, *(np.stack(a, 1) for a in zip(*outputs, strict=True))


@pytest.mark.parametrize("bound", [-5.0, None])
def test_verify_gives_what_the_steps_would(bound):
    pools, rows = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED)
    x, gates = drafted()
    o, records = jitted(verify, eps=EPS, lower_bound=bound)(*pools, x, gates, rows, i32(LENGTHS))
    _, *wanted = after(pools, x, gates, LENGTHS, bound)
    for found, expected in zip((o, *records), wanted, strict=True):
        assert found.dtype == jnp.float32
        assert (np.asarray(found)[np.arange(N) >= LENGTHS[:, None]] == 0).all()
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    "tokens, dtype, sizes",
    [(2, "float32", {}), (8, "float32", {}), (N, "bfloat16", {}), (2, "bfloat16", dict(k=128, v=128))],
)
def test_verify_equals_a_chain_of_layer_steps(tokens, dtype, sizes):
    """In bfloat16 q, k, v and outputs are rounded alike: one falls to the other side of a tie here and there."""
    pools, lengths = memory(PLACES, BEGUN, dtype=dtype, **sizes), np.full(B, tokens)
    x, gates = drafted(lengths, tokens, dtype=dtype, **sizes)
    rows, tolerance = rows_of(PLACES, COMPUTED), TOLERANCE if dtype == "float32" else 2e-4
    o, _ = jitted(verify, eps=EPS, lower_bound=-5.0)(*pools, x, gates, rows, i32(lengths))
    for t in range(tokens):
        pools, expected = advance(pools, *token(x, gates, t), rows_of(PLACES, COMPUTED + t))
        assert o.dtype == expected.dtype == dtype
        assert relative_error(o[:, t], expected) < tolerance


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("accepted", [ACCEPTED, *(np.full(B, m) for m in range(N + 1))], ids=str)
def test_replay_moves_on_by_what_was_accepted(accepted, state):
    """To the state and history of so many steps; a row of which nothing is accepted, and all others, to the bit as before."""
    pools, rows, lengths = memory(PLACES, BEGUN, state=state), rows_of(PLACES, COMPUTED), np.maximum(accepted, LENGTHS)
    x, gates = drafted(lengths)
    _, records = jitted(verify, eps=EPS, lower_bound=-5.0)(*pools, x, gates, rows, i32(lengths))
    moved = Pools(*jitted(replay, lower_bound=-5.0)(*pools, x, gates, records, rows, i32(accepted)))
    truth, *_ = after(pools, x, gates, accepted)
    on = PLACES[(accepted > 0) & (PLACES < SLOTS)]
    others = np.setdiff1d(np.arange(SLOTS), on)
    assert all(same_bits(a[others], b[others]) for a, b in zip(pools, moved, strict=True))
    if len(on):
        assert (np.asarray(moved.conv)[on] == truth.conv[on]).all()
        bound = TOLERANCE if state == "float32" else 2**-8
        assert relative_error(moved.S[on], truth.S[on]) < bound


def test_replay_equals_the_steps():
    pools, rows = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED)
    x, gates = drafted()
    _, records = jitted(verify, eps=EPS, lower_bound=-5.0)(*pools, x, gates, rows, i32(LENGTHS))
    moved = Pools(*jitted(replay, lower_bound=-5.0)(*pools, x, gates, records, rows, i32(ACCEPTED)))
    for t in range(N):
        rows = rows_of(np.where(t < ACCEPTED, PLACES, NOWHERE), COMPUTED + t)
        pools, _ = advance(pools, *token(x, gates, t), rows)
    on = PLACES[[0, 1, 4]]
    assert relative_error(moved.S[on], pools.S[on]) < TOLERANCE
    assert same_bits(moved.conv[on], pools.conv[on])


def test_speculation_refuses_too_many_tokens_and_other_records():
    pools, rows = memory(PLACES, BEGUN), rows_of(PLACES, COMPUTED)
    x, gates = drafted(np.full(B, 9), 9)
    with pytest.raises(ValueError, match=r"N=9: allowed are 1 to 8"):
        verify(*pools, x, gates, rows, i32(LENGTHS), EPS, -5.0, interpret=INTERPRET)
    x, gates = drafted()
    assert refuse(*pools, x, gates, rows, i32(LENGTHS), -5.0) is None
    with pytest.raises(ValueError, match=r"x\.q=\[5, 3, 16\]: allowed is \[B, N, H, K\]"):
        verify(*pools, *draw(1, B), rows, i32(LENGTHS), EPS, -5.0, interpret=INTERPRET)
    with pytest.raises(ValueError, match=r"lengths=\[4\]: allowed is \[5\]"):
        verify(*pools, x, gates, rows, i32(LENGTHS[:4]), EPS, -5.0, interpret=INTERPRET)
    o, records = verify(*pools, x, gates, rows, i32(LENGTHS), EPS, -5.0, interpret=INTERPRET)
    with pytest.raises(ValueError, match=r"records\.u=bfloat16: allowed is float32"):
        replay(
            *pools, x, gates, records._replace(u=o.astype(jnp.bfloat16)), rows, i32(ACCEPTED), -5.0, interpret=INTERPRET
        )
