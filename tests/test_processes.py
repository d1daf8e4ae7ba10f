"""Several processes: all do the same in the same order or none goes on, and where one dies, all end and say which."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import on_mesh, same_bits
from hypothesis import assume, given
from hypothesis import strategies as st

import k3jax
from k3jax import cli, processes
from k3jax.engine import Engine, batch_file, follow, runner
from k3jax.engine.replicas import replicate
from k3jax.group import EXIT, Schedule, ScheduleError

HEARTBEAT = 10  # seconds, the least
WORDS = "k3jax batch --model m"


def ports():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def started(*arguments):
    """Two processes of four devices each, with `--process 0` and `--process 1` for their last arguments."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    where = ("--coordinator", f"localhost:{ports()}", "--processes", "2", "--heartbeat", str(HEARTBEAT), "--process")
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments), *where, str(number)],
            env={**os.environ, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]


def ended(pair):
    """Exit codes and what was said on stderr. It takes no longer than a dead process may go unnoticed, and that is noticed."""
    said = [process.communicate(timeout=100)[1] for process in pair]
    return [process.returncode for process in pair], said


# -- calls ---------------------------------------------------------------------------------------------------------


def schedule_of(calls):
    """What process 0 sends for these calls, and what each of them finds."""
    leader, sent = Schedule(), []
    for name, args, found in calls:
        sent.append(leader.tell(name, args))
        leader.note(found)
    return sent


FOUND = st.lists(st.integers(-1, 2047), max_size=3).map(lambda tokens: np.array(tokens, np.int32))
CALLS = st.lists(st.tuples(st.sampled_from(["place", "copy", "compute"]), st.tuples(st.integers()), FOUND), max_size=8)


@given(CALLS)
def test_calls_arrive_as_they_were_told(calls):
    follower = Schedule()
    for sent, (name, args, found) in zip(schedule_of(calls), calls, strict=True):
        assert follower.hear(*sent) == (name, args)
        follower.note(found)


@given(CALLS.filter(bool), st.data())
def test_no_call_is_taken_after_one_that_was_lost_moved_or_repeated(calls, data):
    """Whatever becomes of the messages, what is taken of them is how the schedule begins."""
    sent, follower = schedule_of(calls), Schedule()
    heard = data.draw(st.lists(st.sampled_from(range(len(sent))), max_size=9))
    for taken, i in enumerate(heard):
        if i != taken:
            with pytest.raises(ScheduleError, match=f"call {i + 1} came after call {taken}"):
                follower.hear(*sent[i])
            return
        assert follower.hear(*sent[i]) == calls[i][:2]
        follower.note(calls[i][2])


@given(CALLS.filter(bool), st.data())
def test_no_call_is_taken_after_anything_else_was_told_or_found(calls, data):
    """A call of another engine, other arguments or another token, anywhere: none from there on is taken."""
    i = data.draw(st.integers(0, len(calls) - 1))
    other = data.draw(st.tuples(st.sampled_from(["place", "copy", "compute"]), st.tuples(st.integers()), FOUND))
    same_call, same_found = other[:2] == calls[i][:2], np.array_equal(other[2], calls[i][2])
    assume(not (same_call and same_found))
    sent, others = schedule_of(calls), schedule_of([*calls[:i], other, *calls[i + 1 :]])
    follower = Schedule()
    for number in range(i + 1):
        follower.hear(*others[number])
        follower.note([*calls[:i], other][number][2])
    for call in sent[i + 1 : i + 2]:
        with pytest.raises(ScheduleError, match=f"call {i + 2}: what was told or found before it differs"):
            follower.hear(*call)


def test_every_program_of_the_runner_is_told():
    """What runs on the device is inside a method that the others are told of, or one that refuses where there are others."""
    [own] = [
        node for node in ast.parse(Path(runner.__file__).read_text()).body if getattr(node, "name", "") == "Runner"
    ]
    told = set()
    for method in own.body:
        source = ast.unparse(method)
        if re.search(r"generate\.(step|decode|place|copy|load|unload)\(", source):
            assert source.startswith("@told\n") or "self._check_alone()" in source, source
        told |= {method.name} if source.startswith("@told\n") else set()
    assert told == {"place", "copy", "compute"}


