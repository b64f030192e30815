"""Tokens a second of a config's train step, where its time goes, and against PyTorch.

    python tools/bench_train.py CONFIG [--peer torch] [--against CONFIG ...] [--rounds 5]
        [--steps 10] [--random-tokens] [--one-at-a-time] [--output F.json]
        [--model.num-layers 3 ...]

Every contestant is a process of its own: CONFIG with its train step and input pipeline, other
CONFIGs (of another optimizer, for example; the overrides apply to all), and with `--peer torch`
(extra `peers`) a plain PyTorch GPT-2 of the same shapes and precision under AdamW, eager and
compiled (`--peer torch-compiled`: compiled alone). They take turns, round after round, so that what
else the machine does falls on all; each round gives a ratio. A contestant that waits uses no core,
but keeps its memory; where that is too much, `--one-at-a-time` ends each before the next starts.

`--random-tokens` trains on random tokens in place of the config's data. Time to the first step
counts from the start of the process. Host time is what the Python thread itself computes in a step.
Phases are shares of some traced steps (`trace_table.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a contestant counts from before these are there
    from rich.table import Table

    from maxmars.config import TrainConfig

STARTED = time.perf_counter()
TOKENS_A_SPLIT = 2**20
TRACED_STEPS = 2
_WORK = "--work"  # the first word of a contestant's own process
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout


# --- a contestant's process -----------------------------------------------------------------------


class MaxmarsSteps:
    """The train step and the input pipeline of a run, driven as `maxmars train` drives them."""

    def __init__(self, config: TrainConfig, scratch: Path) -> None:
        """Open the data and make the state; the first `run` compiles."""
        import jax

        from maxmars.distributed import sharding
        from maxmars.model.parameters import Parameters
        from maxmars.train.resolve import resolve_config
        from maxmars.train.training import open_training

        # What compiles twice here, once to run and once to be read, must be the same program.
        jax.config.update("jax_compilation_cache_dir", str(scratch / "programs"))
        self.num_compiles, self.compile_seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._count)
        self.scratch = scratch
        self.mesh = sharding.training_mesh(config.mesh, config.model)
        resolved = resolve_config(config, Parameters(config.model, self.mesh))
        for text in resolved.messages:
            print(text, file=sys.stderr)
        training = open_training(resolved)
        self.config, self.train_step = training.config, training.step
        self.state, self.batches = training.new_state(), training.batches()
        self.num_compiles, self.compile_seconds = 0, 0.0  # from here on of the step alone

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.compile_seconds += duration_secs
            self.num_compiles += 1

    def run(self, steps: int) -> dict[str, float]:
        """Seconds a step: in all, waiting for tokens, and of this thread's own work."""
        import jax

        jax.block_until_ready(self.state)
        started, busy, waited = time.perf_counter(), time.thread_time(), 0.0
        last, metrics = None, {}
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - asked
            self.state, metrics = self.train_step(self.state, batch)
            if last is not None:  # one step late, as the loop does
                last["train/consecutive_skips"].item()
            last = metrics
        jax.block_until_ready((self.state, metrics))
        return {
            "step": (time.perf_counter() - started) / steps,
            "data_wait": waited / steps,
            "host": (time.thread_time() - busy) / steps,
            "loss": metrics["train/loss"].item(),
            "compiles": self.num_compiles,
        }

    def describe(self) -> dict[str, Any]:
        """Versions, devices, memory, FLOPs, and the phases of some traced steps."""
        import jax

        from maxmars.checkpoint.environment import environment
        from maxmars.config.chips import peak_flops
        from maxmars.plan.compile import compiler_memory
        from maxmars.train.tracer import start_trace

        device = self.mesh.devices.flat[0]
        peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
        text = self.train_step.text()
        program = compiler_memory(self.train_step.lower().compile())  # from the cache
        start_trace(self.scratch / "trace")
        self.run(TRACED_STEPS)
        jax.profiler.stop_trace()
        self.batches.close()
        peak = peak_flops(device.device_kind)
        parameters = self.train_step.parameters
        return {
            "parameters": parameters.count,
            "flops_per_token": parameters.flops_per_token,
            "peak_flops": None if peak is None else peak * self.mesh.size,
            "peak_bytes": peak_bytes,
            "program_bytes": program["peak_memory_in_bytes"],
            "environment": environment(self.mesh),
            **self.parts(text),
            "plan": self.plan(),
        }

    def parts(self, text: str) -> dict[str, Any]:
        """Phases of the traced steps, and the operations that took most; why not, if it failed."""
        from trace_table import PHASES, format_trace, read_trace

        try:
            trace = read_trace(self.scratch / "trace", text)
        except ValueError as error:  # a new kind of device may name its operations otherwise
            return {"phases": {}, "longest": [], "operations": f"No operations: {error}"}
        phases = trace.seconds_of_phases()
        total = sum(op.seconds for op in trace.operations)
        longest = [
            {
                "name": op.name,
                "phase": op.phase,
                "source": op.jax_name,
                "ms": 1e3 * op.seconds / TRACED_STEPS,
                "share": op.seconds / total,
            }
            for op in trace.operations[:10]
        ]
        return {
            "phases": {name: phases[name] / trace.busy_seconds for name in PHASES},
            "longest": longest,
            "operations": format_trace(trace, steps=TRACED_STEPS),
        }

    def plan(self) -> dict[str, Any]:
        """What `maxmars plan` says of this config on these devices, with their own compiler."""
        from maxmars.config.chips import CHIPS, chip_name
        from maxmars.plan import Topology, make_plan

        devices = list(self.mesh.devices.flat)
        kind = chip_name(devices[0].device_kind)
        chip = None if kind is None else CHIPS[kind]
        topology = Topology(name="here", devices=devices, num_slices=1, chip=chip)
        try:
            found = make_plan(self.config, topology, evaluate=False).to_json()
        except ValueError as error:
            return {"error": str(error)}
        keys = ("memory", "time", "clock")
        return {key: found[key] for key in keys}


