"""The all-reduce on peer memory: what is refused, what it compiles to, and its own code run by threads in random order."""

import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import same_bits
from jax.experimental.mosaic.gpu import utils
from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

import k3jax
from k3jax.pallas import all_reduce as kernel
from k3jax.ranks import RANKS

has_ptx = pytest.mark.skipif(not hasattr(utils, "inline_ptx"), reason="jax 0.10 cannot build the kernel")


def arguments(ranks=2, shape=(3, 20), dtype=jnp.bfloat16, words=None):
    size = kernel.words(ranks, np.prod(shape)) if words is None else words
    spec = jax.ShapeDtypeStruct
    return spec(shape, dtype), spec((size,), jnp.int32), spec((ranks, 2), jnp.int32)


def test_what_is_refused():
    x, mailbox, peers = arguments()
    cases = {
        r"x=float32\[3, 20\]: allowed is bfloat16": arguments(dtype=jnp.float32),
        r"x=bfloat16\[3, 5\]: allowed is bfloat16, a multiple of 4": arguments(shape=(3, 5)),
        r"x=bfloat16\[0, 4\]: ": arguments(shape=(0, 4)),
        r"x=bfloat16\[2097156\]: .* at most 2097152": arguments(shape=(2**21 + 4,)),
        r"mailbox=int32\[271\]: allowed is int32\[272\] or more": arguments(words=271),
        r"mailbox=float32\[272\]: ": (x, mailbox.update(dtype=jnp.float32), peers),
        r"peers=int32\[9, 2\]: allowed is int32\[n, 2\] with n from 1 to 8": arguments(ranks=9),
        r"peers=int32\[2\]: ": (x, mailbox, peers.update(shape=(2,))),
    }
    for reason, case in cases.items():
        assert re.match(reason, kernel.refuse(*case))
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(kernel.all_reduce, *case)


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    reason = kernel.refuse(*arguments())
    assert reason is None if hasattr(utils, "inline_ptx") else re.match(r"jax=0\.10\.\d+: .* needs jax 0\.11", reason)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert re.match("processes=2: allowed is 1", kernel.refuse(*arguments()))


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_slots_lie_in_the_mailbox_and_apart(ranks):
    """Also those of a smaller sum, which are the same."""
    for size in (4, 36, 7168, 7170):
        words = kernel.words(ranks, size)
        for extra in (0, 3, 1001):
            slot = kernel._plan(4, words + extra, ranks).slot
            assert slot >= size and slot % 4 == 0, "two words and two flags, 16 bytes, are stored at once"
            assert kernel.HEADER + kernel.TURNS * ranks * slot <= words + extra
        assert kernel.mailbox(ranks, size).shape == (words,)


@has_ptx
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_it_lowers_for_gpus_without_multicast_needs_jax_0_11(ep):
    mesh = k3jax.make_mesh(tp=4, ep=ep)

    def of_rank(x, mailbox):
        peers, mailbox = kernel.connect(mailbox[0], RANKS)
        y, mailbox = kernel.all_reduce(x[0], mailbox, peers)
        z, mailbox = kernel.all_reduce(y, mailbox, peers)
        return z[None], mailbox[None]

    x, mailbox = (jax.ShapeDtypeStruct((4, *a.shape), a.dtype) for a in arguments(ranks=4)[:2])
    f = jax.shard_map(of_rank, mesh=mesh, in_specs=jax.P(RANKS), out_specs=jax.P(RANKS), check_vma=False)
    text = jax.jit(f, donate_argnums=1).trace(x, mailbox).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("trap;") == 1, "the text shows the kernel, and equal sums are one program"
    assert "multimem" not in text and "multicast" not in text


# The kernel's own code, run by threads in random order. It is translated to a Python generator, which stops at every access
# to memory. What is stored arrives later, 8 bytes at a time, in any order but that of stores to one place.

MASK = {"i32": 2**32 - 1, "i64": 2**64 - 1}
OPS = {
    "addi": "({0} + {1}) & {mask}", "muli": "({0} * {1}) & {mask}", "shli": "({0} << {1}) & {mask}", "remui": "{0} % {1}",
    "andi": "{0} & {1}", "ori": "{0} | {1}", "xori": "{0} ^ {1}", "minui": "min({0}, {1})", "extui": "{0}", "index_cast": "{0}",
    "cmpi eq": "{0} == {1}", "cmpi ne": "{0} != {1}", "select": "{1} if {0} else {2}", "addf": "{0} + {1}",
    "bitcast": "np.uint32({0}).view(np.float32)", "constant": "{0} & {mask}",
}  # fmt: skip
ASM = {
    r"@\$0 trap;": "assert not {0}, 'trap'",
    r"ld\.\S*b64 .*": "low, high = yield from load({0}, 2)\n{r} = low | high << 32",
    r"ld\.\S*v(\d)\.b32 .*": "{r} = yield from load({0}, {count})",
    r"ld\.\S*b32 .*": "({r},) = yield from load({0}, 1)",
    r"st\.\S*b32 .*": "yield from store({all})",
    r"atom\.\S*\.add\.u32 .*, 1;": "{r} = yield from increment({0})",
    r"cvt\.rn\.bf16x2\.f32 .*": "{r} = rounded({0}) << 16 | rounded({1})",
}


