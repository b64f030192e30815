"""Small trees of arrays, an optimizer's steps over them, their comparison, and meshes."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxmars.config import MeshConfig
from maxmars.distributed.sharding import make_mesh

# A small network: two matrices and two vectors.
NETWORK = {"dense": {"kernel": (6, 4), "bias": (4,)}, "embedding": (9, 6), "norm": (6,)}


def random_tree(seed=0, shapes=NETWORK, *, scale=1.0, dtype="float32"):
    """A tree of normal numbers, of these shapes and this size."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (scale * rng.standard_normal(shape)).astype(dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def stack(trees):
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def assert_close(ours, theirs, atol=0.0, rtol=0.0):
    """The same structure, and numbers within the tolerances."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), ours, theirs)


def put(tree, mesh, partitions):
    """The arrays of a dict in their partitions of a mesh; without a mesh, the dict as it is."""
    if mesh is None:
        return tree
    return jax.device_put(tree, {name: NamedSharding(mesh, partitions[name]) for name in tree})


@dataclass(frozen=True)
class Steps:
    """Updates and parameters of each step, and the last state."""

    updates: list
    params: list
    state: object


def take_steps(tx, params, gradients, *, extra=None) -> Steps:
    """One step for each gradient; `extra` has further arguments of `update` for each step."""
    state, update = tx.init(params), jax.jit(tx.update)
    place = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if isinstance(place, NamedSharding):  # else the second step would be compiled anew
        everywhere = NamedSharding(place.mesh, PartitionSpec())
        state = jax.tree.map(
            lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere),
            state,
        )
    steps = Steps([], [], state)
    for i, grads in enumerate(gradients):
        arguments = {} if extra is None else {name: each[i] for name, each in extra.items()}
        updates, state = jax.block_until_ready(update(grads, state, params, **arguments))
        params = optax.apply_updates(params, updates)
        steps.updates.append(updates)
        steps.params.append(params)
    assert update._cache_size() <= 2  # the first one may be of NumPy's arrays
    return Steps(steps.updates, steps.params, state)


def mesh_of(data=1, fsdp=1, tensor=1):
    """A mesh of the first devices."""
    return first_devices(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


def first_devices(config: MeshConfig):
    """The mesh of a config on as few devices as it can have."""
    count = (config.data or 1) * (config.fsdp or 1) * config.tensor
    return make_mesh(config, jax.devices()[:count])
