"""What the tests of KDA decode and of its speculation share: inputs, pools, and the equations in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import INTERPRET

from k3jax.batch import NOWHERE
from k3jax.pallas.kda_decode import Gates, Layer, Rows, layer_step

B, H, K, V, W, SLOTS, EPS = 5, 3, 16, 32, 4, 9, 1e-5
# float32 against float64 over a few steps. A state that is kept, sums of 16 and 128 products, exponentials: a few times 2^-24.
TOLERANCE = 1e-6

PLACES = np.array([4, 0, NOWHERE, 7, 2])
COMPUTED = np.array([5, 0, 3, 1, 2])  # row 1 begins, row 2 has no slot
OWNED, BEGUN = np.array([0, 1, 3, 4]), np.array([0, 3, 4])


class Pools(NamedTuple):
    conv: jax.Array
    S: jax.Array


def logit(p):
    return np.log(p / (1 - p))


# f of a channel where A_log = dt_bias = 0 and the bound is -5: the gate is then exactly what is named, but for rounding.
F = {0.0: -200.0, -1e-6: logit(2e-7), -2.5: 0.0, -4.99: logit(0.998), -5.0: 200.0}
GATES = {**{str(g): lambda r, shape, f=f: np.full(shape, f) for g, f in F.items()},
         "mixed": lambda r, shape: r.choice(list(F.values()), shape),
         "normal": lambda r, shape: 3 * r.standard_normal(shape)}  # fmt: skip


def draw(seed, *lead, dtype="float32", gate="normal", common=None, correlation=0.0, k=K, v=V, beta=0.0):
    """A step's inputs; `common` is what the keys of all steps share, `beta` is added to its logit."""
    r = np.random.default_rng(seed)
    q, key, value, out_gate = (r.standard_normal((*lead, H, n)) for n in (k, k, v, v))
    if common is not None:
        key = np.sqrt(1 - correlation) * key + np.sqrt(correlation) * common
    f, b = GATES[gate](r, (*lead, H, k)), r.standard_normal((*lead, H)) + beta
    fixed = np.random.default_rng(7)  # parameters stay from step to step
    taps = tuple(fixed.standard_normal((H, n, W)) for n in (k, k, v))
    if common is not None and correlation == 1:  # equal keys stay equal: no history
        taps[1][..., :-1] = 0
    norm = 1 + fixed.random(v)
    A_log, dt_bias = (fixed.random(s) if gate == "normal" else np.zeros(s) for s in ((H,), (H, k)))
    low, high = (functools.partial(jnp.asarray, dtype=d) for d in (dtype, "float32"))
    return (
        Layer(low(q), low(key), low(value), tuple(map(high, taps)), low(out_gate), high(norm)),
        Gates(low(f), low(b), high(A_log), high(dt_bias)),
    )


def memory(places, begun, dtype="float32", state="float32", k=K, v=V):
    """Pools that hold NaN but in the slots of rows that have begun."""
    r = np.random.default_rng(3)
    shapes = (SLOTS, W - 1, H, 2 * k + v), (SLOTS, H, v, k)
    pools = []
    for shape, d in zip(shapes, (dtype, state), strict=True):
        a = np.full(shape, np.nan)
        a[places[begun]] = r.standard_normal(a[places[begun]].shape)
        pools.append(jnp.asarray(a, d))
    return Pools(*pools)


def rows_of(places, computed):
    return Rows(jnp.asarray(places, jnp.int32), jnp.asarray(computed, jnp.int32))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def definition(pools, x, gates, rows, bound, rounded=lambda a: a):
    """One token a row in float64, from the equations; `rounded` where a layer hands on in its own dtype."""
    x, gates = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, gates))
    history, S = (np.array(a, np.float64) for a in pools)
    outputs, u_all, k_all = np.zeros(x.v.shape), np.zeros(x.v.shape), np.zeros(x.k.shape)
    for row, (slot, computed) in enumerate(zip(*map(np.asarray, rows), strict=True)):
        if not 0 <= slot < len(S):
            continue
        past, M = (history[slot], S[slot]) if computed > 0 else (np.zeros(history.shape[1:]), np.zeros(S.shape[1:]))
        window = np.concatenate([past, np.concatenate([x.q[row], x.k[row], x.v[row]], -1)[None]])
        y = np.einsum("whc,hcw->hc", window, np.concatenate(x.taps, 1))
        n = M.shape[-1]
        q, k, v = np.split(rounded(y * sigmoid(y)), [n, 2 * n], axis=-1)
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        z, rate = gates.f[row] + gates.dt_bias, np.exp(gates.A_log)[:, None]
        g = -rate * np.logaddexp(0, z) if bound is None else bound * sigmoid(rate * z)
        M = M * np.exp(g)[:, None]
        u = sigmoid(gates.b[row])[:, None] * (v - np.einsum("hvk,hk->hv", M, k))
        M = M + u[..., None] * k[:, None]
        o = rounded(np.einsum("hvk,hk->hv", M, q) * n**-0.5)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * x.norm * sigmoid(x.out_gate[row])
        outputs[row], u_all[row], k_all[row] = o, u, k
        history[slot], S[slot] = window[1:], M
    return Pools(history, S), outputs, u_all, k_all


def token(x, gates, t):
    """Token t of every row of what `verify` takes."""
    x, gates = (
        a._replace(**{n: getattr(a, n)[:, t] for n in names})
        for a, names in ((x, ("q", "k", "v", "out_gate")), (gates, ("f", "b")))
    )
    return x, gates


@functools.cache
def jitted(f, **fixed):
    """Without the option XLA, which interprets, leaves out roundings between two float32 operations."""
    call = functools.partial(f, **fixed, interpret=INTERPRET)
    return jax.jit(call, compiler_options={"xla_allow_excess_precision": False})


def advance(pools, x, gates, rows, bound=-5.0, **fixed):
    conv_pool, S, o = jitted(layer_step, eps=EPS, lower_bound=bound, **fixed)(*pools, x, gates, rows)
    return Pools(conv_pool, S), o
