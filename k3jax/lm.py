"""LM, the user's object."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from k3jax import inputs, sharding
from k3jax.answers import ChatCompletion, Completion, Delta, Score
from k3jax.batch import single
from k3jax.carry import PAGE, Conversation
from k3jax.config import K3Config
from k3jax.engine.batching import Buckets, powers
from k3jax.engine.engine import ROWS, Engine
from k3jax.engine.live import Output
from k3jax.generate import DECODE, PREFILL
from k3jax.io import chat, conversation, orbax, release
from k3jax.io.chat import ChatDelta, ChatStream, JinjaChat, K3Chat
from k3jax.io.messages import Parser
from k3jax.io.tokenizer import Tokenizer
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, forward
from k3jax.model import Output as Pass
from k3jax.probe import Probe, as_traced, axes, expand
from k3jax.probe import sites as every_site
from k3jax.requests import Request
from k3jax.sampling import CHAT, SamplingParams, power_of_two
from k3jax.score import token_logprobs, windows


@functools.partial(jax.jit, static_argnames="ctx")
def _forward(model: K3, tokens: Array, length: Array, ctx: Context, routing: Mapping[str, Array] | None) -> Pass:
    """One prompt from its start, without a carry."""

    def of_rank(model: K3, tokens: Array, length: Array, routing: Mapping[str, Array] | None) -> Pass:
        return forward(model, single(tokens, length), None, ctx, routing)

    taps = {site: sharding.spec(tuple(axes(site))) for site in ctx.probe.save}
    out = Pass(sharding.spec((None, "vocab")), jax.P(), taps, jax.P())  # type: ignore[arg-type]
    specs = (sharding.of_model(model), *(jax.P(),) * 3)
    return sharding.per_rank(of_rank, ctx.mesh, specs, out)(model, tokens, length, routing)


class LM:
    """A loaded model. Methods are synchronous; nothing is kept between calls but parameters and compiled programs."""

    def __init__(
        self,
        model: K3,
        config: K3Config,
        tokenizer: Tokenizer | None,
        kernels: Kernels,
        end_ids: Sequence[int] = (),
        ignored: Sequence[str] = (),
        directory: Path | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._model: K3 | None = model
        self.config = config
        self.tokenizer = tokenizer
        self.kernels = kernels
        self.mesh = mesh  # that its parameters are divided over
        self.end_ids = tuple(end_ids)  # tokens that end a generation
        self._sites = frozenset(every_site(config))
        self.ignored_tensors = tuple(ignored)  # left unread by rule: vision, layers past the count
        self.directory = directory  # where the tokenizer's files are

    def __repr__(self) -> str:
        c = self.config
        state = "closed" if self._model is None else str(self._model.dtype)
        return f"<LM: {c.num_hidden_layers} layers ({len(c.kda_layers)} KDA, {len(c.mla_layers)} MLA), {state}>"

    @property
    def model(self) -> K3:
        """The parameters. Raises RuntimeError once closed."""
        if self._model is None:
            raise RuntimeError("this model is closed")
        return self._model

    # -- text ------------------------------------------------------------------------------------------------------
    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; nothing in it becomes a control token."""
        if not isinstance(text, str):
            raise ValueError(f"text={text!r}: allowed is a string")
        return self._tokenizer("encode").encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 (a character cut in half, say) become U+FFFD."""
        tokenizer = self._tokenizer("decode")
        return tokenizer.decode(inputs.integers("ids", ids))

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what}: this model directory has no tokenizer files (tiktoken.model); use token ids")
        return self.tokenizer

    # -- one pass --------------------------------------------------------------------------------------------------
    def logits(self, token_ids: Sequence[int], *, routing: Mapping[str, Any] | None = None) -> Float[np.ndarray, "T N"]:
        """float32 logits of every position, in one forward pass.

        routing: forces experts; `router_ids_L` -> integers [T, A], distinct within a token, as trace gives them. Layers that
        it leaves out choose for themselves. Each set of layers is a program of its own to compile.
        """
        ids = inputs.token_ids("token_ids", token_ids, self.config)
        args = _padded(ids), np.int32(len(ids)), Context(self.kernels, mesh=self.mesh), self._routing(routing, len(ids))
        out = _forward(self.model, *args)
        return np.asarray(out.logits)[: len(ids)]

    def trace(
        self, token_ids: Sequence[int], sites: Sequence[str] | str, *, routing: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Named activations of one forward pass: site names or shell patterns ("router_ids_*").

        k3jax.probe.sites(lm.config) lists the names, tests/golden/README.md says what each holds.
        States are [H, K, V] after the last token; kda_conv_* are the last W raw inputs, zeros before a short prompt.
        """
        ids = inputs.token_ids("token_ids", token_ids, self.config)
        wanted = [sites] if isinstance(sites, str) else sites
        if not isinstance(wanted, Sequence) or not all(isinstance(site, str) for site in wanted):
            raise ValueError(f"sites={sites!r}: allowed are a name or a list of names")
        names = expand(self.config, wanted)
        ctx = Context(self.kernels, probe=Probe(frozenset(names)), mesh=self.mesh)
        out = _forward(self.model, _padded(ids), np.int32(len(ids)), ctx, self._routing(routing, len(ids)))
        return {name: as_traced(self.config, name, np.asarray(out.taps[name]), len(ids)) for name in names}

    def _routing(self, routing: Mapping[str, Any] | None, length: int) -> dict[str, Array] | None:
        if routing is None:
            return None
        padding = ((0, _bucket(length) - length), (0, 0))
        forced = inputs.routing(routing, self._sites, self.config, length)
        return {name: jnp.asarray(np.pad(ids, padding), jnp.int32) for name, ids in forced.items()}

    # -- generation ------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int | None = None,
        state: Conversation | None = None,
        keep_state: bool = False,
    ) -> list[Completion]:
        """Continue each prompt; one SamplingParams for all or one each. Every input is checked before anything runs.

        n samples of a prompt are n completions, one after another. max_new_tokens: a short way to say
        SamplingParams(max_tokens=...). state: a conversation that the one prompt goes on from, which may then be empty; what
        it stands for is not computed again. keep_state: completions carry theirs; the carry is then some megabytes a request.
        A request whose values stop being finite ends with finish_reason "error" and a warning; the others go on.
        """
        several = inputs.several("prompts", prompts)
        requests = self.requests(several, inputs.params(sampling, len(several), max_new_tokens), state)
        done = {
            output.request: output.result for output in self._run(requests, keep_state, live=False) if output.result
        }
        return [completion for number in range(len(requests)) if isinstance(completion := done[number], Completion)]

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        state: Conversation | None = None,
        keep_state: bool = False,
    ) -> Iterator[Delta]:
        """Continue one prompt, a piece at a time: one a token, where a token completes a character. n must be 1.

        The pieces' texts make the completion's text, which the last piece has. Options as in generate; inputs are checked by
        the call, before the first piece is asked for.
        """
        [params] = inputs.params(sampling, 1, max_new_tokens)
        if params.n != 1:
            raise ValueError(f"n={params.n}: allowed is 1 in a stream")
        requests = self.requests([prompt], [params], state)
        return (Delta(text, ids, result) for _, _, text, ids, result in self._run(requests, keep_state, live=True))  # type: ignore[arg-type]

    def requests(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], state: Conversation | None = None
    ) -> list[Request]:
        """Every sample of every prompt, checked: what an engine takes. Raises ValueError."""
        if state is not None:
            self._check_state(state, prompts, params)
        before = [] if state is None else list(state.token_ids)
        requests = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            ids = before + (self.encode(prompt) if isinstance(prompt, str) else inputs.integers(f"prompt {i}", prompt))
            ids = inputs.token_ids(f"prompt {i}", ids, self.config)
            if state is not None and len(ids) == int(state.carry.lengths[0]):
                raise ValueError(
                    "prompt 0 is empty and all tokens of the state are computed: allowed is one token or more"
                )
            inputs.fit(f"prompt {i}", ids, p, self.config, self.tokenizer is not None)
            group = object() if p.n > 1 else None
            requests += [Request(ids, sample, group, state) for sample in p.samples()]
        return requests

    def _check_state(self, state: Conversation, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> None:
        inputs.conversation(state, self.config, str(self.model.dtype))
        if len(prompts) != 1:
            raise ValueError(f"state with {len(prompts)} prompts: allowed is one, which goes on from it")
        if params[0].prompt_logprobs is not None:
            raise ValueError("prompt_logprobs with a state: allowed is None, for its tokens are not computed again")

    def _run(self, requests: list[Request], keep: bool, live: bool) -> Iterator[Output]:
        """Tokens and ends of every request as they are found; `request` is the number in the list. live: soon after that."""
        rows = min(power_of_two(len(requests)), ROWS)
        pages = power_of_two(max(-(-(len(r.token_ids) + r.params.max_tokens) // PAGE) for r in requests))
        shared = len({id(r.group) for r in requests if r.group is not None})
        # A carry cannot go back: where a text ends a conversation that is kept, no step may follow.
        each = keep and any(r.params.stop for r in requests)
        engine = Engine(
            self,
            rows=rows,
            tokens=PREFILL,
            pages=rows * pages if self.config.mla_layers else 0,
            snapshots=min(power_of_two(shared), rows) if shared else 0,
            prefix_cache=False,
            buckets=Buckets((rows,), powers(2, 16, PREFILL), (pages if self.config.mla_layers else 0,)),
            look=1 if each else None if live else DECODE,
        )
        for request in requests:
            engine.add(request, keep=keep)
        return self._outputs(engine)

    def _outputs(self, engine: Engine) -> Iterator[Output]:
        with engine:
            for output in engine.run():
                result = output.result
                completion = result.completion if isinstance(result, ChatCompletion) else result
                if completion is not None and completion.error:
                    warnings.warn(completion.error, RuntimeWarning, stacklevel=4)
                yield output

    # -- chat ------------------------------------------------------------------------------------------------------
    @functools.cached_property
    def chat_format(self) -> K3Chat | JinjaChat | None:
        """How this model's directory writes messages; a template in it that cannot be read is a ChatError here, not before."""
        return chat.find(self.directory, self.tokenizer) if self.directory and self.tokenizer else None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        sampling: SamplingParams | None = None,
        *,
        effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
    ) -> ChatCompletion:
        """The assistant's next message. Messages and tools as in the OpenAI API; the format is the model directory's own.

        sampling: without it up to 4096 tokens at temperature 1 and top_p 0.95; max_tokens is a bound, for an answer also ends
        where the context is full. effort: "low", "high" or "max". response_format as in the OpenAI API: the content is JSON, of the
        schema where there is one (needs k3jax[grammar]). tool_choice ("auto", "none", "required") is put to the model in the
        prompt; nothing forces its answer to follow it. For the next turn append `answer.message()` to the messages.
        """
        deltas = self.stream_chat(
            messages, tools, thinking, sampling, effort=effort, tool_choice=tool_choice, response_format=response_format
        )
        *_, last = deltas
        assert isinstance(last, ChatCompletion)  # a stream ends with it
        return last

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        sampling: SamplingParams | None = None,
        *,
        effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
    ) -> Iterator[ChatDelta | ChatCompletion]:
        """chat, a piece at a time; the whole message comes last. Inputs are checked by the call."""
        [request] = self.chat_requests(
            messages, tools, thinking, sampling, effort=effort, tool_choice=tool_choice, response_format=response_format
        )
        return self._chat(request)

    def chat_requests(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        sampling: SamplingParams | None = None,
        *,
        effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
    ) -> list[Request]:
        """Every sample of the assistant's next message, checked: what an engine takes. Options as in chat."""
        if self.chat_format is None:
            raise ValueError("chat: this model directory has neither a chat template nor K3's markers; use generate")
        prompt = self.chat_format.encode(
            messages,
            tools=tools,
            thinking=thinking,
            effort=effort,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        sampling = CHAT if sampling is None else sampling
        [sampling] = inputs.params(sampling, 1)
        sampling = _kept_to(response_format, sampling)
        room = self.config.max_position_embeddings - len(prompt)
        if room < 1:
            raise ValueError(f"messages of {len(prompt)} tokens: allowed are {len(prompt) + room - 1} (the context)")
        most = min(sampling.max_tokens, room)
        sampling = dataclasses.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))

        calls = bool(tools) and tool_choice != "none"
        return [
            self.as_chat(request._replace(thinking=thinking, calls=calls))
            for request in self.requests([prompt], [sampling])
        ]

    def as_chat(self, request: Request) -> Request:
        """A chat's request with what reads its answer, from the beginning."""
        if self.chat_format is None or request.thinking is None:
            return request

        def parser() -> Parser:
            assert self.chat_format is not None and request.thinking is not None
            return self.chat_format.parser(request.thinking, request.token_ids)

        return request._replace(reader=ChatStream(parser(), request.params.stop), channels=parser())

    def _chat(self, request: Request) -> Iterator[ChatDelta | ChatCompletion]:
        assert request.reader is not None
        given = 0
        for output in self._run([request], False, True):
            yield from request.reader.pieces[given:]
            given = len(request.reader.pieces)
            if isinstance(output.result, ChatCompletion):
                yield output.result

    # -- scores ----------------------------------------------------------------------------------------------------
    def score(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, window: int = 1024, stride: int = 512
    ) -> list[Score]:
        """Log-probability of every token of each text, and bits per byte, read through windows that lie `stride` apart.

        Each token counts once, in the first window that holds it: with everything before it in the first window, with at
        least window - stride tokens before it in the later ones. A text follows the BOS token.
        """
        bos, vocabulary = self.config.bos_token_id, self.config.vocab_size
        if bos is None or not 0 <= bos < vocabulary:
            raise ValueError(f"bos_token_id={bos}, which a score begins with: allowed are 0 to {vocabulary - 1}")
        whole = isinstance(window, int) and not isinstance(window, bool)
        if not whole or not 1 <= window <= self.config.max_position_embeddings:
            raise ValueError(
                f"window={window!r}: allowed are 1 to {self.config.max_position_embeddings} tokens (the context)"
            )
        texts = inputs.several("texts", texts)
        ids = [
            self.encode(inputs.text(f"text {i}", text))
            if isinstance(text, str)
            else inputs.token_ids(f"text {i}", text, self.config, whole=False)
            for i, text in enumerate(texts)
        ]
        cuts = [windows(sequence, bos, window, stride) for sequence in ids]
        ctx = Context(self.kernels, mesh=self.mesh)
        found = [token_logprobs(self.model, windows_, window, ctx) for windows_ in cuts]
        return [self._score(*entry) for entry in zip(texts, ids, found, strict=True)]

    def _score(self, text: Any, ids: list[int], found: list[float]) -> Score:
        if isinstance(text, str):
            size = len(text.encode())
        else:
            size = len(self.tokenizer.decode_bytes(ids, specials=False)) if self.tokenizer else 0
        return Score(ids, found, -math.fsum(found) / math.log(2) / size if size else None)

    def bits_per_byte(self, text: str, *, window: int = 1024, stride: int = 512) -> float:
        """Bits that the model needs for a byte of `text`: score's figure."""
        if not isinstance(text, str):
            raise ValueError(f"text={text!r}: allowed is a string")
        [score] = self.score([text], window=window, stride=stride)
        assert score.bits_per_byte is not None
        return score.bits_per_byte

    # -- disk ------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str], format: str = "hf", experts: str | None = None) -> None:
        """Write a new model directory.

        format: "hf", the released layout with the tokenizer's files, or "orbax", the parameters as held. experts: for "hf",
        "bf16", "mxfp4" or None (as held in memory). Raises FileExistsError; ValueError where several processes share the model.
        """
        path = inputs.path("path", path)
        if jax.process_count() > 1:
            raise ValueError(f"processes={jax.process_count()}: allowed is 1 where a model is saved")
        if format == "hf":
            release.save(path, self.model, self.config, experts=experts, source=self.directory)
        elif format != "orbax":
            raise ValueError(f"format={format!r}: allowed are 'hf' and 'orbax'")
        elif experts is not None:
            raise ValueError(f"experts={experts!r}: allowed is None with format='orbax' (saved as held)")
        else:
            orbax.save(path, self.model, self.config, source=self.directory)

    def save_state(self, path: str | os.PathLike[str], state: Conversation) -> None:
        """Write a conversation, which any process that has loaded this model can go on with. Raises FileExistsError."""
        path, state = inputs.path("path", path), inputs.conversation(state, self.config, str(self.model.dtype))
        conversation.save(path, state, self.config, weights=conversation.fingerprint(self.model))

    def load_state(self, path: str | os.PathLike[str]) -> Conversation:
        """Read a conversation. Raises CheckpointError naming what does not fit this model."""
        path, weights = inputs.path("path", path), conversation.fingerprint(self.model)
        return conversation.load(path, self.config, str(self.model.dtype), weights=weights)

    # -- memory ----------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Free the parameters. The object is of no use afterwards; closing twice is harmless."""
        if self._model is not None:
            for leaf in jax.tree.leaves(nnx.state(self._model)):
                leaf.delete()
            self._model = None

    def __enter__(self) -> LM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kept_to(response_format: Mapping[str, Any] | None, sampling: SamplingParams) -> SamplingParams:
    """The sampling with the schema that a checked response format asks for."""
    if not response_format or response_format["type"] == "text":
        return sampling
    for field in ("json_schema", "regex"):
        if (value := getattr(sampling, field)) is not None:
            raise ValueError(f"{field}={value!r}: allowed is None beside response_format")
    schema = {"type": "object"}
    if response_format["type"] == "json_schema":
        schema = response_format["json_schema"]["schema"]
    return dataclasses.replace(sampling, json_schema=schema)


def _bucket(length: int) -> int:
    """Padded lengths of a single pass: powers of two from 16."""
    return max(16, power_of_two(length))


def _padded(ids: Sequence[int]) -> np.ndarray:
    out = np.zeros(_bucket(len(ids)), np.int32)
    out[: len(ids)] = ids
    return out
