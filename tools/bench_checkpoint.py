"""What a checkpoint of GPT-2 costs: blocking time, time to completion, restore, host memory.

    python tools/bench_checkpoint.py [--directory DIR] [--rounds 5] [--size small] [--moments 2]
        [--layers 12] [--output F.json]

The state is float32 parameters and `--moments` arrays of the same shapes, as AdamW has 2 and MARS
3, of random normal numbers, on one device. Each round is a process of its own, which saves three
times and keeps changing the state in between, as training does; the first save, which compiles the
digests, is not counted. Another process then restores, digests checked.

Memory is the process's peak resident set (Linux: VmHWM), less what it held before it made the
state, as a multiple of the state. On a CPU, where arrays are in the host's memory, a save holds the
state twice: what is being saved, and what training has made of it meanwhile.

The files are read back through the operating system's cache: a cold disk adds its own time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # JAX itself is imported by the processes that are measured
    from maxmars.config import TrainConfig

SAVES = 3


def memory_bytes(key: str) -> int:
    """This process's resident memory: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def run_config(size: str, num_layers: int | None) -> TrainConfig:
    """A run of GPT-2, to be stored with its checkpoints."""
    from maxmars.config import (
        AdamWConfig,
        CheckpointConfig,
        GPT2Config,
        PythonSourcesConfig,
        TrainConfig,
    )

    model = {
        "small": GPT2Config.small,
        "medium": GPT2Config.medium,
        "large": GPT2Config.large,
        "xl": GPT2Config.xl,
    }[size]()
    return TrainConfig(
        name="bench",
        num_steps=1000,
        global_batch_size=8,
        model=dataclasses.replace(model, num_layers=num_layers or model.num_layers),
        optimizer=AdamWConfig(),
        data=PythonSourcesConfig(),
        checkpoint=CheckpointConfig(keep_last=1),
    )


def abstract_state(config: TrainConfig, moments: int, sharding: Any) -> dict[str, Any]:
    """The state's shapes: params and as many copies of them as there are moments."""
    import jax

    from maxmars.model.language_model import graph_and_abstract_params

    _, params = graph_and_abstract_params(config.model)
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), params
    )
    return {"params": params, "opt_state": {f"moment_{i}": params for i in range(moments)}}


def random_state(abstract: Any) -> Any:
    """Normal numbers, made leaf by leaf so that no temporary is large."""
    import jax

    @functools.partial(jax.jit, static_argnums=1)
    def leaf(seed: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape)

    leaves, treedef = jax.tree.flatten(abstract)
    return jax.tree.unflatten(treedef, [leaf(i, a.shape) for i, a in enumerate(leaves)])


def measure(
    action: str, directory: str, moments: int, size: str, num_layers: int | None
) -> dict[str, Any]:
    """Save or restore in this process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from maxmars.checkpoint import Checkpointer
    from maxmars.config import MeshConfig
    from maxmars.distributed.sharding import make_mesh

    config = run_config(size, num_layers)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    abstract = abstract_state(config, moments, NamedSharding(mesh, PartitionSpec()))
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    before = memory_bytes("VmRSS")
    result: dict[str, Any] = {"state_bytes": state, "device": jax.devices()[0].device_kind}
    with Checkpointer(directory, config, mesh=mesh) as checkpointer:
        if action == "save":
            result |= save(checkpointer, random_state(abstract))
        else:
            started = time.perf_counter()
            restored = checkpointer.restore(abstract)
            jax.block_until_ready(restored.state)
            result["restore"] = time.perf_counter() - started
    result["peak"] = (memory_bytes("VmHWM") - before) / state
    return result


def save(checkpointer: Any, state: Any) -> dict[str, Any]:
    """Save several times; seconds blocked and in all, without the first."""
    import jax

    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.001, tree), donate_argnums=0)
    blocked, total = [], []
    for step in range(1, SAVES + 1):
        jax.block_until_ready(state)
        started = time.perf_counter()
        blocked.append(checkpointer.save(step, state, data_position=8 * step))
        state = change(state)  # donates what was saved
        checkpointer.latest_step()  # waits for the save
        total.append(time.perf_counter() - started)
    return {"blocked": blocked[1:], "total": total[1:]}


def spawn(action: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a new process."""
    command = [sys.executable, __file__, "--directory", str(directory), "--measure", action]
    command += ["--moments", str(args.moments), "--size", args.size]
    command += [] if args.layers is None else ["--layers", str(args.layers)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, unit: str, values: list[float]) -> str:
    """One line of the table."""
    middle = statistics.median(values)
    return f"{name:34}{middle:9.2f} {unit:3}{min(values):9.2f} ..{max(values):7.2f}{len(values):5}"


def print_table(args: argparse.Namespace) -> None:
    """Measure round after round, and print medians and ranges."""
    numbers: dict[str, list[float]] = {}
    first: dict[str, Any] = {}
    size_on_disk = 0
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-checkpoint-") as scratch:
        for i in range(args.rounds):
            print(f"round {i + 1} of {args.rounds}", file=sys.stderr, flush=True)
            directory = Path(scratch) / "checkpoints"
            saved = spawn("save", directory, args)
            restored = spawn("restore", directory, args)
            first = first or saved
            size_on_disk = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
            shutil.rmtree(directory)
            for name, values in (
                ("blocked", saved["blocked"]),
                ("total", saved["total"]),
                ("restore", [restored["restore"]]),
                ("save peak", [saved["peak"]]),
                ("restore peak", [restored["peak"]]),
            ):
                numbers.setdefault(name, []).extend(values)
    size = first["state_bytes"]
    print(f"state {size / 1e9:.2f} GB on {first['device']}, {size_on_disk / 1e9:.2f} GB on disk\n")
    print(f"{'':34}{'median':>9} {'':3}{'min .. max':>18}{'n':>5}")
    print(row("save, training is blocked for", "s", numbers["blocked"]))
    print(row("save, complete after", "s", numbers["total"]))
    print(row("restore, digests checked", "s", numbers["restore"]))
    print(row("save, peak host memory / state", "x", numbers["save peak"]))
    print(row("restore, peak host memory / state", "x", numbers["restore peak"]))
    if args.output is not None:
        found = {"state_bytes": size, "bytes_on_disk": size_on_disk, "device": first["device"]}
        args.output.write_text(json.dumps(found | numbers, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", help="where to write (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes")
    parser.add_argument("--moments", type=int, default=2, help="arrays beside each parameter")
    parser.add_argument(
        "--size", choices=("small", "medium", "large", "xl"), default="small", help="of GPT-2"
    )
    parser.add_argument("--layers", type=int, help="fewer for a quick look")
    parser.add_argument("--output", type=Path, help="also write what was measured as JSON")
    parser.add_argument("--measure", choices=("save", "restore"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.rounds, args.moments, args.layers or 1) < 1:
        parser.error("--rounds, --moments and --layers must be at least 1.")
    if args.measure:
        shape = (args.moments, args.size, args.layers)
        print(json.dumps(measure(args.measure, args.directory, *shape)))
    else:
        print_table(args)


if __name__ == "__main__":
    main()
