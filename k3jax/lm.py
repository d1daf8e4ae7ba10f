"""load() and LM, the user's object."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from k3jax import generate as generation
from k3jax.batch import single
from k3jax.config import ConfigError, K3Config
from k3jax.io import hf, orbax
from k3jax.io.tokenizer import Tokenizer
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, Output, forward
from k3jax.probe import Probe, expand
from k3jax.probe import sites as every_site
from k3jax.sampling import SamplingParams, power_of_two
from k3jax.score import windows


@dataclasses.dataclass(frozen=True)
class Completion:
    """One request's outcome.

    token_ids ends with the stop token when one ended it; text leaves that token out, and is None without a tokenizer.
    finish_reason: "stop" (a stop token), "length" (max_tokens), or "error" (a value was not finite; `error` says where).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None = None


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    kernels: Kernels | str = "auto",
    mesh: None = None,
    experts: str = "decoded",
) -> LM:
    """Load a model directory: a Hugging Face one (K3 or Kimi-Linear, safetensors) or an Orbax one of ours.

    dtype: "bfloat16", "float32", or None to keep what is stored. kernels: "auto" or a Kernels. experts: "decoded", or
    "packed" to keep MXFP4 experts at 4.25 bits a weight in memory. mesh: sharding is not supported yet; must be None.
    Raises ConfigError, CheckpointError, TokenizerError or, for an option, plain ValueError. Options, configuration, tokenizer
    and the tensors' names, shapes and dtypes are checked before any weight is read.
    """
    if mesh is not None:
        raise ValueError(f"mesh={mesh!r}: allowed is None (sharding is not supported yet)")
    if experts not in ("decoded", "packed"):
        raise ValueError(f"experts={experts!r}: allowed are 'decoded' and 'packed'")
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path={path!r}: allowed is the path of a model directory")
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"path={str(path)!r}: no such directory; allowed is a model's directory")
    in_orbax = orbax.is_orbax(directory)
    if in_orbax and experts == "packed":
        raise ValueError("experts='packed': an Orbax directory keeps its experts as they were saved")
    config = (orbax if in_orbax else hf).read_config(directory)
    kernels = Kernels.resolve(kernels, config)
    tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    end_ids = _end_ids(directory, config, tokenizer)
    _keep_compiled_programs()
    if in_orbax:
        loaded = orbax.load(directory, dtype=dtype)
    else:
        loaded = hf.load(directory, dtype=dtype, packed=experts == "packed")
    return LM(loaded.model, loaded.config, tokenizer, kernels, end_ids, loaded.ignored)


