"""Continue a run on other meshes and numbers of processes, and see what changes.

    python tools/resume_on_meshes.py [--optimizers mars mars_shampoo] [--steps 10] [--out DIR]

A small GPT-2 trains in legs, each in processes of its own over fake CPU devices, and each on
another mesh (data, fsdp, tensor) or number of processes than the leg before, whose checkpoint it
continues. Beside it runs the same training undisturbed on the first mesh. One line for each leg:

    state    whether the state that was read on the new mesh has the digests of the saved state
    tokens   whether the batches of its steps have the digests of the undisturbed run's batches
    drift    the largest difference between its losses and those of the undisturbed run, in nats

Another mesh sums in another order, so losses drift by rounding; state and tokens may not differ at
all. Exits with 1 if they do. A leg costs a start of Python and JAX and a compilation, some 10 s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxmars.checkpoint import list_steps, load, read
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    LogConfig,
    MarsConfig,
    MeshConfig,
    MuonConfig,
    OptimizerConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    TrainConfig,
    from_dict,
    to_dict,
)
from maxmars.distributed.files import write_json
from maxmars.train.metrics import read_metrics

OPTIMIZERS: dict[str, OptimizerConfig] = {
    "mars": MarsConfig(),
    "mars_exact": MarsConfig(exact=True),
    "mars_shampoo": MarsConfig(variant="shampoo"),
    "muon": MuonConfig(),
}


@dataclass(frozen=True)
class Place:
    """Where a leg runs: the mesh (data, fsdp, tensor) over this number of processes."""

    mesh: tuple[int, int, int]
    processes: int = 1

    def __str__(self) -> str:
        """As in `(1, 8, 1)` or `(2, 1, 1) on 2 processes`."""
        return f"{self.mesh}" + (f" on {self.processes} processes" if self.processes > 1 else "")


CHAINS = (
    (Place((8, 1, 1)), Place((4, 1, 1)), Place((1, 1, 1))),
    (Place((1, 8, 1)), Place((2, 2, 2))),
    (Place((2, 1, 1), processes=2), Place((1, 1, 1)), Place((2, 1, 1), processes=2)),
)


def config_of(optimizer: str, place: Place, num_steps: int, all_steps: int) -> TrainConfig:
    """The config of a leg that ends after `num_steps`; its steps take some milliseconds."""
    data, fsdp, tensor = place.mesh
    return TrainConfig(
        name="meshes",
        num_steps=num_steps,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=2,
            num_heads=2,
            embed_dim=32,
            max_seq_len=32,
            vocab_size=257,
            vocab_pad_multiple=8,
            compute_dtype="float32",
        ),
        optimizer=OPTIMIZERS[optimizer],
        schedule=ScheduleConfig(warmup_steps=2, decay_steps=all_steps),
        data=PythonSourcesConfig(),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=None, keep_last=9),
        log=LogConfig(every=1),
    )


def run_leg(workdir: Path, config: TrainConfig, processes: int) -> None:
    """Train, in `processes` new processes.

    Raises:
      SystemExit: one of them failed.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "leg.json", to_dict(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mesh = config.mesh
    devices = (mesh.data or 1) * (mesh.fsdp or 1) * mesh.tensor // processes
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    log = workdir / "log.txt"
    with log.open("a") as output:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--leg", workdir, str(processes), str(i), str(port)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for i in range(processes)
        ]
        codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"a leg failed:\n{log.read_text()[-3000:]}")


def leg(workdir: Path, num_processes: int, number: int, port: int) -> None:
    """Run one process of a leg: record digests of what it reads, and train."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from maxmars.checkpoint.digest import digest
    from maxmars.data.batches import TrainBatches, open_data
    from maxmars.distributed import processes
    from maxmars.distributed.sharding import make_mesh
    from maxmars.train import train
    from maxmars.train.step import abstract_train_state

    if num_processes > 1:
        processes.initialize(f"127.0.0.1:{port}", num_processes, number)

    def write(kind: str, key: int, value: Any) -> None:
        if processes.is_primary():
            with (workdir / f"{kind}.jsonl").open("a") as file:
                file.write(json.dumps([key, value]) + "\n")

    config = from_dict(json.loads((workdir / "leg.json").read_text()))
    mesh, position = make_mesh(config.mesh), 0
    if list_steps(workdir / "checkpoints"):
        restored = load(workdir / "checkpoints", abstract_train_state(config, mesh))
        position = restored.checkpoint.data_position
        write("restored", restored.checkpoint.step, digest(restored.state))
    tokens = open_data(config.data, "train", model=config.model)
    batches = TrainBatches(tokens, config, mesh, position=position)
    while batches.position < config.num_steps * config.global_batch_size:
        position = batches.position
        sha = hashlib.sha256()
        for array in jax.tree.leaves(next(batches)):
            sha.update(np.asarray(multihost_utils.process_allgather(array, tiled=True)).tobytes())
        write("tokens", position, sha.hexdigest())
    batches.close()
    train(config, workdir)
    processes.shutdown()


def written(workdir: Path, kind: str) -> dict[int, Any]:
    """The records of one kind of all legs of a run."""
    path = workdir / f"{kind}.jsonl"
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def losses(workdir: Path) -> dict[int, float]:
    """Loss of each step."""
    rows = read_metrics(workdir)
    return {row["step"]: float(row["train/loss"]) for row in rows if "train/loss" in row}


def check_chain(optimizer: str, chain: tuple[Place, ...], steps: int, out: Path) -> bool:
    """Run a chain and print its lines; whether state and tokens were the same throughout."""
    last, name = steps * len(chain), f"{optimizer}-{CHAINS.index(chain)}"
    undisturbed, run = out / f"{name}-undisturbed", out / name
    run_leg(undisturbed, config_of(optimizer, chain[0], last, last), chain[0].processes)
    good = True
    for number, place in enumerate(chain):
        begin, end = number * steps, (number + 1) * steps
        config = config_of(optimizer, place, end, last)
        run_leg(run, config, place.processes)
        state = ""
        if number:
            same = written(run, "restored").get(begin) == read(run / "checkpoints", begin).digests
            good &= same
            state = "equal" if same else "DIFFERENT"
        positions = [step * config.global_batch_size for step in range(begin, end)]
        ours, theirs = written(run, "tokens"), written(undisturbed, "tokens")
        same = all(ours[p] == theirs[p] for p in positions)
        good &= same
        tokens = "equal" if same else "DIFFERENT"
        a, b = losses(run), losses(undisturbed)
        drift = max(abs(a[step] - b[step]) for step in range(begin + 1, end + 1))
        where = f"{optimizer:14}{place!s:28}{begin + 1:4} to {end:<4}"
        print(f"{where}{state:>10}{tokens:>11}{drift:11.1e}", flush=True)
    return good


def main() -> None:
    if sys.argv[1:2] == ["--leg"]:
        workdir, *numbers = sys.argv[2:]
        leg(Path(workdir), *map(int, numbers))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=["mars", "mars_shampoo"]
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of a leg")
    parser.add_argument("--out", type=Path, help="directory to keep the runs in")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1.")
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        print(f"{'optimizer':14}{'mesh':28}{'steps':12}{'state':>10}{'tokens':>11}{'drift':>11}")
        good = [
            check_chain(optimizer, chain, arguments.steps, out)
            for optimizer in arguments.optimizers
            for chain in CHAINS
        ]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
