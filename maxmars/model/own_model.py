"""Models of the user's own: a Flax NNX module that a function makes, and the checks of it.

See `ModuleConfig` for the function, and `language_model.LanguageModule` for the module. Three
things are checked: its only state is parameters, each of these names its axes (`make_module`), and
the logits have their shape (`language_model.check_model`). For all else Python, Flax and JAX have
errors of their own, which `in_one_line` shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from flax import nnx

from maxmars.config import ModuleConfig
from maxmars.config.errors import about, in_words, line_in_user_file
from maxmars.config.user_code import Source
from maxmars.distributed.sharding import ShardingRules
from maxmars.model.gpt2 import LAYERS
from maxmars.optim import MatrixSpec
from maxmars.optim.nnx import given_specs, stacked

_NAMES = [f.name for f in dataclasses.fields(ShardingRules) if f.name not in ("batch", "length")]


def module_error(config: ModuleConfig, problem: str) -> ValueError:
    """An error of a module of the user's own."""
    return ValueError(f"model.make={config.make!r}: {problem}.")


@contextlib.contextmanager
def in_one_line(config: ModuleConfig) -> Iterator[None]:
    """Raise errors of Python, Flax or JAX about a module as ValueErrors of one line. An error from
    the user's own file stays as it is: its trace shows the bug."""
    try:
        yield
    except Exception as error:
        if line_in_user_file(error) is not None:
            raise
        raise module_error(config, " ".join(in_words(error).split()).removesuffix(".")) from error


def make_module(config: ModuleConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Make the module by the user's function. Each parameter's metadata then holds the names of its
    axes, `axes`, and its `matrix_spec`.

    Raises:
      FileNotFoundError, ValueError: there is no such function, it does not take the arguments, or
        it returns something else than it should. Any other exception was raised by the function.
    """
    make = Source.parse(config.make).load(field="model.make")
    sizes = {"rngs": rngs, "vocab_size": config.vocab_size, "max_seq_len": config.max_seq_len}
    # Flax would split each array at once, over a mesh whose axes have the names of the array's.
    called = f"called with {', '.join(sizes)} and model.options={config.options}"
    with in_one_line(config), about(called), nnx.use_eager_sharding(False):
        module = make(**sizes, **config.options)
    if not isinstance(module, nnx.Module):
        raise module_error(config, f"it returned a {type(module).__name__}, not a flax.nnx.Module")
    _, params, others = nnx.split(module, nnx.Param, ...)
    for path, _ in nnx.to_flat_state(others):
        raise module_error(
            config,
            f"{_dotted(path)} is no nnx.Param, and a checkpoint holds parameters alone; "
            "make it an nnx.Param, or make it where it is used",
        )
    given = given_specs(module)
    for path, variable in nnx.to_flat_state(params):
        axes, shape = tuple(variable.get_metadata().get("out_sharding") or ()), variable.shape
        if len(axes) != len(shape) or 0 in shape or not {*axes} <= {None, *_NAMES}:
            raise module_error(
                config,
                f"{_dotted(path)} has the shape {list(shape)} and the axis names {list(axes)}; "
                f"each needs a size above zero and a name: {', '.join(_NAMES)}, or None if it is "
                'not split: nnx.Param(..., out_sharding=("embed", "mlp")), or '
                "nnx.with_partitioning around an initializer; nnx.vmap names its axis by "
                'transform_metadata={nnx.PARTITION_NAME: "layers"}',
            )
        if path not in given:
            spec = _spec_of_names(config, _dotted(path), axes, shape)
        else:
            spec = _vector(axes) if (own := given[path]) is None else stacked(own, len(axes))
        # Flax would take names in `out_sharding` for axes of the mesh wherever there is one.
        variable.set_metadata(axes=axes, out_sharding=None, matrix_spec=spec)
    _set_remat(config, module)
    return module


def _set_remat(config: ModuleConfig, module: Any) -> None:
    if config.remat is None:
        return  # a module may have chosen its own
    policies = tuple(getattr(module, "remat_policies", None) or ())
    if not policies or config.remat not in ("auto", *policies):
        raise module_error(
            config,
            f"model.remat={config.remat!r} is none of the remat_policies of the "
            f"{type(module).__name__}: {', '.join((*policies, 'auto')) if policies else 'none'}",
        )
    module.remat = None if config.remat == "auto" else config.remat


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _vector(axes: tuple[str | None, ...]) -> MatrixSpec:
    layers = int(axes[:1] == (LAYERS,) and len(axes) > 1)
    cols = range(layers, max(len(axes), 1))
    return MatrixSpec(batch=(*range(layers),), rows=(), cols=(*cols,))


def _spec_of_names(
    config: ModuleConfig, name: str, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> MatrixSpec:
    """The spec that the names of a parameter's axes imply, `layers` aside:

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
    raise module_error(
        config,
        f"the axes {list(axes)} of {name} do not say whether it is a matrix: neither the first nor "
        "the last one is embed; say so in the parameter's metadata, matrix_spec=MatrixSpec(...), "
        "or matrix_spec=None for a vector",
    )
