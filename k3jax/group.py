"""The processes of a job, connected: all are told the same, and where one dies all end.

    process 0, which leads --calls--> processes 1, 2, ..., which follow          beats both ways, on one connection each

jax makes one set of devices of all processes' devices, and a program runs on all of them: so every process has to run the same
programs in the same order. Process 0 alone decides which. It tells the others each call with its arguments, and they do as they
are told. Calls are numbered, and each carries a hash of all that was told and found before it: a process that was told anything
else, in any other order, or that found other tokens, refuses the next call.

A connection that ends without a word, or that is silent, is a process that died. Whoever notices says which one, and every process
ends, also one that waits in a program for the dead one.
"""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import math
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

GRACE = 1.0  # seconds in which the end of a process is noticed; an error elsewhere in that time may be its consequence
EXIT = 2  # the exit code of every process after one has died or failed


class ScheduleError(RuntimeError):
    """A call is not the one that follows here."""


class Schedule:
    """Calls in their order, and a hash of everything told and found so far: the same in every process, or the next is refused."""

    def __init__(self) -> None:
        self._number, self._hash = 0, b""

    def tell(self, name: str, args: Sequence[Any]) -> tuple[int, bytes, bytes]:
        """The next call, to be sent: its number, the hash of the calls up to it, and what `hear` makes a call of."""
        payload = pickle.dumps((name, tuple(args)))
        self._number += 1
        self._add(payload)
        return self._number, self._hash, payload

    def hear(self, number: int, hash: bytes, payload: bytes) -> tuple[str, tuple[Any, ...]]:
        """Name and arguments of a call that was sent. Raises ScheduleError where it is not the next one."""
        if number != self._number + 1:
            raise ScheduleError(f"call {number} came after call {self._number}: allowed is {self._number + 1}")
        self._number = number
        self._add(payload)
        if hash != self._hash:
            raise ScheduleError(f"call {number}: what was told or found before it differs from process 0")
        return pickle.loads(payload)

    def note(self, *found: np.ndarray) -> None:
        """What a call found, which is to be the same everywhere."""
        for array in found:
            self._add(array.tobytes())

    def _add(self, data: bytes) -> None:
        self._hash = hashlib.blake2b(self._hash + data, digest_size=16).digest()


class Peer:
    """A connection to another process. One thread sends what is in `outbox`, and beats; None in it is the end."""

    def __init__(self, number: int, host: str, connection: socket.socket, heard: Any, heartbeat: float) -> None:
        self.number, self.host, self._connection, self._heard = number, host, connection, heard
        self.outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.told = 0  # calls put there
        self.left = threading.Event()  # it has said that it leaves
        self._every = heartbeat / 5
        self.silence = 0.8 * heartbeat  # so much of it is dead; the rest is for ending
        connection.settimeout(self.silence)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sender = threading.Thread(target=self._send, daemon=True)
        self.sender.start()

    def __str__(self) -> str:
        return f"process {self.number} ({self.host})"

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # whoever hears notices as well
            while True:
                told = self.told  # all of them are sent, if nothing is left now
                try:
                    message = self.outbox.get(timeout=self._every)
                except queue.Empty:
                    message = ("beat", told)
                if message is None:
                    return
                self._connection.sendall(pickle.dumps(message))

    def hear(self) -> tuple[Any, ...]:
        """The next message. Raises EOFError or OSError, TimeoutError too, where there are none any more."""
        return pickle.load(self._heard)

    def flush(self) -> None:
        """Send what is left and no more."""
        self.outbox.put(None)
        self.sender.join(GRACE)


