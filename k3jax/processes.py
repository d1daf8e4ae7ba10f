"""More than one process: how those of a job find each other. What they do together is in group.py.

Hosts have to trust their network, as jax's own coordination does.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import jax

from k3jax.group import Group, Peer

HEARTBEAT = 15.0  # seconds
HELLO = 512  # bytes that a process says first: the word, its number and its host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a command runs in several processes: the arguments of `start`."""

    coordinator: str | None = None
    """HOST:PORT of process 0, the same for every process."""
    processes: int | Literal["auto", "mpi4py"] | None = None
    """How many there are, each with its own `process`; auto: as Slurm, Open MPI or Kubernetes tells; mpi4py: as it tells."""
    process: int | None = None
    """The number of this one, from 0; process 0 reads and writes the files."""
    heartbeat: float = HEARTBEAT
    """Seconds, 10 to 30, within which every process ends after one has died."""


@contextlib.contextmanager
def start(
    coordinator: str | None = None,
    processes: int | str | None = None,
    process: int | None = None,
    *,
    heartbeat: float = HEARTBEAT,
    resume: str = "",
) -> Iterator[Group | None]:
    """Join the processes of a job, before anything is computed; they leave together. None where there is one process only.

    All of the first three are given, the same in each process but for `process`; or processes="auto" has jax ask Slurm, Open MPI,
    Kubernetes or Cloud TPU, and "mpi4py" asks MPI. (There, under Slurm and Open MPI, a process has one GPU of its host, that of
    its number on it; with the three it has all of them.) resume: the command that goes on after a failure, for the report of it.
    An exception inside ends all processes with EXIT, and does not come out; an interrupt, which may come to any of them, does in
    all. Raises ValueError.
    """
    global _current
    _check(coordinator, processes, process, heartbeat)
    if processes is None or processes == 1:
        yield None
        return
    ask = None if processes == "auto" else str(processes) if isinstance(processes, str) else "deactivate"
    if process is not None:
        print(f"process {process} of {processes}: waiting for all at {coordinator}", file=sys.stderr, flush=True)
    try:
        with _interrupts(signal.SIG_DFL):  # it waits for the others without looking at anything
            jax.distributed.initialize(
                coordinator,
                None if isinstance(processes, str) else processes,
                process,
                cluster_detection_method=ask,
                shutdown_timeout_seconds=int(heartbeat),
            )
    except ValueError as error:
        if not isinstance(processes, str):
            raise
        raise ValueError(
            f"processes={processes!r}: jax finds no such job here ({error}); allowed is a number"
        ) from None
    with _aborts_delayed():
        group = _connect(heartbeat, resume)
        if group is None:  # a job of one process
            yield None
            return
        with _interrupts(group.interrupt), group:
            _current = group
            try:
                yield group
            finally:
                _current = None


def current() -> Group | None:
    """The group that this process is in."""
    return _current


_current: Group | None = None  # one a process, as jax has it


def _check(coordinator: object, processes: object, process: object, heartbeat: object) -> None:
    def require(ok: bool, field: str, value: object, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{field}={value!r}: allowed {allowed}")

    def count(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    number = isinstance(heartbeat, int | float) and not isinstance(heartbeat, bool)
    require(number and 10 <= heartbeat <= 30, "heartbeat", heartbeat, "are 10 to 30 seconds")  # type: ignore[operator]
    if processes in (None, "auto", "mpi4py"):
        beside = f"is None beside processes={processes!r} (give coordinator, processes and process, or none of them)"
        require(coordinator is None, "coordinator", coordinator, beside)
        require(process is None, "process", process, beside)
        return
    require(count(processes, 1), "processes", processes, "are a number from 1, 'auto', 'mpi4py' and None")
    if processes == 1 and coordinator is process is None:
        return
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    good = bool(host) and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
    require(good, "coordinator", coordinator, "is HOST:PORT of process 0")
    assert isinstance(processes, int)
    ok = count(process, 0) and process < processes  # type: ignore[operator]
    require(ok, "process", process, f"are 0 to {processes - 1}, of {processes} processes")


def _connect(heartbeat: float, resume: str) -> Group | None:
    """Connections of process 0 with every other one. jax's coordinator tells where and by what word."""
    from jax._src.distributed import global_state as job  # jax has no public name for its store of keys and values

    number, count, own = job.process_id, job.num_processes, socket.gethostname()
    if count == 1:
        return None
    store: Any = job.client
    if number == 0:
        with _listening() as listening:
            listening.settimeout(heartbeat)
            token = secrets.token_hex(16)
            store.key_value_set("k3jax", f"{listening.getsockname()[1]} {token} {own}")
            peers = [_accept(listening, token, heartbeat) for _ in range(count - 1)]
        peers.sort(key=lambda peer: peer.number)
    else:
        port, token, host = store.blocking_key_value_get("k3jax", int(heartbeat * 1000)).split()
        where = str(job.coordinator_address).rpartition(":")[0].strip("[]")
        connection = socket.create_connection((where, int(port)), heartbeat)
        connection.sendall(f"{token} {number} {own}".ljust(HELLO).encode())
        peers = [Peer(0, host, connection, connection.makefile("rb"), heartbeat)]
    return Group(number, own, peers, heartbeat, resume)


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(listening: socket.socket, token: str, heartbeat: float) -> Peer:
    """The next process that knows the word; others are sent away before anything that they say is read."""
    while True:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            raise RuntimeError(f"a process has started and did not connect within {heartbeat:g} seconds") from None
        connection.settimeout(heartbeat)
        heard = connection.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            said = heard.read(HELLO).decode().split()
            if len(said) == 3 and secrets.compare_digest(said[0], token):
                return Peer(int(said[1]), said[2], connection, heard, heartbeat)
        connection.close()


@contextlib.contextmanager
def _interrupts(handler: Any) -> Iterator[None]:
    """Whoever else handles interrupts in the meantime; Python lets the main thread alone say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _aborts_delayed() -> Iterator[None]:
    """jax aborts a process that has lost process 0, perhaps before it is said that process 0 died. As the handler of the signal
    that aborts, sleep(), which is given the signal's number, leaves 6 seconds for it."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)
