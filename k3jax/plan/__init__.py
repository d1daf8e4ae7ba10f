"""What fits on GPUs of one kind, and how fast it could at best be: bytes by component, requests, time, advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from json import dumps, loads
from pathlib import Path
from typing import Any, Literal

from k3jax import sharding
from k3jax.carry import PAGE
from k3jax.config import DTYPES, K3Config
from k3jax.io import hf
from k3jax.ledger import aligned
from k3jax.ops.mxfp4 import GROUP
from k3jax.plan.held import RELEASED, Held
from k3jax.plan.times import GPUS, Part, Step, parts

SHARE = 0.92  # of a GPU's memory that a program may fill; the driver and the libraries have the rest
# Bytes for activations and compiled programs: assumed. XLA's plan for 8,192 new tokens over 8 H200 has 1.7 GiB of temporaries.
WORKSPACE = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found. Bytes are those of one GPU; requests and tokens those of one copy of the model."""

    gpu: str
    count: int
    tp: int  # ranks of one copy
    ep: int  # over so many of them whole experts are divided
    num_hidden_layers: int
    dtype: str
    packed: bool
    rows: int
    tokens: int
    memory: int  # that may be used
    workspace: int
    weights: dict[str, int]  # by component
    state_bytes: int  # a slot: KDA states, convolution histories and the length
    sampling_bytes: int  # a slot: the arrays by which a row is sampled
    page_bytes: int  # a page of PAGE latents, all layers
    requests: int  # of `tokens` tokens at once, at most
    requests_limit: Literal["weights", "slots", "pages"]  # what takes most of the memory of one
    longest: int  # tokens of a request that is alone, at most
    longest_limit: Literal["weights", "pages", "context"]
    layers: int  # first ones that fit
    smallest: int | None  # least power of two of these GPUs that holds one copy
    others: tuple[str, ...]  # kinds of which `tp` hold one
    decode: tuple[Part, ...]  # a step of `rows` rows, `tokens` tokens each
    prefill: tuple[Part, ...]  # of one prompt of `tokens` tokens in one pass
    advice: tuple[str, ...] = ()

    @property
    def copies(self) -> int:
        """Of the model, on all GPUs."""
        return self.count // self.tp

    @property
    def total(self) -> int:
        """Bytes of the released weights, without what is absorbed from them."""
        return sum(self.weights[name] for name in RELEASED)

    @property
    def slot_bytes(self) -> int:
        return self.state_bytes + self.sampling_bytes

    @property
    def left(self) -> int:
        """Bytes for slots and pages; below 0 where not even the weights fit."""
        return self.memory - self.workspace - self.arguments(0, 0)

    @property
    def fits(self) -> bool:
        """Whether there is room for the weights, one slot and one page."""
        return self.layers == self.num_hidden_layers

    def arguments(self, slots: int, pages: int) -> int:
        """Bytes of what a step is given: weights, and pools of so many slots and pages. Its batch is small and not counted."""
        return sum(self.weights.values()) + slots * self.slot_bytes + pages * self.page_bytes

    def seconds(self, step: Step, measured: bool = False) -> float:
        """Of a whole step: the bounds; measured: with what was measured in place of a bound where there is such a figure."""
        return sum(p.measured if measured and p.measured is not None else p.bound for p in getattr(self, step))

    def json(self) -> dict[str, Any]:
        """All of it in types of JSON."""
        derived: dict[str, Any] = {
            name: getattr(self, name) for name in ("copies", "fits", "total", "slot_bytes", "left")
        }
        for step in ("decode", "prefill"):
            derived[f"{step}_seconds"] = {"bound": self.seconds(step), "with_measured": self.seconds(step, True)}
        return loads(dumps(dataclasses.asdict(self) | derived))

    def table(self, width: int = 120) -> str:
        """Plain text of at most `width` columns."""
        gpu, experts = GPUS[self.gpu], "MXFP4" if self.packed else self.dtype
        memory = [(name, self.weights[name], "") for name in RELEASED]
        memory += [
            ("weights", self.total, "as released"),
            ("absorbed", self.weights["absorbed"], "halves of kv_b_proj, made at load and held beside it"),
            ("workspace", self.workspace, "activations and programs: assumed"),
            ("left", self.left, "for slots and pages"),
            ("all", self.memory, f"of {gpu.memory:,} that nvidia-smi says; {gpu.nominal // 10**9} GB by name"),
            ("slot", self.slot_bytes, f"a request: {self.state_bytes:,} state, {self.sampling_bytes:,} sampling"),
            ("page", self.page_bytes, f"{PAGE} tokens of a request"),
        ]
        lines = ((name, f"{size:,}", f"{size / 1e9:,.2f}", why) for name, size, why in memory)
        paragraphs = [
            f"{self.num_hidden_layers} layers, experts in {experts}, the rest in {self.dtype}.\n{self.count} x {gpu.title}:"
            f" {self.copies} {'copy' if self.copies == 1 else 'copies'} on {self.tp} each, whole experts over {self.ep} of them."
            " Bytes and times are those of one GPU.",
            aligned(("what", "bytes", "GB", ""), lines, width, right=("bytes", "GB")),
            f"Most requests of {self.tokens:,} tokens at once, a copy: {self.requests:,} (limit: {self.requests_limit})\n"
            f"Most tokens of one request: {self.longest:,} (limit: {self.longest_limit})",
            f"Decode step of {self.rows:,} rows of {self.tokens:,} tokens\n\n{self._times('decode', self.rows, width)}",
            f"Prefill of {self.tokens:,} tokens in one pass\n\n{self._times('prefill', self.tokens, width)}",
            "\n".join(self.advice),
        ]
        return "\n\n".join(paragraphs) + "\n"

    def _times(self, step: Step, tokens: int, width: int) -> str:
        def row(name: str, size: float, flops: float, *seconds: float | None, why: str) -> tuple[str, ...]:
            times = ("" if s is None else f"{s * 1e6:,.1f}" for s in seconds)
            return name, f"{size / 1e6:,.1f}", f"{flops / 1e9:,.1f}", *times, why

        found, bound, mixed = getattr(self, step), self.seconds(step), self.seconds(step, True)
        rows = [row(p.name, p.bytes, p.flops, p.bound, p.measured, why=p.source) for p in found]
        size, flops = sum(p.bytes for p in found), sum(p.flops for p in found)
        rows.append(row("sum", size, flops, bound, mixed, why="measured where there is a figure, else the bound"))
        head = ("part", "MB", "GFLOP", "bound us", "measured us", "")
        rate = f"At most {self.copies * tokens / bound:,.0f} tokens a second on all GPUs together."
        return f"{aligned(head, rows, width, right=head[1:5])}\n{rate}"


