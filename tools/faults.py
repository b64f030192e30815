"""Kill runs, move them between meshes, and compare them with undisturbed ones.

    python tools/faults.py kills [--kills 100] [--optimizers mars soap ...] [--out DIR]
    python tools/faults.py meshes [--optimizers mars mars_shampoo] [--chains 0 1 2] [--out DIR]

`kills` trains a small GPT-2 on the sources of Python under each optimizer: `fixed` always on one
device, `moved` each time on another mesh or number of processes, `undisturbed` without signals.
Each start of a run, a life, ends by SIGKILL, SIGTERM, SIGSTOP and SIGKILL, or SIGSTOP, SIGCONT and
SIGTERM, of one process or both: while it starts, between steps, or, in every second life, in the
middle of a file operation, which takes 10 to 50 ms there. Each life must continue from the newest
complete checkpoint, end with the right exit code, and leave a run that `maxmars audit` calls one
trajectory. In the end `fixed` must have all metrics but those of speed, and all arrays, of
`undisturbed`, bit by bit, and `audit --replay` the same digest. `moved` sums in another order: its
last 10 losses may differ by `MAX_DRIFT` in the mean. 100 kills take 20 to 30 minutes on two cores.

`meshes` continues a run in legs, each on another mesh or number of processes than the one before.
Loading compares the digests of the state on its new mesh with the saved ones. Each loss may differ
from that of an undisturbed run by `MAX_DRIFT_OF_MESHES`; other tokens would change it far more.

Both exit with 1 at a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxmars.checkpoint import list_steps, read  # noqa: E402
from maxmars.train.audit import audit  # noqa: E402
from maxmars.train.metrics import read_metrics  # noqa: E402

CONFIG = '''\
from maxmars.config import *

OPTIMIZERS = {
    "mars": MarsConfig(),
    "mars_exact": MarsConfig(exact=True),
    "mars_shampoo": MarsConfig(variant="shampoo"),
    "soap": SoapConfig(),
    "own": OptaxConfig(make="own.py:nadamw", options={"b1": 0.9}, learning_rate=3e-3),
}


def get_config(optimizer: str = "mars"):
    """A GPT-2 whose steps take some milliseconds."""
    return TrainConfig(
        name="faults",
        num_steps=10**6,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=2, num_heads=2, embed_dim=32, max_seq_len=32, vocab_size=257,
            vocab_pad_multiple=8, compute_dtype="float32",
        ),
        optimizer=OPTIMIZERS[optimizer],
        schedule=ScheduleConfig(warmup_steps=2, decay_steps=10_000),
        data=PythonSourcesConfig(),
        eval=EvalConfig(every=20, num_windows=16, batch_size=8),
        checkpoint=CheckpointConfig(every=10, keep_last=9),
        log=LogConfig(every=1),
    )
'''
OWN_OPTIMIZER = """\
import optax


def nadamw(learning_rate, *, matrix_specs, mesh, b1):
    return optax.nadamw(learning_rate, b1=b1)
