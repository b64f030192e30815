"""Disturb training runs by random signals, and check that they end where an undisturbed run ends.

    python tools/soak.py [--kills 100] [--seed 0] [--optimizers mars soap ...] [--out DIR]

For each optimizer a small GPT-2 trains on the sources of Python's standard library, as `maxmars
train`. It saves every 10 steps and evaluates every 20. There are four runs of the same length:

    fixed         is disturbed, always on one device
    moved         is disturbed, each time on another mesh or number of processes than before
    undisturbed   the same as `fixed` without signals
    other         with another seed, to plant its files in copies of the others

A disturbed run is started again and again. Each life ends by SIGKILL, by SIGTERM, by SIGSTOP and
SIGKILL, or by SIGSTOP, SIGCONT and SIGTERM; of two processes one gets the signals, or both do. The
signals come while the life starts, between steps, or, in every second life, in the middle of a file
operation, which `slow_files.py` draws out.

Each life must continue from the newest complete checkpoint, and each of its processes must end with
the right exit code: with 75 and the last step saved after SIGTERM, with 75 or JAX's abort after the
SIGKILL of another process. After each life the run must pass `audit`, and the changes of mesh that
`audit` names must be those that were made. At the end `fixed` must agree with `undisturbed` in all
metrics but those of speed, and in all arrays of the last state, bit by bit. `moved` sums in another
order, so its losses differ by rounding, which training makes larger: the mean of its last 10 losses
may differ by `MAX_DRIFT`. `audit --replay` must come to the same digest, and `audit` must find each
of the lies of `soak_lies.py` in copies of both runs.

There is a line for each life, a table with a line for each optimizer, and last the verdict. Exits
with 1 at any fault. A life costs a start of Python and JAX, some 10 s; 100 of them, with the rest,
take 20 to 30 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak_lies import LIES

from maxmars.checkpoint import list_steps, read
from maxmars.cli import main as maxmars
from maxmars.train.audit import audit
from maxmars.train.metrics import read_metrics

CONFIG = '''\
"""A GPT-2 whose steps take some milliseconds."""

from maxmars.config import *

OPTIMIZERS = {
    "mars": MarsConfig(),
    "mars_exact": MarsConfig(exact=True),
    "mars_shampoo": MarsConfig(variant="shampoo"),
    "soap": SoapConfig(),
    "own": OptaxConfig(make="own.py:nadamw", options={"b1": 0.9}, learning_rate=3e-3),
}


def get_config(optimizer: str = "mars"):
    return TrainConfig(
        name="soak",
        num_steps=10**6,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=2,
            num_heads=2,
            embed_dim=32,
            max_seq_len=32,
            vocab_size=257,
            compute_dtype="float32",
        ),
        optimizer=OPTIMIZERS[optimizer],
        schedule=ScheduleConfig(warmup_steps=10, decay_steps=10_000),
        data=PythonSourcesConfig(),
        eval=EvalConfig(every=20, num_windows=16, batch_size=8),
        checkpoint=CheckpointConfig(every=10),
        log=LogConfig(every=1),
    )
'''
OWN_OPTIMIZER = '''\
"""An optimizer of the user's own."""

import optax


def nadamw(learning_rate, *, matrix_specs, mesh, b1):
    return optax.nadamw(learning_rate, b1=b1)
