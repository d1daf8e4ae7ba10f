"""Data parallelism: copies of a model, each on devices of its own, and the thread that serves calls with each."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from k3jax import processes, sharding
from k3jax.answers import ChatCompletion, Completion
from k3jax.engine import Engine
from k3jax.engine.openai import Call, answer, failure
from k3jax.lm import LM

AHEAD = 2  # requests in flight a row: those that wait are at hand when a row gets free


def replicate(lm: LM, count: int | str = "auto") -> list[LM]:
    """`lm` and copies of it, `count` in all, each on as many devices of its own as `lm` has; nothing is read from disk again.

    "auto": as many as there are devices of the same platform whose free memory holds their part of the parameters; on a CPU,
    whose devices share its cores, and in a job of several processes 1. Closing a copy frees that copy alone. Raises ValueError
    for more than there are devices.
    """
    home, job = _home(lm), processes.current() is not None
    others = [device for device in jax.local_devices(backend=home[0].platform) if device not in home]
    most = 1 if job else 1 + len(others) // len(home)
    homes = [others[i * len(home) : (i + 1) * len(home)] for i in range(most - 1)]
    if count == "auto":
        size = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(nnx.state(lm.model)))
        return [lm, *(_copy(lm, home) for home in homes if all(_free(device) > size for device in home))]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        allowed = "the one of a job of several processes" if job else f"for {len(home)} of the devices each"
        raise ValueError(f"replicas={count!r}: allowed are 'auto' and 1 to {most}, {allowed}")
    return [lm, *(_copy(lm, home) for home in homes[: count - 1])]


def _home(lm: LM) -> list[Any]:
    """Its devices, in the order of its mesh."""
    return [*lm.model.model.embed_tokens.weight[...].devices()] if lm.mesh is None else [*lm.mesh.devices.flat]


def _free(device: Any) -> int:
    """Bytes; 0 where the device does not tell, as a CPU does not."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def _copy(lm: LM, home: Sequence[Any]) -> LM:
    if lm.mesh is None:
        graph, state = nnx.split(lm.model)
        mesh, model = None, nnx.merge(graph, jax.device_put(state, home[0]))
    else:
        tp, ep = len(home), lm.mesh.shape["ep"]
        mesh = sharding.make_mesh(tp=tp, ep=ep, devices=home)
        model = sharding.placed(lm.model, mesh, sharding.of_model(lm.model))
    return LM(model, lm.config, lm.tokenizer, lm.kernels, lm.end_ids, lm.ignored_tensors, lm.directory, mesh)


class Replica(threading.Thread):
    """Takes calls and appends their records, with an engine of its own, until there are no more calls.

    Both functions may be called by several threads. error: what ended it early. generated: tokens so far. stats: of its engine,
    at the end. ended: to wait for, since an interrupted join() of Python 3.11 takes a running thread for a dead one. The thread is
    no daemon: one that is still in JAX when the interpreter goes would abort the process.
    """

    def __init__(
        self,
        lm: LM,
        take: Callable[[], Call | None],
        append: Callable[[dict[str, Any]], None],
        *,
        rows: int,
        tokens: int,
    ) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.generated = 0
        self.stats: dict[str, Any] = {}
        self.ended = threading.Event()
        self._lm, self._take, self._append, self._rows, self._tokens = lm, take, append, rows, tokens
        self._stopping = threading.Event()
        # By request: its call, and those of its samples that ended.
        self._running: dict[int, tuple[Call, dict[int, Completion | ChatCompletion]]] = {}

    def stop(self) -> None:
        """Finish the step under way and no more."""
        self._stopping.set()

    def wait(self) -> None:
        """Until it has ended, if it was started."""
        if self.ident is not None:
            self.ended.wait()
            self.join()

    def run(self) -> None:
        try:
            # On a mesh every array says where it is.
            with jax.default_device(_home(self._lm)[0]) if self._lm.mesh is None else contextlib.nullcontext():
                engine = Engine(self._lm, rows=self._rows, tokens=self._tokens)
                while self._fill(engine) and not self._stopping.is_set():
                    self._step(engine)
                self.stats = dataclasses.asdict(engine.stats())
        except BaseException as error:  # the thread that waits for it raises it
            self.error = error
        finally:
            self.ended.set()

    def _fill(self, engine: Engine) -> bool:
        """Whether anything is left to do, once as many calls as are allowed are under way."""
        while len(self._running) < AHEAD * self._rows and (call := self._take()) is not None:
            try:
                self._running[call.submit(engine)] = call, {}
            except ValueError as error:
                self._append(failure(call.line, "invalid_request", str(error)))
        return bool(self._running)

    def _step(self, engine: Engine) -> None:
        tokenizer = self._lm.tokenizer
        assert tokenizer is not None
        for output in engine.step():
            self.generated += len(output.token_ids)
            if output.result is None:
                continue
            call, ended = self._running[output.request]
            ended[output.sample] = output.result
            if len(ended) == call.sampling.n:
                del self._running[output.request]
                self._append(answer(call, [ended[sample] for sample in range(len(ended))], tokenizer))