"""
OPTIMIZERS = ("mars", "mars_exact", "mars_shampoo", "soap", "own")
EVERY = 10  # steps between checkpoints
MAX_DRIFT = 0.05  # nats; it was below 0.003 over 70 to 240 steps, and grows with them
MAX_DRIFT_OF_MESHES = 0.01  # nats; it was below 0.001 over 30 steps
ENDINGS = ("KILL", "KILL", "TERM", "TERM", "STOP KILL", "STOP CONT TERM")
STARTING_S = 6.0  # a life that is disturbed while it starts is so within this time
TRAINING_S = 1.5  # the others within this time after their first step, or
OPERATIONS = 40  # within so many file operations after it
DISTURBED_WHILE_STARTING = 0.2  # share of the lives
PATIENCE_S = 240.0  # for a first step, and for the end of a process
STEP = re.compile(r"\bstep +\d+/")


@dataclass(frozen=True)
class Place:
    """The mesh (data, fsdp, tensor) that a run is on, over a number of processes."""

    mesh: tuple[int, int, int] = (1, 1, 1)
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.mesh}" + (f" on {self.processes} processes" if self.processes > 1 else "")


PLACES = (Place(), Place((2, 1, 1)), Place((1, 2, 1)), Place((2, 1, 1), processes=2))
CHAINS = (
    (Place((8, 1, 1)), Place((4, 1, 1)), Place()),
    (Place((1, 8, 1)), Place((2, 2, 2))),
    (PLACES[3], PLACES[0], PLACES[3]),
)


def on_cpus(devices: int, cache: Path) -> dict[str, str]:
    """What a process with so many fake devices gets."""
    # XLA then compiles in a fraction of the usual time, another program than it else would.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
    }


def newest(workdir: Path) -> int:
    """Step of the newest complete checkpoint; 0 without any."""
    return max(list_steps(workdir / "checkpoints"), default=0)


def series(workdir: Path) -> dict[tuple[int, str], float]:
    """The metrics of a run but for those of its speed, by step and name."""
    return {
        (row["step"], key): float(row[key])
        for row in read_metrics(workdir)
        for key in row
        if key != "step" and not key.startswith("perf/")
    }


def losses(workdir: Path) -> dict[int, float]:
    return {step: loss for (step, key), loss in series(workdir).items() if key == "train/loss"}


class Life:
    """The processes of one start of a run, each line of whose file operations is a file."""

    def __init__(
        self, workdir: Path, optimizer: str, place: Place, *options: object, slow: bool = False
    ) -> None:
        self.workdir, self.place, self.complete = workdir, place, newest(workdir)
        self.slow, self.in_file_operation = slow, False
        workdir.parent.mkdir(exist_ok=True)
        words = ["train", f"{workdir.parents[1] / 'config.py'}:optimizer={optimizer}"]
        words += ["--workdir", str(workdir), *map(str, options)]
        for axis, size in zip(("data", "fsdp", "tensor"), place.mesh, strict=True):
            words += [f"--mesh.{axis}", str(size)]
        each = [words]
        if place.processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            words += ["--coordinator", address, "--start-timeout-s", "60"]
            words += ["--num-processes", str(place.processes), "--process-id"]
            each = [[*words, str(i)] for i in range(place.processes)]
        self.logs = [workdir.with_suffix(f".{i}.log") for i in range(place.processes)]
        self.begins = [path.stat().st_size if path.exists() else 0 for path in self.logs]
        self.operations = [path.with_suffix(".operations") for path in self.logs]
        for path in self.operations:
            path.unlink(missing_ok=True)
        environment = on_cpus(math.prod(place.mesh) // place.processes, workdir.parent)
        self.processes = []
        for path, operations, own in zip(self.logs, self.operations, each, strict=True):
            program = [__file__, "slow", str(workdir), str(operations)]
            with path.open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *(program if slow else ["-m", "maxmars"]), *own],
                        env=os.environ | environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self, process: int = 0) -> str:
        """What a process has printed so far."""
        with self.logs[process].open() as log:
            log.seek(self.begins[process])
            return log.read()

    @property
    def is_training(self) -> bool:
        return STEP.search(self.output()) is not None

    def num_operations(self) -> int:
        """How many file operations process 0, which makes nearly all, has begun."""
        path = self.operations[0]
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Return when it holds, a process has ended, or it takes too long."""
        deadline = time.monotonic() + patience_s
        while not holds() and time.monotonic() < deadline:
            if any(process.poll() is not None for process in self.processes):
                return
            time.sleep(0.002)

    def disturb(self, ending: str, chance: random.Random) -> Iterator[str]:
        """Send signals at a random time; what was wrong with the end."""
        victims = chance.choice(((0,), (1,), (0, 1))) if self.place.processes > 1 else (0,)
        starting = chance.random() < DISTURBED_WHILE_STARTING
        if not starting:
            self.wait_until(lambda: self.is_training)
        if self.slow:
            wanted = self.num_operations() + chance.randint(1, OPERATIONS)
            self.wait_until(lambda: self.num_operations() >= wanted, 30.0)
            self.in_file_operation = self.num_operations() >= wanted
        else:
            time.sleep(chance.uniform(0, STARTING_S if starting else TRAINING_S))
        early = [process.poll() for process in self.processes]
        was_training = self.is_training
        was_loading = not self.in_file_operation and not self.output()
        for name in ending.split():
            for victim in victims:
                self.processes[victim].send_signal(signal.Signals[f"SIG{name}"])
            if name != ending.split()[-1]:
                time.sleep(chance.uniform(0.1, 1.0))
        codes = self.end()
        yield from (f"process {i} had ended with {c}" for i, c in enumerate(early) if c is not None)
        for i, code in enumerate(codes):
            # A process whose peer is gone ends itself, or JAX aborts it.
            right = {75} if was_training and ending.endswith("TERM") else {75, -signal.SIGABRT}
            if ending.endswith("KILL") and i in victims:
                right = {-signal.SIGKILL}
            if was_loading and ending.endswith("TERM"):  # before maxmars has a handler
                right |= {-signal.SIGTERM}
            if code not in right:
                yield f"process {i} ended with {code} after {ending}"
        last = max((row["step"] for row in read_metrics(self.workdir)), default=0)
        if was_training and ending.endswith("TERM") and newest(self.workdir) != last:
            yield f"step {last} was not saved after SIGTERM"

    def end(self, patience_s: float = PATIENCE_S) -> list[int | None]:
        """The exit codes; None of a process that did not end by itself, and was killed."""
        deadline = time.monotonic() + patience_s
        codes = []
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            codes.append(process.poll())
            process.kill()
            process.wait()
        return codes

    def check(self) -> Iterator[str]:
        """What was wrong with a life that has ended, besides its end."""
        found = re.search(r"continuing from step (\d+)", self.output())
        continued = int(found[1]) if found else 0
        if (found or self.is_training) and continued != self.complete:
            yield f"it continued from step {continued}, not {self.complete}"
        if newest(self.workdir) < self.complete:
            yield f"the checkpoint of step {self.complete} is gone"
        if "Traceback" in "".join(map(self.output, range(self.place.processes))):
            yield "a stack trace"
        if newest(self.workdir):
            try:
                verdict = audit(self.workdir, log=lambda text: None).verdict
            except ValueError as error:
                verdict = str(error)
            if not verdict.startswith("one trajectory"):
                yield f"audit: {verdict}"


