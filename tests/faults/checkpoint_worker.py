"""A process that test_checkpoint_faults.py starts: its first argument says what it does."""

import json
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmars import distributed
from maxmars.checkpoint import Checkpointer, list_steps
from maxmars.config import CheckpointConfig, GPT2Config, MeshConfig, TrainConfig
from maxmars.data_config import PythonSourcesConfig
from maxmars.optimizer_config import AdamWConfig
from maxmars.sharding import make_mesh

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
    want = host_state(restored.step)["params"]["w"]
    shards = restored.state["params"]["w"].addressable_shards
    return all(np.array_equal(shard.data, want[shard.index]) for shard in shards)


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def hold(directory):
    with Checkpointer(directory, CONFIG, mesh=make_mesh(MeshConfig())):
        print("holding", flush=True)
        time.sleep(600)


def run_out(directory, exhaust, relieve):
    """Save a checkpoint, another without the space for it, go on from the first with space."""
    mesh = make_mesh(MeshConfig())
    checkpointer = Checkpointer(directory, CONFIG, mesh=mesh)
    checkpointer.save(1, place(host_state(1), mesh), data_position=8, wait=True)
    exhaust()
    try:
        with checkpointer:
            checkpointer.save(2, place(host_state(2), mesh), data_position=16)
        error = "none"
    except OSError as caught:
        error = str(caught)
    relieve()
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        restored = checkpointer.restore(abstract(mesh))
        checkpointer.save(2, place(host_state(2), mesh), data_position=16)
    after = {"step": restored.step, "sound": is_sound(restored)}
    again = list_steps(directory)
    print(json.dumps({"error": error, "after": after, "again": again, "left": names(directory)}))


def limit(directory):
    """Files may not grow beyond a limit: what works without any rights."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    run_out(
        directory,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1])),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited),
    )


def fill(directory):
    """The directory lies on a small file system."""
    ballast = Path(directory).parent / "ballast"

    def exhaust():
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError:
                file.truncate(file.tell() - 2**20)  # room for the beginning of a save

    run_out(directory, exhaust, ballast.unlink)


def pair(directory, port, index):
    """One of two processes; the newest checkpoint's file that only the second reads is cut."""
    distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh = make_mesh(MeshConfig(data=1, fsdp=4))
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, place(host_state(step), mesh), data_position=8 * step)
        checkpointer.latest_step()  # waits for the save
        if distributed.is_primary():
            own = (Path(directory) / "2/state/ocdbt.process_1/d").iterdir()
            largest = max(own, key=lambda p: p.stat().st_size)
            largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        distributed.barrier("cut")
        restored = checkpointer.restore(abstract(mesh))
        left = names(directory)
        distributed.barrier("listed")
        checkpointer.save(3, place(host_state(3), mesh), data_position=24, wait=True)
        saved = list_steps(directory)
    result = {"step": restored.step, "sound": is_sound(restored), "skipped": restored.skipped}
    print(json.dumps(result | {"left": left, "saved": saved}))
    distributed.shutdown()


if __name__ == "__main__":
    {"hold": hold, "limit": limit, "fill": fill, "pair": pair}[sys.argv[1]](*sys.argv[2:])