def _end_ids(directory: Path, config: K3Config, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens that end a generation: the union of what the configuration, the generation defaults and the tokenizer say."""
    ends = [] if config.eos_token_id is None else [config.eos_token_id]
    defaults = directory / "generation_config.json"
    if defaults.exists():
        eos = hf.read_json(defaults).get("eos_token_id")
        ends += eos if isinstance(eos, list) else [] if eos is None else [eos]
    for end in ends:
        if type(end) is not int or not 0 <= end < config.vocab_size:
            raise ConfigError(f"eos_token_id has {end!r}: allowed are token ids, 0 to {config.vocab_size - 1}")
    special = {} if tokenizer is None else tokenizer.special_ids
    return sorted({*ends, *(special[name] for name in ("[EOS]", "<|end_of_msg|>", "<|im_end|>") if name in special)})


def _keep_compiled_programs() -> None:
    """Compiled programs outlive the process, unless the user has chosen a cache. Programs of any size and speed are kept."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "k3jax" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@functools.partial(jax.jit, static_argnames="ctx")
def _forward(model: K3, tokens: Array, length: Array, ctx: Context, routing: Mapping[str, Array] | None) -> Output:
    """One prompt from its start, without a carry."""
    return forward(model, single(tokens, length), None, ctx, routing)


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
    ) -> None:
        self._model: K3 | None = model
        self.config = config
        self.tokenizer = tokenizer
        self.kernels = kernels
        self.end_ids = tuple(end_ids)  # tokens that end a generation
        self._sites = frozenset(every_site(config))
        self.ignored_tensors = tuple(ignored)  # left unread by rule: vision, layers past the count

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
        return tokenizer.decode(_integers("ids", ids))

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
        ids = self._check_ids("token_ids", token_ids)
        out = _forward(
            self.model, _padded(ids), np.int32(len(ids)), Context(self.kernels), self._routing(routing, len(ids))
        )
        return np.asarray(out.logits)[: len(ids)]

    def trace(
        self, token_ids: Sequence[int], sites: Sequence[str] | str, *, routing: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Named activations of one forward pass: site names or shell patterns ("router_ids_*").

        k3jax.probe.sites lists the names of a model, tests/golden/README.md says what each holds.
        States are [H, K, V] after the last token; kda_conv_* are the last W raw inputs, zeros before a short prompt.
        """
        ids = self._check_ids("token_ids", token_ids)
        wanted = [sites] if isinstance(sites, str) else sites
        if not isinstance(wanted, Sequence) or not all(isinstance(site, str) for site in wanted):
            raise ValueError(f"sites={sites!r}: allowed are a name or a list of names")
        names = expand(self.config, wanted)
        ctx = Context(self.kernels, probe=Probe(frozenset(names)))
        out = _forward(self.model, _padded(ids), np.int32(len(ids)), ctx, self._routing(routing, len(ids)))
        return {name: self._traced(name, np.asarray(out.taps[name]), len(ids)) for name in names}

    def _traced(self, name: str, value: np.ndarray, length: int) -> np.ndarray:
        """A tapped array without its padding, in the golden data's axis order."""
        if value.dtype == jnp.bfloat16:
            value = value.astype(np.float32)
        if name.startswith("kda_state"):
            return value[0]
        if name.startswith("attnres_R"):
            return value
        if name.startswith("kda_conv"):
            width = self.config.short_conv_kernel_size
            return np.concatenate([np.zeros((width, *value.shape[1:]), value.dtype), value[:length]])[-width:]
        return value[:, :length] if name == "hidden" else value[:length]

    def _routing(self, routing: Mapping[str, Any] | None, length: int) -> dict[str, Array] | None:
        if routing is None:
            return None
        if not isinstance(routing, Mapping):
            raise ValueError(
                f"routing is a {type(routing).__name__}: allowed is a mapping from router_ids_L to experts"
            )
        known = {f"router_ids_{layer}" for layer in self.config.moe_layers}
        forced = {}
        for name, value in routing.items():
            if name in known:
                ids = self._experts(f"routing[{name!r}]", value, length)
                forced[name] = jnp.asarray(np.pad(ids, ((0, _bucket(length) - length), (0, 0))), jnp.int32)
            elif name not in self._sites:  # the rest of a trace may be there
                raise ValueError(f"routing: {name!r} is not a mixture layer of this model")
        if not forced:
            raise ValueError("routing names no router_ids_L: allowed are the router_ids_L of a trace")
        return forced

    def _experts(self, what: str, value: Any, length: int) -> np.ndarray:
        experts, shape = self.config.num_experts, (length, self.config.num_experts_per_token)
        try:
            ids = np.asarray(value)
        except ValueError:
            raise ValueError(f"{what} is ragged: allowed is an array of shape {shape}") from None
        if ids.shape != shape or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{what} is {ids.dtype} of shape {ids.shape}: allowed are integers of shape {shape}")
        if ids.min() < 0 or ids.max() >= experts:
            raise ValueError(f"{what} has experts {ids.min()} to {ids.max()}: allowed are integers below {experts}")
        if (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any():
            raise ValueError(f"{what} names an expert twice for one token: allowed are distinct ones")
        return ids

    # -- generation ------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue each prompt; one SamplingParams for all or one each. Every input is checked before anything runs.

        A request whose values stop being finite ends with finish_reason "error" and a warning; the others go on.
        """
        ids = self._prompt_ids(prompts)
        params = self._params(sampling, len(ids))
        for i, (prompt, p) in enumerate(zip(ids, params, strict=True)):
            if len(prompt) + p.max_tokens > self.config.max_position_embeddings:
                raise ValueError(
                    f"prompt {i} of {len(prompt)} tokens with max_tokens={p.max_tokens}: "
                    f"allowed are {self.config.max_position_embeddings} tokens in all (the context)"
                )
            for stop in p.stop_token_ids:
                if stop >= self.config.vocab_size:
                    raise ValueError(f"stop_token_ids has {stop}: allowed are 0 to {self.config.vocab_size - 1}")
        finished = generation.generate(self.model, ids, params, self.end_ids, Context(self.kernels))
        return [self._completion(prompt, f, i) for i, (prompt, f) in enumerate(zip(ids, finished, strict=True))]

    def _completion(self, prompt: list[int], finished: generation.Finished, index: int) -> Completion:
        kept = finished.token_ids[:-1] if finished.stopped else finished.token_ids
        text = None if self.tokenizer is None else self.tokenizer.decode(kept)
        if finished.bad_layer is None:
            return Completion(prompt, finished.token_ids, text, "stop" if finished.stopped else "length")
        where = "the head" if finished.bad_layer == self.config.num_hidden_layers else f"layer {finished.bad_layer}"
        error = f"request {index}: values are not finite after {where}"
        warnings.warn(error, RuntimeWarning, stacklevel=3)
        return Completion(prompt, finished.token_ids, text, "error", error)

    def _prompt_ids(self, prompts: object) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence) or not prompts:
            raise ValueError(
                f"prompts={prompts!r}: allowed are a string, a list of strings or a list of lists of token ids, not empty"
            )
        if any(isinstance(prompt, int | np.integer) for prompt in prompts):
            raise ValueError("prompts is one list of token ids: allowed is a list of such lists")
        return [
            self._check_ids(f"prompt {i}", self.encode(p) if isinstance(p, str) else p) for i, p in enumerate(prompts)
        ]

    def _check_ids(self, what: str, ids: Any) -> list[int]:
        """Token ids that the model can take as input."""
        ids = _integers(what, ids)
        if not ids:
            raise ValueError(f"{what} is empty: allowed is one token or more")
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise ValueError(f"{what} has id {int(i)}: allowed are 0 to {self.config.vocab_size - 1}")
            if i == self.config.media_placeholder_token_id:
                raise ValueError(f"{what} has id {int(i)}, an image part: vision is not supported")
        if len(ids) > self.config.max_position_embeddings:
            raise ValueError(
                f"{what} has {len(ids)} tokens: allowed are {self.config.max_position_embeddings} (the context)"
            )
        return ids

    def _params(self, sampling: object, count: int) -> list[SamplingParams]:
        if sampling is None:
            sampling = SamplingParams()
        if isinstance(sampling, SamplingParams):
            return [sampling] * count
        if (
            isinstance(sampling, Sequence)
            and len(sampling) == count
            and all(isinstance(p, SamplingParams) for p in sampling)
        ):
            return list(sampling)
        raise ValueError(f"sampling={sampling!r}: allowed are one SamplingParams or a list of {count}")

    # -- scores ----------------------------------------------------------------------------------------------------
    def bits_per_byte(self, text: str, *, window: int = 1024, stride: int = 512) -> float:
        """Bits that the model needs for a byte of `text`, read through windows of `window` tokens that lie `stride` apart.

        Each token counts once, in the first window that holds it: with everything before it in the first window, with at
        least window - stride tokens before it in the later ones.

        The text follows the BOS token. Raises ValueError for an empty text or a model without tokenizer or BOS id.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={text!r}: allowed is a string")
        if not text:
            raise ValueError("text is empty: allowed is one byte or more")
        size = len(text.encode())  # raises UnicodeEncodeError, a ValueError, on a lone surrogate
        bos, vocabulary = self.config.bos_token_id, self.config.vocab_size
        if bos is None or not 0 <= bos < vocabulary:
            raise ValueError(f"bos_token_id={bos}, which a score begins with: allowed are 0 to {vocabulary - 1}")
        if not 1 <= window <= self.config.max_position_embeddings:
            raise ValueError(
                f"window={window}: allowed are 1 to {self.config.max_position_embeddings} tokens (the context)"
            )
        bits = 0.0
        for w in windows(self.encode(text), bos, window, stride):
            inputs, targets = _padded(w.inputs, window), _padded(w.targets, window)
            fresh = (len(w.targets) - w.fresh, len(w.targets))
            bits += float(_bits(self.model, inputs, targets, np.array(fresh, np.int32), Context(self.kernels)))
        return bits / size

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


@functools.partial(jax.jit, static_argnames="ctx")
def _bits(model: K3, inputs: Array, targets: Array, fresh: Array, ctx: Context) -> Float[Array, ""]:
    """Bits of targets [fresh[0], fresh[1])."""
    logits = forward(model, single(inputs, fresh[1]), None, ctx).logits
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[:, None], -1)[:, 0]
    index = jnp.arange(inputs.shape[0])
    return -jnp.sum(jnp.where((index >= fresh[0]) & (index < fresh[1]), log_p, 0)) / jnp.log(2.0)


def _integers(what: str, ids: Any) -> list[int]:
    """A list of Python integers from a list or an array of integers."""
    if isinstance(ids, Mapping):
        raise ValueError(f"{what} is a mapping: allowed are text or token ids (vision is not supported)")
    if isinstance(ids, jax.Array | np.ndarray):
        if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"{what} is {ids.dtype} of shape {ids.shape}: allowed are integers of one axis")
        return np.asarray(ids).tolist()
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray):
        for i in ids:
            if not isinstance(i, int | np.integer) or isinstance(i, bool):
                raise ValueError(f"{what} holds {i!r}: allowed are integer token ids")
        return [int(i) for i in ids]
    raise ValueError(f"{what} is a {type(ids).__name__}: allowed are integer token ids")


def _bucket(length: int) -> int:
    """Padded lengths of a single pass: powers of two from 16."""
    return max(16, power_of_two(length))


def _padded(ids: Sequence[int] | np.ndarray, size: int | None = None) -> np.ndarray:
    out = np.zeros(_bucket(len(ids)) if size is None else size, np.int32)
    out[: len(ids)] = ids
    return out