def make_steps(kind: str, config: TrainConfig, scratch: Path) -> Any:
    """What takes the steps of a contestant."""
    if kind == "maxmars":
        return MaxmarsSteps(config, scratch)
    import torch
    from torch_gpt2 import TorchSteps

    from maxmars.config import GPT2Config, to_dict
    from maxmars.train.auto import auto_dtype, with_compute_dtype

    if getattr(config.model, "compute_dtype", None) == "auto":  # the same on both sides
        platform = "gpu" if torch.cuda.is_available() else "cpu"
        config = with_compute_dtype(config, auto_dtype(platform))

    assert isinstance(config.model, GPT2Config), "PyTorch has a GPT-2 alone here"
    vocab_rows = config.model.padded_vocab_size
    return TorchSteps(to_dict(config), vocab_rows, compiled=kind == "torch-compiled")


def work(kind: str, path: str) -> None:
    """A contestant's process: take a first step, then answer each line of standard input by a line
    of JSON. A number N asks for N steps, `describe` for what stays."""
    from maxmars.cli.memory import keep_freed_memory
    from maxmars.config import from_dict

    if kind == "maxmars":  # as the command does
        keep_freed_memory()
    config = from_dict(json.loads(Path(path).read_text()))
    with tempfile.TemporaryDirectory(prefix="bench-train-") as scratch:
        steps = make_steps(kind, config, Path(scratch))
        made = time.perf_counter()
        found = steps.run(1)
        now = time.perf_counter()
        first = {"ready": now - STARTED, "first_step": now - made}
        compile_seconds = getattr(steps, "compile_seconds", None)
        print(json.dumps(found | first | {"compile": compile_seconds}), flush=True)
        for line in sys.stdin:
            if line.strip() == "describe":
                peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux
                print(json.dumps({"resident_bytes": peak} | steps.describe()), flush=True)
            else:
                print(json.dumps(steps.run(int(line))), flush=True)


# --- rounds and the table -------------------------------------------------------------------------