class Group:
    """The processes of a job, as one of them sees them; a context that all leave together. code: process 0's exit code.

    Only what an Engine runs is told; any other program has to be run by every process of its own accord, in the same place.
    """

    def __init__(self, number: int, host: str, peers: Sequence[Peer], heartbeat: float, resume: str) -> None:
        self.number, self.code = number, 0
        self._name, self._peers, self._heartbeat, self._resume = f"process {number} ({host})", peers, heartbeat, resume
        self._schedule = Schedule()
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._left, self._reporting = threading.Event(), threading.Lock()
        self._interrupted = -math.inf
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.number == 0

    # -- calls ---------------------------------------------------------------------------------------------------------
    def tell(self, name: str, *args: Any) -> None:
        """Process 0 has every other one do this, before it does it itself. Nothing in the others, which do as they are told."""
        if self.leads:
            call = self._schedule.tell(name, args)
            for peer in self._peers:
                peer.outbox.put(("call", *call))
                peer.told += 1

    def note(self, *found: np.ndarray) -> None:
        """What the call found, to be the same in every process: the next call says whether it was."""
        self._schedule.note(*found)

    def agree(self, **values: Any) -> None:
        """That all processes have the same of these, as texts. Raises ValueError in one that has something else."""
        own = {name: str(value) for name, value in values.items()}
        self.tell("agree", own)
        if not self.leads:
            _, [first] = next(self.calls())
            for name in {**own, **first}:
                if own.get(name) != first.get(name):
                    raise ValueError(f"{name}={own.get(name)}: allowed is {first.get(name)}, which process 0 has")

    def calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What process 0 tells, until it ends; `code` is then its exit code. Raises KeyboardInterrupt as process 0 did."""
        while True:
            match self._inbox.get():
                case "call", *call:
                    yield self._schedule.hear(*call)
                case "end", *call:
                    _, [self.code] = self._schedule.hear(*call)
                    return
                case "missed", number:
                    raise ScheduleError(f"call {number} did not come")
                case _:
                    raise KeyboardInterrupt

    # -- ends ----------------------------------------------------------------------------------------------------------
    def _listen(self, peer: Peer) -> None:
        """One thread a peer."""
        heard = 0  # calls
        try:
            while True:
                match message := peer.hear():
                    case "call", *call:
                        heard += 1
                        self._inbox.put(("call", *call))
                    case "beat", told:
                        if told > heard:
                            self._inbox.put(("missed", heard + 1))
                    case (("end" | "interrupted"), *_):
                        self._inbox.put(message)
                        threading.Thread(target=self._leave, args=(peer,), daemon=True).start()
                    case ("interrupt",):
                        _thread.interrupt_main()  # as if it had come to process 0
                    case ("failed", why, again):
                        time.sleep(GRACE)
                        self._end_all(f"{peer}: {why}", again)
                    case ("lost", why, again):
                        self._end_all(why, again)
                    case ("left",):
                        peer.left.set()
                        return
        except TimeoutError:
            self._end_all(f"{peer} has been silent for {peer.silence:g} seconds")
        except (OSError, EOFError):
            self._end_all(f"{peer} died")
        except Exception as error:
            self._end_all(f"{peer} cannot be understood: {error!r}")

    def _leave(self, peer: Peer) -> None:
        """See to it that this process ends now that process 0 does."""
        if not self._left.wait(5 * GRACE):
            peer.outbox.put(("failed", "was in a program that process 0 has left", True))
            peer.flush()
            os._exit(EXIT)

    def _end_all(self, why: str, again: bool = True) -> None:
        """Say why, here and in every process, and end without waiting for anything: a program may never end.

        again: whether the same command may come further.
        """
        if self._left.is_set():
            return
        if not self._reporting.acquire(blocking=False):
            threading.Event().wait()  # the process ends
        threading.Thread(target=lambda: (time.sleep(2 * GRACE), os._exit(EXIT)), daemon=True).start()  # whatever blocks
        for peer in self._peers if self.leads else ():
            peer.outbox.put(("lost", why, again))
        words = " ".join(why.split())
        if again and self._resume:
            words += (
                f"; the same commands, each process with its own number, go on from what is finished: {self._resume}"
            )
        with contextlib.suppress(OSError):  # nobody may be reading
            print(f"k3jax: {words}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        for peer in self._peers:
            peer.flush()
        os._exit(EXIT)

    def __enter__(self) -> Group:
        return self

    def interrupt(self, *_: Any) -> None:
        """An interrupt of any process is one of process 0, which ends all of them."""
        if not self.leads:
            self._peers[0].outbox.put(("interrupt",))
        elif time.monotonic() - self._interrupted > GRACE:  # a launcher sends it to all, and they pass it on
            self._interrupted = time.monotonic()
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._fail(error)
        if self.leads:
            last = ("interrupted",) if error else ("end", *self._schedule.tell("end", [self.code]))
            for peer in self._peers:
                peer.outbox.put(last)
            end = time.monotonic() + self._heartbeat
            for peer in self._peers:
                if not peer.left.wait(max(end - time.monotonic(), 0)):
                    self._end_all(f"{peer} did not end")
        else:
            self._peers[0].outbox.put(("left",))
        self._left.set()
        for peer in self._peers:
            peer.flush()
        jax.distributed.shutdown()

    def _fail(self, error: BaseException) -> None:
        """An error here ends every process; where it follows from the end of another one, that is what is reported."""
        why, again = str(error), not isinstance(error, ValueError)  # bad input stays bad
        if not isinstance(error, ValueError | OSError | RuntimeError):
            why = repr(error)
            traceback.print_exception(error)
        if not self.leads:
            self._peers[0].outbox.put(("failed", why, again))
            time.sleep(self._heartbeat)  # process 0 says which one it was
        time.sleep(GRACE)
        self._end_all(f"{self._name}: {why}", again)
