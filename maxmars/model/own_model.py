"""Models of the user's own: a Flax NNX module made by a function, and what is asked of it.

See `ModuleConfig` for the function, and `train/README.md` for the module and an example.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxmars.config import ModelConfig, ModuleConfig
from maxmars.config.user_code import load_function
from maxmars.distributed.sharding import RULES, ShardingRules
from maxmars.model.gpt2 import LAYERS
from maxmars.optim import MatrixSpec
from maxmars.optim.nnx import given_specs, stacked

_NAMES = [f.name for f in dataclasses.fields(ShardingRules) if f.name not in ("batch", "length")]


def wrong(config: ModelConfig, problem: str) -> ValueError:
    """An error of a module of the user's own."""
    return ValueError(f"model.make={config.make!r}: {problem}.")


def make_module(config: ModuleConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The module that the user's function makes. The metadata of each of its parameters
    holds the names of its axes, `axes`, and its `matrix_spec`.

    Raises:
      FileNotFoundError, ValueError: there is no such function, it does not take the arguments, or
        it returns something else than it should. Any other exception was raised by the function.
    """
    make = load_function(config.make, field="model.make")
    arguments = {
        "rngs": rngs,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
        **config.options,
    }
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise wrong(
            config,
            f"it cannot be called with {', '.join(arguments)} ({error}); it is make(*, rngs, "
            "vocab_size, max_seq_len, **options) with the keys of model.options",
        ) from None
    # Flax would split each array at once, over a mesh whose axes have the names of the array's.
    with nnx.use_eager_sharding(False):
        module = make(**arguments)
    if not isinstance(module, nnx.Module):
        raise wrong(config, f"it returned a {type(module).__name__}, not a flax.nnx.Module")
    _check_call(config, module)
    for path, node in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Variable):
            _name_axes(config, name, node)
        elif isinstance(node, nnx.Module):
            arrays = [key for key, value in vars(node).items() if isinstance(value, jax.Array)]
            if arrays:
                raise wrong(
                    config,
                    f"{'.'.join(filter(None, [name, arrays[0]]))} is an array outside of nnx.Param,"
                    " and a checkpoint holds parameters alone; make it where it is used, or a "
                    "numpy array",
                )
    _put_matrix_specs(config, module)
    if config.remat is not None:
        _put_remat(config, module)
    return module


def _check_call(config: ModuleConfig, module: nnx.Module) -> None:
    try:
        inspect.signature(module.__call__).bind(None, segment_ids=None, positions=None)
    except (AttributeError, TypeError) as error:
        raise wrong(
            config,
            f"the {type(module).__name__} cannot be called with tokens, segment_ids and positions "
            f"({error}); it needs __call__(self, tokens, segment_ids=None, positions=None)",
        ) from None
    takes_tables = "tables" in inspect.signature(module.__call__).parameters
    problems = {
        "has no output_embedding; it needs a property, method or parameter of this name with the "
        "rows [vocab_size, width] of the output head": not hasattr(module, "output_embedding"),
        "takes tables, and has no table_dtype; it must say in which type": (
            takes_tables and not hasattr(module, "table_dtype")
        ),
        "has only one of prefill(self, tokens, lengths, num_slots) and decode(self, tokens, "
        "positions, cache); a cache needs both": (
            hasattr(module, "prefill") != hasattr(module, "decode")
        ),
    }
    for problem, holds in problems.items():
        if holds:
            raise wrong(config, f"the {type(module).__name__} {problem}")
    if getattr(module, "cap_logits", None) is not None:
        _check_cap(config, module)


def _put_remat(config: ModuleConfig, module: Any) -> None:
    policies = getattr(module, "remat_policies", None)
    if not policies:
        raise wrong(
            config,
            f"the {type(module).__name__} has no remat_policies, the names of what model.remat="
            f"{config.remat!r} may be; give it some, or leave model.remat out",
        )
    if config.remat not in ("auto", *policies):
        raise wrong(
            config,
            f"the {type(module).__name__} has no policy model.remat={config.remat!r}; there are "
            f"{', '.join(policies)}, auto and None",
        )
    module.remat = None if config.remat == "auto" else config.remat


def _check_cap(config: ModuleConfig, module: Any) -> None:
    logits = jax.ShapeDtypeStruct((2, config.vocab_size), jnp.float32)
    if callable(module.cap_logits):
        program = jax.make_jaxpr(module.cap_logits)(logits)
        results = [(aval.shape, aval.dtype) for aval in program.out_avals]
        # The loss has a gradient of its own, which knows nothing of parameters in here.
        uses_arrays = any(isinstance(const, jax.Array) for const in program.consts)
        if results == [(logits.shape, logits.dtype)] and not uses_arrays:
            return
    raise wrong(
        config,
        f"the cap_logits of the {type(module).__name__} must be a function of the logits [..., "
        "vocab_size] alone, which keeps their shape and type and uses no parameter",
    )


def _name_axes(config: ModuleConfig, name: str, variable: nnx.Variable) -> None:
    """Check the names that Flax keeps as `out_sharding`, and keep them as `axes`."""
    if not isinstance(variable, nnx.Param):
        raise wrong(
            config,
            f"{name} is a {type(variable).__name__}, and a checkpoint holds parameters alone; "
            "every variable must be an nnx.Param",
        )
    axes, shape = tuple(variable.get_metadata().get("out_sharding") or ()), variable.shape
    if 0 in shape:
        raise wrong(
            config,
            f"{name} has the shape {list(shape)}, and a checkpoint has no empty arrays; "
            "leave it out where it would be empty",
        )
    if len(axes) != len(shape):
        raise wrong(
            config,
            f"{name} has the shape {list(shape)} and the axis names {list(axes)}, where each axis "
            'needs one: nnx.Param(..., out_sharding=("embed", "mlp")), or nnx.with_partitioning '
            "around an initializer; nnx.vmap names its axis by transform_metadata="
            '{nnx.PARTITION_NAME: "layers"}',
        )
    unknown = [axis for axis in axes if axis is not None and axis not in _NAMES]
    if unknown:
        raise wrong(
            config,
            f"an axis of {name} has the name {unknown[0]!r}; there are {', '.join(_NAMES)}, and "
            "None for an axis that is not split",
        )
    split = [axis for axis in RULES.spec(*axes) if axis is not None]
    if len(set(split)) < len(split):
        raise wrong(
            config,
            f"two axes of {name}, of {list(axes)}, would be split over the same axis of the mesh; "
            "name one of them None",
        )
    # Without Flax's name, which it takes for axes of the mesh wherever there is one.
    variable.set_metadata(axes=axes, out_sharding=None)


def _put_matrix_specs(config: ModuleConfig, module: nnx.Module) -> None:
    """Put a `MatrixSpec` on every parameter: what it says itself, or else what its names say."""
    given = given_specs(module)
    for path, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Param):
            continue
        axes = variable.get_metadata("axes")
        spec = given.get(path)
        if path in given:
            spec = _vector(axes) if spec is None else stacked(spec, len(axes))
        else:
            spec = _spec_of_names(config, ".".join(map(str, path)), axes, variable.shape)
        variable.set_metadata(matrix_spec=spec)


def _vector(axes: tuple[str | None, ...]) -> MatrixSpec:
    layers = int(axes[:1] == (LAYERS,) and len(axes) > 1)
    cols = range(layers, max(len(axes), 1))
    return MatrixSpec(batch=(*range(layers),), rows=(), cols=(*cols,))


def _spec_of_names(
    config: ModuleConfig, name: str, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> MatrixSpec:
    """What the names of a parameter's axes say, `layers` aside:

    * an axis `vocab` or `positions` and others: an embedding, which maps from the others in a head;
    * `embed` first or last, and others: a matrix, which maps from `embed` or to it;
    * one axis, or only qkv, heads and head_dim (a bias of attention): a vector.
    """
    vector = _vector(axes)
    batch, dims = vector.batch, vector.cols
    names = axes[len(batch) :]
    if len(names) <= 1 or set(names) <= {"qkv", "heads", "head_dim"}:
        return vector
    for i, axis in zip(dims, names, strict=True):
        if axis in ("vocab", "positions"):
            rows = tuple(dim for dim in dims if dim != i)
            padding = shape[i] - config.vocab_size if axis == "vocab" else 0
            return MatrixSpec(batch=batch, rows=rows, cols=(i,), embedding=True, padding=padding)
    if names[0] == "embed":
        return MatrixSpec(batch=batch, rows=dims[:1], cols=dims[1:])
    if names[-1] == "embed":
        return MatrixSpec(batch=batch, rows=dims[:-1], cols=dims[-1:])
    raise wrong(
        config,
        f"the axes {list(axes)} of {name} do not say whether it is a matrix: neither the first nor "
        "the last one is embed; say so in the parameter's metadata, matrix_spec=MatrixSpec(...), "
        "or matrix_spec=None for a vector",
    )


def shape_of_floats(value: Any) -> Sequence[int] | None:
    """The shape of an array of floating-point numbers; None of anything else."""
    is_array = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
    return value.shape if is_array else None


def described(value: Any) -> str:
    """Type and shape of an array; the type of anything else."""
    if isinstance(value, jax.Array):
        return f"an array of {value.dtype} with the shape {list(value.shape)}"
    return f"a {type(value).__name__}"