class Lives:
    """All lives and checks, and what they found."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.chance = out, random.Random(seed)
        self.endings: list[str] = []  # those to come
        self.lives = self.in_files = 0
        self.faults: list[str] = []

    def note(self, what: str, faults: Sequence[str]) -> None:
        print(what, *(f"\n     FAULT: {fault}" for fault in faults), flush=True)
        self.faults += [f"{what}: {fault}" for fault in faults]

    def life(self, life: Life, ending: str | None) -> None:
        """A life that signals end, or that goes to the end."""
        self.lives += 1
        try:
            if ending is None:
                codes = life.end(10 * PATIENCE_S)
                faults = [f"it ended with {codes}; see {life.logs[0]}"] if any(codes) else []
            else:
                faults = [*life.disturb(ending, self.chance)]
        finally:
            life.end()
        self.in_files += life.in_file_operation
        shown = f"{self.lives:4} {life.workdir.parent.name:13}{life.workdir.name:12}"
        shown += f"{life.place!s:27}{life.complete:6} to {newest(life.workdir):6}  {ending or '-'}"
        self.note(shown, [*faults, *life.check()])

    def another(self, place: Place) -> Place:
        return self.chance.choice([other for other in PLACES if other != place])

    def to_the_end(self, run: Path, place: Place, steps: int) -> None:
        """Train to a step without signals."""
        self.life(Life(run, run.parent.name, place, "--num-steps", steps), None)

    def run_chain(self, optimizer: str, number: int, steps: int) -> None:
        """A run in legs of so many steps, each on the next mesh of a chain."""
        run = self.out / optimizer / f"chain{number}"
        undisturbed = run.with_name(f"whole{number}")
        chain = CHAINS[number]
        for leg, place in enumerate(chain, 1):
            self.to_the_end(run, place, leg * steps)
        self.to_the_end(undisturbed, chain[0], len(chain) * steps)
        ours, theirs = losses(run), losses(undisturbed)
        drift = max(abs(loss - ours.get(step, math.inf)) for step, loss in theirs.items())
        faults = [] if drift <= MAX_DRIFT_OF_MESHES else ["a loss is another one"]
        self.note(f"{optimizer}: {' to '.join(map(str, chain))}, drift {drift:.1e}", faults)

    def run_kills(self, optimizer: str, kills: int) -> None:
        """All runs of an optimizer that are killed, and the undisturbed one."""
        fixed, moved, undisturbed = (
            self.out / optimizer / name for name in ("fixed", "moved", "undisturbed")
        )
        place = PLACES[0]
        for run, count in ((fixed, kills - kills // 2), (moved, kills // 2)):
            for number in range(count):
                if run == moved:
                    place = self.another(place)
                if not self.endings:  # each as often as the others
                    self.endings = self.chance.sample(ENDINGS, len(ENDINGS))
                life = Life(run, optimizer, place, slow=number % 2 == 0)
                self.life(life, self.endings.pop())
        last = max(step for run in (fixed, moved) for step, _ in series(run))
        steps = (last // EVERY + 2) * EVERY
        self.to_the_end(fixed, PLACES[0], steps)
        self.to_the_end(moved, self.another(place), steps)
        self.to_the_end(undisturbed, PLACES[0], steps)
        faults = [f"fixed: {fault}" for fault in differences(fixed, undisturbed)]
        means = [
            sum(losses(run)[s] for s in range(steps - 9, steps + 1)) / 10
            for run in (moved, undisturbed)
        ]
        drift = abs(means[0] - means[1])
        if not drift <= MAX_DRIFT:
            faults.append(f"moved: its last losses differ by {drift:.3f}")
        words = [sys.executable, "-m", "maxmars", "audit", str(fixed), "--replay", str(EVERY)]
        environment = os.environ | on_cpus(1, fixed.parent)
        replay = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if replay.returncode or "the same digest" not in replay.stdout:
            faults.append(f"audit --replay: {replay.stdout}{replay.stderr}")
        self.note(f"{optimizer}: {kills} kills, {steps} steps, drift {drift:.1e}", faults)


def differences(one: Path, other: Path) -> Iterator[str]:
    """How two runs differ in metrics and in the last state, in words."""
    ours, theirs = series(one), series(other)
    wrong = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if wrong:
        yield f"{len(wrong)} metrics differ, first {wrong[0]}"
    ours, theirs = (read(run / "checkpoints").digests for run in (one, other))
    wrong = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    if wrong:
        yield f"{len(wrong)} arrays differ, such as {wrong[0]}"


def slow(directory: str, operations: str, *arguments: str) -> None:
    """Run maxmars with slow file operations in a directory, so that kills come between them."""
    file = os.open(operations, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    events = {
        "open",
        *map("os.{}".format, ("mkdir", "remove", "rename", "rmdir", "truncate", "utime")),
    }

    def slow_down(event: str, about: tuple[Any, ...]) -> None:
        if event in events and isinstance(about[0], str | os.PathLike):
            path = os.fspath(about[0])
            if isinstance(path, str) and path.startswith(directory):
                os.write(file, f"{event} {os.path.relpath(path, directory)}\n".encode())
                time.sleep(random.uniform(0.01, 0.05))

    sys.addaudithook(slow_down)
    sys.argv[1:] = arguments
    runpy.run_module("maxmars", run_name="__main__", alter_sys=True)


def main() -> None:
    if sys.argv[1:2] == ["slow"]:
        return slow(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="kills|meshes")
    kills, meshes = commands.add_parser("kills"), commands.add_parser("meshes")
    kills.add_argument("--kills", type=int, default=100, help="of all runs")
    kills.add_argument("--seed", type=int, default=0, help="of all chance")
    meshes.add_argument("--steps", type=int, default=10, help="of a leg")
    chains = range(len(CHAINS))
    meshes.add_argument("--chains", type=int, nargs="+", choices=chains, default=chains)
    for command, some in ((kills, OPTIMIZERS), (meshes, ("mars", "mars_shampoo"))):
        command.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=some)
        command.add_argument("--out", type=Path, help="new directory to keep the runs in")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # of the audits here
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out" if args.out is None else args.out.absolute()
        out.mkdir(parents=True)
        (out / "config.py").write_text(CONFIG)
        (out / "own.py").write_text(OWN_OPTIMIZER)
        lives = Lives(out, getattr(args, "seed", 0))
        for i, optimizer in enumerate(args.optimizers):
            if args.command == "kills":
                lives.run_kills(optimizer, len(range(i, args.kills, len(args.optimizers))))
            else:
                for number in args.chains:
                    lives.run_chain(optimizer, number, args.steps)
        shown = f"{lives.lives} lives: {len(lives.faults) or 'no'} faults"
        if args.command == "kills":
            shown = f"{args.kills} kills ({lives.in_files} in file operations), {shown}"
        print(shown)
        sys.exit(bool(lives.faults))


if __name__ == "__main__":
    main()
