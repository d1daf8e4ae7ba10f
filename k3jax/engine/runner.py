"""The engine's side of the device: pools in, programs run, small arrays out.

In a job of several processes (k3jax.processes) process 0 alone has an engine. Its runner tells the runners of the others
(follow.py) what it does, and every one of them does it: so all run the same programs in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from k3jax import carry as carries
from k3jax import generate, processes, sharding
from k3jax.batch import NOWHERE
from k3jax.carry import PAGE, Carry
from k3jax.engine.batching import Bucket, Buckets, Packed, Row, fill, pack
from k3jax.engine.sizes import Sizes
from k3jax.generate import Found, Moves, Sampling, State
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, Weights
from k3jax.sampling import SamplingParams, power_of_two

Method = TypeVar("Method", bound=Callable[..., Any])


def told(method: Method) -> Method:
    """A method that every process runs, and that process 0 tells the others."""

    @functools.wraps(method)
    def run(self: Runner, *args: Any) -> Any:
        if self.group is not None:
            self.group.tell(method.__name__, *args)
        return method(self, *args)

    return run  # type: ignore[return-value]


class Runner:
    """The pools and what moves in them. `state` is given to every program and comes back from it."""

    def __init__(
        self, model: K3, kernels: Kernels, end_ids: Sequence[int], sizes: Sizes, buckets: Buckets, mesh: Mesh | None
    ) -> None:
        self.model, self.end_ids, self.sizes, self.buckets = model, end_ids, sizes, buckets
        self.vocabulary = model.config.vocab_size
        self.weights = Weights(model)  # as they are now
        self.ctx, self.mesh = Context(kernels, mesh=mesh), mesh
        self.group = processes.current()
        if self.group is not None:
            self.group.tell("begin", sizes, buckets)
        self.state: State = self._empty()

    def _empty(self) -> State:
        sizes = dict(slots=self.sizes.slots, pages=self.sizes.pages, page=self.sizes.page)
        if self.mesh is None:
            return jax.device_put(generate.empty(self.model, **sizes), *self._devices())

        def make() -> State:
            state = generate.empty(self.model, **sizes)
            # A seed that nobody gives is drawn, and this is to be the same program in every process.
            return state._replace(sampling=state.sampling._replace(seed=jnp.zeros_like(state.sampling.seed)))

        # Made in place: no device could hold all heads' states.
        return sharding.made(make, self.mesh, sharding.specs(generate.axes(jax.eval_shape(make))))

    def _devices(self) -> set[Any]:
        return self.model.model.embed_tokens.weight[...].devices()

    def recover(self) -> None:
        """After a program that did not end, which may have taken the memory with it: what was in it counts no more.

        Not where there are other processes, which cannot tell how far it came: their job ends, and begins again from its files.
        """
        if self.group is None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            self.state = self._empty()

    def close(self) -> None:
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    # -- slots and pages -----------------------------------------------------------------------------------------------
    @told
    def place(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        token_ids: Sequence[Sequence[int]],
        made: Sequence[int],
    ) -> None:
        """Requests begin in these slots; the last `made` of their tokens are generated."""
        size = power_of_two(len(slots))
        new = generate.rows(params, token_ids, made, self.end_ids, size, self.vocabulary)
        padded = np.full(size, NOWHERE, np.int32)
        padded[: len(slots)] = slots
        self.state = generate.place(self.state, padded, new, mesh=self.mesh)  # type: ignore[arg-type]

    @told
    def copy(self, slots: Sequence[tuple[int, int]], pages: Sequence[tuple[int, int]] = ()) -> None:
        """Move memory from the first to the second of each pair, all at once: what is given up and taken is read first."""
        if not slots:
            return
        size = power_of_two(max(len(slots), len(pages)))
        moves: Any = np.full((4, size), NOWHERE, np.int32)
        moves[:2, : len(slots)] = np.array(slots).T
        if pages:
            moves[2:, : len(pages)] = np.array(pages).T
        self.state = generate.copy(self.state, Moves(*moves), mesh=self.mesh)

    def load(self, slot: int, pages: Sequence[int], one: Carry) -> None:
        """A conversation's memory, in pages of PAGE tokens, into a slot and as many of these pages as it fills."""
        self._check_alone()
        tokens = one.mla[0].shape[0] * PAGE if one.mla else 0
        table: Any = np.full(-(-tokens // self.sizes.page), NOWHERE, np.int32)
        own = pages[: len(table)]
        table[: len(own)] = own
        if self.mesh is None:
            one = jax.device_put(one, *self._devices())
        else:  # it may come from one device, or from another mesh
            one = sharding.placed(one, self.mesh, sharding.specs(carries.axes(one)))
        self.state = generate.load(self.state, np.int32(slot), table, one, mesh=self.mesh)  # type: ignore[arg-type]

    def unload(self, slot: int, pages: Sequence[int]) -> Carry:
        """The memory of one request, copied out."""
        self._check_alone()
        assert self.state.carry is not None
        table: Any = np.array(pages, np.int32)
        return generate.unload(self.state.carry, np.int32(slot), table, mesh=self.mesh)  # type: ignore[arg-type]

    def _check_alone(self) -> None:
        """A carry is divided over the devices of all processes, and none of them could be told of it."""
        if self.group is not None:
            raise ValueError("state, keep_state or suspend: allowed where there is one process")

    # -- steps ---------------------------------------------------------------------------------------------------------
    def run(
        self,
        rows: Sequence[Row],
        sampling: Sampling = Sampling(),  # noqa: B008  # a tuple
        *,
        steps: int = 1,
        until_end: bool = False,
        masks: Sequence[np.ndarray | None] = (),
    ) -> tuple[Packed, Found]:
        """One step of these rows, or where all decode up to `steps`, to the first end with `until_end`.

        masks: bits of the tokens that each row may have; None: all of them.
        """
        packed = pack(rows, self.buckets)
        return packed, self.compute(packed, sampling, steps, until_end, self._allowed(packed, masks))

    @told
    def compute(
        self, packed: Packed, sampling: Sampling, steps: int, until_end: bool, allowed: np.ndarray | None
    ) -> Found:
        """A step that is packed; arrays of the host."""
        batch: Any = packed.batch
        options: Any
        if packed.bucket.tokens:
            ctx = dataclasses.replace(self.ctx, decode_rows=packed.bucket.decodes)
            options = (ctx, sampling, None if sampling.prompt is None else packed.targets, allowed)
            self.state, found = generate.step(self.weights, self.state, batch, packed.sampled, *options)  # type: ignore[arg-type]
        else:
            options = (np.int32(steps), self.ctx, sampling._replace(prompt=None), np.bool_(until_end), allowed)
            self.state, found = generate.decode(
                self.weights, self.state, batch.state_indices, batch.block_table, *options
            )
        found = jax.tree.map(np.asarray, found)
        if self.group is not None:
            self.group.note(found.new.token, found.done, found.bad_layer)
        return found

    def _allowed(self, packed: Packed, masks: Sequence[np.ndarray | None]) -> np.ndarray | None:
        if all(mask is None for mask in masks):
            return None
        allowed = np.full((len(packed.sampled), -(-self.vocabulary // 32)), 0xFFFFFFFF, np.uint32)
        for place, mask in zip(packed.places, masks, strict=True):
            if mask is not None:
                allowed[place] = mask
        return allowed

    def warm(self, buckets: Iterable[Bucket]) -> None:
        """Compile these steps, by steps without requests."""
        for bucket in buckets:
            self.compute(fill([], bucket), Sampling(), 1, False, None)
