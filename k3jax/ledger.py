"""The ledger of one request: what persists between its steps, what one forward pass makes and drops, what the model holds.

Every shape comes from the code that makes the array, traced without memory, so that any size of model can be asked about.

The rule for `tp` ranks is that of k3jax.sharding, with whole experts divided: a parameter is split along its axis tagged
heads, expert, mlp or vocab, and whole on every rank where it has none. What a request keeps and what
a pass makes is that of a model with a tp-th of the heads, of the dense MLP and of the vocabulary: KDA memory splits by
heads. MLA latents are whole on every rank, since all heads read them; so are hidden states, router scores and experts'
outputs, which are summed or gathered over the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from k3jax import carry as carries
from k3jax import sharding
from k3jax.batch import Batch
from k3jax.carry import PAGE
from k3jax.config import DTYPES, K3Config
from k3jax.generate import PREFILL
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, forward
from k3jax.ops import mla, moe
from k3jax.ops.mxfp4 import GROUP
from k3jax.probe import Probe, sites

Lifetime = Literal["persists", "transient", "resident"]
Step = Literal["prefill", "decode"]
Shape = tuple[int, ...]
Made = jax.ShapeDtypeStruct  # an array that was traced


class Entry(NamedTuple):
    """One kind of array. Shapes and bytes are those of one rank."""

    lifetime: Lifetime
    what: str
    where: str  # the class and attribute, or the code that makes it
    copies: int  # how many there are: one a layer, say
    alive: int  # how many of them exist at the same time
    shape: Shape  # of one, as stored
    dtype: str
    why: str
    logical: Shape = ()  # of one, where it is stored otherwise
    step: Step | None = None  # the forward pass that makes it, if it is transient

    @property
    def count(self) -> str:
        return str(self.copies) if self.copies == self.alive else f"{self.alive} of {self.copies}"

    @property
    def bytes(self) -> int:
        """Of all that exist at the same time, as stored."""
        return self.alive * math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What `ledger` found. `parameters` counts the whole model's, decoded, without what is absorbed from them."""

    layers: int
    tp: int
    tokens: int
    parameters: int
    entries: tuple[Entry, ...]

    def of(self, lifetime: Lifetime, step: Step | None = None) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if (entry.lifetime, entry.step) == (lifetime, step))

    def bytes(self, lifetime: Literal["persists", "resident"]) -> int:
        """On one rank. Transient arrays have no sum: they do not all exist at once."""
        if lifetime not in ("persists", "resident"):
            raise ValueError(f"lifetime={lifetime!r}: allowed are 'persists' and 'resident'")
        return sum(entry.bytes for entry in self.of(lifetime))

    def table(self, width: int = 160) -> str:
        """Plain text of at most `width` columns."""
        parts = [
            f"{self.layers} layers, {self.parameters:,} parameters; one request of {self.tokens:,} tokens\n"
            f"{_human(self.bytes('persists'))} persist with the request, {_human(self.bytes('resident'))} with the model\n"
            f"Shapes and bytes are those of one rank of {self.tp}.\n"
            '"1 of 69" copies: 69 are made, one after another, and 1 exists at a time.'
        ]
        for title, entries, total in (
            ("Persists between steps, with the request", self.of("persists"), self.bytes("persists")),
            ("Transient in the prefill of the prompt", self.of("transient", "prefill"), None),
            ("Transient in the decode of its last token", self.of("transient", "decode"), None),
            ("Resident with the model", self.of("resident"), self.bytes("resident")),
        ):
            tail = "" if total is None else f": {total:,} bytes ({_human(total)})"
            rows = [(e.what, e.where, e.count, _shape(e), e.dtype, f"{e.bytes:,}", e.why) for e in entries]
            head = ("what", "where", "copies", "one, as stored", "dtype", "bytes", "why")
            parts.append(f"{title}{tail}\n\n{aligned(head, rows, width, right={'copies', 'bytes'})}")
        return "\n\n".join(parts) + "\n"


