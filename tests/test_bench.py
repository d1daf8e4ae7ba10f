"""`k3jax bench kernels`: floors, that both forms of a chained operation do the same work, the table, the record, refusals."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import bench, cli
from k3jax.bench import cases, peer

OPS = ["kda_prefill", "kda_decode", "kda_verify", "kda_replay", "attnres", "gated_norm", "conv"]
SPECULATION = ["kda_verify", "kda_replay"]  # of which there is no peer
# Small and interpreted; the sizes of an operation all differ.
TINY = {
    "kda_prefill": cases.kda_prefill_case(2, [70, 33], K=16, V=32, interpret=True),
    "kda_decode": cases.kda_decode_case(3, 5, K=16, V=32, sets=2, interpret=True),
    "kda_decode, bfloat16": cases.kda_decode_case(3, 5, "bfloat16", K=16, V=32, sets=2, interpret=True),
    "kda_verify": cases.kda_verify_case(3, 5, 4, K=16, V=32, sets=2, interpret=True),
    "kda_replay": cases.kda_replay_case(3, 5, 2, K=16, V=32, sets=2, interpret=True),
    "attnres": cases.attnres_case(6, 3, False, D=48, sets=2, interpret=True),
    "attnres, pending": cases.attnres_case(6, 3, True, D=48, sets=2, interpret=True),
    "attnres, any R": cases.attnres_case(6, 3, True, bank=True, D=48, sets=2, interpret=True),
    "gated_norm": cases.gated_norm_case(7, 3, V=24, sets=2, interpret=True),
    "conv": cases.conv_case(3, [9, 5], K=16, V=24, interpret=True),
}


def test_floors_by_hand():
    decode = cases.kda_decode_case(12, 256)
    state = 2 * 4 * 12 * 256 * 128 * 128  # float32, read and written
    history = 2 * 2 * 12 * 256 * 3 * 384
    token = 2 * 12 * 256 * (6 * 128 + 1)  # q, k, v, f, the gate, the output; b
    assert decode.bytes == state + history + token == 421_533_696
    assert bench.floor(decode) == (98.031, "bytes", 98.031)
    verify, replay = cases.kda_verify_case(12, 32, 4), cases.kda_replay_case(12, 32, 4)
    state, history, records = 4 * 12 * 32 * 128 * 128, 2 * 12 * 32 * 3 * 384, 4 * 4 * 12 * 32 * 2 * 128
    assert verify.bytes == state + history + 4 * 2 * 12 * 32 * (6 * 128 + 1) + records == 29_985_792
    assert verify.flops == 4 * cases.kda_decode_case(12, 32).flops
    assert replay.bytes == 2 * (state + history) + 4 * 2 * 12 * 32 * 128 + records == 54_067_200
    assert replay.flops == 4 * 3 * 12 * 32 * 128 * 128
    prefill = cases.kda_prefill_case(96, [8192])
    assert prefill.bytes == 8192 * 96 * 1282 + 2 * 96 * 65536
    assert (prefill.flops, prefill.handed) == (8192 * 96 * 139_264, 8192 * 96 * 1856)
    least = bench.floor(prefill)
    assert least == (round(prefill.bytes / 4.3e6, 3), "bytes", round((prefill.bytes + prefill.handed) / 4.3e6, 3))
    many = prefill._replace(flops=79 * 10**11)
    assert bench.floor(many)[:2] == (10_000, "FLOPs")


def size(tree, axis=None):
    """Bytes of the floating-point arrays, or of those of so many rows."""
    arrays = [a for a in jax.tree.leaves(tree) if a.dtype != jnp.int32 and axis in (None, a.shape[0])]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


@pytest.mark.parametrize("name", [name for name in TINY if name not in SPECULATION])
def test_bytes_are_those_of_the_arrays(name):
    """All results are carried, so a call reads and writes a set's share of the carry; it reads what has a token's axis.

    Of a bank it reads the blocks that are there.
    """
    case = TINY[name]
    carry, args, sets = jax.eval_shape(case.make)
    tokens = sum(case.sizes["lengths"]) if "lengths" in case.sizes else case.sizes.get("T", case.sizes.get("B"))
    pools = size(carry[:2]) if case.op == "kda_decode" else 0
    inputs = 0 if isinstance(sets[0], tuple) and case.op in ("conv", "kda_prefill") else size(sets[0])
    if case.sizes.get("bank"):
        inputs *= (case.sizes["R"] - 1) / cases.BLOCKS
    assert case.bytes == 2 * (size(carry) - pools + pools / case.sets) + size(args, tokens) + inputs


def test_bytes_of_speculation_are_those_of_the_arrays():
    """Verify reads a set's share of the pools and writes what it carries; replay moves the share on and reads of tokens f."""
    verify, replay = (TINY[name] for name in SPECULATION)
    (v, records), (pools, inputs, _), _ = jax.eval_shape(verify.make)
    assert verify.bytes == size(pools) / verify.sets + size(inputs, 5) + 2 * size(v) + size(records)
    pools, (records, _, _, ((*_, f, _), _)), _ = jax.eval_shape(replay.make)
    assert replay.bytes == 2 * size(pools) / replay.sets + size(f) + size(records)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("conv", "kda_decode, bfloat16", "kda_verify")))
        for name in TINY
    ],
)
def test_both_forms_do_the_same(name):
    case, strict, results = TINY[name], {"xla_allow_excess_precision": False}, []
    for call in (case.kernel, case.plain):
        operands = case.make()
        program = case.chained(call, 1)  # of every set
        results.append(program.lower(*operands).compile(strict)(*operands))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.dtype == want.dtype
        # Chunks are products of bfloat16; elsewhere a few results fall on the other side of a rounding.
        assert np.linalg.norm(a - b) <= (6e-3 if name == "kda_prefill" else 1e-3) * np.linalg.norm(b)


