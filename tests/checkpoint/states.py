"""Small states, configs and kinds of damage that the tests of checkpoints share."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trees import mesh_of

from maxmars.checkpoint import Checkpointer
from maxmars.checkpoint.reader import checksum
from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    GPT2Config,
    PythonSourcesConfig,
    ScheduleConfig,
    TrainConfig,
)


def config(keep_last=2, **checkpoint):
    return TrainConfig(
        name="test",
        num_steps=100,
        global_batch_size=8,
        model=GPT2Config(num_layers=2, num_heads=2, embed_dim=16),
        optimizer=AdamWConfig(),
        schedule=ScheduleConfig(warmup_steps=1),
        data=PythonSourcesConfig(),
        checkpoint=CheckpointConfig(keep_last=keep_last, **checkpoint),
    )


MESH = mesh_of(2, 2, 2)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
PARTITION = optax.partition(
    {"a": optax.adamw(optax.linear_schedule(0, 1, 9)), "b": optax.sgd(0.1, momentum=0.9)},
    {"wte": "b", "h": {"kernel": "a", "bias": "b"}},
)


def make_state(tx=PARTITION, width=16, seed=0):
    """The shape of a training state: dicts, optax's containers, a None and scalars."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        # Large enough that Orbax does not store it inside its index, which has checksums.
        "wte": jax.random.normal(keys[0], (512, width)),
        "h": {
            "kernel": jax.random.normal(keys[1], (2, width, 32)),
            "bias": jax.random.normal(keys[2], (8, 32)).astype(jnp.bfloat16),
        },
    }
    return {
        "step": jnp.int32(3),
        "params": params,
        "opt_state": tx.init(params),
        "prev_params": None,
        "hyperparams": {"learning_rate": jnp.float32(0.1)},
    }


def abstract(state, mesh=MESH, cuts=("fsdp", "tensor")):
    """The state on a mesh; `cuts` are the mesh axes that cut the last two axes of an array."""

    def leaf(x):
        spec = P(*[None] * (x.ndim - 2), *cuts) if x.ndim >= 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, state)


def place(state, mesh=MESH, cuts=("fsdp", "tensor")):
    on_mesh = abstract(state, mesh, cuts)
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, on_mesh)


def assert_same(got, want):
    """Same containers, types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def restore(directory, want, mesh=MESH):
    with Checkpointer(directory, config(), mesh=mesh) as checkpointer:
        return checkpointer.restore(abstract(want, mesh))


def data_files(path):
    """The files of a checkpoint with arrays or Orbax's index of them, largest first."""
    files = [p for p in (path / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    return sorted(files, key=lambda p: -p.stat().st_size)


def change_meta(path, change):
    """Apply a function to the fields of a checkpoint's meta, and mend its checksum."""
    file = path / "meta" / "data.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta | {"checksum": checksum(meta)}))