def test_runners_begin_alike(pair):
    """Also where nobody has given a seed yet: a process that drew one would run another program."""
    sizes, pools = dict(rows=3, page=8, pages=4, snapshots=0, memory=None), []
    with on_mesh(pair, k3jax.make_mesh(tp=2)) as lm:
        for _ in range(2):
            with Engine(lm, prefix_cache=False, **sizes) as engine:
                pools.append(jax.tree.map(np.asarray, engine.runner.state))
    assert all(map(same_bits, *map(jax.tree.leaves, pools)))


# -- starting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(processes=2, process=0), "coordinator=None: allowed is HOST:PORT"),
        (dict(processes=2, process=0, coordinator="host"), "coordinator='host': allowed is HOST:PORT"),
        (dict(processes=2, process=0, coordinator=":1234"), "coordinator=':1234'"),
        (dict(processes=2, process=0, coordinator="host:0"), "coordinator='host:0'"),
        (dict(processes=2, process=0, coordinator="host:65536"), "coordinator='host:65536'"),
        (dict(processes=2, coordinator="host:1"), "process=None: allowed are 0 to 1, of 2 processes"),
        (dict(processes=2, coordinator="host:1", process=2), "process=2: allowed are 0 to 1"),
        (dict(processes=0, coordinator="host:1", process=0), "processes=0: allowed are a number from 1, 'auto'"),
        (dict(processes=True), "processes=True"),
        (dict(processes="slurm"), "processes='slurm'"),
        (dict(coordinator="host:1"), "coordinator='host:1': allowed is None beside processes=None"),
        (dict(process=0), "process=0: allowed is None beside processes=None"),
        (dict(processes="auto", process=1), "process=1: allowed is None beside processes='auto'"),
        (dict(heartbeat=9), "heartbeat=9: allowed are 10 to 30 seconds"),
        (dict(heartbeat=31.0), "heartbeat=31.0: allowed"),
        (dict(heartbeat=True), "heartbeat=True: allowed"),
    ],
)
def test_what_cannot_start_is_refused_by_name(options, words):
    with pytest.raises(ValueError, match=re.escape(words)), processes.start(**options):
        pass


@pytest.mark.parametrize("options", [{}, dict(processes=1), dict(processes=1, process=0, coordinator="host:1")])
def test_one_process_is_no_group(options):
    with processes.start(**options) as group:
        assert group is None and processes.current() is None


def test_auto_without_a_job_is_refused():
    code = "from k3jax import processes\nwith processes.start(processes='auto'): pass"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORD"))}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True)
    assert "ValueError: processes='auto': jax finds no such job here" in done.stderr


def test_the_command_refuses_before_a_model_is_loaded(tmp_path, capsys):
    (tmp_path / "in").write_text("{}\n")
    files = ["--model", str(tmp_path), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    for options, words in (
        (["--processes", "2", "--process", "0"], "coordinator=None"),
        (["--processes", "2", "--process", "1"], "coordinator=None"),
        (["--heartbeat", "5"], "heartbeat=5"),
        (["--ep", "2"], "ep=2: allowed beside tp"),
        (["--tp", "99"], "tp=99: allowed are 1 to"),
    ):
        assert cli.main(["batch", *files, *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err


def test_an_abort_leaves_time_to_say_why():
    """jax aborts a process that has lost process 0; what notices the same says it first."""
    code = """
import ctypes, os, threading, time
from k3jax import processes
with processes._aborts_delayed():
    threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()  # which holds no lock, as jax's
    time.sleep(1)
    os._exit(5)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 5


# -- a group at work -----------------------------------------------------------------------------------------------

# Two processes that add up over all eight devices, as often as process 0 says, and what goes wrong in one of them.
WORK = """
import os, sys, time
import jax, numpy as np
from k3jax import processes, sharding

what, number, coordinator = sys.argv[1], int(sys.argv[-1]), sys.argv[3]
told = dict(coordinator=coordinator, processes=2, process=number)
if what == "slurm":
    os.environ |= dict(SLURM_JOB_ID=coordinator[10:], SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2",
                       SLURM_PROCID=str(number), SLURM_LOCALID=str(number))
    told = dict(processes="auto")
if what == "mpi":
    os.environ |= dict(OMPI_MCA_orte_hnp_uri=f"{int(coordinator[10:]) << 12}.0;tcp://127.0.0.1:1", OMPI_COMM_WORLD_SIZE="2",
                       OMPI_COMM_WORLD_RANK=str(number), OMPI_COMM_WORLD_LOCAL_RANK=str(number))
    told = dict(processes="auto")
with processes.start(**told, heartbeat=float(sys.argv[7]), resume="WORDS") as group:
    assert processes.current() is group and jax.local_device_count() == 4
    group.agree(what=what, size=number * (what == "other"))
    mesh = sharding.make_mesh()
    total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, ("data", "ep", "tp")), mesh=mesh, in_specs=jax.P("ep"),
                                  out_specs=jax.P(), check_vma=False))

    def add(i):
        found = np.asarray(total(np.arange(8) + i))
        assert found == [28 + 8 * i]
        group.note(found + number * ((what, i) in (("found", 5), ("last", 19))))

    def shown(i):
        if i == 3:
            print("under way", flush=True)
        if i == 5 and what == f"raises{number}":
            raise ValueError(f"field={i}: allowed is 4")

    if group.leads:
        if what == "dropped":
            [peer] = group._peers
            put, peer.outbox = peer.outbox.put, type("Outbox", (), {"get": peer.outbox.get, "put": staticmethod(
                lambda message: None if message and message[:2] == ("call", 6) else put(message))})()
        for i in range(20 if what in ("ends", "slurm", "mpi", "last") else 10**9):
            group.tell("add", i)
            add(i)
            shown(i)
            time.sleep(0.01)
        group.code = 7
    else:
        for name, (i,) in group.calls():
            assert name == "add"
            add(i)
            shown(i)
