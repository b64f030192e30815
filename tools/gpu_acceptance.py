"""Everything that is to be measured on a GPU: commands that each run once, and a table of them.

    python tools/gpu_acceptance.py --out DIR [--pieces tests,steps,...] [--sizes small,...]
        [--minutes 8] [--shared DIR] [--tokens DIR] [--real-steps 400] [--rehearse]
        [--list | --table] [-- --model.remat dots ...]

Each command is a process with a time limit. It leaves its output in DIR/UNIT.log and, if it
succeeds, what it found in DIR/UNIT.json, and is not run again. None is started that does not fit
into `--minutes`; the same command continues. Exit codes: 0 all is done, 75 something is left, 1 it
failed. Pieces, in the order in which they run:

  machine      what the card reaches: a matrix product, a copy; versions
  tests        the tests marked `gpu`
  steps        train steps of four optimizers at each size: rates, MFU, memory, phases, the ten
               longest operations, and what `plan` says with this machine's compiler
  peer         AdamW beside the compiled PyTorch GPT-2 with flash attention
  real         GPT-2 small on --tokens under MARS and AdamW
  checkpoint   save and restore of XL
  generate, eval   tokens and HellaSwag questions a second

Options after `--` go to every train step that is measured. `--rehearse` runs tiny models on the
CPU. `--table` runs nothing: it prints what DIR holds as Markdown, with how far the clock and the
memory of `maxmars plan` are from each measured step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxmars.compare.tables import markdown_table  # noqa: E402
from maxmars.distributed.files import write_json  # noqa: E402

OPTIMIZERS = ("adamw", "mars", "mars_m", "muon")
AGAIN = 75


@dataclass(frozen=True)
class Shape:
    """How the steps of a size are measured, so that they fit into an H200's 141 GB."""

    rows: int
    """Sequences of 1,024 tokens a step; 480 in the published runs."""
    microbatch: int
    peer_microbatch: int
    """Beside PyTorch, which recomputes nothing."""
    seconds: int
    """Expected of one contestant."""
    in_turns: bool = False
    """Whether the contestants fit into the memory at once."""


SHAPES = {
    "small": Shape(480, 60, 24, 45, in_turns=True),
    "medium": Shape(480, 16, 8, 65),
    "large": Shape(240, 8, 8, 75),
    "xl": Shape(240, 16, 4, 90),
}
TINY = [
    *("--model.compute-dtype", "float32", "--model.max-seq-len", "64", "--model.num-layers", "2"),
    *("--model.num-heads", "2", "--model.embed-dim", "64"),
]
TESTS = {
    "kernels": (
        "tests/model/test_attention.py",
        "tests/model/test_cross_entropy.py",
        "tests/optim/test_newton_schulz.py",
        "tests/checkpoint/test_digest.py",
        "tests/tools/test_trace_table.py",
    ),
    "training": ("tests/train/test_step.py",),
    "resume": ("tests/train/test_killed.py",),
}


@dataclass(frozen=True)
class Unit:
    """One process and what it finds."""

    name: str
    command: list[object]
    """Of Python. `{output}` stands for what it writes, `{scratch}` for a directory."""
    seconds: float
    """Expected; it is ended after three times as long."""
    environment: dict[str, str] = field(default_factory=dict)