def test_calls_take_turns_over_slots_that_no_other_has():
    case = TINY["kda_decode"]
    slots = np.concatenate(cases.slot_sets(5, 2))
    assert sorted(slots) == list(range(10))
    assert [int(turn[0][0]) for turn in cases.turns_of(case.make().sets, 3)] == [slots[5 * (i % 2)] for i in range(4)]
    before = np.asarray(case.make().carry[1])
    after = np.asarray(case.chained(case.plain, 2)(*case.make())[1])
    assert (before != after).any(axis=(1, 2, 3)).all()


def test_real_sizes_stay_out_of_the_cache():
    """All sets together are more than the L2 holds, but for the depth mixture of one token, which says so."""
    assert [*dict.fromkeys(case.op for case in bench.CASES)] == OPS
    for case in bench.CASES:
        arrays = jax.tree.leaves(jax.eval_shape(case.make))
        total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        assert total > 6e7 or (case.shape.startswith("T=1 ") and "T=1 " in bench.FOOTNOTES)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were one: two small operations, of which calls are few."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "CASES", [TINY[name]._replace(calls=2) for name in ("gated_norm", "attnres")])
    monkeypatch.setattr(bench, "QUEUED_US", 0)
    monkeypatch.setattr(bench, "cannot_compile", lambda: None)


def run(capsys, *options):
    code = cli.main(["bench", "kernels", *map(str, options)])
    return code, *capsys.readouterr()


def test_table_and_record(on_gpu, capsys, tmp_path):
    out = tmp_path / "new" / "results"
    code, said, err = run(capsys, "--xla", "--out", out)
    assert (code, err) == (0, "")
    header, first, second, *notes = said.splitlines()
    assert header == bench.COLUMNS and "\n".join(notes) == bench.FOOTNOTES
    assert first.split()[:3] == ["gated_norm", "H=3", "T=7"] and second.split()[:3] == ["attnres", "T=6", "R=3"]
    [path] = out.iterdir()
    record = json.loads(path.read_text())
    assert path.name == f"{record['date']}-kernels.json" and record["what"] == "kernels"
    assert record["device"] and record["jax"] == jax.__version__ and {"driver", "python", "k3jax"} <= record.keys()
    assert record["options"] == {"only": None, "xla": True, "peer": False}
    for row, case in zip(record["rows"], bench.CASES, strict=True):
        assert row == {
            "op": case.op, **case.sizes, "bytes": case.bytes, "flops": case.flops, "floor_us": bench.floor(case).us,
            "floor_by": "bytes", "handed_bytes": 0, "floor_handed_us": bench.floor(case).us, "us": row["us"],
            "ratio": round(row["us"] / row["floor_us"], 3), "xla_us": row["xla_us"],
        }  # fmt: skip
        assert row["us"] > 0 and row["xla_us"] > 0


