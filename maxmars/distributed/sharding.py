"""Mesh, sharding rules, and the rows of a batch that a process holds.

The mesh has three axes. `data` replicates the parameters, `fsdp` splits parameters, gradients and
optimizer state, `tensor` splits heads, MLP and vocabulary; the batch is split over `data` and
`fsdp`. Axis types are Auto: XLA's partitioner inserts the collectives, and constraints say where.
The train step makes `data` Manual where it adds up the gradients of microbatches.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from maxmars.config import MeshConfig, ModelConfig
from maxmars.config.mesh import choose_mesh, mesh_shape

AXES = ("data", "fsdp", "tensor")


@dataclass(frozen=True)
class ShardingRules:
    """From each logical axis to the mesh axes that it is split over; `None` is not split."""

    batch: tuple[str, ...] | None = ("data", "fsdp")
    length: str | None = None
    layers: str | None = None
    embed: str | None = "fsdp"
    qkv: str | None = None
    heads: str | None = "tensor"
    head_dim: str | None = None
    mlp: str | None = "tensor"
    vocab: str | None = "tensor"
    positions: str | None = None
    norm: str | None = None  # a few thousand numbers: gathering them costs more than keeping them

    def spec(self, *logical_axes: str | None) -> PartitionSpec:
        """PartitionSpec of an array whose axes have these logical names (None: not split).

        Inside of a `jax.shard_map` it leaves out the Manual axes.
        """
        spec = PartitionSpec(*(None if a is None else getattr(self, a) for a in logical_axes))
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return _without(spec, manual) if manual else spec


RULES = ShardingRules()


def _without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """A spec without these axes of the mesh."""

    def rest(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if axis not in axes) or None
        return None if entry in axes else entry

    return PartitionSpec(*map(rest, spec))


def make_mesh(
    config: MeshConfig,
    devices: Sequence[jax.Device] | None = None,
    networks: Sequence[int] | None = None,
) -> Mesh:
    """The `data` x `fsdp` x `tensor` mesh over `devices` (default: all devices of all processes).

    On several TPU slices only `data` crosses the network between slices: its first factor is the
    number of slices, so that `fsdp` and `tensor` stay within a slice. GPUs are in the order of
    their networks.

    Args:
      config: sizes of the axes; an `fsdp` of None is 1, see `training_mesh`.
      devices: TPUs, GPUs or CPUs.
      networks: the number of each device's fast network, by default `fast_networks`.

    Raises:
      ValueError: the axis sizes do not multiply to the number of devices, or `data` is no multiple
        of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    networks = fast_networks(devices) if networks is None else networks
    is_tpu = devices[0].platform == "tpu"
    slices = len(set(networks)) if is_tpu else 1
    data, *inner = shape = tuple(mesh_shape(config, len(devices), slices).values())
    types = (AxisType.Auto,) * len(AXES)
    if not is_tpu:
        # `jax.make_mesh` refuses GPUs of several hosts. By JAX's ids near hosts follow each other.
        by_network = sorted(range(len(devices)), key=lambda i: (networks[i], devices[i].id))
        return Mesh(np.array(devices)[by_network].reshape(shape), AXES, axis_types=types)
    # JAX lays the axes of a mesh along whole axes of a TPU's torus, and raises if their sizes do
    # not fit; only then may it split the torus's axes.
    if slices > 1:
        arrange = mesh_utils.create_hybrid_device_mesh
        inside, across = (data // slices, *inner), (slices, 1, 1)
        try:
            grid = arrange(inside, across, devices)
        except NotImplementedError:
            grid = arrange(inside, across, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=types)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=types)


def training_mesh(
    config: MeshConfig,
    model: ModelConfig,
    devices: Sequence[jax.Device] | None = None,
    networks: Sequence[int] | None = None,
) -> Mesh:
    """The mesh of a run: that of its config, with `fsdp` chosen for the model if it is None.

    Raises:
      ValueError: see `make_mesh`, whose arguments these are.
    """
    devices = jax.devices() if devices is None else devices
    networks = fast_networks(devices) if networks is None else networks
    size = math.gcd(*Counter(networks).values())
    return make_mesh(choose_mesh(config, model, size), devices, networks)


