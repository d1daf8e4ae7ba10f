"""The engine: many requests at once, one step after another, without an event loop.

    engine = Engine(lm, rows=64)
    number = engine.add_request("And God said", SamplingParams(max_tokens=20))
    for output in engine.run():
        print(output.request, output.text)

What a request gets does not depend on what else is in the batch, on its slot or pages, on where its prompt was cut, on
preemption or on whose prefix it went on from: in float32 logits agree to 1e-4 and tokens are those of the request run alone
(where the two best logits are closer than that, either may be taken). In bfloat16 the same holds up to its rounding, so that
tokens may differ where two logits are close. The same calls in the same order on the same machine give the same bits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from k3jax import inputs, sharding
from k3jax.answers import failure
from k3jax.carry import PAGE, Conversation
from k3jax.engine.batching import Bucket, Buckets, Packed, Row, powers
from k3jax.engine.live import Live, Loaded, Output
from k3jax.engine.pool import Pool
from k3jax.engine.prefix import PrefixCache
from k3jax.engine.runner import Runner
from k3jax.engine.scheduler import Job, Plan, Scheduler
from k3jax.engine.sizes import Sizes, sizes
from k3jax.engine.stats import Compiles, Stats
from k3jax.generate import DECODE, Found, Sampling
from k3jax.requests import Request, Sample, Suspended, Token
from k3jax.sampling import SamplingParams, power_of_two

ROWS = 64  # requests that run together
TOKENS = 1024  # prompt tokens of a step
LIVE = 0.03  # seconds between two looks that nobody notices


class Engine:
    """Requests go in by add_request, add_chat or add, and come out of step or run. Not for several threads at once."""

    def __init__(
        self,
        lm: Loaded,
        *,
        rows: int = ROWS,
        tokens: int = TOKENS,
        memory: int | None = None,
        page: int = PAGE,
        pages: int | None = None,
        snapshots: int | None = None,
        prefix_cache: bool = True,
        buckets: Buckets | None = None,
        look: int | None = DECODE,
    ) -> None:
        """rows: requests that run together. tokens: of prompts, in one step. memory: bytes a device for slots and pages (None: a share
        of what is free). page: tokens of a latent page. pages, snapshots: how many, in place of the split of `memory`.
        prefix_cache: whether prompts go on from what others have computed. buckets: sizes of compiled steps.
        look: decode steps between two looks of the host (1 to 32); None: as many as fit into 0.03 s.
        """
        for field, value, most in (("rows", rows, 2**20), ("tokens", tokens, 2**20), ("page", page, 2**16)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{field}={value!r}: allowed is an integer from 1 to {most}")
        if look is not None and (not isinstance(look, int) or isinstance(look, bool) or not 1 <= look <= DECODE):
            raise ValueError(f"look={look!r}: allowed are 1 to {DECODE}, or None")
        self.lm, self.look, self._size = lm, look, 1
        self._dtype = dtype = str(lm.model.dtype)
        if not prefix_cache and snapshots is None:
            snapshots = 0
        self.sizes: Sizes = sizes(
            lm.config,
            memory,
            rows=rows,
            page=page,
            dtype=dtype,
            snapshots=snapshots,
            pages=pages,
            device=next(iter(lm.model.model.embed_tokens.weight[...].sharding.addressable_devices)),
            ranks=sharding.ranks(lm.mesh),
        )
        self.pool = Pool(self.sizes.slots, self.sizes.pages)
        self.cache = PrefixCache(self.pool, self.sizes.snapshots)
        context = min(-(-lm.config.max_position_embeddings // page), self.pool.pages)
        self.buckets = buckets or Buckets(
            rows=powers(4, 1, rows),
            tokens=powers(4, 16, max(16, tokens)),
            pages=powers(4, 1, context) if context else (0,),
        )
        if self.buckets.rows[-1] != rows:
            raise ValueError(f"buckets.rows={self.buckets.rows}: allowed are sizes up to rows={rows}")
        self.scheduler = Scheduler(
            self.pool,
            self.cache,
            rows=rows,
            budget=min(tokens, self.buckets.tokens[-1]),
            page=page,
            chunk_rows=self.buckets.prefill_rows(self.buckets.tokens[-1]),
            snapshot=prefix_cache,
        )
        self.runner = Runner(lm.model, lm.kernels, lm.end_ids, self.sizes, self.buckets, lm.mesh)
        self._live: dict[int, Live] = {}  # by job
        self._ready: list[Output] = []  # that nobody has taken yet
        self._closed = False
        self._names: dict[int, list[int]] = {}  # jobs of a request
        self._next = 0
        self._leaders: dict[Any, Job] = {}  # by group
        self._stats = Stats()
        self._compiles = Compiles()

    def __repr__(self) -> str:
        return f"<Engine: {len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting>"

    # -- requests ------------------------------------------------------------------------------------------------------
    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        state: Conversation | None = None,
        keep_state: bool = False,
        priority: int = 0,
        salt: str = "",
    ) -> int:
        """Queue a prompt, text or token ids; returns the request's number. ValueError, and nothing queued, for bad input.

        state, keep_state: as in LM.generate; a state that is kept where a stop text ends the request needs look=1.
        priority: lower goes first. salt: only requests of the same salt go on from each other's prefixes.
        """
        [params] = inputs.params(sampling, 1)
        return self._add_all(self.lm.requests([prompt], [params], state), priority, salt, keep_state)

    def add_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        sampling: SamplingParams | None = None,
        *,
        effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        priority: int = 0,
        salt: str = "",
    ) -> int:
        """Queue a conversation whose next message is wanted; as LM.chat, and several samples are allowed.

        max_tokens is a bound: an answer also ends where the context, or the engine's memory for one request, is full.
        """
        requests = self.lm.chat_requests(
            messages, tools, thinking, sampling, effort=effort, tool_choice=tool_choice, response_format=response_format
        )
        return self._add_all([self._bounded(request) for request in requests], priority, salt)

    def _bounded(self, request: Request) -> Request:
        room = self._most_pages * self.sizes.page - len(request.token_ids) + 1  # the last token is in no cache
        if not self.pool.pages or not 1 <= room < request.params.max_tokens:
            return request
        least = min(room, request.params.min_tokens)
        return request._replace(params=dataclasses.replace(request.params, max_tokens=room, min_tokens=least))

    @property
    def _most_pages(self) -> int:
        """Of one request."""
        return min(self.pool.pages, self.buckets.pages[-1])

    def _add_all(self, requests: list[Request], priority: int, salt: str, keep: bool = False) -> int:
        """The samples of one request."""
        first = self._next
        lives = [
            self._new(request, (first, sample), first + sample, priority, salt, keep)
            for sample, request in enumerate(requests)
        ]
        for live in lives:
            self._queue(live)
        return first

    def add(self, request: Request, *, priority: int = 0, salt: str = "", keep: bool = False) -> int:
        """Queue one checked request (LM.requests). keep: its end carries its memory."""
        number = self._next
        self._queue(self._new(request, (number, 0), number, priority, salt, keep))
        return number

    def _new(
        self, request: Request, name: tuple[int, int], number: int, priority: int, salt: str, keep: bool = False
    ) -> Live:
        self._check_open()
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority={priority!r}: allowed is an integer (lower goes first)")
        if not isinstance(salt, str):
            raise ValueError(f"salt={salt!r}: allowed is a text")
        params = request.params
        if keep and params.stop and self.look != 1:
            raise ValueError(
                f"keep_state with stop={params.stop!r}: allowed in an engine with look=1, for a carry cannot go back"
            )
        most = len(request.token_ids) + params.max_tokens
        needed, pages = self.scheduler.pages_for(most - 1), self._most_pages
        if needed > pages:
            raise ValueError(
                f"prompt of {len(request.token_ids)} tokens with max_tokens={params.max_tokens} needs {needed} pages of "
                f"{self.sizes.page} tokens: allowed are {pages} (the engine's memory and buckets)"
            )
        job = Job(
            number=number,
            tokens=list(request.token_ids),
            prompt=len(request.token_ids),
            most=most,
            priority=priority,
            salt=salt,
            reuse=params.prompt_logprobs is None,  # they are found by computing the prompt
            held=int(request.start.carry.lengths[0]) if request.start else 0,
        )
        return Live.begin(self.lm, name, request, job, keep)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed")

    def _queue(self, live: Live) -> None:
        job, group = live.job, live.request.group
        if group is not None and job.reuse and not job.held and self.cache.limit:
            leader = self._leaders.setdefault(group, job)
            if leader is not job:
                job.leader, leader.leads = leader, True
        self._next = max(self._next, job.number + 1)
        self._live[job.number] = live
        self._names.setdefault(live.name[0], []).append(job.number)
        self.scheduler.add(job)

    def abort(self, number: int) -> None:
        """End a request with all its samples; it has no more outputs. Nothing happens where it has ended already."""
        for job in self._names.get(number, ())[:]:
            self._drop(self._live[job])
        self._ready = [output for output in self._ready if output.request != number]

    def suspend(self, number: int) -> Suspended:
        """Take a request out, with its memory: `resume` goes on with it, here, in another engine of this model or, once saved
        (k3jax.engine.suspended), in another process. ValueError for a number of no request under way.
        """
        lives = [self._live[job] for job in self._names.get(number, ())]
        if not lives:
            raise ValueError(f"number={number!r}: allowed are {sorted(self._names)}, the requests under way")
        samples = []
        for live in lives:
            job = live.job
            carry = self.runner.unload(*self._memory(job)) if job.computed else None
            made = tuple(live.writer.tokens)
            samples.append(Sample(live.name[1], live.request, made, [*live.prompt], carry, live.keep))
        for live in lives:
            self._drop(live)
        return Suspended(tuple(samples), lives[0].job.priority, lives[0].job.salt)

    def resume(self, suspended: Suspended) -> int:
        """Queue a request that was suspended; returns its number here. Its outputs go on where they were."""
        first, lives = self._next, []
        for i, (sample, request, made, prompt, carry, keep) in enumerate(suspended.samples):
            ids = (*request.token_ids, *(token.token for token in made))
            start = (
                None if carry is None else inputs.conversation(Conversation(ids, carry), self.lm.config, self._dtype)
            )
            request = self.lm.as_chat(request)._replace(start=start, group=None)
            live = self._new(request, (first, sample), first + i, suspended.priority, suspended.salt, keep)
            live.prompt = [*prompt]
            for token in made:
                live.push(token)
            lives.append(live)
        for live in lives:
            self._queue(live)
        return first

    def _drop(self, live: Live) -> None:
        self.scheduler.remove(live.job)
        del self._live[live.job.number]
        number = live.name[0]
        self._names[number].remove(live.job.number)
        if not self._names[number]:
            del self._names[number]
        if self._leaders.get(live.request.group) is live.job:
            del self._leaders[live.request.group]

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._ready)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def run(self) -> Iterator[Output]:
        """Outputs until nothing is left to do. Nothing is lost where the loop is left: the next one goes on."""
        while self.has_work:
            if not self._ready:
                self._ready = self.step()
            while self._ready:  # looked at each time: an abort takes outputs away
                yield self._ready.pop(0)

    def step(self) -> list[Output]:
        """One step of the device, and what came of it.

        After an exception, an interrupt too, the engine goes on: what ran computes its tokens anew, and nothing that was found
        is lost.
        """
        self._check_open()
        began = time.perf_counter()
        try:
            with self._compiles:
                decoded = self._step()
        except BaseException:
            self._recover()
            raise
        seconds = time.perf_counter() - began
        self._stats.seconds += seconds
        if decoded:
            self._adapt(decoded, seconds)
        outputs, self._ready = self._ready, []
        return outputs

    def _step(self) -> int:
        """The number of decode steps; 0 where it was another step."""
        plan = self.scheduler.schedule(self._steps())
        self._stats.preemptions += len(plan.preempted)
        plan, masks = self._mask(plan)
        if not plan.shares:
            return 0
        self._place(plan.admitted)
        packed, found = self._compute(plan, masks)
        self._take(plan, packed, found)
        return 0 if packed.bucket.tokens else plan.steps

    def _steps(self) -> int:
        """Decode steps before the next look. What a grammar allows is known after each token alone."""
        if any(live.constraint for live in self._live.values()):
            return 1
        return self._size if self.look is None else self.look

    def _adapt(self, steps: int, seconds: float) -> None:
        """Where nobody says how often to look: twice as many steps next time, if they are as quick."""
        if self.look is None and steps == self._size:
            quick = 2 * seconds < LIVE
            self._size = min(2 * steps, DECODE) if quick else max(steps // 2, 1) if seconds > LIVE else steps

    def _recover(self) -> None:
        """After a step that did not end, wherever it was: nothing in the pools counts any more. Requests begin anew with the
        tokens that they have; one that has all of them ends, without its memory."""
        for live in self._live.values():
            live.job.tokens = [*live.request.token_ids, *(token.token for token in live.writer.tokens)]
        self.scheduler.restart(live.job for live in self._live.values())
        self.runner.recover()
        for live in [*self._live.values()]:
            if (reason := live.ending) is not None:
                live.keep = False
                self._end(live, reason)

    def _place(self, admitted: Sequence[Job]) -> None:
        """What requests that begin need in their slots before the step."""
        if not admitted:
            return
        lives = [self._live[job.number] for job in admitted]
        self.runner.place(
            [job.slot or 0 for job in admitted],
            [live.request.params for live in lives],
            [job.tokens for job in admitted],
            [len(job.tokens) - job.prompt for job in admitted],
        )
        self._stats.prompt_tokens += sum(job.prompt for job in admitted)
        slot_moves, page_moves = [], []
        for job in admitted:
            assert job.slot is not None
            if job.found:
                self._stats.prefix_hits += 1
                self._stats.reused_tokens += job.reused
                slot_moves.append((job.found.slot, job.slot))
                whole = job.reused // self.sizes.page
                page_moves += [(job.found.pages[whole], job.pages[whole])] if whole < len(job.found.pages) else []
                self.pool.wrote(job.slot)
        # Before anything is written: what one goes on from may have been given up for the next one, and be its slot now.
        self.runner.copy(slot_moves, page_moves)
        for job, live in zip(admitted, lives, strict=True):
            if live.request.start is not None and job.held:
                self.runner.load(job.slot or 0, job.pages, live.request.start.carry)
                self.pool.wrote(job.slot or 0)

    def _row(self, job: Job, count: int) -> Row:
        assert job.slot is not None and (job.computed == 0 or self.pool.written(job.slot)), "a state that nobody wrote"
        end = job.computed + count
        return Row(
            tokens=job.tokens[job.computed : end],
            computed=job.computed,
            slot=job.slot,
            pages=job.pages,
            sampled=end == len(job.tokens),
            following=job.tokens[job.computed + 1 : end + 1],
        )

    def _mask(self, plan: Plan) -> tuple[Plan, dict[int, np.ndarray | None]]:
        """What the grammars of the step's rows allow, by job; one whose grammar turns out to be too complex ends here."""
        masks = {}
        for job, count in plan.shares:
            live = self._live[job.number]
            if live.constraint and count == job.left:
                try:
                    masks[job.number] = live.constraint.mask()
                except ValueError as error:
                    self._end(live, "error", str(error))
        shares = [share for share in plan.shares if not share.job.ended]
        return plan._replace(shares=shares, admitted=[job for job in plan.admitted if not job.ended]), masks

    def _compute(self, plan: Plan, masks: Mapping[int, np.ndarray | None]) -> tuple[Packed, Found]:
        params = [self._live[job.number].request.params for job, _ in plan.shares]
        vocabulary = self.lm.config.vocab_size
        widths = ([getattr(p, field) for p in params] for field in ("logprobs", "prompt_logprobs"))
        return self.runner.run(
            [self._row(*share) for share in plan.shares],
            Sampling(*(_widest(numbers, vocabulary) for numbers in widths)),
            steps=plan.steps,
            until_end=bool(self.scheduler.waiting),
            masks=[masks.get(job.number) for job, _ in plan.shares],
        )

    # -- what came of it -----------------------------------------------------------------------------------------------
    def _take(self, plan: Plan, packed: Packed, found: Found) -> None:
        moves: dict[int, int] = {}  # to a slot, from one: the last one where it was given up and taken again
        for (job, count), place in zip(plan.shares, packed.places, strict=True):
            assert job.slot is not None
            self.pool.wrote(job.slot)
            self._advance(self._live[job.number], count, packed, found, place)
            if not job.ended and (slot := self.scheduler.keep(job)) is not None:
                moves[slot] = job.slot
        self.runner.copy([(source, target) for target, source in moves.items()])

    def _advance(self, live: Live, count: int, packed: Packed, found: Found, place: int) -> None:
        """One row's tokens, and its end where it has come."""
        job, tokens = live.job, list(live.tokens(found, place))
        if found.prompt is not None:
            live.take_prompt(count, found.prompt, int(packed.batch.query_start_loc[place]))
        job.computed += count if packed.bucket.tokens else len(tokens)
        for token in tokens:
            self._push(live, token)
            if job.ended:
                return
        if found.bad_layer[place] >= 0:
            self._end(live, "error", failure(int(found.bad_layer[place]), self.lm.config.num_hidden_layers))
        elif found.done[place]:
            self._end(live, "stop" if tokens[-1].token in live.writer.stop_ids else "length")

    def _push(self, live: Live, token: Token) -> None:
        self._stats.tokens += 1
        try:
            self._ready.append(Output(*live.name, live.push(token), [token.token]))
        except ValueError as error:  # its grammar
            self._end(live, "error", str(error))
        else:
            if live.complete:
                self._end(live, "stop")

    def _end(self, live: Live, reason: str, error: str | None = None) -> None:
        job = live.job
        if error is not None and job.found:
            self.cache.drop(job.found)  # it may be what is wrong
        carry = self.runner.unload(*self._memory(job)) if live.keep and error is None else None
        self._stats.requests += 1
        self._stats.errors += error is not None
        self._drop(live)
        self._ready.append(live.end(reason, error and f"request {live.name[0]}: {error}", carry))

    def _memory(self, job: Job) -> tuple[int, list[int]]:
        """Slot and pages of what is computed."""
        assert job.slot is not None
        return job.slot, job.pages[: self.scheduler.pages_for(job.computed)]

    # -- programs and figures --------------------------------------------------------------------------------------------
    def programs(self) -> list[Bucket]:
        """Every step that may come to be compiled, without log-probabilities and grammars, which make further ones."""
        return list(self.buckets.all())

    def warm(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Compile these steps now (None: all of them), by steps without requests."""
        self._check_open()
        began = time.perf_counter()
        with self._compiles:
            self.runner.warm(self.programs() if buckets is None else buckets)
        self._stats.seconds += time.perf_counter() - began

    def stats(self) -> Stats:
        """Figures since the engine began, and what is in use now."""
        return dataclasses.replace(
            self._stats,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            slots=self.pool.slots,
            slots_used=self.pool.slots - self.pool.free_slots,
            pages=self.pool.pages,
            pages_used=self.pool.pages - self.pool.free_pages,
            snapshots=len(self.cache),
            compiles=self._compiles.count,
            compile_seconds=self._compiles.seconds,
        )

    def close(self) -> None:
        """Free slots and pages. Requests under way are lost; closing twice is harmless."""
        for live in [*self._live.values()]:
            self._drop(live)
        self.scheduler.restart(())
        self._ready = []
        self._closed = True
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _widest(wanted: Sequence[int | None], vocabulary: int) -> int | None:
    """Alternatives that a step finds: a power of two (or all), so that there are few programs."""
    numbers = [number for number in wanted if number is not None]
    return min(power_of_two(max(1, *numbers)) if max(numbers) else 0, vocabulary) if numbers else None