def plan(
    config: K3Config,
    gpu: str = "h200",
    count: int = 8,
    *,
    tp: int | None = None,
    ep: int | None = None,
    packed: bool = True,
    dtype: str = "bfloat16",
    memory: int | None = None,
    workspace: int = WORKSPACE,
    rows: int = 32,
    tokens: int | None = None,
) -> Plan:
    """What `count` GPUs of a kind, a key of GPUS, can do with a model.

    tp, ep: as in k3jax.make_mesh; None: all GPUs share one copy, and each has whole experts. packed: experts in MXFP4. dtype: of
    the rest. memory: bytes of one GPU that may be used; None: SHARE of what nvidia-smi says. rows: requests that decode
    together. tokens: of each of them, and of a prompt; None: 8192, or the context. Raises ValueError naming the field, the value
    and what is allowed.
    """
    gpu = gpu.lower() if isinstance(gpu, str) else gpu
    tokens = min(8192, config.max_position_embeddings) if tokens is None else tokens
    _check_numbers(gpu, count=count, tp=tp, ep=ep, memory=memory, workspace=workspace, rows=rows, tokens=tokens)
    tp = count if tp is None else tp
    ep = tp if ep is None else ep
    _check(config, count, tp, ep, packed, dtype, tokens)
    held, memory = Held(config, dtype, packed, ep, tp // ep), _usable(gpu) if memory is None else memory
    weights, (state, sampling, page) = held.weights(), held.pools()
    room, slot, context = memory - workspace, state + sampling, config.max_position_embeddings
    left, request, fits = room - sum(weights.values()), slot + -(-tokens // PAGE) * page, held.fits(room)
    longest = min(context, (left - slot) // page * PAGE if page else context) if fits else 0
    powers = (held._replace(ep=2**power, tp=1) for power in range(11))
    found = Plan(
        gpu=gpu, count=count, tp=tp, ep=ep, num_hidden_layers=config.num_hidden_layers, dtype=dtype, packed=packed,
        rows=rows, tokens=tokens, memory=memory, workspace=workspace, weights=weights,
        state_bytes=state, sampling_bytes=sampling, page_bytes=page, requests=max(0, left // request),
        requests_limit="weights" if not fits else "slots" if 2 * slot > request else "pages",
        longest=longest, longest_limit="weights" if not fits else "context" if longest == context else "pages",
        layers=held.layers(room), smallest=next((one.ep for one in powers if one.fits(room)), None),
        others=tuple(kind for kind in GPUS if kind != gpu and held.fits(_usable(kind) - workspace)),
        decode=parts("decode", held, gpu, rows, tokens), prefill=parts("prefill", held, gpu, 1, tokens),
    )  # fmt: skip
    return dataclasses.replace(found, advice=tuple(_advice(found, config)))


def _usable(gpu: str) -> int:
    return int(SHARE * GPUS[gpu].memory)


def _check_numbers(gpu: str, **numbers: int | None) -> None:
    if not isinstance(gpu, str) or gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r}: allowed are {', '.join(map(repr, GPUS))}")
    for name, value in numbers.items():
        lowest, optional = int(name != "workspace"), name in ("tp", "ep", "memory")
        if not (value is None and optional) and (type(value) is not int or value < lowest):
            raise ValueError(f"{name}={value!r}: allowed is an integer of {lowest} or more{', or None' * optional}")


def _check(config: K3Config, count: int, tp: int, ep: int, packed: bool, dtype: str, tokens: int) -> None:
    c = config
    group = f"False, where MXFP4 cannot scale {GROUP} inputs together"
    even = not c.moe_layers or (c.expert_width % GROUP, c.moe_intermediate_size % GROUP) == (0, 0)
    for ok, name, value, allowed in (
        (count % tp == 0, "tp", tp, f"divisors of count={count}"),
        (tp % ep == 0, "ep", ep, f"divisors of tp={tp}"),
        (tokens <= c.max_position_embeddings, "tokens", tokens, f"1 to {c.max_position_embeddings} (the context)"),
        (dtype in DTYPES, "dtype", dtype, " and ".join(map(repr, DTYPES))),
        (type(packed) is bool, "packed", packed, "True and False"),
        (even or not packed, "packed", packed, group),
    ):
        if not ok:
            raise ValueError(f"{name}={value!r}: allowed are {allowed}")
    sharding.check_split(config, ep, tp // ep, packed)


def _advice(p: Plan, config: K3Config) -> Iterator[str]:
    title, joined, block = GPUS[p.gpu].title, GPUS[p.gpu].joined, config.attn_res_block_size
    if p.fits:
        yield f"Fits {p.tp} x {title}: {p.left / 1e9:,.1f} GB of each are left for slots and pages."
    else:
        lacking = (p.slot_bytes + p.page_bytes - p.left) / 1e9
        yield f"Does not fit {p.tp} x {title}: {lacking:,.1f} GB are lacking on each. The times are those if it did."
        whole = (
            f", {p.layers // block * block} of them in whole blocks of {block}" if block and p.layers >= block else ""
        )
        yield f"Of {config.num_hidden_layers} layers the first {p.layers} fit{whole}."
    least = "no power of two that can share it" if p.smallest is None else f"{p.smallest} x {title}"
    yield f"The fewest of this kind that hold one copy: {least}."
    others = ", ".join(GPUS[kind].title for kind in p.others) or "none that is known here"
    yield f"Other kinds of which {p.tp} hold one copy: {others}."
    if p.fits and p.requests < p.rows:
        yield f"{p.rows:,} rows of {p.tokens:,} tokens do not fit a copy: at most {p.requests:,} do."
    if p.tp > joined:
        yield f"NVLink joins {joined} of them: sums over {p.tp} pass the network as well."


def command(model: Path | None, preset: str | None, memory: float | None, json: bool, **options: Any) -> str:
    """What `k3jax plan` prints. memory: GiB. Of a model directory only config.json is read; neither of the two: K3."""
    if model is not None and preset is not None:
        raise ValueError(f"model={str(model)!r}, preset={preset!r}: allowed is one of the two")
    if preset not in (None, "k3", "kimi-linear-48b"):
        raise ValueError(f"preset={preset!r}: allowed are 'k3', 'kimi-linear-48b' and None")
    if memory is not None and not 0 < memory < 2**40:
        raise ValueError(f"memory={memory}: allowed is a positive number of GiB, below 2**40")
    if model is None:
        config, packed = (K3Config.kimi_linear_48b(), False) if preset == "kimi-linear-48b" else (K3Config.k3(), True)
    else:
        values = hf.read_json(model / "config.json")
        config, packed = K3Config.from_hf(values), "quantization_config" in values.get("text_config", values)
    room = None if memory is None else max(1, int(memory * 2**30))
    found = plan(config, memory=room, packed=packed, dtype=config.dtype, **options)
    return dumps(found.json(), indent=1) + "\n" if json else found.table()