def fast_networks(devices: Sequence[jax.Device]) -> list[int]:
    """The number of each device's fast network: its TPU slice, or the GPUs that NVLink joins.

    The numbers are JAX's. Without the driver's information JAX numbers GPUs by host, whatever the
    number of processes; JAX_PARTITION_INDEX, set for every process, replaces the numbers. Each CPU
    device is a network of its own: all share one memory, so `fsdp` would gain nothing.
    """
    if devices[0].platform == "cpu":
        return list(range(len(devices)))
    return [getattr(device, "slice_index", None) or 0 for device in devices]


def crosses(mesh: Mesh, axis: str, networks: Sequence[int]) -> bool:
    """Whether devices along an axis of the mesh are in several networks.

    Args:
      mesh: any mesh.
      axis: name of the axis.
      networks: the number of each device's network, in the order of `mesh.devices.flat`.
    """
    grid = np.reshape(networks, mesh.devices.shape)
    first = grid.take([0], axis=mesh.axis_names.index(axis))
    return bool(np.any(grid != first))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding that replicates an array on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Constrain an activation to the ambient mesh (`jax.set_mesh`), if there is one."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, RULES.spec(*logical_axes))


def on_devices(
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    axes: Collection[str] | None = AXES,
) -> Callable[..., Any]:
    """`jax.shard_map` over the `axes` of the ambient mesh that are not Manual yet."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes or ()) - set(manual),
        check_vma=False,
    )


def gathered(kernel: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """A kernel with these logical axes, gathered over `fsdp` on the ambient mesh.

    The gradient is reduced straight to the shards. A plain constraint would gather the gradient as
    well; without a constraint, XLA may send pieces of the kernel among the products several times.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return kernel if mesh.empty or mesh.shape["fsdp"] == 1 else _gathered(kernel, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(kernel: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(kernel, _without(RULES.spec(*axes), ("fsdp",)))


_gathered.defvjp(
    lambda kernel, axes: (_gathered(kernel, axes), None),
    lambda axes, _, gradient: (constrain(gradient, *axes),),
)


def copies(
    table: Float[Array, "V D"], axes: tuple[str | None, str | None] = ("vocab", "embed")
) -> Float[Array, "P V D"]:
    """A copy of a table with these logical axes for each shard of the batch, gathered over `fsdp`.

    The gradients of all uses are summed on each device, and cross between devices once, in the
    table's dtype.
    """
    num_shards = ambient_batch_shards()
    return table[None] if num_shards == 1 else _copies(table, num_shards, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copies(table: jax.Array, num_shards: int, axes: tuple[str | None, str | None]) -> jax.Array:
    table = constrain(table, axes[0], None)
    return constrain(jnp.broadcast_to(table, (num_shards, *table.shape)), "batch", axes[0], None)


def _copies_bwd(
    num_shards: int, axes: tuple[str | None, str | None], _: None, gradients: jax.Array
) -> tuple[jax.Array]:
    # An all-to-all over fsdp and a local sum: libtpu turns a reduce-scatter into an all-reduce,
    # which sends twice as much.
    data = _without(RULES.spec("batch"), ("fsdp",))
    spec = PartitionSpec(*data, *RULES.spec(*axes))
    shards = jax.lax.with_sharding_constraint(gradients, spec)
    wide = jnp.promote_types(gradients.dtype, jnp.float32)
    return (shards.astype(wide).sum(0).astype(gradients.dtype),)


_copies.defvjp(lambda *arguments: (_copies(*arguments), None), _copies_bwd)


def look_up(tables: Float[Array, "P V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The row of each id, in float32 at least, from the `copies` of a table in any dtype.

    The gradient of a row is a sum over all tokens with this id. Each device sums in float32 and
    rounds once, to the table's dtype: a sum in bfloat16 stops growing at 256 times its terms, which
    a frequent token soon reaches.
    """
    shape, dtype = tables.shape[1:], tables.dtype
    wide = jnp.promote_types(dtype, jnp.float32)

    # `table.astype(wide)[ids]` has the same gradient, but with a table split over `tensor` its rows
    # would cross between devices in float32.
    @jax.custom_vjp
    def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table[ids].astype(wide)

    def gradient(ids: jax.Array, slopes: jax.Array) -> tuple[jax.Array, None]:
        return jnp.zeros(shape, wide).at[ids].add(slopes).astype(dtype), None

    rows.defvjp(lambda table, ids: (rows(table, ids), ids), gradient)
    return on_shards(lambda tables, ids: rows(tables[0], ids), tables, ids)


def on_shards(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function`, which computes each row by itself, applied to each shard of the batch. The arrays
    are split over the batch on their first axis, as rows and `copies` are."""
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    by_batch = RULES.spec("batch")
    return on_devices(function, (by_batch,) * len(arrays), by_batch, axes=RULES.batch)(*arrays)


GPUS = ("gpu", "cuda")
"""Platforms of GPUs; the second is the compiler's name for GPUs of a `plan`, which are absent."""


def ambient_platform() -> str | None:
    """Platform of the devices of the ambient mesh (`jax.set_mesh`); None without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device.platform


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch of shape [microbatches, rows, tokens]."""
    return NamedSharding(mesh, RULES.spec(None, "batch", None))


def ambient_batch_shards() -> int:
    """Number of shards into which the ambient mesh splits the rows of a batch; 1 without a mesh.
    Arrays inside of a `jax.shard_map` are split over its Manual axes already."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set() if mesh.empty else set(RULES.batch or ()) - set(mesh.manual_axes)
    return math.prod(mesh.shape[axis] for axis in axes)


def batch_shards(mesh: Mesh) -> int:
    """Number of shards into which the rows of a microbatch are split."""
    return int(np.prod([mesh.shape[a] for a in RULES.batch or ()]))


def local_rows(
    mesh: Mesh, shape: tuple[int, int], devices: Collection[jax.Device] | None = None
) -> np.ndarray:
    """Rows of a [microbatches, rows] batch that this process's devices hold.

    Args:
      mesh: mesh whose `data` and `fsdp` split the rows.
      shape: microbatches, and rows of each.
      devices: devices to take instead of this process's.

    Returns:
      int array [microbatches, local rows] of global row numbers `j * rows + k`, ascending.
      Processes between which only `tensor` is split hold the same rows.
    """
    microbatches, rows = shape
    devices = mesh.local_devices if devices is None else devices
    held = np.zeros(rows, bool)
    indices = NamedSharding(mesh, RULES.spec("batch")).devices_indices_map((rows,))
    for device, index in indices.items():
        held[index] |= device in devices
    return np.arange(microbatches)[:, None] * rows + np.flatnonzero(held)


def to_device(mesh: Mesh, local: np.ndarray, rows: int) -> jax.Array:
    """Global array [microbatches, rows, ...] from each process's rows; see `local_rows`."""
    shape = (local.shape[0], rows, *local.shape[2:])
    sharding = NamedSharding(mesh, RULES.spec(None, "batch", *[None] * (local.ndim - 2)))
    return jax.make_array_from_process_local_data(sharding, local, shape)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s like `abstract`, with `shardings`."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract or concrete, over all devices."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_on_chip(tree: Any) -> int:
    """Bytes of a tree on one device; its arrays have shardings, and may be abstract."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def like_params(tree: Any, params: Any) -> Any:
    """NamedShardings for a tree, such as an abstract optimizer state, after the parameters'.

    A leaf takes the sharding of a parameter if its path ends with the parameter's path and the
    shapes are equal, except for axes of size 1 of the leaf. The other leaves are replicated.

    Args:
      tree: arrays, abstract or concrete.
      params: abstract parameters that carry NamedShardings.
    """

    def names(path: tuple[Any, ...]) -> tuple[str, ...]:
        return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)

    by_path = {names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    no_split = replicated(jax.tree.leaves(params)[0].sharding.mesh)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            param = by_path.get(names(path[start:]))
            if param is None or param.ndim != leaf.ndim:
                continue
            if param.shape == leaf.shape:
                return param.sharding
            same_size = [own == size for own, size in zip(leaf.shape, param.shape, strict=True)]
            if all(same or own == 1 for same, own in zip(same_size, leaf.shape, strict=True)):
                split_over = itertools.chain(param.sharding.spec, itertools.repeat(None))
                entries = [
                    cut if same else None for same, cut in zip(same_size, split_over, strict=False)
                ]
                return NamedSharding(no_split.mesh, PartitionSpec(*entries))
        return no_split

    return jax.tree_util.tree_map_with_path(sharding, tree)
