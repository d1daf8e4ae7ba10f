"""The Mosaic form of KDA prefill against the recurrence in float64; on a CPU it is interpreted, which jax 0.10 cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_kda_prefill import GATES, check, draw, memory, near_one, run

from k3jax import pallas
from k3jax.pallas import cannot_compile
from k3jax.pallas import kda_prefill as kda

MOSAIC = kda.Mosaic()
LENGTHS = [33, 0, 1, 40, 15, 64]
has_mosaic = pytest.mark.skipif(cannot_compile() is not None, reason="jax 0.10 has no interpreter of Mosaic")
# Products of two chunks that share a block, of which the interpreter tells, are not used.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in (matmul|add):RuntimeWarning")


def inputs(lengths=LENGTHS, H=1, V=128, padding=9, **options):
    return draw(lengths, H=H, K=128, V=V, dtype=jnp.bfloat16, padding=padding, **options)


@has_mosaic
@pytest.mark.parametrize("gate, correlation", [("mixed", 0.5), *((gate, 0.9) for gate in GATES)])
def test_prefill_equals_the_recurrence_needs_jax_0_11(gate, correlation):
    x = inputs(gate=gate, correlation=correlation)
    remembered = gate in ("0", "-1e-6", "channels at 0 or -5", "tokens at 0 or -5")
    tolerance = 3e-2 if correlation > 0.5 and remembered else 6e-3
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), tolerance, tuning=MOSAIC)


@has_mosaic
@pytest.mark.parametrize("gate, correlation", [("mixed", 1.0), ("0", 0.5), ("0", 0.9), ("0", 1.0)])
def test_betas_near_one_needs_jax_0_11(gate, correlation):
    x = inputs(gate=gate, correlation=correlation, beta=8.0)
    check(LENGTHS, x, *memory(LENGTHS, x, begun=True), near_one(gate, correlation), tuning=MOSAIC)


@has_mosaic
@pytest.mark.parametrize("lengths", [[5], [31, 1]])
def test_fewer_tokens_than_a_pair_of_chunks_needs_jax_0_11(lengths):
    x = inputs(lengths, padding=0)
    check(lengths, x, *memory(lengths, x, begun=False), 6e-3, tuning=MOSAIC)


@has_mosaic
def test_heads_and_values_wider_than_keys_needs_jax_0_11():
    lengths = [40, 33]
    x = inputs(lengths, H=3, V=256)
    check(lengths, x, *memory(lengths, x, begun=True), 6e-3, tuning=MOSAIC)


@has_mosaic
def test_a_row_of_nan_reaches_no_other_needs_jax_0_11():
    """Though a chunk of it may share a block with one of theirs."""
    lengths = [20, 30, 13]
    x = inputs(lengths)
    pool, rows = memory(lengths, x, begun=True)
    bad = x._replace(**{name: getattr(x, name).at[20:50].set(jnp.nan) for name in ("q", "k", "v", "f", "b")})
    (S, o), (T, p) = (run(pool, a, rows, tuning=MOSAIC) for a in (x, bad))
    whole, slots = np.r_[0:20, 50:63], np.asarray(rows.slots)[[0, 2]]
    assert np.isfinite(o[whole]).all() and o[whole].tobytes() == p[whole].tobytes()
    assert S[slots].tobytes() == T[slots].tobytes()


@has_mosaic
@pytest.mark.parametrize("A_log, bound", [(-200.0, -5.0), (0.0, 0.0), (0.5, -1.0)])
def test_gates_at_their_ends_needs_jax_0_11(A_log, bound):
    lengths = [40, 9]
    x = inputs(lengths)._replace(A_log=jnp.full(1, A_log))
    x = x._replace(k=x.k.at[::3].set(0), q=x.q.at[1::4].set(0))
    check(lengths, x, *memory(lengths, x, begun=True), 6e-3, bound, tuning=MOSAIC)


@pytest.mark.parametrize(
    "H, V, B, T, mosaic, chosen",
    [
        (96, 128, 1, 512, True, MOSAIC), (12, 128, 32, 8192, True, MOSAIC), (24, 256, 1, 1024, True, MOSAIC),
        (96, 128, 1, 8192, False, kda.Tuning()), (96, 128, 1, 511, True, kda.Tuning()), (48, 128, 1, 8192, True, MOSAIC),
        (47, 128, 1, 1024, True, kda.Tuning(rows=16)),
        (12, 128, 1, 8192, True, kda.Tuning(segments=8)), (12, 128, 1, 4096, True, kda.Tuning(segments=4)),
        (12, 128, 1, 2048, True, kda.Tuning(rows=16)),
    ],
)  # fmt: skip
def test_the_choice(H, V, B, T, mosaic, chosen):
    x = draw([1])._replace(v=jax.ShapeDtypeStruct((T, H, V), jnp.bfloat16))
    assert kda.choose(x, B, "default", mosaic) == chosen
    if not mosaic:
        assert kda.choose(x, B, "highest", mosaic) == chosen._replace(rows=min(chosen.rows, 32))


def test_what_it_cannot_take_is_refused(monkeypatch):
    x = inputs([5])
    pool, rows = memory([5], x, begun=False)
    cases = [
        (x._replace(f=x.f.astype(jnp.float32)), {}, r"f=float32: allowed is bfloat16"),
        (draw([5], H=1, K=64, V=128, dtype=jnp.bfloat16), {}, r"K=64: allowed is 128"),
        (x, {"bound": None}, r"lower_bound=None: allowed is a number"),
        (x, {"precision": "high"}, r"precision='high': allowed is 'default'"),
        (draw([5], H=1, K=128, V=64, dtype=jnp.bfloat16), {}, r"V=64: allowed "),
    ]
    for bad, options, message in cases:
        pool, rows = memory([5], bad, begun=False)
        with pytest.raises(ValueError, match=message):
            run(pool, bad, rows, tuning=MOSAIC, **options)
    monkeypatch.setattr(pallas, "cannot_compile", lambda: "jax=0.10.2: allowed are 0.11 and newer")
    pool, rows = memory([5], x, begun=False)
    with pytest.raises(ValueError, match=r"jax=0.10.2: allowed are 0.11"):
        run(pool, x, rows, tuning=kda.Mosaic(stages=3))
