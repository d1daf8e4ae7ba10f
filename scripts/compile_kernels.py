"""Compile the kernels at Kimi K3's sizes for an H200, on a machine that needs no GPU, and print what ptxas says of each.

    python scripts/compile_kernels.py [--only kda_prefill,attnres]

Needs Python 3.12 and jax[cuda13]; exit code 2 without them, and 1 where a kernel does not compile or the scan of the KDA
prefill spills registers. ptxas is that of the installed packages. Registers, stack and spills are of a thread, shared memory
of a block; of the all-reduce, which XLA launches otherwise, the last two columns are not known.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # jax may not start before its flags are set
    from k3jax.bench.cases import Case

H200 = (Path(__file__).parents[1] / "benchmarks" / "h200.textproto").read_text()
NO_SPILLS = ("kda_scan", "kda_survey", "kda_join")  # chunk after chunk: what they spill is waited for
MOST = {"kda_prepare_mosaic": 168}  # registers: with more, two of its blocks fit a multiprocessor and not three
SNAPSHOTS, RANKS = 4, 8  # of a row; of an all-reduce
SAID = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


class Program(NamedTuple):
    """Something to compile: a function and abstract arguments for it, on one GPU or on RANKS."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    ranks: int = 1


class Kernel(NamedTuple):
    """What ptxas and the launch say of one."""

    name: str
    registers: int
    stack: int  # bytes
    spilled: int  # bytes, stored and loaded
    shared: int | None  # bytes
    threads: int | None


def ptxas() -> Path | None:
    """That of the installed packages."""
    nvidia = importlib.util.find_spec("nvidia")
    found = (Path(place, "cu13/bin/ptxas") for place in (nvidia and nvidia.submodule_search_locations) or ())
    return next((path for path in found if path.is_file()), None)


def unable() -> str | None:
    """Why nothing can be compiled here, or None."""
    if sys.version_info < (3, 12):
        return f"python={sys.version.split()[0]}: allowed is 3.12 or newer"
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None or ptxas() is None:
        return "jax[cuda13]: is not installed"
    return None


# -- what there is -----------------------------------------------------------------------------------------------------


def programs(only: str | None) -> Iterator[Program]:
    """Every case of the benchmark and, where it is among them, more of the KDA prefill; without `only` also the all-reduce."""
    from k3jax.bench import chosen

    cases = chosen(only)
    yield from (of_case(case) for case in cases)
    if any(case.op == "kda_prefill" for case in cases):
        yield from untimed_prefill()
    if only is None:
        yield all_reduce(64)


def of_case(case: Case, note: str = "", *more: Any) -> Program:
    import jax

    carry, args, sets = jax.eval_shape(case.make)
    return Program(f"{case.op} {case.shape}{note}", case.kernel, (carry, args, sets[0], *more))


def untimed_prefill() -> Iterator[Program]:
    """Segments with more precision, too few tokens or heads for Mosaic, and snapshots in both forms."""
    import jax
    import jax.numpy as jnp

    from k3jax.bench.cases import kda_prefill_case as case
    from k3jax.pallas.kda_prefill import Snapshots

    yield from (of_case(case(12, [8192], precision=p)) for p in ("high", "highest"))
    yield from (of_case(case(H, [T])) for H, T in ((96, 256), (12, 2048)))
    snapshots = Snapshots(*[jax.ShapeDtypeStruct((1, SNAPSHOTS), jnp.int32)] * 2)
    yield from (of_case(case(H, [8192]), " snapshots", snapshots) for H in (96, 12))


def all_reduce(rows: int) -> Program:
    import jax
    import jax.numpy as jnp

    from k3jax.bench.cases import D
    from k3jax.pallas import all_reduce as kernel

    def of_rank(x: Any, mailbox: Any) -> Any:
        peers, mailbox = kernel.connect(mailbox, "ranks")
        return kernel.all_reduce(x, mailbox, peers)

    def call(x: Any, mailbox: Any) -> Any:
        split = jax.P("ranks")
        return jax.shard_map(of_rank, in_specs=split, out_specs=split, check_vma=False)(x, mailbox)

    x = jax.ShapeDtypeStruct((RANKS * rows, D), jnp.bfloat16)
    mailbox = jax.ShapeDtypeStruct((RANKS * kernel.words(RANKS, rows * D),), jnp.int32)
    return Program(f"all_reduce {rows} rows, {RANKS} ranks", call, (x, mailbox), (1,), RANKS)


