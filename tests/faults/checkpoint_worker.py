"""A process that test_checkpoint_faults.py starts: its first argument says what it does."""

import json
import resource
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmars.checkpoint import Checkpointer, list_steps, load
from maxmars.checkpoint.writer import SaveTimer
from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    GPT2Config,
    MeshConfig,
    PythonSourcesConfig,
    TrainConfig,
)
from maxmars.distributed import processes
from maxmars.distributed.sharding import make_mesh

CONFIG = TrainConfig(
    name="worker",
    num_steps=10,
    global_batch_size=8,
    model=GPT2Config(num_layers=1, num_heads=1, embed_dim=8),
    optimizer=AdamWConfig(),
    data=PythonSourcesConfig(),
    checkpoint=CheckpointConfig(keep_last=2),
)
SHAPE = (1024, 512)  # 2 MB of noise, which does not compress


def host_state(step):
    return {"params": {"w": np.random.default_rng(step).random(SHAPE, np.float32)}}


def place(state, mesh):
    sharding = NamedSharding(mesh, P("fsdp"))
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), state
    )


def abstract(mesh):
    sharding = NamedSharding(mesh, P("fsdp"))
    return {"params": {"w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)}}


def is_sound(restored):
    want = host_state(restored.checkpoint.step)["params"]["w"]
    shards = restored.state["params"]["w"].addressable_shards
    return all(np.array_equal(shard.data, want[shard.index]) for shard in shards)


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def run_out_of(directory):
    """Meet one shortage after the other, each in a directory of its name."""
    for meet in (limit, descriptors):
        meet(f"{directory}/{meet.__name__}/checkpoints")


def limit(directory):
    """Save a checkpoint, another without the space for it, go on from the first with space.

    Files may not grow beyond a limit, which works without any rights.
    """
    mesh, unlimited = make_mesh(MeshConfig()), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer = Checkpointer(directory, CONFIG, mesh=mesh)
    checkpointer.save(1, place(host_state(1), mesh), data_position=8, wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    errors = []
    for attempt in (
        lambda: checkpointer.save(2, place(host_state(2), mesh), data_position=16, wait=True),
        lambda: checkpointer.save(3, place(host_state(3), mesh), data_position=24, wait=True),
        checkpointer.close,
    ):
        try:
            attempt()
        except OSError as caught:
            errors.append(str(caught))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        restored = checkpointer.restore(abstract(mesh))
        checkpointer.save(2, place(host_state(2), mesh), data_position=16)
    after = {"step": restored.checkpoint.step, "sound": is_sound(restored)}
    again = list_steps(directory)
    print(json.dumps({"errors": errors, "after": after, "again": again, "left": names(directory)}))


def descriptors(directory):
    """Read with ever more file descriptors: the newest checkpoint, or an error of this process."""
    mesh = make_mesh(MeshConfig())
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, place(host_state(step), mesh), data_position=8 * step)
    load(directory, abstract(mesh))
    limits, (_, hard) = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    for spare in range(1, 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            limits.append(load(directory, abstract(mesh)).checkpoint.step)
        except (OSError, ValueError, RuntimeError) as error:
            limits.append(str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps({"limits": limits, "left": names(directory)}))


def pair(directory, port, index):
    """One of two processes; the newest checkpoint's file that only the second reads is cut.

    The directory beside it is owned by the test.
    """
    processes.initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh = make_mesh(MeshConfig(data=1, fsdp=4))
    try:
        Checkpointer(Path(directory).parent / "owned", CONFIG, mesh=mesh)
        refused = None
    except (ValueError, OSError) as error:
        refused = str(error)
    now, due = [0.0], []
    timer = SaveTimer(1.0, lambda: now[0])
    for step in range(200):
        if timer.is_due(step):
            due.append(step)
            timer.restart()
        now[0] += 1 + 9 * int(index)  # the second process's clock runs fast
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, place(host_state(step), mesh), data_position=8 * step)
        checkpointer.latest_step()  # waits for the save
        if processes.is_primary():
            own = (Path(directory) / "2/state/ocdbt.process_1/d").iterdir()
            largest = max(own, key=lambda p: p.stat().st_size)
            largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        processes.barrier("cut")
        restored = checkpointer.restore(abstract(mesh))
        left = names(directory)
        processes.barrier("listed")
        checkpointer.save(3, place(host_state(3), mesh), data_position=24, wait=True)
        saved = list_steps(directory)
    result = {"step": restored.checkpoint.step, "sound": is_sound(restored)}
    result |= {"skipped": restored.skipped, "refused": refused, "due": due}
    print(json.dumps(result | {"left": left, "saved": saved}))
    processes.shutdown()


if __name__ == "__main__":
    modes = [run_out_of, pair]
    {mode.__name__: mode for mode in modes}[sys.argv[1]](*sys.argv[2:])
