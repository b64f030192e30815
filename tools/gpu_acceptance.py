"""Everything that is to be measured on a GPU, in one command that continues where it stopped.

    python tools/gpu_acceptance.py --out DIR [--pieces tests,steps,...] [--sizes small,...]
        [--minutes 8] [--shared DIR] [--tokens DIR] [--real-minutes 3] [--retry] [--rehearse]
        [--list] [--table] [-- --model.remat dots ...]

The work is cut into units of some minutes. Each is a process of its own with a time limit and
leaves DIR/UNIT.json, and its output in DIR/UNIT.log. Units that have a JSON are not run again
(`--retry`: those that failed are), and none is started that does not fit into `--minutes`. Exit
codes: 0 all is done, 75 there is more to do (start the same command again), 1 a unit failed.

Pieces, in the order in which they run:
  machine      what the card reaches: a matrix product, a copy; versions
  tests        the tests marked `gpu`
  steps        train steps of four optimizers at each size: rates, MFU, memory, phases, the ten
               longest operations, and what `plan` says with this machine's compiler
  peer         AdamW beside the compiled PyTorch GPT-2 with flash attention
  real         GPT-2 small on --tokens under AdamW and MARS, killed and resumed
  checkpoint   save and restore of XL
  generate, eval   tokens and HellaSwag questions a second
  plan         `maxmars plan` as on a machine without the card

`--table` runs nothing: it prints a Markdown table of what DIR holds, verdicts on the goals, and the
line of data that calibrates `maxmars plan`. Options after `--` go to every train step that is
measured; a DIR belongs to one set of them. `--rehearse` runs tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxmars.compare.tables import markdown_table  # noqa: E402
from maxmars.config.chips import CHIPS, chip_name  # noqa: E402
from maxmars.distributed.files import write_json  # noqa: E402
from maxmars.plan.roofline import Calibration  # noqa: E402
from maxmars.train.metrics import read_metrics  # noqa: E402

SIZES = ("small", "medium", "large", "xl")
OPTIMIZERS = ("adamw", "mars", "mars_m", "muon")
AGAIN = 75

Results = dict[str, dict[str, Any]]
"""What each unit found, by the unit's name."""


@dataclass(frozen=True)
class Shape:
    """How the steps of a size are measured, so that they fit into 80 GB."""

    rows: int
    """Sequences of 1,024 tokens a step; 480 in the published runs."""
    microbatch: int
    remat: str
    in_turns: bool
    """Whether the four optimizers fit into the memory at once."""
    peer_microbatch: int
    """Beside PyTorch, which recomputes nothing."""
    peer_in_turns: bool
    seconds: int
    """Expected of one contestant."""


SHAPES = {
    "small": Shape(480, 24, "None", True, 24, True, 45),
    "medium": Shape(480, 16, "None", False, 8, True, 65),
    "large": Shape(240, 8, "None", False, 8, False, 75),
    "xl": Shape(240, 8, "None", False, 4, False, 90),
}
TINY = [
    *("--model.compute-dtype", "float32", "--model.max-seq-len", "64", "--model.num-layers", "2"),
    *("--model.num-heads", "2", "--model.embed-dim", "64"),
]


@dataclass(frozen=True)
class Unit:
    """One process and the JSON that it leaves."""

    name: str
    command: list[str]
    """`{output}` stands for the JSON file that it writes, `{scratch}` for a directory."""
    seconds: float
    """Expected; it is ended after three times as long."""
    environment: dict[str, str] = field(default_factory=dict)
    missing: str | None = None
    """What it needs and this machine lacks."""

    @property
    def limit_s(self) -> float:
        return max(60.0, 3 * self.seconds)


def tool(name: str, *words: object) -> list[str]:
    """A script of this directory that writes its findings as JSON."""
    return [sys.executable, f"tools/{name}.py", *map(str, words), "--output", "{output}"]


def maxmars(*words: object) -> list[str]:
    """A command of this checkout."""
    return [sys.executable, "-m", "maxmars", *map(str, words)]


def machine_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """The card's ceilings."""
    small = ("--size", 128, "--rounds", 2) if args.rehearse else ()
    yield Unit("machine", tool("bench", "device", *small), 30)