# -- compiling ---------------------------------------------------------------------------------------------------------


def compiled(program: Program) -> str:
    """The program as XLA leaves it."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{program.ranks}")
    mesh = topologies.make_mesh(topology, (program.ranks,), ("ranks",))
    where = jax.sharding.NamedSharding(mesh, jax.P("ranks") if program.ranks > 1 else jax.P())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), program.args)
    with jax.set_mesh(mesh):
        traced = jax.jit(program.call, donate_argnums=program.donate).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()


@contextlib.contextmanager
def output(path: Path) -> Iterator[None]:
    """What anything in the process writes to stdout and stderr goes to a file."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


def kernels(program: Program, dump: Path, assembler: Path) -> list[Kernel]:
    """The program's kernels but for those that XLA makes itself. `dump` is where XLA leaves PTX and launches."""
    for path in dump.iterdir():
        path.unlink()
    with output(dump / "said"):
        text = compiled(program)
    by_mosaic = (dump / "said").read_text(errors="replace")
    ours = set(re.findall(r'__gpu\$xla\.gpu\.triton.*?\bname = "(\w+)"', text))
    launches = "".join(path.read_text() for path in dump.glob("*.thunk_sequence.txt"))
    found = [Kernel(*_numbers(match), None, None) for match in SAID.finditer(by_mosaic)]
    for path in sorted(dump.glob("*.ptx")):
        if not (entry := re.search(r"\.entry (\w+)\(", path.read_text())) or entry[1] not in ours:
            continue
        command = [assembler, "-v", "-arch=sm_90a", "-o", os.devnull, path]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        launch = re.search(rf"\b{entry[1]} grid: .*threads: \[(\d+).*shared_memory: (\d+)", launches)
        threads, shared = map(int, launch.groups()) if launch else (None, None)
        found.append(Kernel(*_numbers(SAID.search(said)), shared, threads))
    if ours - {kernel.name for kernel in found} or not found:
        raise RuntimeError(f"no PTX of {', '.join(sorted(ours)) or 'any kernel'} was left")
    return found


def _numbers(match: re.Match[str] | None) -> tuple[str, int, int, int]:
    """Name, registers, stack and spills."""
    if match is None:
        raise RuntimeError("ptxas says nothing of a kernel")
    stack, stores, loads, registers = map(int, match.groups()[1:])
    return match[1], registers, stack, stores + loads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="operations of `k3jax bench kernels`, with commas between them")
    args = parser.parse_args()
    if reason := unable():
        print(reason, file=sys.stderr)
        return 2
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        # Before jax starts. Two of them say what to leave behind.
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={directory} --xla_dump_emitter_re=ptx",
        }  # fmt: skip
        try:
            todo = list(programs(args.only))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{'program':34} {'kernel':28} {'registers':>9} {'spilled':>8} {'stack':>6} {'shared':>7} {'threads':>7}")
        for program in todo:
            try:
                found = kernels(program, Path(directory), ptxas() or Path())
            except Exception as error:  # the others are still to be seen
                print(f"{program.name:34} {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
                wrong.append(f"{program.name}: does not compile")
                continue
            for k in found:
                shared, threads = ("-" if n is None else n for n in (k.shared, k.threads))
                numbers = f"{k.registers:9} {k.spilled:8} {k.stack:6} {shared:>7} {threads:>7}"
                print(f"{program.name:34} {k.name:28} {numbers}", flush=True)
                if k.spilled and k.name.startswith(NO_SPILLS):
                    wrong.append(f"{program.name}: {k.name} spills {k.spilled} bytes")
                wrong += [
                    f"{program.name}: {k.name} has {k.registers} registers, at most {most} are meant"
                    for name, most in MOST.items()
                    if k.name.startswith(name) and k.registers > most
                ]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