def test_only(on_gpu, capsys):
    code, said, _ = run(capsys, "--only", "attnres")
    assert code == 0 and [line.split()[0] for line in said.splitlines()[1:2]] == ["attnres"]
    assert "gated_norm" not in said and said.splitlines()[1].split()[-2:] == ["-", "-"]
    code, said, err = run(capsys, "--only", "attnres,mla")
    assert (code, said) == (2, "")
    assert err == "k3jax: only='mla': allowed are gated_norm, attnres, with commas between them\n"


def test_a_failure_is_a_row_and_an_exit_code(on_gpu, capsys, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such\nluck")

    monkeypatch.setattr(bench, "CASES", [bench.CASES[0]._replace(kernel=broken), bench.CASES[1]])
    code, said, _ = run(capsys, "--out", tmp_path)
    assert code == 1 and "failed" in said.splitlines()[1] and "us: RuntimeError: no such luck" in said
    [path] = tmp_path.iterdir()
    first, second = json.loads(path.read_text())["rows"]
    assert (first["us"], first["ratio"]) == (None, None) and first["errors"] == {"us": "RuntimeError: no such luck"}
    assert second["us"] > 0 and "errors" not in second


def test_an_interrupt_leaves_what_was_done(on_gpu, capsys, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "CASES", [bench.CASES[0], bench.CASES[1]._replace(make=interrupted)])
    code, _, err = run(capsys, "--out", tmp_path)
    assert (code, err) == (130, "k3jax: interrupted\n")
    [path] = tmp_path.iterdir()
    assert [row["op"] for row in json.loads(path.read_text())["rows"]] == ["gated_norm"]


def test_refusals(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    code, said, err = run(capsys, "--out", tmp_path / "results")
    assert (code, said, err.count("\n")) == (2, "", 1) and err.startswith("k3jax: backend='cpu': allowed is 'gpu'")
    assert not (tmp_path / "results").exists()
    # A wrong name is told before the missing GPU.
    assert all(op in run(capsys, "--only", "kda")[2] for op in ["only='kda'", *OPS])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "cannot_compile", lambda: "jax=0: allowed are others")
    assert run(capsys) == (2, "", "k3jax: jax=0: allowed are others\n")
    monkeypatch.setattr(bench, "cannot_compile", lambda: None)
    monkeypatch.setattr(peer, "NEEDS", ("jax", "no_such_package"))
    code, said, err = run(capsys, "--peer")
    assert (code, said, err) == (2, "", "k3jax: peer=True: allowed where no_such_package can be imported\n")


# -- the peer ----------------------------------------------------------------------------------------------------------


def test_what_a_peer_cannot_do_is_an_answer():
    with peer.Peer() as process:
        for op in ("no such operation", "conv"):  # here without a GPU, and as a rule without torch
            assert "error" in process.ask(op=op, calls=1, sets=1, H=0, lengths=[])
        process.process.kill()
        assert process.ask(op="conv") == {"error": "it ended with code -9"}
    assert list(peer.OPS) == [op for op in OPS if op not in SPECULATION] == list(peer.NOTES)


def test_times_of_a_peer_stand_in_table_and_record(on_gpu, capsys, tmp_path, monkeypatch):
    class Fake:
        answers = iter([{"us": 12.5, "how": "eager"}, {"error": "RuntimeError: out of memory"}])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def ask(self, op, calls, sets, **sizes):
            assert calls >= sets == 2 and (op, sizes) in [(case.op, case.sizes) for case in bench.CASES]
            return next(self.answers)

    monkeypatch.setattr(peer, "Peer", Fake)
    monkeypatch.setattr(peer, "missing", list)
    alone = TINY["attnres, any R"]._replace(calls=2)  # of which the peer is not asked
    monkeypatch.setattr(bench, "CASES", [*bench.CASES, alone])
    code, said, _ = run(capsys, "--peer", "--out", tmp_path)
    lines = said.splitlines()
    assert code == 1 and lines[1].endswith(" 12.5e") and lines[2].endswith(" failed")
    assert "peer_us: RuntimeError: out of memory" in lines[3] and peer.NOTES["attnres"] in lines[-2]
    assert lines[4].split()[:6] == ["attnres", "T=6", "R=3", "+pending", "any", "R"] and lines[4].endswith(" -")
    [path] = tmp_path.iterdir()
    first, second, third = json.loads(path.read_text())["rows"]
    assert (first["peer_us"], first["peer_how"], second["peer_us"]) == (12.5, "eager", None)
    assert third["bank"] is True and "peer_us" not in third