class Contestant:
    """The process that `work` is, and the rounds that it has run."""

    def __init__(self, name: str, kind: str, config: TrainConfig, scratch: Path) -> None:
        """Start it, and wait for its first step.

        Raises:
          RuntimeError: it failed; its messages are on standard error.
        """
        self.name, self.kind, self.config = name, kind, config
        self.rounds: list[dict[str, float]] = []
        from maxmars.config import to_dict

        path = scratch / "config.json"
        path.write_text(json.dumps(to_dict(config)))
        # Two processes share a GPU: each takes what it needs instead of three quarters.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        self._process = subprocess.Popen(
            [sys.executable, __file__, _WORK, kind, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.first = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print, too
                return json.loads(line)
        raise RuntimeError(f"{self.name} failed with exit code {self._process.wait()}; see above.")

    def ask(self, request: str) -> dict[str, Any]:
        """Its answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def median(self, key: str) -> float | None:
        """Median over the rounds; None if it does not measure that."""
        values = [found[key] for found in self.rounds if key in found]
        return statistics.median(values) if values else None


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def result(contestant: Contestant, baseline: Contestant) -> dict[str, Any]:
    """All that was found of one contestant; ratios above 1 mean more tokens a second."""
    from maxmars.config import to_dict

    described = contestant.ask("describe")
    tokens = contestant.config.tokens_per_step
    seconds = [found["step"] for found in contestant.rounds]
    theirs = [found["step"] for found in baseline.rounds]
    rate = tokens / statistics.median(seconds)
    found = {
        "name": contestant.name,
        "tokens_a_step": tokens,
        "tokens_per_sec": spread([tokens / s for s in seconds]),
        "step_time": spread(seconds),
        "ratio_to_first": spread([b / a for a, b in zip(seconds, theirs, strict=True)]),
        "data_wait": contestant.median("data_wait"),
        "host_time": contestant.median("host"),
        "compile_time": contestant.first["compile"],
        "first_step_time": contestant.first["first_step"],
        "time_to_first_step": contestant.first["ready"],
        "first_loss": contestant.first["loss"],
        "config": to_dict(contestant.config),
        **described,
    }
    if described.get("peak_flops") is not None:
        found["mfu"] = rate * described["flops_per_token"] / described["peak_flops"]
    if "compiles" in contestant.first:
        last = contestant.rounds[-1]["compiles"]
        found["recompiles"] = last - contestant.first["compiles"]
    return found


def cell(value: dict[str, float] | float | None, scale: float, form: str) -> str:
    """A number, or the median with the range in brackets, or nothing."""
    if isinstance(value, dict):
        middle, low, high = (format(scale * value[key], form) for key in ("median", "min", "max"))
        return f"{middle} ({low} to {high})"
    return "" if value is None else format(scale * value, form)


def table(results: list[dict[str, Any]]) -> Table:
    """One column for each contestant."""
    from rich.table import Column, Table

    first = results[0]
    title = f"{first['parameters'] / 1e6:.2f}M parameters, {first['tokens_a_step']:,} tokens a step"
    table = Table("", *(Column(r["name"], justify="right") for r in results), title=title)
    rows = [  # name, key, scale and format; memory of a device, or else of the process
        ("tokens/s", "tokens_per_sec", 1, ",.0f"),
        (f"ratio to {first['name']}", "ratio_to_first", 1, ".3f"),
        ("MFU, %", "mfu", 100, ".1f"),
        ("step, ms", "step_time", 1e3, ".2f"),
        *((f"  {phase}, %", phase, 100, ".1f") for phase in first["phases"]),
        ("  data wait, ms", "data_wait", 1e3, ".3f"),
        ("  host, ms", "host_time", 1e3, ".3f"),
        ("recompiles", "recompiles", 1, "d"),
        ("compile, s", "compile_time", 1, ".1f"),
        ("first step, s", "first_step_time", 1, ".1f"),
        ("time to first step, s", "time_to_first_step", 1, ".1f"),
        ("peak memory, GB", "peak_memory", 1e-9, ".2f"),
        ("  of the program, GB", "program_bytes", 1e-9, ".2f"),
    ]
    values = [
        r | r.get("phases", {}) | {"peak_memory": r.get("peak_bytes") or r["resident_bytes"]}
        for r in results
    ]
    for name, key, scale, form in rows:
        cells = [cell(of_one.get(key), scale, form) for of_one in values]
        if any(cells):
            table.add_row(name, *cells)
    return table


def random_tokens(config: TrainConfig, directory: Path) -> TrainConfig:
    """The config on random tokens, which are written into `directory` as nanoGPT does."""
    import numpy as np

    from maxmars.config import TokenShardsConfig

    size = config.model.vocab_size
    dtype = "uint16" if size <= 2**16 else "uint32"
    count = max(TOKENS_A_SPLIT, 2 * config.tokens_per_step)
    directory.mkdir()
    for seed, name in enumerate(("train", "val")):
        tokens = np.random.default_rng(seed).integers(size, size=count, dtype=dtype)
        tokens.tofile(directory / f"{name}.bin")
    data = TokenShardsConfig(path=str(directory), tokenizer="unknown", vocab_size=size, dtype=dtype)
    return dataclasses.replace(config, data=data)


def contestants_of(args: argparse.Namespace, overrides: list[str]) -> list[tuple[str, str, Any]]:
    """Name, kind and config of each contestant; the first is what the others are compared with."""
    from maxmars.cli.parse import ConfigArguments, parse_arguments
    from maxmars.config.checks import UsageError
    from maxmars.config.errors import pip_install

    specs = [args.config, *args.against]
    configs = [
        parse_arguments(ConfigArguments, [spec, *overrides], prog="bench_train.py").config
        for spec in specs
    ]
    if args.peer is not None:  # which has no rule to choose it, and must compute in the same parts
        configs = [dataclasses.replace(c, num_microbatches=c.microbatches) for c in configs]
    names = [
        c.name if len({c.name for c in configs}) == len(configs) else s
        for s, c in zip(specs, configs, strict=True)
    ]
    found = [(name, "maxmars", config) for name, config in zip(names, configs, strict=True)]
    if args.peer is not None:
        if importlib.util.find_spec("torch") is None:
            raise UsageError(f"--peer {args.peer} needs PyTorch: {pip_install('peers')}.")
        if args.peer == "torch":
            found += [("PyTorch", "torch", configs[0])]
        found += [("PyTorch, compiled", "torch-compiled", configs[0])]
    return found


def measure(args: argparse.Namespace, overrides: list[str]) -> list[dict[str, Any]]:
    """Run all rounds.

    Raises:
      RuntimeError: a config of ours failed.
    """
    contestants = contestants_of(args, overrides)
    groups = [[contestant] for contestant in contestants] if args.one_at_a_time else [contestants]
    results: list[dict[str, Any]] = []
    baseline: Contestant | None = None
    for group in groups:
        with contextlib.ExitStack() as stack:
            running = start(group, args, stack)
            for number in range(args.rounds + 1):
                print(f"round {number} of {args.rounds}", file=sys.stderr, flush=True)
                # Each second round goes backwards: no one always runs after the same one.
                for contestant in running[:: 1 if number % 2 else -1]:
                    found = contestant.ask(str(args.steps if number else 1))
                    print(f"  {contestant.name}: {found['step']:.4f} s a step", file=sys.stderr)
                    if number:  # the first one warms up
                        contestant.rounds.append(found)
            baseline = baseline or running[0]
            results += [result(contestant, baseline) for contestant in running]
    return results


def start(
    contestants: list[tuple[str, str, Any]], args: argparse.Namespace, stack: contextlib.ExitStack
) -> list[Contestant]:
    """Processes that have taken their first step; they end with the stack."""
    running = []
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-train-")))
    for name, kind, config in contestants:
        place = Path(tempfile.mkdtemp(dir=scratch))
        used = random_tokens(config, place / "tokens") if args.random_tokens else config
        print(f"starting {name}", file=sys.stderr, flush=True)
        try:
            contestant = Contestant(name, kind, used, place)
        except RuntimeError as error:
            if kind != "torch-compiled":
                raise
            print(f"left out: {error}", file=sys.stderr)  # no C++ compiler, for example
            continue
        stack.callback(contestant.close)
        running.append(contestant)
    return running


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="as for `maxmars train`")
    parser.add_argument(
        "--peer",
        choices=("torch", "torch-compiled"),
        help="also run a plain PyTorch GPT-2; num_microbatches that is not set is then 1",
    )
    parser.add_argument("--against", nargs="+", default=(), metavar="CONFIG", help="other configs")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="end each before the next one starts"
    )
    parser.add_argument("--random-tokens", action="store_true", help="instead of the config's data")
    parser.add_argument("--output", type=Path, help="also write all that was found as JSON")
    if sys.argv[1:2] == [_WORK]:
        work(*sys.argv[2:])
        return
    from rich.console import Console

    from maxmars.config.checks import UsageError

    args, overrides = parser.parse_known_args()
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1.")
    try:
        results = measure(args, overrides)
    except (UsageError, RuntimeError) as error:
        sys.exit(f"bench_train.py: {error}")
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table(results))
    environment = results[0]["environment"]
    kinds = ", ".join(environment["device_kinds"])
    versions = f"JAX {environment['jax']}"
    versions += "".join(f", PyTorch {r['torch']}" for r in results[1:2] if "torch" in r)
    console.print(f"{environment['num_devices']} x {kinds}, {os.cpu_count()} cores, {versions}")
    console.print(results[0]["operations"])
    if args.output is not None:
        args.output.write_text(json.dumps({"rounds": args.rounds, "results": results}, indent=2))


if __name__ == "__main__":
    main()