def test_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """The tests marked `gpu`, in three parts; other files would miss a second device at once."""
    parts = {
        "tests-kernels": (
            60,
            "tests/model/test_attention.py",
            "tests/model/test_cross_entropy.py",
            "tests/optim/test_newton_schulz.py",
            "tests/checkpoint/test_digest.py",
            "tests/plan/test_trace.py",
        ),
        "tests-training": (100, "tests/train/test_step.py"),
        "tests-resume": (120, "tests/train/test_verify_resume.py"),
    }
    for name, (seconds, *paths) in parts.items():
        # Versions differ from those of the developers' machines: a warning is no failure here.
        options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *paths, *options, "--junitxml", "{output}"]
        yield Unit(name, command, seconds)


def config_name(args: argparse.Namespace, size: str, optimizer: str) -> str:
    """As on the command line of `maxmars train`."""
    return f"gpt2:size={'tiny' if args.rehearse else size},optimizer={optimizer}"


def shape_options(args: argparse.Namespace, shape: Shape, microbatch: int) -> list[str]:
    """Overrides of a config whose steps are measured."""
    rows, count = (8, 2) if args.rehearse else (shape.rows, shape.rows // microbatch)
    options = ["--global-batch-size", str(rows), "--num-microbatches", str(count)]
    if args.rehearse:
        options += [*TINY, "--model.vocab-size", "512"]
    else:
        options += ["--model.remat", shape.remat]
    return [*options, *args.overrides]


def memory_for(processes: int) -> dict[str, str]:
    """The memory of the card for each of some processes, which JAX takes at once."""
    share = f"{0.92 / processes:.3f}"
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": share}


def step_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """Four optimizers at each size: in turns where the memory holds all, else each alone."""
    for size in args.sizes:
        shape = SHAPES[size]
        options = shape_options(args, shape, shape.microbatch)
        rounds = ("--rounds", 5 if size == "small" else 2, "--steps", 2 if size == "small" else 1)
        names = [config_name(args, size, optimizer) for optimizer in OPTIMIZERS]
        groups = {f"steps-{size}": names}
        if not shape.in_turns:
            groups = {f"steps-{size}-{o}": [n] for o, n in zip(OPTIMIZERS, names, strict=True)}
        for name, (first, *others) in groups.items():
            against = ["--against", *others] if others else []
            command = tool("bench_train", first, "--random-tokens", *rounds, *options, *against)
            count = 1 + len(others)
            yield Unit(name, command, shape.seconds * count, memory_for(count))


def peer_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """AdamW and the compiled PyTorch model, in turns where both fit."""
    no_torch = None if importlib.util.find_spec("torch") else "no PyTorch here"
    for size in args.sizes:
        shape = SHAPES[size]
        turns = () if shape.peer_in_turns else ("--one-at-a-time",)
        words = ["--random-tokens", "--rounds", 3, "--steps", 2 if size == "small" else 1, *turns]
        words += shape_options(args, shape, shape.peer_microbatch)
        name = config_name(args, size, "adamw")
        command = tool("bench_train", name, "--peer", "torch-compiled", *words)
        memory = memory_for(2 if turns == () else 1)
        yield Unit(f"peer-{size}", command, 3 * shape.seconds, memory, no_torch)


def real_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """GPT-2 small on real text, as many steps under AdamW as under MARS."""
    rows = 8 if args.rehearse else 64
    steps = 20
    if not args.rehearse:
        # Known once steps-small is there; else 50 % of an H100. All steps are computed twice.
        found = steps_of(results, "small").get("adamw")
        rate = 550_000 if found is None else found["tokens_per_sec"]["median"]
        steps = max(20, int(args.real_minutes * 60 * rate / (rows * 1024)) // 20 * 10)
    options = ["--schedule.warmup-steps", steps // 10, "--global-batch-size", rows]
    options += TINY if args.rehearse else ["--num-microbatches", 4, "--model.remat", "None"]
    # Under the flag below XLA (JAX 0.11.2) runs no program that has two equal backward passes of
    # attention, so the layers stay a loop.
    options += ["--model.scan-unroll", 1]
    missing = None if args.tokens else "no --tokens"
    flag = "--xla_gpu_exclude_nondeterministic_ops=true"
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
    for optimizer in ("mars", "adamw"):
        words = [config_name(args, "small", optimizer), "--steps", steps, "--data.path"]
        words += [args.tokens and args.tokens.resolve(), *options]
        command = maxmars("verify-resume", *words, "--out", "{output}")
        expected = 150 if args.rehearse else 60 * args.real_minutes + 100
        yield Unit(f"real-{optimizer}", command, expected, flags, missing)


def checkpoint_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """AdamW's state of XL, 19 GB, to the scratch disk and back."""
    size = ("--size", "small", "--layers", 1) if args.rehearse else ("--size", "xl")
    command = tool("bench", "checkpoint", *size, "--rounds", 1, "--directory", "{scratch}")
    yield Unit("checkpoint-xl", command, 150)


def generate_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """GPT-2 small in bfloat16."""
    words = ("--batch-sizes", "1,8,64", "--compute-dtype", "bfloat16")
    if args.rehearse:
        words = ("--batch-sizes", 1, "--layers", 1, "--new-tokens", 4)
    yield Unit("generate", tool("bench", "generate", *words), 60)


def eval_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """HellaSwag on random weights of GPT-2 small, or on the reference's tiny model."""
    questions = args.shared / "data" / "hellaswag_val_600.jsonl"
    words: list[object] = [questions, "--no-peer"]
    if args.rehearse:
        model = args.shared / "reference" / "hf_gpt2_tiny"
        words += ["--model", model, "--num-questions", 20, "--rounds", 1]
    missing = None if questions.exists() else f"no {questions.name} in {args.shared}"
    yield Unit("eval", tool("bench", "eval", *words), 60, missing=missing)


def plan_units(args: argparse.Namespace, results: Results) -> Iterator[Unit]:
    """`maxmars plan`, which uses no device: its compiler knows the card from a table."""
    kind = chip_name(results.get("machine", {}).get("device_kind", ""))
    topology = "cpu:1" if args.rehearse else f"{kind}:1"
    missing = None if kind or args.rehearse else "no machine.json of a known card"
    for size in args.sizes:
        shape = SHAPES[size]
        words = [config_name(args, size, "adamw"), "--topology", topology]
        words += shape_options(args, shape, shape.microbatch)
        command = maxmars("plan", *words, "--output", "{output}")
        yield Unit(f"plan-{size}", command, 90, missing=missing)


MAKERS: dict[str, Callable[[argparse.Namespace, Results], Iterator[Unit]]] = {
    "machine": machine_units,
    "tests": test_units,
    "steps": step_units,
    "peer": peer_units,
    "real": real_units,
    "checkpoint": checkpoint_units,
    "generate": generate_units,
    "eval": eval_units,
    "plan": plan_units,
}
"""Of each piece its units, in the order in which they run. Some commands need the results of
another unit; they are made without, where these are lacking."""


# --- running -------------------------------------------------------------------------------------


def environment_of(args: argparse.Namespace, unit: Unit) -> dict[str, str]:
    """What every unit's process gets."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    flags = os.environ.get("XLA_FLAGS", "")
    if args.rehearse:  # one device, as there
        flags = f"{flags} --xla_force_host_platform_device_count=1".strip()
    return os.environ | {
        "XLA_FLAGS": flags,
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


def run(args: argparse.Namespace, unit: Unit, limit_s: float) -> dict[str, Any]:
    """Run a unit; its status is `ok`, `failed`, `timed out` or `left out`."""
    found: dict[str, Any] = {"unit": unit.name, "overrides": args.overrides}
    if unit.missing is not None:
        return found | {"status": "left out", "reason": unit.missing, "seconds": 0.0, "found": {}}
    started, status = time.monotonic(), "ok"
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as scratch:
        output = Path(scratch) / "found"
        words = [w.format(output=output, scratch=scratch) for w in unit.command]
        with (args.out / f"{unit.name}.log").open("w") as log:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment_of(args, unit),
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its children can be ended with it
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code, status = None, "timed out"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            inner = output / "run.log"  # which goes with the scratch directory
            if code and inner.exists():
                log.write(inner.read_text())
        data = read_findings(output)
    if code is not None and (code or not data or data.get("skipped")):
        status = "failed"
    return found | {
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "command": unit.command,
        "found": data,
    }


def read_findings(output: Path) -> dict[str, Any]:
    """The JSON of a benchmark, the receipt and the losses of a run, or the counts of JUnit."""
    if output.is_dir():
        receipt = output / "receipt.json"
        rows = [row for row in read_metrics(output / "run") if "train/loss" in row]
        losses = [[row["step"], row["train/loss"]] for row in rows]
        return json.loads(receipt.read_text()) | {"losses": losses} if receipt.exists() else {}
    text = output.read_text() if output.exists() else "{}"
    if not text.startswith("<"):
        return json.loads(text)
    cases = list(ElementTree.fromstring(text).iter("testcase"))

    def names(*kinds: str) -> list[str | None]:
        return [c.get("name") for c in cases if any(c.find(kind) is not None for kind in kinds)]

    failed, skipped = names("failure", "error"), names("skipped")
    return {"tests": len(cases), "failed": failed, "skipped": skipped}


def run_all(args: argparse.Namespace) -> int:
    """Run what is left and fits; the exit code."""
    started, first = time.monotonic(), True
    tried: set[str] = set()
    # Planned anew after each unit, since some commands depend on what others found.
    while unit := next((u for u in open_units(args) if u.name not in tried), None):
        tried.add(unit.name)
        remaining = 60 * args.minutes - (time.monotonic() - started)
        if unit.missing is None and unit.seconds > remaining and not first:
            continue
        limit = min(unit.limit_s, max(remaining, 30))
        if unit.missing is None:
            print(f"{unit.name}: about {unit.seconds:.0f} s, at most {limit:.0f} s", flush=True)
        result = run(args, unit, limit)
        if result["status"] == "timed out" and limit < unit.limit_s and not first:
            print(f"{unit.name}: cut off by --minutes; comes again", flush=True)
            continue
        first = first and unit.missing is not None
        write_json(args.out / f"{unit.name}.json", result)
        reason = f" ({result['reason']})" if "reason" in result else ""
        print(f"{unit.name}: {result['status']}{reason}, {result['seconds']:.0f} s", flush=True)
    if left := [u.name for u in open_units(args) if u.missing is None]:
        print(f"left for the next time: {', '.join(left)}")
        return AGAIN
    done = read_results(args.out)
    failed = [name for name, r in done.items() if r["status"] in ("failed", "timed out")]
    if failed:
        print(f"failed: {', '.join(failed)}; see their .log in {args.out}, and run with --retry")
        return 1
    print(f"all is done; python tools/gpu_acceptance.py --out {args.out} --table")
    return 0


def open_units(args: argparse.Namespace) -> list[Unit]:
    """Units without a JSON, or whose JSON says that something was missing.

    Raises:
      SystemExit: there are results of other overrides.
    """
    done = read_results(args.out)
    for name, result in done.items():
        if result["overrides"] != args.overrides:
            sys.exit(
                f"gpu_acceptance.py: {args.out / name}.json was measured with "
                f"{' '.join(result['overrides']) or 'no overrides'}; take another --out."
            )
    found = {name: result["found"] for name, result in done.items()}
    closed = {name for name, result in done.items() if result["status"] != "left out"}
    units = (unit for piece in args.pieces for unit in MAKERS[piece](args, found))
    return [unit for unit in units if unit.name not in closed]


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """All JSON files of a folder, by unit."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


# --- the table -----------------------------------------------------------------------------------


def steps_of(results: Results, size: str) -> dict[str, dict[str, Any]]:
    """What was measured of each optimizer at a size."""
    found = {}
    for name, data in results.items():
        if name == f"steps-{size}" or name.startswith(f"steps-{size}-"):
            for row in data.get("results", []):
                optimizer = next(o for o in reversed(OPTIMIZERS) if row["name"].endswith(o))
                found[optimizer] = row | {"in_turns": len(data["results"]) > 1}
    return found


def step_ratio(rows: dict[str, dict[str, Any]], optimizer: str) -> float | None:
    """How much longer a step of an optimizer takes than AdamW's; by round, if they took turns."""
    if optimizer not in rows or "adamw" not in rows:
        return None
    if rows[optimizer]["in_turns"]:
        return 1 / rows[optimizer]["ratio_to_first"]["median"] - 1
    return rows[optimizer]["step_time"]["median"] / rows["adamw"]["step_time"]["median"] - 1


def peer_ratio(results: Results, size: str) -> float | None:
    """Our tokens/s over those of the compiled PyTorch model."""
    rows = results.get(f"peer-{size}", {}).get("results", [])
    return 1 / rows[1]["ratio_to_first"]["median"] if len(rows) > 1 else None


def memory_errors(results: Results) -> list[float]:
    """Planned over measured peak of memory, less one."""
    return [
        row["plan"]["memory"]["peak_bytes"] / row["peak_bytes"] - 1
        for size in SIZES
        for row in steps_of(results, size).values()
        if row.get("peak_bytes") and "memory" in row.get("plan", {})
    ]


@dataclass(frozen=True)
class Measured:
    """A step, its parts, and what bounds them."""

    parameters: int
    is_adamw: bool
    step_s: float
    model_s: float
    optimizer_s: float
    model_peak_s: float
    """Its model's products at the published peak."""
    optimizer_peak_s: float
    moved_s: float
    """The optimizer's memory traffic at the published rate."""


def measured_steps(results: Results) -> list[Measured]:
    """All steps with a plan of a known chip and with phases."""
    found = []
    for size in SIZES:
        for optimizer, row in steps_of(results, size).items():
            plan = row.get("plan", {})
            if not plan.get("chip") or not row.get("phases"):
                continue
            peak, step = plan["chip"]["peak_flops"], row["step_time"]["median"]
            flops, memory = plan["flops"], plan["memory"]
            state = sum(memory["optimizer_state_bytes"].values())
            state += memory["previous_parameters_bytes"]
            moved = 3 * memory["parameters_bytes"] + 2 * state
            share = row["phases"]["optimizer"]
            found.append(
                Measured(
                    parameters=plan["num_parameters"],
                    is_adamw=optimizer == "adamw",
                    step_s=step,
                    model_s=step * (1 - share),
                    optimizer_s=step * share,
                    model_peak_s=(flops["hardware"] - flops["optimizer"]) / peak,
                    optimizer_peak_s=flops["optimizer"] / peak,
                    moved_s=moved / plan["chip"]["memory_bandwidth"],
                )
            )
    return found


def calibrate(results: Results) -> Calibration | None:
    """Shares of the published rates from AdamW's steps, and the error over all steps."""
    steps = measured_steps(results)
    bases = sorted((s for s in steps if s.is_adamw), key=lambda s: s.parameters)
    if not bases:
        return None
    machine = results.get("machine", {})
    versions = machine.get("environment", {})
    shares = tuple((s.parameters, round(s.model_peak_s / s.model_s, 3)) for s in bases)
    memory = statistics.median(s.moved_s / s.optimizer_s for s in bases)
    what = f"{machine.get('date')}, {machine.get('device_kind')}, JAX {versions.get('jax')}"
    fit = Calibration(measured=what, arithmetic=shares, memory=round(memory, 3), error=0.0)
    errors = []
    for s in steps:
        others = tuple(pair for pair in shares if pair[0] != s.parameters) or shares
        share = dataclasses.replace(fit, arithmetic=others).share(s.parameters)
        guess = (s.model_peak_s + s.optimizer_peak_s) / share + s.moved_s / fit.memory
        errors.append(abs(guess / s.step_s - 1))
    return dataclasses.replace(fit, error=round(max(errors), 3))


def verdicts(results: Results) -> list[tuple[str, str, str, str]]:
    """Goal, what is wanted, what was found, and whether that meets it."""
    rows = []

    def judge(goal: str, found: float | None, wanted: float, form: str, at_least: bool) -> None:
        if found is None:
            rows.append((goal, form.format(wanted), "", "not measured"))
            return
        miss = wanted - found if at_least else found - wanted
        verdict = "met" if miss <= 0 else f"missed by {form.format(miss)}"
        rows.append((goal, form.format(wanted), form.format(found), verdict))

    for size, wanted in zip(SIZES, (0.50, 0.55, 0.55, 0.55), strict=True):
        row = steps_of(results, size).get("adamw")
        mfu = None if row is None else row.get("mfu")
        judge(f"MFU of {size}, AdamW, at least", mfu, wanted, "{:.1%}", True)
    for size in SIZES:
        ratio = peer_ratio(results, size)
        judge(f"tokens/s of {size} over compiled PyTorch, at least", ratio, 1.15, "{:.2f}", True)
    for optimizer, wanted in (("mars", 0.015), ("mars_m", 0.04)):
        for size in SIZES:
            more = step_ratio(steps_of(results, size), optimizer)
            goal = f"step of {optimizer} over AdamW's, {size}, at most"
            judge(goal, more, wanted, "{:+.1%}", False)
    fit = calibrate(results)
    error = None if fit is None else fit.error
    judge("plan's time, calibrated, off by at most", error, 0.10, "{:.1%}", False)
    errors = memory_errors(results)
    worst = max(map(abs, errors)) if errors else None
    judge("plan's peak of memory off by at most", worst, 0.03, "{:.1%}", False)
    for optimizer in ("adamw", "mars"):
        verdict = results.get(f"real-{optimizer}", {}).get("verdict")
        met = "not measured" if verdict is None else "met" if verdict == "identical" else "missed"
        goal = f"{optimizer} on real text, killed and resumed"
        rows.append((goal, "identical", verdict or "", met))
    return rows


def step_rows(results: Results) -> Iterator[list[str]]:
    """One row for each size and optimizer."""
    for size in SIZES:
        rows = steps_of(results, size)
        peer = results.get(f"peer-{size}", {}).get("results", [])
        named = [(o, rows[o]) for o in OPTIMIZERS if o in rows]
        named += [("AdamW, compiled PyTorch", row) for row in peer[1:]]
        for optimizer, row in named:
            rate, phases = row["tokens_per_sec"], row.get("phases", {})
            more = None if optimizer == "adamw" else step_ratio(rows, optimizer)
            mfu, memory, compile_s = row.get("mfu"), row.get("peak_bytes"), row["compile_time"]
            yield [
                f"{size}, {row['tokens_a_step']:,} tokens",
                optimizer,
                f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})",
                "" if mfu is None else f"{mfu:.1%}",
                f"{1e3 * row['step_time']['median']:.1f}",
                "" if more is None else f"{more:+.1%}",
                f"{phases['optimizer']:.1%}" if "optimizer" in phases else "",
                "" if memory is None else f"{memory / 1e9:.1f}",
                "" if compile_s is None else f"{compile_s:.0f}",
            ]


def other_rows(results: Results) -> Iterator[list[str]]:
    """One line for each of the other units."""
    for name, found in results.items():
        piece, text = name.partition("-")[0], ""
        if not found or piece in ("steps", "peer", "machine"):
            continue
        if piece == "tests":
            wrong = [*found["failed"], *found["skipped"]]
            text = f"{found['tests']} tests, failed or skipped: {', '.join(wrong) or 'none'}"
        elif piece == "real":
            tokens = found["config"]["global_batch_size"] * found["config"]["model"]["max_seq_len"]
            shown = found["losses"][:: max(1, len(found["losses"]) // 4)]
            text = "training loss by tokens: "
            text += ", ".join(f"{step * tokens / 1e6:.1f}M: {loss:.3f}" for step, loss in shown)
        elif piece == "checkpoint":
            text = ", ".join(
                f"{key} {statistics.median(found[key]):.1f} s"
                for key in ("blocked", "total", "restore")
            )
        elif piece == "generate":
            rates = (f"{r['cached']:.0f} (batch {r['batch']})" for r in found["tokens_per_sec"])
            text = f"tokens/s {', '.join(rates)}, {found['compute_dtype']}"
        elif piece == "eval":
            rates = found["questions_per_sec"]["maxmars"]
            text = f"{statistics.median(rates):.1f} HellaSwag questions/s"
        elif piece == "plan" and found["estimate"] is not None:
            text = (
                f"step {found['estimate']['step_time_s']:.3f} s, peak "
                f"{found['memory']['peak_bytes'] / 1e9:.2f} GB, without the card"
            )
        yield [name, text]


def print_table(done: dict[str, dict[str, Any]]) -> None:
    """Print the table, verdicts, longest operations, the calibration, and what failed."""
    results = {name: result["found"] for name, result in done.items()}
    machine = results.get("machine") or {}
    if machine:
        versions = machine["environment"]
        product, copy = (
            statistics.median(machine[key]) for key in ("matmul_flops", "copy_bytes_per_sec")
        )
        card = machine["driver"] or machine["device_kind"]
        print(
            f"{card}; Python {versions['python']}, JAX {versions['jax']}, Flax {versions['flax']}, "
            f"Optax {versions['optax']}, maxmars {versions['maxmars']}. A large bfloat16 product: "
            f"{product / 1e12:.0f} TFLOP/s; memory: {copy / 1e9:,.0f} GB/s.\n"
        )
    measured = [row for r in results.values() for row in r.get("results", []) if "plan" in row]
    kinds = {kind for row in measured for kind in row["environment"]["device_kinds"]}
    kinds |= {machine["device_kind"]} if machine else set()
    if len(kinds) > 1:
        print(f"These are of different devices: {', '.join(sorted(kinds))}.\n")
    head = ["size", "optimizer", "tokens/s (range)", "MFU", "step, ms", "over AdamW"]
    head += ["optimizer's share", "peak, GB", "compile, s"]
    print(markdown_table(head, list(step_rows(results))), "\n")
    print(markdown_table(["unit", "found"], list(other_rows(results))), "\n")
    print(markdown_table(["goal", "wanted", "found", "verdict"], verdicts(results)), "\n")
    for size in SIZES:
        row = steps_of(results, size).get("adamw")
        if row and row.get("longest"):
            print(f"The ten longest operations of {size} under AdamW, ms a step:\n")
            lines = [
                [op["name"], op["phase"], op["source"], f"{op['ms']:.2f}", f"{op['share']:.1%}"]
                for op in row["longest"]
            ]
            columns = ["operation", "phase", "made from", "ms", "share"]
            print(markdown_table(columns, lines), "\n")
    if (fit := calibrate(results)) is not None:
        chip = CHIPS[chip_name(machine["device_kind"]) or ""].name if machine else "?"
        print(f"For CALIBRATIONS in maxmars/plan/roofline.py:\n\n    {chip!r}: {fit!r},\n")
    for name, result in done.items():
        if result["status"] != "ok":
            print(f"{name}: {result['status']} {result.get('reason', '')}".rstrip())


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
    parser.add_argument("--out", type=Path, required=True, help="where the JSON files are")
    parser.add_argument("--pieces", type=choice(MAKERS), default=list(MAKERS), help="see above")
    parser.add_argument("--sizes", type=choice(SIZES), default=list(SIZES), help=",".join(SIZES))
    parser.add_argument("--minutes", type=float, default=8.0, help="time for this command (8)")
    parser.add_argument(
        "--shared", type=Path, default=shared, help="reference/ and data/ (MAXMARS_REFERENCE_DIR)"
    )
    parser.add_argument("--tokens", type=Path, help="of `maxmars data prepare --tokenizer gpt2`")
    parser.add_argument("--real-minutes", type=float, default=3.0, help="of each real run (3)")
    parser.add_argument("--retry", action="store_true", help="run failed units once more")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--list", action="store_true", help="list the units that are left")
    parser.add_argument("--table", action="store_true", help="print what was found")
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.overrides, args.shared = words[cut + 1 :], args.shared.resolve()
    if args.tokens is not None and not args.tokens.is_dir():
        parser.error(f"--tokens {args.tokens} is no directory; `maxmars data prepare` makes one.")
    if args.table:
        if not (done := read_results(args.out)):
            parser.error(f"--out {args.out} holds no results.")
        print_table(done)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.retry:
        for name, result in read_results(args.out).items():
            if result["status"] in ("failed", "timed out"):
                (args.out / f"{name}.json").unlink()
    if args.list:
        for unit in open_units(args):
            print(f"{unit.name:24}{unit.seconds:6.0f} s {unit.missing or ''}".rstrip())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `run`, which ends the unit
    try:
        sys.exit(run_all(args))
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
