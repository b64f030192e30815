"""Kill a training run again and again, and check that it ends where an undisturbed run ends.

    python tools/soak.py [--kills 100] [--seed 0] [--out DIR]

A small GPT-2 trains on the sources of Python's standard library with MARS and saves every 20 steps.
Its process is killed with SIGKILL at random times: while it starts, between steps, in the middle of
saves. After the last kill the run may finish. Then another run takes the same number of steps
undisturbed, and both must agree in every loss, every gradient norm and every array of the last
state, bit by bit.

The table has a line for each process: the newest complete checkpoint when it started, the step that
it continued from, and the last step that it reported. Exits with 1 if a process did not continue
from the newest complete checkpoint, or if the two runs differ. A kill costs a start of Python and
JAX, some 10 s.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from maxmars.checkpoint import list_steps
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    LogConfig,
    MarsConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    TrainConfig,
    to_dict,
)
from maxmars.distributed.files import write_json
from maxmars.train.verify_resume import TRAIN_FROM_JSON, first_difference, series

EVERY = 20  # steps between checkpoints
STARTING_S = 300
LONGEST_S = 6.0  # from the first step of a process to its kill
KILLED_WHILE_STARTING = 0.2  # share of the processes


def small_config(num_steps: int) -> TrainConfig:
    """The config of a run whose steps take some milliseconds."""
    return TrainConfig(
        name="soak",
        num_steps=num_steps,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=2,
            num_heads=2,
            embed_dim=32,
            max_seq_len=32,
            vocab_size=257,
            compute_dtype="float32",
        ),
        optimizer=MarsConfig(),
        schedule=ScheduleConfig(warmup_steps=10, decay_steps=10_000),
        data=PythonSourcesConfig(),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=EVERY),
        log=LogConfig(every=1),
    )


class Life:
    """One process of the run."""

    def __init__(self, out: Path, name: str, config: TrainConfig) -> None:
        self.workdir = out / name
        self.log = out / f"{name}.log"
        self.complete = max(list_steps(self.workdir / "checkpoints"), default=0)
        write_json(out / "config.json", to_dict(config))
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            command = [sys.executable, "-c", TRAIN_FROM_JSON, str(out / "config.json")]
            self.process = subprocess.Popen(
                [*command, str(self.workdir)], stdout=log, stderr=subprocess.STDOUT
            )

    def output(self) -> str:
        """What the process has printed so far."""
        with self.log.open() as log:
            log.seek(self.begin)
            return log.read()

    def last_step(self) -> int:
        """The last step that any process of the run reported."""
        return max((step for step, _ in series(self.workdir)), default=0)

    def wait_for_a_step(self) -> None:
        """Return when the process has reported a step.

        Raises:
          SystemExit: it ended before, or reported none within `STARTING_S`.
        """
        deadline = time.monotonic() + STARTING_S
        while not re.search(r"\bstep +\d+/", self.output()):
            if self.process.poll() is not None:
                raise SystemExit(f"a run ended by itself; see the end of {self.log}")
            if time.monotonic() > deadline:
                self.kill()
                raise SystemExit(f"no step was reported in {STARTING_S} s; see {self.log}")
            time.sleep(0.01)

    def continued_from(self) -> int | None:
        """The step that the process continued from; None if it was killed before."""
        found = re.search(r"continuing from step (\d+)", self.output())
        if found:
            return int(found[1])
        return 0 if re.search(r"\bstep +\d+/", self.output()) else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> None:
        """Wait until the process ends by itself.

        Raises:
          SystemExit: it failed.
        """
        if self.process.wait():
            raise SystemExit(f"a run failed; see the end of {self.log}")


def soak(kills: int, seed: int, out: Path) -> bool:
    """Whether every process continued from the newest checkpoint, and the runs end equal."""
    chance, good = random.Random(seed), True
    print(f"{'start':>5}{'checkpoint':>12}{'continued':>11}{'reached':>9}  killed")
    for number in range(1, kills + 1):
        life = Life(out, "killed", small_config(10**6))
        if chance.random() < KILLED_WHILE_STARTING:
            when = "while starting"
            time.sleep(chance.uniform(0, 10))
        else:
            life.wait_for_a_step()
            delay = chance.uniform(0, LONGEST_S)
            when = f"{delay:.2f} s after a step"
            time.sleep(delay)
        life.kill()
        good &= report(number, life, when)
    steps = max((step for step, _ in series(out / "killed")), default=0) + EVERY
    life = Life(out, "killed", small_config(steps))
    life.finish()
    good &= report(kills + 1, life, "no")
    Life(out, "undisturbed", small_config(steps)).finish()
    difference = first_difference(out / "undisturbed", out / "killed")
    if difference is None:
        print(f"{steps} steps, {kills} kills: identical to the undisturbed run")
    else:
        print(f"{steps} steps, {kills} kills: DIFFERENT: {difference}")
    return good and difference is None


def report(number: int, life: Life, when: str) -> bool:
    """Print the line of a process; whether it continued from the newest complete checkpoint."""
    continued = life.continued_from()
    shown = "-" if continued is None else str(continued)
    print(f"{number:5}{life.complete:12}{shown:>11}{life.last_step():9}  {when}", flush=True)
    return continued is None or continued == life.complete


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--out", type=Path, help="directory to keep the runs in")
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error("--kills must be at least 1.")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True)
        sys.exit(not soak(arguments.kills, arguments.seed, arguments.out))
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(not soak(arguments.kills, arguments.seed, Path(scratch)))


if __name__ == "__main__":
    main()
