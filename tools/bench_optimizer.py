"""What an optimizer's update costs beside AdamW's.

    python tools/bench_optimizer.py [--time] [--rounds 7] [--slow-rounds 1] [--only "mars adamw"]
    python tools/bench_optimizer.py --train-step [--rounds 3] [--only "mars adamw"]
    python tools/bench_optimizer.py --traffic [--topology v5e:4x4]

`--time`, which is also what happens without flags, times the update alone on this machine's first
device: the optimizer's arithmetic and its result added to the parameters, jitted, parameters and
state donated, in float32 at the shapes of GPT-2 small without biases, layers stacked. Each
optimizer takes turns with optax's AdamW (A B A B ...), and each pair of turns gives a ratio, so
what else the machine does falls on both. Those with Newton-Schulz multiply far more than they read
or write, and take minutes on a CPU: `--slow-rounds` says how many pairs they get.

`--train-step` times whole train steps of GPT-2 small instead, on 8 sequences of 1,024 tokens.

On Linux both keep freed memory in the process, as the allocators of accelerators do. Left alone,
the C library gives large temporaries back to the system after each step, and the page faults of
getting them again then take longer than the arithmetic.

`--traffic` prints the bytes that one update moves between devices at GPT-2 XL's matrix shapes, on
16 devices that need not be there: the update alone is compiled from shapes and shardings, and the
collectives are read from the program (`maxmars.plan.collectives`). Bytes are those of the results
on one device, times loop trip counts; of a reduce-scatter, those of the operand.

Without `--topology` the devices are fake CPU devices. Their compiler keeps float32 where a TPU's
multiplies, and so gathers, in bfloat16: an optimizer that leaves its communication to the compiler
moves 2 to 3 times as much there. `--topology` compiles for TPUs (extra `tpu`).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # JAX itself is imported once its devices are chosen
    import jax
    import optax

NUM_DEVICES = 16


@dataclass(frozen=True)
class Stack:
    """The sizes of a model's layers."""

    name: str
    num_layers: int
    embed_dim: int


XL = Stack("xl", 48, 1600)
LARGE = Stack("large", 36, 1280)  # 20 heads: XL's 25 do not divide over tensor=4

CASES = (
    ((1, 16, 1), XL),
    ((1, 4, 4), LARGE),
    ((1, 4, 4), XL),  # cannot be trained; the matrices alone divide, and were measured before
    ((2, 8, 1), XL),
    ((4, 4, 1), XL),
)
"""Meshes (data, fsdp, tensor) and models."""