assert processes.current() is None
sys.exit(group.code)
""".replace("WORDS", WORDS)


def work(what, victim=0, kill=None):
    pair = started("-c", WORK, what)
    if kill is not None:
        for process in pair:
            assert process.stdout.readline() == "under way\n" or process.stdout.readline()
        time.sleep(0.1)
        pair[victim].send_signal(kill)
    return ended(pair) if kill != signal.SIGSTOP else pair


def lines(said):
    return [line for line in said.splitlines() if line.startswith("k3jax: ")]


@pytest.mark.parametrize("how", ["ends", *(pytest.param(how, marks=pytest.mark.slow) for how in ("slurm", "mpi"))])
def test_all_end_with_the_exit_code_of_the_first(how):
    """Told who they are, or found out from Slurm's or Open MPI's variables."""
    codes, said = work(how)
    assert codes == [7, 7] and not any(map(lines, said)), said


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_ends_the_other_which_says_so(victim):
    codes, said = work("on", victim, signal.SIGKILL)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == EXIT, said
    host = re.escape(socket.gethostname())
    [line] = lines(said[1 - victim])
    assert re.fullmatch(rf"k3jax: process {victim} \({host}\) died; the same commands.*: {WORDS}", line)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_silence_is_death(victim):
    """The other one waits in a program for it, and still ends in time."""
    pair = work("on", victim, signal.SIGSTOP)
    try:
        _, said = pair[1 - victim].communicate(timeout=HEARTBEAT)
        assert pair[1 - victim].returncode == EXIT
        assert f"process {victim} ({socket.gethostname()}) has been silent for 8 seconds" in lines(said)[0]
    finally:
        pair[victim].kill()
        pair[victim].communicate()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_of_any_is_one_of_all(victim):
    codes, said = work("on", victim, signal.SIGINT)
    assert codes == [-signal.SIGINT] * 2 and all("KeyboardInterrupt" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_one_ends_all_which_name_it(victim):
    codes, said = work(f"raises{victim}")
    assert codes == [EXIT] * 2
    for text in said:
        [line] = lines(text)
        assert line == f"k3jax: process {victim} ({socket.gethostname()}): field=5: allowed is 4"


@pytest.mark.parametrize(
    "what, words",
    [
        ("dropped", "call 6 did not come"),
        pytest.param("found", "call 8: what was told or found before it differs", marks=pytest.mark.slow),
        pytest.param("other", "size=1: allowed is 0, which process 0 has", marks=pytest.mark.slow),
        pytest.param("last", "call 22: what was told or found before it differs", marks=pytest.mark.slow),
    ],
)
def test_what_differs_ends_all_before_the_next_program(what, words):
    codes, said = work(what)
    assert codes == [EXIT] * 2
    assert all(f"process 1 ({socket.gethostname()}): {words}" in lines(text)[0] for text in said)


# -- a model -------------------------------------------------------------------------------------------------------


def batch(path, count):
    """Pairs of lines of the same length, greedy and drawn, so that few programs are compiled."""
    given = [
        {"custom_id": f"r{i}", "prompt": ["And God said", "Therefore"][i % 2], "max_tokens": 6, "ignore_eos": True}
        | ({"temperature": 0} if i % 4 < 2 else {"temperature": 0.9, "top_p": 0.95, "seed": i})
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    return path


def records(path):
    """By custom_id; all lines are whole and no id is there twice."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {record["custom_id"]: record for record in found}
    assert len(by_name) == len(found)
    return by_name


