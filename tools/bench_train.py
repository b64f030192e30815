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
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxmars.cli.parse import ConfigArguments, parse_arguments  # noqa: E402
from maxmars.config import TokenShardsConfig, TrainConfig, to_dict  # noqa: E402
from maxmars.config.checks import UsageError  # noqa: E402
from maxmars.config.errors import pip_install  # noqa: E402

TOKENS_A_SPLIT = 2**20


class Contestant:
    """A `bench_worker.py` process and the rounds that it has run."""

    def __init__(self, name: str, kind: str, config: TrainConfig, scratch: Path) -> None:
        """Start it, and wait for its first step.

        Raises:
          RuntimeError: it failed; its messages are on standard error.
        """
        self.name, self.kind, self.config = name, kind, config
        self.rounds: list[dict[str, float]] = []
        path = scratch / "config.json"
        path.write_text(json.dumps(to_dict(config)))
        # Two processes share a GPU: each takes what it needs instead of three quarters.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "bench_worker.py"), kind, str(path)],
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