def matrices(stack: Stack, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The kernels of a stack of blocks, [layers, in, out] in float32, sharded as in training."""
    import jax
    from jax.numpy import float32

    from maxmars.distributed.sharding import RULES

    layers, d = stack.num_layers, stack.embed_dim
    shapes = {
        "c_attn": ((layers, d, 3 * d), ("layers", "embed", "heads")),
        "attn_c_proj": ((layers, d, d), ("layers", "heads", "embed")),
        "c_fc": ((layers, d, 4 * d), ("layers", "embed", "mlp")),
        "mlp_c_proj": ((layers, 4 * d, d), ("layers", "mlp", "embed")),
    }
    return {
        name: jax.ShapeDtypeStruct(
            shape, float32, sharding=jax.sharding.NamedSharding(mesh, RULES.spec(*axes))
        )
        for name, (shape, axes) in shapes.items()
    }


def optax_muon(params: Any, mesh: jax.sharding.Mesh) -> optax.GradientTransformation:
    """Muon as optax has it; each layer of a stack is a matrix of its own."""
    import jax
    from optax.contrib import MuonDimensionNumbers, muon

    numbers = jax.tree.map(lambda _: MuonDimensionNumbers(reduction_axis=1, output_axis=2), params)
    return muon(1e-3, muon_weight_dimension_numbers=numbers)


def specs(params: Any) -> Any:
    """The `MatrixSpec` of each stack of kernels."""
    import jax

    from maxmars.optim import MatrixSpec

    return jax.tree.map(
        lambda p: MatrixSpec(batch=(0,), rows=(1,), cols=(2,), partition=p.sharding.spec), params
    )


def our_muon(params: Any, mesh: jax.sharding.Mesh) -> optax.GradientTransformation:
    """Muon as maxmars has it."""
    from maxmars.optim import muon

    return muon(1e-3, matrix_specs=specs(params), mesh=mesh)


def mars_shampoo(params: Any, mesh: jax.sharding.Mesh) -> optax.GradientTransformation:
    """MARS-Shampoo."""
    from maxmars.optim import mars

    return mars(1e-3, variant="shampoo", matrix_specs=specs(params), mesh=mesh)


def mars_adamw(params: Any, mesh: jax.sharding.Mesh) -> optax.GradientTransformation:
    """MARS-AdamW."""
    from maxmars.optim import mars

    return mars(1e-3, matrix_specs=specs(params), mesh=mesh)


OPTIMIZERS: dict[str, Callable[[Any, jax.sharding.Mesh], optax.GradientTransformation]] = {
    "optax.contrib.muon": optax_muon,
    "muon": our_muon,
    "mars shampoo": mars_shampoo,
    "mars adamw": mars_adamw,
}
"""Each makes an optimizer for these (abstract) parameters on this mesh."""


def build_update(name: str, stack: Stack, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """An optimizer's update of a stack's matrices, lowered with the parameters' shardings."""
    import jax

    from maxmars.distributed import sharding

    params = matrices(stack, mesh)
    tx = OPTIMIZERS[name](params, mesh)
    state = jax.eval_shape(tx.init, params)
    state = sharding.with_shardings(state, sharding.like_params(state, params))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    update = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=shardings)
    with jax.set_mesh(mesh):
        return update.lower(params, state, params)


def get_devices(topology: str | None) -> list[jax.Device]:
    """Fake CPU devices, or those of a TPU topology such as `v5e:4x4`.

    Raises:
      SystemExit: the topology has another number of chips.
    """
    import jax
    from jax.experimental import topologies

    if topology is None:
        return jax.devices()[:NUM_DEVICES]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    if len(devices) != NUM_DEVICES:
        raise SystemExit(f"{topology} has {len(devices)} chips; choose one of {NUM_DEVICES}.")
    return devices


COLUMNS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def print_traffic(topology: str | None) -> None:
    """Print one line for each optimizer, model and mesh."""
    from maxmars.config import MeshConfig
    from maxmars.distributed import sharding
    from maxmars.plan.collectives import collectives, total_bytes
    from maxmars.plan.compile import compiler_memory

    devices = get_devices(topology)
    print(f"GB that an update moves, on each of {NUM_DEVICES} devices ({topology or 'fake CPU'})")
    header = "".join(f"{name:>{len(name) + 2}}" for name in (*COLUMNS, "total", "temporaries"))
    print(f"\n{'optimizer':20}{'model':7}{'data,fsdp,tensor':16}{header}")
    for name in OPTIMIZERS:
        for (data, fsdp, tensor), stack in CASES:
            mesh = sharding.make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)
            compiled = build_update(name, stack, mesh).compile()
            found = collectives(compiled, mesh)
            cells = {column: total_bytes(found, op=column) for column in COLUMNS}
            cells["total"] = total_bytes(found)
            cells["temporaries"] = compiler_memory(compiled).temp_bytes
            numbers = "".join(f"{n / 1e9:{max(len(c) + 2, 7)}.2f}" for c, n in cells.items())
            print(f"{name:20}{stack.name:7}{f'{data},{fsdp},{tensor}':16}{numbers}", flush=True)


BASELINE = "adamw (optax)"
STEP_SEQUENCES = 8