def command(model, source, target):
    return ["-m", "k3jax", "batch", "--model", model, "-i", source, "-o", target, "--rows", "2", "--tokens", "16"]


@pytest.mark.slow
def test_two_processes_write_what_one_device_writes(pair, pair_directory, tmp_path):
    source = batch(tmp_path / "in", 4)
    codes, said = ended(started(*command(pair_directory, source, tmp_path / "two")))
    assert codes == [0, 0], said
    assert "4 of 4 lines, 0 errors" in said[0] and "lines" not in said[1]
    batch_file.run(pair, source, tmp_path / "one", rows=2, tokens=16)
    assert records(tmp_path / "two") == records(tmp_path / "one")
    state = [json.loads((tmp_path / f"{name}.state").read_text()) for name in ("one", "two")]
    assert state[0] == state[1]  # the same weights, so that either goes on with the other's


@pytest.mark.slow
def test_a_job_whose_processes_die_goes_on_to_the_same(pair, pair_directory, tmp_path):
    """kill -9 of the one that follows, then of the one that leads, while records are being written; then to the end."""
    source, target = batch(tmp_path / "in", 32), tmp_path / "out"
    done = 0
    for victim in (1, 0, None):
        processes_ = started(*command(pair_directory, source, target))
        if victim is not None:
            while len(target.read_bytes().splitlines() if target.exists() else ()) < done + 3:
                assert all(process.poll() is None for process in processes_)
                time.sleep(0.01)
            processes_[victim].kill()
        codes, said = ended(processes_)
        if victim is None:
            assert codes == [0, 0], said
            break
        assert codes[1 - victim] == EXIT and codes[victim] == -signal.SIGKILL, said
        [line] = lines(said[1 - victim])
        assert f"process {victim} ({socket.gethostname()}) died; the same commands" in line
        assert f"k3jax batch --model {pair_directory}" in line
        done = len(records(target))
        assert 3 <= done < 32
    batch_file.run(pair, source, tmp_path / "one", rows=2, tokens=16)
    assert records(target) == records(tmp_path / "one")


@pytest.mark.slow
def test_ranks_and_copies_in_one_process(pair, tmp_path):
    """--tp 2 --replicas 2: each copy on two devices of its own, and together they write what one device writes."""
    source = batch(tmp_path / "in", 8)
    batch_file.run(pair, source, tmp_path / "one", rows=2, tokens=16)
    with on_mesh(pair, k3jax.make_mesh(tp=2)) as lm:
        copies = replicate(lm, 2)
        found = batch_file.run(copies, source, tmp_path / "two", rows=2, tokens=16)
    assert records(tmp_path / "two") == records(tmp_path / "one")
    assert len(found.engines) == 2 and all(engine["requests"] for engine in found.engines)


def test_copies_have_devices_of_their_own(pair):
    with on_mesh(pair, k3jax.make_mesh(tp=4, ep=2)) as lm:
        assert replicate(lm) == [lm]  # on a CPU, whose devices share its cores
        first, second = replicate(lm, 2)
        with second:
            devices = [copy.model.lm_head.weight[...].devices() for copy in (first, second)]
            assert first is lm and [len(d) for d in devices] == [4, 4] and not devices[0] & devices[1]
            assert dict(second.mesh.shape) == dict(lm.mesh.shape)
            assert follow.fingerprint(second) == follow.fingerprint(lm) == follow.fingerprint(pair)
        with pytest.raises(ValueError, match="replicas=3: allowed are 'auto' and 1 to 2, for 4 of the devices each"):
            replicate(lm, 3)