def units(args: argparse.Namespace) -> Iterator[Unit]:
    """All, in the order in which they run."""
    tiny = args.rehearse

    def bench(name: str, *words: object, seconds: float) -> Unit:
        output = ("--output", "{output}")
        return Unit(name, ["tools/bench.py", *words, *output], seconds)

    def config(size: str, optimizer: str) -> str:
        return f"gpt2:size={'tiny' if tiny else size},optimizer={optimizer}"

    def steps(name: str, *words: object, size: str, contestants: int, microbatch: int) -> Unit:
        shape = SHAPES[size]
        rounds = (5, 2) if size == "small" else (2, 1)
        rows, count = (8, 2) if tiny else (shape.rows, shape.rows // microbatch)
        words += ("--random-tokens", "--rounds", rounds[0], "--steps", rounds[1])
        words += ("--global-batch-size", rows, "--num-microbatches", count)
        words += (*TINY, "--model.vocab-size", 512) if tiny else ("--model.remat", "None")
        # JAX takes its share of the card's memory at once.
        share = f"{0.92 / (contestants if shape.in_turns else 1):.3f}"
        memory = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": share,
        }
        command = ["tools/bench_train.py", *words, *args.options, "--output", "{output}"]
        return Unit(name, command, shape.seconds * contestants, memory)

    yield bench("machine", "device", *(("--size", 128) if tiny else ()), seconds=30)
    for name, paths in TESTS.items():
        # Versions differ from those of the developers' machines: a warning is no failure here.
        options = ("-q", "-rs", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
        yield Unit(f"tests-{name}", ["-m", "pytest", *paths, *options], 120)
    for size in args.sizes:
        names = [config(size, optimizer) for optimizer in OPTIMIZERS]
        of_size = {"size": size, "microbatch": SHAPES[size].microbatch}
        if SHAPES[size].in_turns:
            against = ("--against", *names[1:])
            yield steps(f"steps-{size}", names[0], *against, contestants=len(names), **of_size)
        else:
            for optimizer, name in zip(OPTIMIZERS, names, strict=True):
                yield steps(f"steps-{size}-{optimizer}", name, contestants=1, **of_size)
    for size in args.sizes:
        words = [config(size, "adamw"), "--peer", "torch-compiled"]
        words += [] if SHAPES[size].in_turns else ["--one-at-a-time"]
        microbatch = SHAPES[size].peer_microbatch
        yield steps(f"peer-{size}", *words, size=size, contestants=2, microbatch=microbatch)
    for optimizer in ("mars", "adamw"):
        rows, count = (8, 20) if tiny else (64, args.real_steps)
        command = ["-m", "maxmars", "train", config("small", optimizer), "--num-steps", count]
        command += ["--data.path", args.tokens, "--schedule.warmup-steps", count // 10]
        command += ["--global-batch-size", rows, "--workdir", "{output}"]
        command += TINY if tiny else ["--num-microbatches", 4, "--model.remat", "None"]
        yield Unit(f"real-{optimizer}", command, 100 + count / 10)
    size = ("--size", "small", "--layers", 1) if tiny else ("--size", "xl")
    words = ("checkpoint", *size, "--rounds", 1, "--directory", "{scratch}")
    yield bench("checkpoint", *words, seconds=150)
    words = ("--batch-sizes", "1,8,64", "--compute-dtype", "bfloat16")
    words = ("--batch-sizes", 1, "--layers", 1, "--new-tokens", 4) if tiny else words
    yield bench("generate", "generate", *words, seconds=60)
    words = ("eval", args.shared / "data" / "hellaswag_val_600.jsonl", "--no-peer")
    if tiny:
        words += ("--model", args.shared / "reference" / "hf_gpt2_tiny", "--num-questions", 20)
    yield bench("eval", *words, seconds=60)


PIECES = ("machine", "tests", "steps", "peer", "real", "checkpoint", "generate", "eval")


def open_units(args: argparse.Namespace) -> list[Unit]:
    """Those of the pieces that have found nothing yet."""
    return [
        unit
        for unit in units(args)
        if unit.name.partition("-")[0] in args.pieces
        and not (args.out / f"{unit.name}.json").exists()
    ]


def run(args: argparse.Namespace, unit: Unit, limit_s: float) -> bool:
    """Run a unit; whether it succeeded."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    one_device = "--xla_force_host_platform_device_count=1" if args.rehearse else ""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one_device}".strip(),
        "JAX_PLATFORMS": "cpu" if args.rehearse else "cuda",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "MAXMARS_REFERENCE_DIR": str(args.shared),
        "TIKTOKEN_CACHE_DIR": str(args.shared / "data" / "tiktoken"),
        # Tests and runs start processes of their own: each takes what it needs of the card.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        **unit.environment,
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as scratch:
        output = Path(scratch) / "found"
        words = [str(w).format(output=output, scratch=scratch) for w in unit.command]
        with (args.out / f"{unit.name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its children can be ended with it
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                log.write(f"\nended after {limit_s:.0f} s\n")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode == 0:
            files = [output, output / "summary.json"]  # a benchmark's JSON, or what a run leaves
            said = (args.out / f"{unit.name}.log").read_text().strip().splitlines()[-1:]
            found = next((json.loads(f.read_text()) for f in files if f.is_file()), said)
            seconds = round(time.monotonic() - started, 1)
            write_json(
                args.out / f"{unit.name}.json",
                {"command": words, "options": args.options, "seconds": seconds, "found": found},
            )
    return process.returncode == 0


def run_all(args: argparse.Namespace) -> int:
    """Run what is left and fits; the exit code."""
    started, failed, left = time.monotonic(), [], []
    for number, unit in enumerate(open_units(args)):
        remaining = 60 * args.minutes - (time.monotonic() - started)
        if number and unit.seconds > remaining:
            left.append(unit.name)
            continue
        limit = min(max(60.0, 3 * unit.seconds), max(remaining, 30))
        print(f"{unit.name}: about {unit.seconds:.0f} s, at most {limit:.0f} s", flush=True)
        if not run(args, unit, limit):
            failed.append(unit.name)
    if failed:
        print(f"failed: {', '.join(failed)}; see their .log in {args.out}")
    if left:
        print(f"left for the next time: {', '.join(left)}")
    if not failed and not left:
        print(f"all is done; python tools/gpu_acceptance.py --out {args.out} --table")
    return 1 if failed else AGAIN if left else 0


# --- the table ------------------------------------------------------------------------------------

Steps = dict[str, list[dict[str, Any]]]
"""What was measured of each contestant, by unit."""


def step_row(unit: str, row: dict[str, Any], in_turns: bool) -> list[str]:
    def shown(found: dict[str, float], form: str) -> str:
        middle, low, high = (format(found[key], form) for key in ("median", "min", "max"))
        return f"{middle} ({low} to {high})"

    mfu, peak, seconds = row.get("mfu"), row.get("peak_bytes"), row["step_time"]["median"]
    planned, phases = row.get("plan", {}), row.get("phases") or {}
    off, late, compile_s = "", "", row["compile_time"]
    if peak and "memory" in planned:
        off = f" ({planned['memory']['peak_bytes'] / peak - 1:+.1%})"
    if planned.get("clock"):
        late = f" ({planned['time']['step_time_s'] / seconds - 1:+.1%})"
    return [
        f"{unit.split('-')[1]}, {row['tokens_a_step']:,} tokens",
        row["name"],
        shown(row["tokens_per_sec"], ",.0f"),
        shown(row["ratio_to_first"], ".3f") if in_turns else "",
        "" if mfu is None else f"{mfu:.1%}",
        f"{1e3 * seconds:.1f}{late}",
        f"{phases['optimizer']:.1%}" if phases else "",
        "" if peak is None else f"{peak / 1e9:.1f}{off}",
        "" if compile_s is None else f"{compile_s:.0f}",
    ]


def print_table(found: dict[str, dict[str, Any]]) -> None:
    """Print all that was found: the card, steps, their longest operations."""
    machine = found.get("machine")
    versions = machine["environment"] if machine else {}
    if machine:
        product, copy = (
            statistics.median(machine[key]) for key in ("matmul_flops", "copy_bytes_per_sec")
        )
        card = machine["driver"] or machine["device_kind"]
        print(
            f"{card}; Python {versions['python']}, JAX {versions['jax']}, Flax {versions['flax']}, "
            f"Optax {versions['optax']}, maxmars {versions['maxmars']}. A large bfloat16 product: "
            f"{product / 1e12:.0f} TFLOP/s; memory: {copy / 1e9:,.0f} GB/s.\n"
        )
    steps: Steps = {n: each["results"] for n, each in found.items() if "results" in each}
    head = ["size", "contestant", "tokens/s (range)", "of the first's rate, by round", "MFU"]
    head += ["step, ms (plan's)", "optimizer's share", "peak, GB (plan's)", "compile, s"]
    lines = [step_row(n, row, len(rows) > 1) for n, rows in steps.items() for row in rows]
    print(markdown_table(head, lines))
    for name, rows in steps.items():
        columns = ["operation", "phase", "made from", "ms", "share"]
        lines = [
            [op["name"], op["phase"], op["source"], f"{op['ms']:.2f}", f"{op['share']:.1%}"]
            for op in rows[0].get("longest", ())
        ]
        if lines:
            print(f"\n{name}, {rows[0]['name']}:\n\n{markdown_table(columns, lines)}")
    for name, each in found.items():
        if name != "machine" and "results" not in each:
            own = {"found": each} if isinstance(each, list) else each
            own = {k: v for k, v in own.items() if k not in ("config", "environment")}
            print(f"\n{name}: {json.dumps(own)}")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def choice(known: Iterable[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            if wrong := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(known)}")
            return [name for name in known if name in names]

        return parse

    shared = Path(os.environ.get("MAXMARS_REFERENCE_DIR", ROOT.parent / "shared"))
    sizes = list(SHAPES)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON files are")
    parser.add_argument("--pieces", type=choice(PIECES), default=list(PIECES), help="see above")
    parser.add_argument("--sizes", type=choice(sizes), default=sizes, help=",".join(sizes))
    parser.add_argument("--minutes", type=float, default=8.0, help="time for this command (8)")
    parser.add_argument(
        "--shared", type=Path, default=shared, help="reference/ and data/ (MAXMARS_REFERENCE_DIR)"
    )
    parser.add_argument("--tokens", type=Path, help="of `maxmars data prepare --tokenizer gpt2`")
    parser.add_argument("--real-steps", type=int, default=400, help="of each real run (400)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--list", action="store_true", help="list the units that are left")
    parser.add_argument("--table", action="store_true", help="print what was found")
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.options, args.shared = words[cut + 1 :], args.shared.resolve()
    if "real" in args.pieces and not (args.table or args.list):
        if args.tokens is None or not args.tokens.is_dir():
            parser.error(
                f"--tokens {args.tokens} is no directory; `maxmars data prepare` makes it."
            )
        args.tokens = args.tokens.resolve()
    if args.table:
        done = {p.stem: json.loads(p.read_text())["found"] for p in sorted(args.out.glob("*.json"))}
        if not done:
            parser.error(f"--out {args.out} holds no results.")
        print_table(done)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.list:
        for unit in open_units(args):
            print(f"{unit.name:24}{unit.seconds:6.0f} s")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `run`, which ends the unit
    try:
        sys.exit(run_all(args))
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