def thread_of(plan):
    """The kernel's code as thread(x, table, mine, y, thread, block, load, store, increment)."""
    with make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            f = func.FuncOp("f", ([ir.IntegerType.get_signless(64)] * 4, []))
            with ir.InsertionPoint(f.add_entry_block()):
                kernel._sum(*f.entry_block.arguments, plan)
                func.ReturnOp([])
        text = str(f)
    code, depth, loop = ["def thread_of_it(arg0, arg1, arg2, arg3, thread, block, load, store, increment):"], 1, ""
    text = re.sub(r"%([\w-]+)(?:#(\d+))?", lambda m: "_" + m[1].replace("-", "_") + (f"[{m[2]}]" if m[2] else ""), text)
    for line in text.replace("_arg", "arg").splitlines()[1:]:
        r, _, op = line.strip().rpartition(" = ")
        if m := re.match(r'llvm.inline_asm has_side_effects "(.*?)", ".*?" (.*) :', op):
            pattern = next(p for p in ASM if re.fullmatch(p, m[1]))
            count = (re.fullmatch(pattern, m[1]).groups() or [1])[0]
            new = ASM[pattern].format(*m[2].split(", "), r=r, all=m[2], count=count)
        elif m := re.match(r"arith\.(cmpi \w+|\w+),? (.*?) : .*?(\w+)$", op):
            new = f"{r} = {OPS[m[1]].format(*m[2].split(', '), mask=MASK.get(m[3]))}"
        elif m := re.match(r"llvm.extractvalue (.*) :", op) or re.match(r"gpu\.(thread|block)_id +x", op):
            new = f"{r} = {m[1]}"
        elif m := re.match(r"scf.if (\w+) {", op):
            new = f"if {m[1]}:"
        elif op.startswith("scf.while"):
            loop, new = r.split(":")[0], "while True:"
        elif m := re.match(r"scf.condition\((\w+)\) (.*) :", op):
            new = f"{loop} = {m[2]}\nif not {m[1]}: break"
        else:
            assert op in ("gpu.barrier", "} do {", "scf.yield", "return", "}") or op.startswith("^bb0"), op
            new = "yield 'barrier'" if op == "gpu.barrier" else ""
            depth -= op == "}"
        code += [" " * depth + part for part in new.splitlines()]
        depth += new.endswith(":")
    scope = {"np": np, "rounded": lambda v: int(v.astype(jnp.bfloat16).view(np.uint16))}
    exec("\n".join(code), scope)
    return scope["thread_of_it"]