def ledger(config: K3Config, *, tp: int = 1, tokens: int, dtype: str = "bfloat16", packed: bool = False) -> Ledger:
    """The ledger of one request of `tokens` tokens on one of `tp` ranks.

    dtype: of the trunk, activations and latents. packed: routed experts in MXFP4, 4.25 bits a weight, as K3 is released.
    Persistent entries stand for all `tokens`. Transient ones are of two passes: the prefill of T = min(tokens, PREFILL)
    tokens (longer prompts take several), and the decode of T = 1, the last of them. T is without padding.
    ValueError names what cannot be: a tp that does not divide the heads, experts and widths that are split, for one.
    """
    _check(config, tp, tokens, dtype, packed)
    rank, pages = _rank(config, tp), -(-tokens // PAGE)
    parameters = jax.tree.leaves(nnx.state(K3.abstract(config, dtype=dtype), nnx.Param))
    return Ledger(
        layers=config.num_hidden_layers,
        tp=tp,
        tokens=tokens,
        parameters=sum(math.prod(p.shape) for p in parameters),
        entries=(
            *_persistent(rank, tokens, pages, dtype),
            *_transient(rank, "prefill", min(tokens, PREFILL), pages, dtype, packed),
            *_transient(rank, "decode", 1, pages, dtype, packed),
            *_resident(config, tp, dtype, packed),
        ),
    )


def _check(config: K3Config, tp: int, tokens: int, dtype: str, packed: bool) -> None:
    c = config
    if type(tp) is not int or tp < 1:
        raise ValueError(f"tp={tp!r}: allowed is an integer of 1 or more")
    if type(tokens) is not int or not 1 <= tokens <= c.max_position_embeddings:
        raise ValueError(f"tokens={tokens!r}: allowed are 1 to {c.max_position_embeddings} (the context)")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: allowed are {' and '.join(map(repr, DTYPES))}")
    if type(packed) is not bool:
        raise ValueError(f"packed={packed!r}: allowed are True and False")
    sharding.check_split(config, tp, 1)
    if packed and c.moe_layers:
        for name, size in (("width of an expert", c.expert_width), ("moe_intermediate_size", c.moe_intermediate_size)):
            if size % GROUP:
                raise ValueError(f"packed=True: allowed is False, since the {name}, {size}, is no multiple of {GROUP}")


def _rank(config: K3Config, tp: int) -> K3Config:
    """The model that one rank's activations and memory are those of."""
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size // tp,
        kda_num_heads=max(1, config.kda_num_heads // tp),
        num_attention_heads=max(1, config.num_attention_heads // tp),
        intermediate_size=max(1, config.intermediate_size // tp),
    )


# -- what persists -------------------------------------------------------------------------------------------------------


def _persistent(config: K3Config, tokens: int, pages: int, dtype: str) -> Iterator[Entry]:
    carry = jax.eval_shape(functools.partial(carries.empty, config, slots=1, pages=pages, dtype=dtype))

    def entry(what: str, where: str, all_: Sequence[Made], shape: Shape, why: str, logical: Shape = ()) -> Entry:
        return Entry("persists", what, where, len(all_), len(all_), shape, str(all_[0].dtype), why, logical)

    if carry.kda:
        S, conv = [state.S for state in carry.kda], [state.conv for state in carry.kda]
        kept, channels = conv[0].shape[1], math.prod(conv[0].shape[2:])
        why = "all the past of a layer: each token updates it"
        yield entry("KDA recurrent state", "Carry.kda[].S", S, S[0].shape[1:], why)
        why = f"the last {kept} raw q, k and v, for the next token's convolution"
        yield entry("KDA convolution history", "Carry.kda[].conv", conv, conv[0].shape[1:], why, (channels, kept))
    if carry.mla:
        size = carry.mla[0].shape[-1]
        a_token = len(carry.mla) * size * carry.mla[0].dtype.itemsize
        why = f"{a_token:,} bytes a token in all layers, on every rank; grows by a page of {PAGE} tokens"
        yield entry("MLA latents", "Carry.mla[]", carry.mla, carry.mla[0].shape, why, (tokens, size))
    yield entry("length", "Carry.lengths", [carry.lengths], (), "the tokens that all of the above stand for")
    host = Made((), jnp.int32)
    yield entry("block table", "engine.pool (host)", [host], (pages,), "which pages hold the latents, in order")
    yield entry("token list", "host", [host], (tokens + 1,), "one longer than the caches: the last was only sampled")


# -- what one pass makes ---------------------------------------------------------------------------------------------------


def _traced(config: K3Config, T: int, pages: int, decode: bool, dtype: str, packed: bool) -> dict[str, Made]:
    """Arrays of one pass by name: every tapped site of the first layers that have all kinds, slots, logits and a tile."""
    first = _first_layers(config)
    cut = config.slice(1 + max(first.values()))
    model = jax.eval_shape(K3.absorb, K3.abstract(cut, dtype=dtype, packed=packed))
    carry = jax.eval_shape(functools.partial(carries.empty, cut, slots=1, pages=pages, dtype=dtype))
    fields: Any = (Made(shape, jnp.int32) for shape in ((T,), (2,), (1,), (1,), (1, pages), (1,)))
    batch = Batch(*fields)
    ctx = Context(Kernels.auto(config, "cpu"), decode_rows=int(decode), probe=Probe(frozenset(sites(cut))))
    out = jax.eval_shape(functools.partial(forward, ctx=ctx), model, batch, carry)
    found = out.taps | {"logits": out.logits, "slots": jax.eval_shape(lambda batch: batch.slot_mapping(PAGE), batch)}
    if "moe" in first:
        layer = model.model.layers[first["moe"]].block_sparse_moe
        routing = moe.Routing(*(found[f"router_{part}_{first['moe']}"] for part in ("ids", "weights")))
        z = Made((T, config.expert_width), found["embed"].dtype)
        found["tile"] = _activation(layer, z, routing, ctx.kernels.moe)
    return found


def _first_layers(config: K3Config) -> dict[str, int]:
    """The first layer of each kind that the model has."""
    kinds = {"kda": config.kda_layers, "mla": config.mla_layers, "moe": config.moe_layers}
    return {kind: layers[0] for kind, layers in kinds.items() if layers} | {"any": 0}


def _activation(layer: Any, z: Made, routing: moe.Routing, impl: moe.Impl) -> Made:
    """The gate that the experts' activation function is given: what of them is computed at a time."""
    seen = []

    def act(gate: jax.Array, up: jax.Array) -> jax.Array:
        seen.append(Made(gate.shape, gate.dtype))
        return up

    def run(layer: Any, z: jax.Array, routing: moe.Routing) -> jax.Array:
        matrices = (layer.experts.w1.value, layer.experts.w3.value, layer.experts.w2.value)
        return moe.experts(z, routing, *matrices, act, impl)  # type: ignore[arg-type]

    jax.eval_shape(run, layer, z, routing)
    return seen[0]


def _transient(config: K3Config, step: Step, T: int, pages: int, dtype: str, packed: bool) -> Iterator[Entry]:
    made, first, c = _traced(config, T, pages, step == "decode", dtype, packed), _first_layers(config), config
    layers = {"kda": len(c.kda_layers), "mla": len(c.mla_layers), "moe": len(c.moe_layers), "any": c.num_hidden_layers}
    x, heads, cached = made["embed"], c.num_attention_heads, pages * PAGE

    def like(*shape: int, dtype: Any = x.dtype) -> Made:
        return Made(shape, dtype)

    def tap(kind: str, site: str) -> Made:
        return made[f"{site}_{first[kind]}"]

    # what, where, the layers that make some and how many each, array, why. The next layer reuses the memory.
    # fmt: off
    rows: list[tuple[str, str, str, int, Made, str]] = [
        ("hidden state", "Block", "any", 2, x, "what the attention and the MLP of a layer read"),
    ]
    if "kda" in first:
        rows += [
            ("KDA q, k, v", "KDA.{q,k,v}_proj", "kda", 3, tap("kda", "kda_conv_q"), "raw; the last ones stay as history"),
            ("KDA log decay", "KDA.f_b_proj", "kda", 1, tap("kda", "kda_log_decay"), "what a token makes the state forget"),
            ("KDA beta", "KDA.b_proj", "kda", 1, tap("kda", "kda_beta"), "how strongly a token writes"),
            ("KDA output", "KDA", "kda", 1, tap("kda", "kda_core"), "what the state answers to q, before norm and gate"),
        ]
    if "mla" in first:
        q = "MLA.q_proj" if c.q_lora_rank is None else "MLA.q_b_proj"
        rows += [("MLA q", q, "mla", 1, like(T, heads, c.qk_head_dim), "of the new tokens")]
    if "mla" in first and step == "prefill":
        kv_b = like(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        expand = functools.partial(mla.expand, heads=heads, nope=c.qk_nope_head_dim)
        k, v = jax.eval_shape(expand, tap("mla", "mla_latent"), tap("mla", "mla_krope"), kv_b)
        scores = like(min(T, mla.QUERIES), heads, T, dtype=jnp.float32)
        rows += [
            ("MLA k", "ops.mla.expand", "mla", 1, k, "made from the latents for this pass alone"),
            ("MLA v", "ops.mla.expand", "mla", 1, v, "made from the latents for this pass alone"),
            ("MLA scores", "ops.mla.prefill", "mla", 1, scores, f"of up to {mla.QUERIES} queries at a time"),
        ]
    if "mla" in first and step == "decode":
        absorbed, scores = like(T, heads, c.latent_size), like(T, heads, cached, dtype=jnp.float32)
        rows += [
            ("MLA absorbed q", "ops.mla.decode", "mla", 1, absorbed, "q W_UK and the shared part: no k of the past is made"),
            ("MLA gathered latents", "ops.mla.decode", "mla", 1, like(T, cached, c.latent_size), "the pages side by side"),
            ("MLA scores", "ops.mla.decode", "mla", 1, scores, "against every cached latent"),
        ]
    if "moe" in first:
        rows += [
            ("router scores", "ops.moe.Router", "moe", 1, like(T, c.num_experts, dtype=jnp.float32), "of the new tokens alone"),
            ("chosen experts", "ops.moe.Routing.ids", "moe", 1, tap("moe", "router_ids"), "chosen anew by each token and layer"),
            ("their weights", "ops.moe.Routing.weights", "moe", 1, tap("moe", "router_weights"), "of the sum over them"),
            ("expert activations", "ops.moe.experts", "moe", 2, made["tile"], "gate and up of what is computed at a time"),
        ]
    if "moe" in first and Kernels.auto(c, "cpu").moe == "grouped":
        total = like(T, c.expert_width, dtype=jnp.float32)
        rows += [("sum over experts", "ops.moe.experts", "moe", 1, total, "what the experts so far add up to")]
    # fmt: on

    R = max(c.depth_sources(layer, site) for layer in range(c.num_hidden_layers) for site in ("attn", "mlp"))
    depth = "blocks so far and the running sum: depth, not history" if R > 1 else "the residual stream"
    once = [
        ("slot mapping", "Batch.slot_mapping", 1, made["slots"], "where latents go; anew in every step"),
        ("depth sources", "Depth.sources", R, x, depth),
        ("logits", "K3.lm_head", 1, made["logits"], "of the last token; sampling reads them, no cache does"),
    ]
    for what, where, copies, array, why in once:
        yield Entry("transient", what, where, copies, copies, array.shape, str(array.dtype), why, step=step)
    for what, where, kind, each, array, why in rows:
        copies, alive = each * layers[kind], 1 if kind == "any" else each
        yield Entry("transient", what, where, copies, alive, array.shape, str(array.dtype), why, step=step)


# -- what the model holds --------------------------------------------------------------------------------------------------

# What a parameter is, by the first pattern that its path fits, in the order of the table; and why it is there.
_KINDS = (
    ("embedding", r"embed_tokens", "token ids to hidden states"),
    ("head", r"lm_head", "hidden states to logits"),
    ("depth score", r"_res_(norm|proj)\.", "gain or query of a site's scores over depth"),
    ("absorbed", r"W_UK_T|W_UV", "a half of kv_b_proj, made once after loading for decoding"),
    ("router", r"\.gate\.", "scores and bias that choose the experts"),
    ("expert", r"\.experts\.", "of all experts of a layer; a token reads a few"),
    ("norm", r"norm\.", "gain of an RMSNorm"),
    ("taps", r"conv1d", "of the short convolution, one filter a channel"),
    ("rate", r"A_log|dt_bias", "of a head's decay"),
    ("projection", r"", "between hidden states, heads and latents"),
)


def _resident(config: K3Config, tp: int, dtype: str, packed: bool) -> list[Entry]:
    """Parameters of one kind, place, shape and dtype are one entry."""
    model = jax.eval_shape(K3.absorb, K3.abstract(config, dtype=dtype, packed=packed))
    groups: dict[tuple[int, str, Shape, Shape, str], list[str]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            shape = sharding.share(node.shape, node.axes, tp, 1)
            owner, name = _place(config, path)
            kind = next(i for i, (_, pattern, _) in enumerate(_KINDS) if re.search(pattern, ".".join(map(str, path))))
            groups.setdefault((kind, owner, node.shape, shape, str(node.dtype)), []).append(name)
    found = []
    for (kind, owner, _, shape, dtype_), names in sorted(groups.items()):
        what, _, why = _KINDS[kind]
        where, copies = f"{owner}.{_braced(sorted(set(names)))}", len(names)
        found.append(Entry("resident", what, where, copies, copies, shape, dtype_, why))
    return found


def _place(config: K3Config, path: tuple[Any, ...]) -> tuple[str, str]:
    """The class that owns a parameter, and its name there: KDA and q_proj, say."""
    parts = [str(part) for part in path if part != "weight"]
    if parts[:2] != ["model", "layers"]:
        return "K3", ".".join(parts)
    classes = {"self_attn": config.mixer(int(parts[2])).upper(), "block_sparse_moe": "MoE", "mlp": "MLP"}
    return (classes[parts[3]], ".".join(parts[4:])) if parts[3] in classes else ("Block", ".".join(parts[3:]))


def _braced(names: Sequence[str]) -> str:
    """Names that share their two ends, as one: {k,q,v}_proj."""
    if len(names) == 1:
        return names[0]
    start = _shared(names)
    end = _shared([name[len(start) :][::-1] for name in names])[::-1]
    return f"{start}{{{','.join(name[len(start) : len(name) - len(end)] for name in names)}}}{end}"


def _shared(names: Sequence[str]) -> str:
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike)


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]], width: int, right: Iterable[str] = ()) -> str:
    """A table in plain text: no colours, no line wider than `width`, nothing in a cell read as markup; the last column wraps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in head:
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name != head[-1])
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    options = dict(markup=False, emoji=False, highlight=False, color_system=None, force_terminal=False)
    Console(file=text, width=width, force_jupyter=False, **options).print(table)  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _shape(entry: Entry) -> str:
    stored, logical = (f"[{', '.join(map(str, shape))}]" for shape in (entry.shape, entry.logical))
    return f"{stored} for {logical}" if entry.logical else stored


def _human(size: int) -> str:
    """Bytes in the largest binary unit that fits."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:,.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
