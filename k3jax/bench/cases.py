"""The operations that have kernels, at Kimi K3's sizes: what one call must move and compute, and a form that can be chained.

A later kernel joins with a function that gives its Case, and its sizes in CASES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from k3jax.batch import Batch, prepare
from k3jax.ops import attnres as plain_attnres
from k3jax.ops import conv as plain_conv
from k3jax.ops import kda as plain_kda
from k3jax.ops.linear import einsum, gated_rms_norm, rms_norm
from k3jax.ops.pool import put
from k3jax.pallas import attnres, conv, gated_norm, kda_decode, kda_prefill, kda_verify
from k3jax.pallas.kda_prepare import CHUNK, Precision

K, V, W, D = 128, 128, 4, 7168  # of K3: channels of a head's keys and values, taps, width of the model
EPS, BOUND = 1e-5, -5.0
BLOCKS = 8  # of K3, of its depth mixture: at most so many beside what runs
COLD = 2 * 10**8  # bytes that other calls touch before one comes back to the same arrays: an H200's L2 cache holds 6e7

Sizes = dict[str, Any]
Call = Callable[[Any, Any, Any], Any]


class Operands(NamedTuple):
    """What a program of chained calls is given."""

    carry: Any  # what a call gives the next one: all its results, so that none can be left out
    args: Any  # of a layer: hidden behind a barrier before every call, so that nothing of them is computed once for all
    sets: Sequence[Any]  # what calls have in turn; of the step itself one, from which XLA computes things once


class Case(NamedTuple):
    """One operation at one size."""

    op: str
    sizes: Sizes  # the arguments of its function here, and of the peer's
    shape: str  # the same for people
    bytes: int  # read and written by a call, each array once; parameters, which are small, left out
    flops: int  # multiplications and additions; an exponential or a root is one
    make: Callable[[], Operands]
    kernel: Call  # (carry, args, turn) -> carry
    plain: Call  # the same by XLA
    calls: int  # in one program, at least
    plain_calls: int = 8
    sets: int = 1  # so many that a call's arrays come from memory
    handed: int = 0  # bytes that its kernels write for one another, and read
    peered: bool = True  # whether the peer has it, where it has the operation
    # The carry is donated, and goes on from program to program: it is large, or calls are so short that a program with its
    # arrays in other places, for which a graph of its calls is changed, would wait for the host.
    in_place: bool = False

    def chained(self, call: Call, calls: int) -> Callable[[Any, Any, Sequence[Any]], Any]:
        """The program: so many calls or more, in turns, each on what the one before gave."""
        one = jax.jit(call)  # traced once for all calls

        def run(carry: Any, args: Any, sets: Sequence[Any]) -> Any:
            for turn in turns_of(sets, calls):
                carry, args = lax.optimization_barrier((carry, args))
                carry = one(carry, args, turn)
            return carry

        return jax.jit(run, donate_argnums=0 if self.in_place else ())


def turns_of(sets: Sequence[Any], calls: int) -> list[Any]:
    """All sets, one after another, and again until there are enough calls."""
    return list(sets) * math.ceil(calls / len(sets))


def sets_of(size: int) -> int:
    """How many sets of so many bytes there must be for the others to come to COLD."""
    return 1 + math.ceil(COLD / size)


def slot_sets(B: int, sets: int) -> list[np.ndarray]:
    """Disjoint sets of B slots in random order."""
    return list(np.random.default_rng(5).permutation(sets * B).astype(np.int32).reshape(sets, B))


def _normals(count: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[Array]:
    make = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    return [make(jax.random.key(i)) for i in range(count)]


def _i32(values: Any) -> Array:
    return jnp.asarray(values, jnp.int32)


def _packed(lengths: list[int]) -> tuple[Any, Any]:
    """Packed rows that all go on, for the kernels, and what `prepare` makes of them for the plain operations."""
    B = len(lengths)
    starts, slots, computed = _i32(np.cumsum([0, *lengths])), _i32(np.arange(B)), jnp.ones(B, jnp.int32)
    tokens, none = jnp.zeros(sum(lengths), jnp.int32), jnp.zeros(0, jnp.int32)
    batch = Batch(tokens, starts, computed, slots, jnp.zeros((B, 0), jnp.int32), none)
    return (starts, slots, computed), jax.jit(prepare, static_argnums=(1, 2, 3))(batch, 0, 64, W).prefill


def _turns(B: int, sets: int) -> list[kda_decode.Rows]:
    """B rows that all go on, in other slots in each set."""
    return [kda_decode.Rows(_i32(slots), jnp.ones(B, jnp.int32)) for slots in slot_sets(B, sets)]


def _label(lengths: list[int]) -> str:
    return f"{len(lengths)}x{lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))


def _read(pool: Array, slots: Array) -> Array:
    """Once: a pool in bfloat16, which `put` writes as integers, XLA may read again as it writes, and copies it all for that."""
    held = pool.at[slots].get(mode="fill", fill_value=0)
    return lax.optimization_barrier(held) if pool.dtype == jnp.bfloat16 else held


def _beta(b: Array) -> Array:
    return jax.nn.sigmoid(b.astype(jnp.float32))


# -- the operations ----------------------------------------------------------------------------------------------------


def kda_prefill_case(
    H: int, lengths: list[int], bound: float | None = BOUND, precision: Precision = "default", K: int = K, V: int = V,
    interpret: bool = False,
) -> Case:  # fmt: skip
    """q, k, v, f, b and the outputs in bfloat16, and every row's state."""
    T, B = sum(lengths), len(lengths)
    item = 2 if precision == "default" else 4  # of what the kernels hand each other
    form = "" if bound is not None else " no bound"
    form += "" if precision == "default" else f" {precision}"

    def make() -> Operands:
        (q, k, f), [v], [b] = _normals(3, (T, H, K)), _normals(1, (T, H, V)), _normals(1, (T, H))
        [S], [bias] = _normals(1, (B, H, V, K), jnp.float32), _normals(1, (H, K), jnp.float32)
        return Operands((S, v), (q, k, f, b, jnp.zeros(H), bias), [_packed(lengths)])

    def kernel(carry: Any, args: Any, turn: Any, snapshots: kda_prefill.Snapshots | None = None) -> Any:
        (S, v), (q, k, *gates) = carry, args
        x, rows = kda_prefill.Raw(q, k, v, *gates), kda_prefill.Rows(*turn[0])
        return kda_prefill.prefill(S, x, rows, bound, snapshots, precision, interpret=interpret)

    def plain(carry: Any, args: Any, turn: Any) -> Any:
        (S, v), (q, k, f, b, A_log, bias), ((_, slots, _), rows) = carry, args, turn
        x = plain_kda.Inputs(q, k, v, plain_kda.log_decay(f, A_log, bias, bound), _beta(b))
        new, o = plain_kda.prefill(_read(S, slots), x, rows, "chunk")
        return put(S, slots, new), o.astype(v.dtype)

    return Case(
        op="kda_prefill", sizes={"H": H, "lengths": lengths, "bound": bound, "precision": precision},
        shape=f"H={H} {_label(lengths)}{form}",
        bytes=2 * T * H * (3 * K + 2 * V + 1) + 2 * 4 * B * H * K * V,
        flops=2 * T * H * (3 * K * V + 5 * CHUNK * K),
        # X, Y and three tiles of K channels, and decays of half chunks in float32.
        handed=2 * T * H * (item * (3 * K + 2 * CHUNK) + 4 * 2 * K // CHUNK),
        make=make, kernel=kernel, plain=plain, calls=8, plain_calls=2,
    )  # fmt: skip


def _inputs(lead: tuple[int, ...], H: int, K: int, V: int) -> tuple[Array, Any]:
    """Of a KDA layer v, the other inputs of each token, and the parameters."""
    (q, k, f), (v, gate), [b] = _normals(3, (*lead, H, K)), _normals(2, (*lead, H, V)), _normals(1, (*lead, H))
    [bias], taps = _normals(1, (H, K), jnp.float32), [_normals(1, (H, C, W), jnp.float32)[0] for C in (K, K, V)]
    return v, ((q, k, gate, f, b), (tuple(taps), jnp.ones(V), jnp.zeros(H), bias))


def _pools(slots: int, H: int, K: int, V: int, state: str = "float32") -> tuple[Array, Array]:
    """Histories and states."""
    [history], [S] = _normals(1, (slots, W - 1, H, 2 * K + V)), _normals(1, (slots, H, V, K), jnp.dtype(state))
    return history, S


def _layer(v: Any, tokens: Any, parameters: Any) -> tuple[kda_decode.Layer, kda_decode.Gates]:
    (q, k, gate, f, b), (taps, norm, A_log, bias) = tokens, parameters
    return kda_decode.Layer(q, k, v, taps, gate, norm), kda_decode.Gates(f, b, A_log, bias)


def _log_decay(gates: kda_decode.Gates) -> Array:
    return plain_kda.log_decay(gates.f, gates.A_log, gates.dt_bias, BOUND)


def _plain_step(S: Array, past: Array, x: kda_decode.Layer, gates: kda_decode.Gates) -> tuple[Any, ...]:
    """States and histories after a token a row, its output, and its record; XLA computes once what state and record share."""
    y, past = plain_conv.step(jnp.concatenate([x.q, x.k, x.v], -1), jnp.concatenate(x.taps, 1), past)
    q, k, v = jnp.split(y, [x.q.shape[-1], 2 * x.q.shape[-1]], -1)
    g, beta, unit = _log_decay(gates), _beta(gates.b), plain_kda.l2_normalise(k)
    new, o = plain_kda.step(S, plain_kda.Inputs(q, k, v, g, beta))
    u = beta[..., None] * (v.astype(jnp.float32) - einsum("bhvk,bhk->bhv", S * jnp.exp(g)[..., None, :], unit))
    return new, past, gated_rms_norm(o.astype(v.dtype), x.out_gate, x.norm, EPS), kda_verify.Records(u, unit)


def kda_decode_case(
    H: int, B: int, state: str = "float32", K: int = K, V: int = V, sets: int | None = None, interpret: bool = False
) -> Case:
    """State and history read and written; q, k, v, f, b, the output's gate and the output. Other slots at every call."""
    item = jnp.dtype(state).itemsize
    sets = sets or sets_of(B * H * K * V * item)

    def make() -> Operands:
        v, args = _inputs((B,), H, K, V)
        return Operands((*_pools(sets * B, H, K, V, state), v), args, _turns(B, sets))

    def kernel(carry: Any, args: Any, rows: Any) -> Any:
        history, S, v = carry
        return kda_decode.layer_step(history, S, *_layer(v, *args), rows, EPS, BOUND, interpret=interpret)

    def plain(carry: Any, args: Any, rows: Any) -> Any:
        history, S, v = carry
        held, past = _read(S, rows.slots).astype(jnp.float32), _read(history, rows.slots)
        new, kept, o, _ = _plain_step(held, past, *_layer(v, *args))
        return put(history, rows.slots, kept), put(S, rows.slots, new.astype(S.dtype)), o

    token = 2 * (3 * K + 3 * V + 1) + 2 * 2 * (W - 1) * (2 * K + V)
    return Case(
        op="kda_decode", sizes={"H": H, "B": B, "state": state}, shape=f"H={H} B={B} {state}",
        bytes=B * H * (2 * item * K * V + token), flops=B * H * (7 * K * V + 2 * W * (2 * K + V)),
        make=make, kernel=kernel, plain=plain, calls=32, sets=sets, in_place=True,
    )  # fmt: skip


def kda_verify_case(
    H: int, B: int, N: int, K: int = K, V: int = V, sets: int | None = None, interpret: bool = False
) -> Case:
    """State and history read; of N tokens a row what decode reads and writes, and the records. Other slots at every call."""
    sets = sets or sets_of(4 * B * H * K * V)

    def make() -> Operands:
        (v, inputs), lengths = _inputs((B, N), H, K, V), jnp.full(B, N, jnp.int32)
        records = kda_verify.Records(*(jnp.zeros((B, N, H, C)) for C in (V, K)))
        return Operands((v, records), (_pools(sets * B, H, K, V), inputs, lengths), _turns(B, sets))

    def kernel(carry: Any, args: Any, rows: Any) -> Any:
        (v, _), ((history, S), inputs, lengths) = carry, args
        return kda_verify.verify(history, S, *_layer(v, *inputs), rows, lengths, EPS, BOUND, interpret=interpret)

    def plain(carry: Any, args: Any, rows: Any) -> Any:
        (v, _), ((history, S), (tokens, parameters), _) = carry, args
        S, past, found = _read(S, rows.slots), _read(history, rows.slots), []
        for t in range(N):
            S, past, *results = _plain_step(S, past, *_layer(v[:, t], [a[:, t] for a in tokens], parameters))
            found.append(tuple(results))
        return jax.tree.map(lambda *a: jnp.stack(a, 1), *found)

    token = 2 * (3 * K + 3 * V + 1) + 4 * (K + V)
    return Case(
        op="kda_verify", sizes={"H": H, "B": B, "N": N}, shape=f"H={H} B={B} N={N}",
        bytes=B * H * (4 * K * V + 2 * (W - 1) * (2 * K + V) + N * token),
        flops=B * H * N * (7 * K * V + 2 * W * (2 * K + V)),
        make=make, kernel=kernel, plain=plain, calls=32, sets=sets, peered=False, in_place=True,
    )  # fmt: skip


def kda_replay_case(
    H: int, B: int, N: int, K: int = K, V: int = V, sets: int | None = None, interpret: bool = False
) -> Case:
    """State read and written, f and records of N tokens a row, all accepted, and the W - 1 inputs that become history."""
    sets = sets or sets_of(4 * B * H * K * V)

    def make() -> Operands:
        records = kda_verify.Records(*(_normals(1, (B, N, H, C), jnp.float32)[0] for C in (V, K)))
        args = records, jnp.full(B, N, jnp.int32), *_inputs((B, N), H, K, V)
        return Operands(_pools(sets * B, H, K, V), args, _turns(B, sets))

    def kernel(pools: Any, args: Any, rows: Any) -> Any:
        (history, S), (records, accepted, v, inputs) = pools, args
        return kda_verify.replay(history, S, *_layer(v, *inputs), records, rows, accepted, BOUND, interpret=interpret)

    def plain(pools: Any, args: Any, rows: Any) -> Any:
        (history, S), (records, _, v, inputs) = pools, args
        x, gates = _layer(v, *inputs)
        new, decay = _read(S, rows.slots), jnp.exp(_log_decay(gates))
        for t in range(N):
            new = new * decay[:, t, :, None, :] + records.u[:, t, :, :, None] * records.k[:, t, :, None, :]
        seen = jnp.concatenate([_read(history, rows.slots), jnp.concatenate([x.q, x.k, x.v], -1)], 1)
        return put(history, rows.slots, seen[:, 1 - W :]), put(S, rows.slots, new)

    return Case(
        op="kda_replay", sizes={"H": H, "B": B, "N": N}, shape=f"H={H} B={B} N={N}",
        bytes=B * H * (2 * 4 * K * V + 2 * 2 * (W - 1) * (2 * K + V) + N * (2 * K + 4 * (K + V))),
        flops=B * H * N * 3 * K * V,
        make=make, kernel=kernel, plain=plain, calls=32, sets=sets, peered=False, in_place=True,
    )  # fmt: skip


def attnres_case(
    T: int, R: int, pending: bool, bank: bool = False, D: int = D, sets: int | None = None, interpret: bool = False
) -> Case:
    """R sources and the addition's operand read, the sum and the normed mixture written. Other blocks at every call.

    bank: the blocks are the first of BLOCKS, as the step says, and XLA's form reads all of them.
    """
    sets = sets or min(16, sets_of(2 * T * D * R))

    def make() -> Operands:
        (running, added), (norm, query, gain) = _normals(2, (T, D)), _normals(3, (D,))
        if bank:
            turns = [attnres.Bank(a, _i32(R - 1)) for a in _normals(sets, (BLOCKS, T, D))]
        else:
            turns = [tuple(_normals(R - 1, (T, D))) for _ in range(sets)]
        return Operands((running, added) if pending else (running,), (norm, query * D**-0.5, gain), turns)

    def kernel(carry: Any, args: Any, blocks: Any) -> Any:
        (running, added), (norm, query, gain) = carry if pending else (*carry, None), args
        running, x, _ = attnres.mix_norm(running, added, blocks, norm, query, gain, EPS, interpret=interpret)
        return (running, x) if pending else (x,)

    def plain(carry: Any, args: Any, blocks: Any) -> Any:
        carry, blocks = lax.optimization_barrier((carry, blocks))  # their norms too are computed at every call
        running, (norm, query, gain) = carry[0] + carry[1] if pending else carry[0], args
        there = None
        if bank:
            blocks, count = blocks
            there = jnp.append(jnp.arange(BLOCKS) < count, True)
        mixed, _ = plain_attnres.mix((*blocks, running), norm, query.reshape(1, -1), EPS, there)
        x = rms_norm(mixed, gain, EPS)
        return (running, x) if pending else (x,)

    sizes: Sizes = {"T": T, "R": R, "pending": pending}
    return Case(
        op="attnres", sizes=sizes | ({"bank": True} if bank else {}),
        shape=f"T={T} R={R}{' +pending' if pending else ''}{' any R' if bank else ''}",
        bytes=2 * T * D * (R + 1 + 2 * pending), flops=T * D * (6 * R + 5 + pending),
        make=make, kernel=kernel, plain=plain, calls=8 if T > 256 else 64, sets=sets, peered=not bank, in_place=True,
    )  # fmt: skip


def gated_norm_case(T: int, H: int, V: int = V, sets: int | None = None, interpret: bool = False) -> Case:
    """o and its gate read, the result written. Other gates at every call."""
    sets = sets or sets_of(2 * T * H * V)

    def make() -> Operands:
        [o], gates = _normals(1, (T, H, V)), _normals(sets, (T, H, V))
        return Operands(o, jnp.ones(V), gates)

    def kernel(o: Any, gain: Any, gate: Any) -> Any:
        return gated_norm.gated_rms_norm(o, gate, gain, EPS, interpret=interpret)

    def plain(o: Any, gain: Any, gate: Any) -> Any:
        return gated_rms_norm(o, gate, gain, EPS)

    return Case(
        op="gated_norm", sizes={"T": T, "H": H}, shape=f"H={H} T={T}",
        bytes=3 * 2 * T * H * V, flops=6 * T * H * V, make=make, kernel=kernel, plain=plain, calls=24, sets=sets,
    )  # fmt: skip


def conv_case(H: int, lengths: list[int], K: int = K, V: int = V, interpret: bool = False) -> Case:
    """q, k and v read and written, and every row's history."""
    T, B, C = sum(lengths), len(lengths), 2 * K + V

    def make() -> Operands:
        (q, k), [v], [taps] = _normals(2, (T, H, K)), _normals(1, (T, H, V)), _normals(1, (W, H, C), jnp.float32)
        [pool] = _normals(1, (B, W - 1, H, C))
        return Operands((q, k, v, pool), taps, [_packed(lengths)])

    def kernel(carry: Any, taps: Any, turn: Any) -> Any:
        q, k, v, pool = carry
        return conv.packed(q, k, v, taps, pool, *turn[0], interpret=interpret)

    def plain(carry: Any, taps: Any, turn: Any) -> Any:
        *qkv, pool = carry
        (_, slots, _), rows = turn
        raw, weight = jnp.concatenate(qkv, -1), jnp.moveaxis(taps, 0, -1)
        y, kept = plain_conv.packed(raw, weight, _read(pool, slots), rows)
        return *jnp.split(y, [K, 2 * K], -1), put(pool, slots, kept)

    return Case(
        op="conv", sizes={"H": H, "lengths": lengths}, shape=f"H={H} {_label(lengths)}",
        bytes=2 * 2 * H * C * (T + B * (W - 1)), flops=T * H * C * 2 * W,
        make=make, kernel=kernel, plain=plain, calls=16,
    )  # fmt: skip


CASES = [
    *(kda_prefill_case(H, n) for H, n in ((96, [8192]), (12, [8192]), (12, [32768]), (12, [1024] * 8))),
    kda_prefill_case(32, [8192], bound=None),  # Kimi-Linear's gate and heads
    *(kda_prefill_case(96, [8192], precision=p) for p in ("high", "highest")),
    *(
        kda_decode_case(H, B, state)
        for H, rows in ((12, (1, 8, 32, 64, 128, 256)), (96, (1, 8, 32, 128)))
        for B in rows
        for state in ("float32", "bfloat16")
    ),
    *(f(H, B, 4) for f in (kda_verify_case, kda_replay_case) for H, B in ((12, 1), (12, 32), (96, 8))),
    *(attnres_case(T, R, p) for T, R in ((8192, 2), (8192, 5), (8192, 9), (1, 9), (64, 9)) for p in (False, True)),
    *(attnres_case(T, R, False, bank=True) for T, R in ((8192, 2), (8192, 9), (1, 9))),
    *(gated_norm_case(8192, H) for H in (96, 12)),
    *(conv_case(H, n) for H in (96, 12) for n in ([8192], [1024] * 8)),
]