def timed_configs() -> tuple[dict[str, Any], dict[str, Any]]:
    """The configs of the optimizers to time, without and with Newton-Schulz."""
    from maxmars.config import (
        AdamWConfig,
        AdoptConfig,
        LionConfig,
        MarsConfig,
        MuonConfig,
        NAdamWConfig,
        OptaxConfig,
        SoapConfig,
        SophiaConfig,
    )

    plain = {
        BASELINE: AdamWConfig(),
        "nadamw (optax)": NAdamWConfig(),
        "lion (optax)": LionConfig(),
        "adopt (optax)": AdoptConfig(),
        "mars adamw": MarsConfig(),
        "mars adamw, bf16 last": MarsConfig(last_grad_dtype="bfloat16"),
        "mars adamw exact": MarsConfig(exact=True),
        "mars adamw amsgrad": MarsConfig(amsgrad=True),
        "mars lion": MarsConfig(variant="lion"),
        "sophia, without estimate": SophiaConfig(update_hessian_every=10**9),
    }
    slow = {
        "mars shampoo": MarsConfig(variant="shampoo"),
        "mars m": MarsConfig(variant="m"),
        "muon": MuonConfig(),
        "optax.contrib.muon": OptaxConfig(make=f"{__file__}:contrib_muon", learning_rate=1e-3),
        "moonlight": MuonConfig(ns_scale="rms", vector_learning_rate_scale=1.0),
        "soap": SoapConfig(),
    }
    return plain, slow


def contrib_muon(
    learning_rate: Any, *, matrix_specs: Any, mesh: Any
) -> optax.GradientTransformation:
    """optax's Muon on the matrices that `muon` orthogonalises, in the way of any own optimizer."""
    import jax
    from optax.contrib import MuonDimensionNumbers, muon

    del mesh

    def numbers(spec: Any) -> MuonDimensionNumbers | None:
        if not spec.is_matrix or spec.embedding:
            return None
        return MuonDimensionNumbers(reduction_axis=spec.rows, output_axis=spec.cols)

    return muon(learning_rate, muon_weight_dimension_numbers=jax.tree.map(numbers, matrix_specs))


class Update:
    """An optimizer's compiled update, with its parameters and state."""

    def __init__(self, config: Any, model: Any, params: Any, grads: Any) -> None:
        """Compile it."""
        import jax
        import jax.numpy as jnp
        import optax

        from maxmars.config import SophiaConfig
        from maxmars.train.optimizer import make_optimizer

        tx = make_optimizer(config, model, 1e-4)
        extra = {}
        if getattr(config, "exact", False):  # another array: exact MARS reads two gradients
            extra["prev_grads"] = jax.tree.map(jnp.negative, grads)
        if isinstance(config, SophiaConfig):
            extra["sampled_grads"] = grads
        self.grads = (grads, extra)

        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads[0], state, params, **grads[1])
            return optax.apply_updates(params, updates), state

        self.carry = (jax.tree.map(jnp.copy, params), jax.jit(tx.init)(params))
        self.step = jax.jit(step, donate_argnums=(0, 1)).lower(*self.carry, self.grads).compile()

    def seconds(self) -> float:
        """Take a step, and say how long it took."""
        import jax

        jax.block_until_ready((self.carry, self.grads))
        start = time.perf_counter()
        self.carry = jax.block_until_ready(self.step(*self.carry, self.grads))
        return time.perf_counter() - start


class WholeStep:
    """A compiled train step of GPT-2 small with its state."""

    def __init__(self, config: Any, model: Any) -> None:
        """Compile it."""
        import jax
        import jax.numpy as jnp

        from maxmars.config import MeshConfig, PythonSourcesConfig, TrainConfig
        from maxmars.distributed.sharding import make_mesh
        from maxmars.train.step import init_train_state, make_train_step

        train_config = TrainConfig(
            name="bench",
            num_steps=1000,
            global_batch_size=STEP_SEQUENCES,
            num_microbatches=1 if jax.default_backend() != "cpu" else STEP_SEQUENCES,
            model=model,
            optimizer=config,
            data=PythonSourcesConfig(),
        )
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self.step = make_train_step(train_config, mesh)
        self.state = init_train_state(train_config, mesh)
        abstract = self.step.abstract_batch["tokens"]
        tokens = jnp.arange(abstract.size, dtype=jnp.int32).reshape(abstract.shape) * 7919
        self.batch = {"tokens": jax.device_put(tokens % model.vocab_size, abstract.sharding)}

    def seconds(self) -> float:
        """Take a step, and say how long it took."""
        import jax

        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start