'''
OPTIMIZERS = ("mars", "mars_exact", "mars_shampoo", "soap", "own")
EVERY = 10  # steps between checkpoints
MAX_DRIFT = 0.05  # nats; it was below 0.003 over 70 to 240 steps, and grows with them
ENDINGS = ("KILL", "KILL", "TERM", "TERM", "STOP KILL", "STOP CONT TERM")
STARTING_S = 6.0  # a life that is disturbed while it starts is so within this time
TRAINING_S = 1.5  # the others within this time after their first step, or
OPERATIONS = 40  # within so many file operations after it
DISTURBED_WHILE_STARTING = 0.2  # share of the lives
PATIENCE_S = 240.0  # for a first step, and for the end of a process
SLOW_FILES = Path(__file__).with_name("slow_files.py")
STEP = re.compile(r"\bstep +\d+/")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a life runs on."""

    name: str
    devices: int = 1
    """Of each process."""
    processes: int = 1
    options: tuple[str, ...] = ()


PLACES = (
    Place(name="1 device"),
    Place(name="data=2", devices=2),
    Place(name="fsdp=2", devices=2, options=("--mesh.fsdp", "2")),
    Place(name="2 processes", processes=2),
)


@dataclass
class Run:
    """A run, and what is known of it from its lives."""

    out: Path
    optimizer: str
    name: str
    saved_on: Place | None = None
    """Where the newest checkpoint was written."""
    moves: list[int] = field(default_factory=list)
    """Steps where the run went on in another place."""
    barren: int = 0
    """Lives since then that were killed or aborted."""
    audits: int = 0

    @property
    def workdir(self) -> Path:
        return self.out / self.optimizer / self.name

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 without any."""
        return max(list_steps(self.workdir / "checkpoints"), default=0)

    @property
    def last_step(self) -> int:
        """The last step in the metrics."""
        return max((row["step"] for row in read_metrics(self.workdir)), default=0)

    def audit(self) -> list[str]:
        """What is wrong with the answer of `audit`, which must know all moves and nothing else."""
        self.audits += 1
        found = audit(self.workdir, log=lambda text: None)
        changed = [
            int(step) for text in found.changes for step in re.findall(r"^at step (\d+)", text)
        ]
        verdict = "one trajectory" + (" up to rounding" if self.moves else "")
        if found.verdict == verdict and changed == self.moves:
            return []
        return [f"audit: {found.text}; the run moved at {self.moves}"]


class Life:
    """The processes of one start of a run."""

    def __init__(self, run: Run, place: Place, *options: str, slow: bool = False) -> None:
        self.run, self.place, self.slow = run, place, slow
        self.complete = run.newest
        self.in_file_operation = False  # when the signals came
        command = ["train", f"{run.out / 'config.py'}:optimizer={run.optimizer}"]
        command += ["--workdir", str(run.workdir), *place.options, *options]
        if place.processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            command += ["--coordinator", address, "--num-processes", str(place.processes)]
            command += ["--start-timeout-s", "60", "--process-id"]
        run.workdir.parent.mkdir(exist_ok=True)
        paths = [run.workdir.with_suffix(f".{i}.log") for i in range(place.processes)]
        self.operations = [path.with_suffix(".operations") for path in paths]
        self.logs = paths
        self.begins = [path.stat().st_size if path.exists() else 0 for path in paths]
        self.processes = []
        for i, path in enumerate(paths):
            own = [*command, str(i)] if place.processes > 1 else command
            program = ["-m", "maxmars"]
            if slow:
                self.operations[i].unlink(missing_ok=True)
                program = [str(SLOW_FILES), str(run.workdir), str(self.operations[i])]
            with path.open("a") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *program, *own],
                        env=environment(run.out, place.devices),
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
    def has_made_a_step(self) -> bool:
        return STEP.search(self.output()) is not None

    def continued_from(self) -> int | None:
        """The step that the life continued from; None if it ended before."""
        found = re.search(r"continuing from step (\d+)", self.output())
        if found:
            return int(found[1])
        return 0 if self.has_made_a_step else None

    def file_operations(self) -> list[str]:
        """The file operations that process 0 has begun."""
        path = self.operations[0]
        return path.read_text().splitlines() if path.exists() else []

    def wait_until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Return when it holds, a process has ended, or it takes too long."""
        deadline = time.monotonic() + patience_s
        while not holds() and time.monotonic() < deadline:
            if any(process.poll() is not None for process in self.processes):
                return
            time.sleep(0.002)

    def disturb(
        self, ending: str, chance: random.Random, *, may_be_starting: bool
    ) -> tuple[str, list[str]]:
        """Send signals at a random time; which and when in words, and what was wrong then."""
        victims = chance.choice(((0,), (1,), (0, 1))) if self.place.processes > 1 else (0,)
        starting = may_be_starting and chance.random() < DISTURBED_WHILE_STARTING
        if not starting:
            self.wait_until(lambda: self.has_made_a_step)
        if self.slow:  # operations of process 0, which makes nearly all
            wanted = len(self.file_operations()) + chance.randint(1, OPERATIONS)
            self.wait_until(lambda: len(self.file_operations()) >= wanted, 30.0)
            operations = self.file_operations()
            self.in_file_operation = len(operations) >= wanted
            when = f"in {operations[-1]}" if self.in_file_operation else "in no file operation"
        else:
            delay = chance.uniform(0, STARTING_S if starting else TRAINING_S)
            when = f"{delay:.2f} s after {'the start' if starting else 'a step'}"
            time.sleep(delay)
        early = [process.poll() for process in self.processes]
        was_training = self.has_made_a_step
        was_loading = not self.in_file_operation and not self.output()
        for name in ending.split():
            for victim in victims:
                self.processes[victim].send_signal(signal.Signals[f"SIG{name}"])
            if name != ending.split()[-1]:
                time.sleep(chance.uniform(0.1, 1.0))
        codes = self.end()
        faults = [
            f"process {i} had ended with {code}" for i, code in enumerate(early) if code is not None
        ]
        for i, code in enumerate(codes):
            right = right_codes(ending, signalled=i in victims, was_training=was_training)
            if was_loading and ending.endswith("TERM"):  # before maxmars has a handler
                right.add(-signal.SIGTERM)
            if code not in right:
                faults.append(f"process {i} ended with {code}")
        is_saved = self.run.newest == self.run.last_step
        if was_training and ending.endswith("TERM") and not is_saved:
            faults.append(f"step {self.run.last_step} was not saved after SIGTERM")
        whom = f" of process {victims[0]}" if len(codes) > len(victims) else ""
        return f"{ending}{whom} {when}", faults

    def end(self, patience_s: float = PATIENCE_S) -> list[int | None]:
        """The exit codes; None of a process that did not end by itself, and was killed."""
        deadline = time.monotonic() + patience_s
        codes = []
        try:
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
                codes.append(process.poll())
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return codes

    def check(self) -> list[str]:
        """What was wrong with a life that has ended, besides its end."""
        run, faults = self.run, []
        continued = self.continued_from()
        if continued not in (None, self.complete):
            faults.append(f"it continued from step {continued}, not {self.complete}")
        if run.newest < self.complete:
            faults.append(f"the checkpoint of step {self.complete} is gone")
        if run.newest > self.complete:
            if run.saved_on not in (None, self.place):
                run.moves.append(self.complete)
            run.saved_on, run.barren = self.place, 0
        if "Traceback" in "".join(map(self.output, range(self.place.processes))):
            faults.append("a stack trace")
        return faults + (run.audit() if run.newest else [])


def right_codes(ending: str, *, signalled: bool, was_training: bool) -> set[int]:
    """The exit codes that a process may have after these signals."""
    if ending.endswith("KILL"):
        return {-signal.SIGKILL} if signalled else {75, -signal.SIGABRT}
    # A process whose peer ends while both start waits for it, and JAX aborts it.
    return {75} if was_training else {75, -signal.SIGABRT}


def environment(out: Path, devices: int) -> dict[str, str]:
    """Of a process with so many fake devices; XLA compiles in a fraction of the usual time."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(out / "jax_cache"),
        "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


class Soak:
    """All lives and checks, and what they found."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.chance = out, random.Random(seed)
        self.endings: list[str] = []  # those to come
        self.lives = 0
        self.in_files = 0  # lives that got their signals in a file operation
        self.faults: list[str] = []
        (out / "config.py").write_text(CONFIG)
        (out / "own.py").write_text(OWN_OPTIMIZER)

    def report(self, life: Life, what: str, codes: str, faults: list[str]) -> None:
        """Print the line of a life."""
        self.lives += 1
        continued = life.continued_from()
        columns = f"{self.lives:4} {life.run.optimizer:13}{life.run.name:12}{life.place.name:12}"
        columns += f"{life.complete:6}{'-' if continued is None else continued:>10}"
        print(f"{columns}{life.run.last_step:8}  {codes:9}  {what}", flush=True)
        self.note(f"life {self.lives} ({life.run.workdir})", faults)

    def note(self, where: str, faults: list[str]) -> None:
        for fault in faults:
            print(f"     FAULT: {where}: {fault}", flush=True)
            self.faults.append(f"{where}: {fault}")

    def life(self, run: Run, place: Place, *, slow: bool) -> None:
        """One life of a run, which signals end."""
        if not self.endings:  # each as often as the others
            self.endings = self.chance.sample(ENDINGS, len(ENDINGS))
        # `train` refuses to start again after three lives that were killed and saved nothing.
        is_last_chance = run.barren == 2
        ending = "TERM" if is_last_chance else self.endings.pop()
        life = Life(run, place, slow=slow)
        try:
            what, faults = life.disturb(ending, self.chance, may_be_starting=not is_last_chance)
        finally:
            codes = life.end()
        self.in_files += life.in_file_operation
        run.barren += any(code != 75 for code in codes) or ending.endswith("KILL")
        self.report(life, what, shown(codes), [*faults, *life.check()])

    def finish(self, run: Run, place: Place, steps: int, *options: str) -> None:
        """The last life of a run, which nothing disturbs."""
        life = Life(run, place, "--num-steps", str(steps), *options)
        codes = life.end(patience_s=10 * PATIENCE_S)
        faults = [] if not any(codes) else [f"it ended with {codes}; see {life.logs[0]}"]
        self.report(life, "-", shown(codes), [*faults, *life.check()])

    def run_optimizer(self, optimizer: str, kills: int) -> dict[str, object]:
        """All runs of an optimizer; their line in the last table."""
        started, before, in_files = time.monotonic(), len(self.faults), self.in_files
        fixed, moved, undisturbed, other = (
            Run(self.out, optimizer, name) for name in ("fixed", "moved", "undisturbed", "other")
        )
        for number in range(kills - kills // 2):
            self.life(fixed, PLACES[0], slow=number % 2 == 1)
        place = PLACES[0]
        for number in range(kills // 2):
            place = self.another(place)
            self.life(moved, place, slow=number % 2 == 0)
        steps = (max(fixed.last_step, moved.last_step) // EVERY + 2) * EVERY
        self.finish(fixed, PLACES[0], steps)
        self.finish(moved, self.another(moved.saved_on or place), steps)
        self.finish(undisturbed, PLACES[0], steps)
        self.finish(other, PLACES[0], steps, "--seed", "1")
        difference = first_difference(fixed, undisturbed)
        drift = abs(last_loss(moved) - last_loss(undisturbed))
        self.note(f"{optimizer}: fixed", [difference] if difference else [])
        if not drift <= MAX_DRIFT:
            self.note(f"{optimizer}: moved", [f"its last losses differ by {drift:.3f}"])
        audits = sum(run.audits for run in (fixed, moved, undisturbed, other))
        lies = self.plant_lies(fixed, other) + self.plant_lies(moved, other)
        replayed = self.replay(fixed)
        return {
            "optimizer": optimizer,
            "kills": kills,
            "in files": self.in_files - in_files,
            "steps": steps,
            "digests": "different" if difference else "equal",
            "drift": f"{drift:.1e}",
            "moves": len(moved.moves),
            "audits": audits,
            "lies found": f"{lies} of {2 * len(LIES)}",
            "replay": replayed,
            "faults": len(self.faults) - before,
            "minutes": f"{(time.monotonic() - started) / 60:.1f}",
        }

    def another(self, place: Place) -> Place:
        return self.chance.choice([other for other in PLACES if other != place])

    def plant_lies(self, run: Run, other: Run) -> int:
        """How many lies about a run `maxmars audit` finds."""
        found = 0
        copy = run.workdir.with_name("copy")
        for lie in (None, *LIES):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run.workdir, copy)
            if lie is None:  # the copy itself is sound
                if audit_command(copy)[0] != 0:
                    self.note(f"{run.workdir}", ["a copy of it is no trajectory"])
                continue
            pattern = lie(copy, other.workdir, self.chance)
            code, text = audit_command(copy)
            if code == 1 and re.search(pattern, text):
                found += 1
            else:
                self.note(f"{run.workdir}, {lie.__name__}", [f"not found: {text}"])
        shutil.rmtree(copy)
        return found

    def replay(self, run: Run) -> str:
        """Whether the last steps, computed again, lead to the digest of before."""
        result = subprocess.run(
            [sys.executable, "-m", "maxmars", "audit", str(run.workdir), "--replay", str(EVERY)],
            env=environment(self.out, 1),
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode == 0 and "computed again: the same digest" in result.stdout:
            return "equal"
        self.note(f"{run.workdir}, --replay", [f"{result.stdout}{result.stderr}"])
        return "different"


def shown(codes: Sequence[int | None]) -> str:
    return ",".join("none" if code is None else str(code) for code in codes)


def audit_command(workdir: Path) -> tuple[int, str]:
    """Exit code and output of `maxmars audit`."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        try:
            maxmars(["audit", str(workdir)])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, output.getvalue()


def metrics_of(run: Run) -> dict[tuple[int, str], float | str]:
    """The metrics of a run but for those of its speed, by step and name."""
    return {
        (row["step"], key): row[key]
        for row in read_metrics(run.workdir)
        for key in row
        if key != "step" and not key.startswith("perf/")
    }


def first_difference(one: Run, other: Run) -> str | None:
    """The first difference between two runs, in words; None if there is none."""
    ours, theirs = metrics_of(one), metrics_of(other)
    for step, key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get((step, key)), theirs.get((step, key))
        if a != b:
            return f"{key} of step {step} is {a} in {one.name} and {b} in {other.name}"
    ours, theirs = (read(run.workdir / "checkpoints").digests for run in (one, other))
    wrong = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    return f"{len(wrong)} arrays of the last state differ, such as {min(wrong)}" if wrong else None


def last_loss(run: Run) -> float:
    """Mean training loss of the last 10 steps, nats a token."""
    losses = [float(row["train/loss"]) for row in read_metrics(run.workdir) if "train/loss" in row]
    return sum(losses[-10:]) / 10


def soak(kills: int, seed: int, optimizers: Sequence[str], out: Path) -> bool:
    """Whether there was no fault."""
    everything, rows = Soak(out, seed), []
    print(
        f"{'life':>4} {'optimizer':13}{'run':12}{'on':12}{'saved':>6}{'continued':>10}"
        f"{'reached':>8}  {'exit':9}  signals"
    )
    for number, optimizer in enumerate(optimizers):
        share = kills // len(optimizers) + (number < kills % len(optimizers))
        rows.append(everything.run_optimizer(optimizer, share))
    print()
    for line in (rows[0].keys(), *(row.values() for row in rows)):
        print("".join(f"{cell!s:>13}" for cell in line))
    for fault in everything.faults:
        print(f"fault: {fault}")
    print(f"{kills} kills, {everything.lives} lives: {len(everything.faults) or 'no'} faults")
    return not everything.faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="over all optimizers")
    parser.add_argument("--seed", type=int, default=0, help="of the random times and places")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--out", type=Path, help="new directory to keep the runs in")
    arguments = parser.parse_args()
    if arguments.kills < len(arguments.optimizers):
        parser.error("--kills must be at least the number of optimizers.")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "soak" if arguments.out is None else arguments.out.absolute()
        out.mkdir(parents=True)
        sys.exit(not soak(arguments.kills, arguments.seed, arguments.optimizers, out))


if __name__ == "__main__":
    main()