class Machine:
    """Ranks that make the sums of `xs`, [calls][ranks, size], each at a pace of its own; results are in `ys`, alike."""

    def __init__(self, xs, seed, start=0):
        self.random, self.xs, self.ranks = random.Random(seed), xs, len(xs[0])
        most = max(x.shape[1] for x in xs)
        self.words = kernel.words(self.ranks, most)
        ends = np.cumsum([-(-n // 32) * 32 for n in (most, 2 * self.ranks, self.words, most)])
        self.places = [rank * ends[-1] + np.array([0, *ends[:-1]]) for rank in range(self.ranks)]  # x, table, mine, y
        self.memory = [0xDEAD] * int(self.ranks * ends[-1])
        for _, table, mine, _ in self.places:
            self.memory[mine : mine + self.words] = [start, *[0] * (self.words - 1)]
            self.memory[table : table + 2 * self.ranks] = [v for p in self.places for v in (4 * int(p[2]), 0)]
        self.stored = [[] for _ in range(self.ranks)]  # and not arrived
        self.ys = [[None] * self.ranks for _ in xs]
        self.calls, self.threads = [-1] * self.ranks, [{} for _ in range(self.ranks)]
        self.held = [set() for _ in range(self.ranks)]  # threads at a barrier

    def load(self, address, count):
        assert address % (4 * count) == 0
        found, first = [], address // 4
        for at in range(first, first + count, 2):
            yield
            found += self.memory[at : min(at + 2, first + count)]
        return found

    def store(self, rank, address, *words):
        assert address % (4 * len(words)) == 0
        yield
        self.stored[rank] += [(address // 4 + i, words[i : i + 2]) for i in range(0, len(words), 2)]

    def increment(self, address):
        yield
        self.memory[address // 4] += 1
        return self.memory[address // 4] - 1

    def arrive(self, rank, number):
        place = self.stored[rank][number][0]
        at, words = self.stored[rank].pop(next(i for i, s in enumerate(self.stored[rank]) if s[0] == place))
        self.memory[at : at + len(words)] = words

    def advance(self, rank):
        """One step of one thread. A call begins when all threads of the one before are done and what they stored is there."""
        threads, held = self.threads[rank], self.held[rank]
        if not threads:
            while self.stored[rank]:
                self.arrive(rank, 0)
            x, table, mine, y = map(int, self.places[rank])
            if self.calls[rank] >= 0:
                words = self.memory[y : y + self.xs[self.calls[rank]].shape[1] // 2]
                self.ys[self.calls[rank]][rank] = np.array(words, np.uint32).view(jnp.bfloat16)
            self.calls[rank] += 1
            if self.calls[rank] == len(self.xs):
                return
            values = self.xs[self.calls[rank]][rank].view(np.uint32).tolist()
            self.memory[x : x + len(values)] = values
            plan = kernel._plan(2 * len(values), self.words, self.ranks)
            for block, thread in np.ndindex(plan.grid, kernel._THREADS):
                functions = self.load, functools.partial(self.store, rank), self.increment
                threads[block, thread] = thread_of(plan)(4 * x, 4 * table, 4 * mine, 4 * y, thread, block, *functions)
        free = [key for key in threads if key not in held]
        key = free[int(len(free) * self.random.random() ** self.bias)]
        try:
            if next(threads[key]) == "barrier":
                held.add(key)
                block = {(key[0], thread) for thread in range(kernel._THREADS)}
                if block <= held:
                    held -= block
        except StopIteration:
            del threads[key]

    def run(self):
        pace: list[float] = []
        for step in range(40_000 * len(self.xs)):
            live = [rank for rank, call in enumerate(self.calls) if call < len(self.xs)]
            if not live:
                return self.ys
            if step % 300 == 0:
                pace = [self.random.random() ** 6 for _ in self.calls]
                self.bias = self.random.choice((0.1, 1, 10))  # for the last threads, none, and for the first ones
            [rank] = self.random.choices(live, [pace[rank] for rank in live])
            if self.stored[rank] and self.random.random() < 0.3:
                self.arrive(rank, self.random.randrange(len(self.stored[rank])))
            else:
                self.advance(rank)
        raise AssertionError(f"a rank waits for ever: calls {self.calls}")


@pytest.fixture
def few(monkeypatch):
    """Two blocks of three threads, which have several groups of units each."""
    for name, value in (("_THREADS", 3), ("_BLOCKS", 2), ("_LOADS", 4)):
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setitem(globals(), "thread_of", functools.cache(thread_of))


def draw(ranks, seed, sizes=(60, 4, 28, 60, 8, 44)):
    """Of three ranks or more the first two cancel, so that the order of the sum shows."""
    rng, xs = np.random.default_rng(seed), []
    for size in sizes:
        x = rng.normal(size=(ranks, size)).astype(jnp.bfloat16)
        if ranks > 2:
            x[0] *= 2**18
            x[1] = -x[0]
        xs.append(x)
    return xs


@has_ptx
@pytest.mark.parametrize("start", [0, 2**32 - 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_in_any_order_of_threads_needs_jax_0_11(few, ranks, start):
    """Also where epochs wrap. Sums are float32 in the order of the ranks, rounded once."""
    for seed in range(4):
        xs = draw(ranks, seed)
        for x, ys in zip(xs, Machine(xs, seed, start).run(), strict=True):
            want = functools.reduce(np.add, x.astype(np.float32)).astype(jnp.bfloat16)
            assert all(same_bits(y, want) for y in ys)


@has_ptx
def test_one_slot_a_source_would_not_do_needs_jax_0_11(few, monkeypatch):
    """Without turns a rank that runs ahead writes where a late one has yet to read."""
    monkeypatch.setattr(kernel, "TURNS", 1)
    with pytest.raises(AssertionError, match="waits for ever"):
        for seed in range(4):
            Machine(draw(2, seed), seed).run()


@has_ptx
def test_a_mailbox_that_moved_traps_needs_jax_0_11(few):
    machine = Machine(draw(2, 0), 0)
    table = int(machine.places[1][1])
    machine.memory[table + 2] += 16
    with pytest.raises(AssertionError, match="trap"):
        machine.run()