def random_trees(model: Any) -> tuple[Any, Any]:
    """Parameters and gradients of a model's shapes."""
    import jax

    from maxmars.model.language_model import graph_and_abstract_params

    _, shapes = graph_and_abstract_params(model)
    leaves, treedef = jax.tree.flatten(shapes)

    @jax.jit
    def random(seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        pairs = zip(keys, leaves, strict=True)
        arrays = [0.02 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in pairs]
        return jax.tree.unflatten(treedef, arrays)

    return random(0), random(1)


def print_times(args: argparse.Namespace) -> None:
    """Print one line for each optimizer: medians, and ratios to AdamW's time."""
    import dataclasses

    import jax

    from maxmars.config import GPT2Config

    cpu = jax.default_backend() == "cpu"
    model = dataclasses.replace(GPT2Config.small(), use_bias=False)
    if args.train_step:
        # A CPU emulates bfloat16.
        model = dataclasses.replace(model, compute_dtype="float32" if cpu else "bfloat16")
        what = f"a train step of {STEP_SEQUENCES * model.max_seq_len:,} tokens in GPT-2 small"
        make: Callable[[Any], Update | WholeStep] = functools.partial(WholeStep, model=model)
    else:
        trees = random_trees(model)
        size = sum(leaf.size for leaf in jax.tree.leaves(trees[0]))
        what = f"an update of {size / 1e6:.0f} M float32 parameters"
        make = functools.partial(Update, model=model, params=trees[0], grads=trees[1])
    print(f"Time of {what} on {jax.devices()[0].device_kind}, JAX {jax.__version__}")
    columns = f"{'optimizer':26}{'pairs':>6}{'s':>9}{'AdamW s':>9}{'ratio: min':>12}{'median':>9}"
    print(f"\n{columns}{'max':>9}")
    plain, slow = timed_configs()
    unknown = set(args.only) - (plain | slow).keys()
    if unknown:
        names = ", ".join(plain | slow)
        raise SystemExit(f"--only {', '.join(map(repr, unknown))} is unknown; known: {names}.")
    baseline = make(plain[BASELINE])
    for name, config in (plain | slow).items():
        if args.only and name not in args.only:
            continue
        other = make(config)
        few = name in slow and not args.train_step
        if not few:  # the first step finds caches cold and pages new
            other.seconds()
        baseline.seconds()
        pairs = [
            (baseline.seconds(), other.seconds())
            for _ in range(args.slow_rounds if few else args.rounds)
        ]
        ratios = [b / a for a, b in pairs]
        a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
        numbers = f"{b:9.3f}{a:9.3f}{min(ratios):12.3f}{statistics.median(ratios):9.3f}"
        print(f"{name:26}{len(pairs):6}{numbers}{max(ratios):9.3f}", flush=True)
        del other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true", help="time of an update (the default)")
    parser.add_argument("--train-step", action="store_true", help="time of whole train steps")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of turns of an optimizer")
    parser.add_argument("--slow-rounds", type=int, default=1, help="the same with Newton-Schulz")
    parser.add_argument("--only", nargs="*", default=(), help="names of optimizers to time")
    parser.add_argument("--traffic", action="store_true", help="bytes between devices")
    parser.add_argument("--topology", help="TPU topology to compile for, such as v5e:4x4")
    args = parser.parse_args()
    if args.time + args.train_step + args.traffic > 1:
        parser.error("give one of --time, --train-step and --traffic.")
    if not args.traffic:
        if min(args.rounds, args.slow_rounds) < 1:
            parser.error("--rounds and --slow-rounds must be at least 1.")
        print_times(args)
        return
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this host need not have a TPU
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    print_traffic(args.topology)


if __name__ == "__main__":
    main()
