"""The scan in Mosaic GPU behind the prepare kernel in Triton, against the recurrence in float64; on a CPU they are interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pallas_kda_prefill as prefill
from helpers import INTERPRET, relative_error
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import kda_scan_mosaic as kernel
from k3jax.pallas.kda_prefill import Snapshots
from k3jax.pallas.kda_prepare import Unit, chunks_of, prepare

has_mosaic = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.10 neither builds the kernel nor interprets it"
)
GATES = ["mixed", "0", "-5", "tokens at 0 or -5"]
LENGTHS = [33, 1, 0, 71, 30, 0]  # none but the first begins at a multiple of 8, none ends with a whole chunk


@functools.partial(jax.jit, static_argnums=2)
def prepared(x, chunks, bound):
    return prepare(x, chunks, bound, Unit("default", INTERPRET), 2)  # it does not look at v


@functools.lru_cache
def program(bound, tuning=None):
    tuning = tuning or kernel.Tuning()
    scan = jax.jit(functools.partial(kernel.scan, tuning=tuning, interpret=INTERPRET))

    def run(pool, x, rows, snapshots=None):
        assert kernel.refuse(x.v, tuning) is None
        chunks = chunks_of(rows.starts, x.q.shape[0])
        return scan(pool, prepared(x._replace(v=None), chunks, bound), x.v, chunks, rows, snapshots)

    return run


@pytest.fixture(autouse=True)
def this_kernel(monkeypatch):
    """What checks the prefill runs this program."""
    monkeypatch.setattr(prefill, "program", program)


def draw(lengths=LENGTHS, padding=8, H=2, V=128, **options):
    return prefill.draw(lengths, padding=padding, H=H, K=128, V=V, dtype=jnp.bfloat16, **options)


def check(lengths, x, **options):
    prefill.check(lengths, x, *prefill.memory(lengths, x, begun=True), 6e-3, **options)


@has_mosaic
@pytest.mark.parametrize("gate", GATES)
def test_scan_equals_the_recurrence_needs_jax_0_11(gate):
    check(LENGTHS, draw(gate=gate))


@has_mosaic
@pytest.mark.parametrize("V, groups, stages", [(192, 1, 1), (256, 2, 5)])
def test_tuning_and_width_needs_jax_0_11(V, groups, stages):
    check(LENGTHS, draw(V=V), tuning=kernel.Tuning(groups, stages))


@has_mosaic
@pytest.mark.parametrize("lengths, padding", [([1], 0), ([0, 96, 0], 33)])
def test_fewer_tokens_than_a_copy_takes_and_chunks_that_are_whole_needs_jax_0_11(lengths, padding):
    check(lengths, draw(lengths, padding, H=1, correlation=0.5))


@has_mosaic
def test_no_tokens_in_any_row_needs_jax_0_11():
    x = draw()
    pool, rows = prefill.memory([0] * len(LENGTHS), x, begun=True)
    got, o = prefill.run(pool, x, rows)
    assert got.tobytes() == np.asarray(pool).tobytes()
    assert (o == 0).all()


@has_mosaic
def test_long_rows_needs_jax_0_11():
    lengths = [201, 300]
    check(lengths, draw(lengths, correlation=0.5))


@has_mosaic
def test_snapshots_needs_jax_0_11():
    """The state after so many tokens, in slots of the same pool; what no chunk ends with, and slots nowhere, are not kept."""
    lengths, wanted = [100, 31, 64, 0], {(0, 32): 9, (0, 96): 11, (2, 64): 10}
    x = draw(lengths, padding=0, H=1)
    pool, rows = prefill.memory(lengths, x, begun=True)
    pool = jnp.concatenate([pool[rows.slots], jnp.full((8, *pool.shape[1:]), jnp.nan)])
    rows = rows._replace(slots=jnp.arange(4, dtype=jnp.int32))
    table = [[0, 32, 96], [32, 0, 0], [33, 64, 96], [32, 64, 96]]
    slots = [[8, 9, 11], [8, 8, 8], [8, 10, 8], [8, 8, prefill.NOWHERE]]
    got, o = prefill.run(pool, x, rows, snapshots=Snapshots(jnp.int32(table), jnp.int32(slots)))
    want, states, kept = prefill.recurrence(pool, x, rows, snapshots=wanted)
    assert relative_error(o, want) < 6e-3
    for at, slot in wanted.items():
        assert relative_error(got[slot], kept[at]) < 6e-3, at
    assert relative_error(got[:3], states[:3]) < 6e-3
    assert np.isnan(got[[4, 5, 6, 7, 8]]).all()


@has_mosaic
def test_rows_without_a_slot_leave_nothing_needs_jax_0_11():
    x, T = draw(), sum(LENGTHS)
    pool, rows = prefill.memory(LENGTHS, x, begun=True)
    got, o = prefill.run(pool, x, rows._replace(slots=jnp.int32([prefill.NOWHERE, -1] * 3)))
    want, _, _ = prefill.recurrence(pool, x, rows._replace(num_computed=jnp.zeros(6, jnp.int32)))
    assert relative_error(o[:T], want[:T]) < 6e-3
    assert got.tobytes() == np.asarray(pool).tobytes()


def test_what_is_refused():
    cases = {
        "tuning.groups=3: allowed are 1 to 2": (192, kernel.Tuning(groups=3)),
        "tuning.groups=0: allowed are 1 to 2": (128, kernel.Tuning(groups=0)),
        "tuning.stages=6: allowed are 1 to 5": (128, kernel.Tuning(stages=6)),
        "V=192: allowed are multiples of 128": (192, kernel.Tuning()),
        "V=96: allowed are multiples of 64": (96, kernel.Tuning(groups=1)),
    }
    for reason, (V, tuning) in cases.items():
        assert kernel.refuse(jax.ShapeDtypeStruct((5, 1, V), jnp.bfloat16), tuning) == reason
