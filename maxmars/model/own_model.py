"""Models of the user's own: a Flax NNX module made by a function, and what is asked of it.

See `ModuleConfig` for the function, and `train/README.md` for the module and an example.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from maxmars.config import ModuleConfig
from maxmars.config.secrets import reveal
from maxmars.config.user_code import load_function
from maxmars.distributed.sharding import RULES, ShardingRules, constrain, gathered
from maxmars.model import cross_entropy

_NAMES = [f.name for f in dataclasses.fields(ShardingRules) if f.name not in ("batch", "length")]


def _wrong(config: ModuleConfig, problem: str) -> ValueError:
    return ValueError(f"model.make={config.make!r}: {problem}.")


def make_module(config: ModuleConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The module that the user's function makes. The metadata `axes` of each of its parameters
    holds the names of the axes.

    Raises:
      FileNotFoundError, ValueError: there is no such function, it does not take the arguments, or
        it returns something else than it should. Any other exception was raised by the function.
    """
    make = load_function(config.make, field="model.make")
    arguments = {
        "rngs": rngs,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
        **reveal(config.options, "model.options"),
    }
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise _wrong(
            config,
            f"it cannot be called with {', '.join(arguments)} ({error}); it is make(*, rngs, "
            "vocab_size, max_seq_len, **options) with the keys of model.options",
        ) from None
    # Flax would split each array at once, over a mesh whose axes have the names of the array's.
    with nnx.use_eager_sharding(False):
        module = make(**arguments)
    if not isinstance(module, nnx.Module):
        raise _wrong(config, f"it returned a {type(module).__name__}, not a flax.nnx.Module")
    _check_call(config, module)
    for path, node in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Variable):
            _name_axes(config, name, node)
        elif isinstance(node, nnx.Module):
            arrays = [key for key, value in vars(node).items() if isinstance(value, jax.Array)]
            if arrays:
                raise _wrong(
                    config,
                    f"{'.'.join(filter(None, [name, arrays[0]]))} is an array outside of nnx.Param,"
                    " and a checkpoint holds parameters alone; make it where it is used, or a "
                    "numpy array",
                )
    return module


def _check_call(config: ModuleConfig, module: nnx.Module) -> None:
    try:
        inspect.signature(module.__call__).bind(None, segment_ids=None, positions=None)
    except (AttributeError, TypeError) as error:
        raise _wrong(
            config,
            f"the {type(module).__name__} cannot be called with tokens, segment_ids and positions "
            f"({error}); it needs __call__(self, tokens, segment_ids=None, positions=None)",
        ) from None
    if not hasattr(module, "output_embedding"):
        raise _wrong(
            config,
            f"the {type(module).__name__} has no output_embedding; it needs a property, method or "
            "parameter of this name with the rows [vocab_size, width] of the output head",
        )
    if hasattr(module, "prefill") != hasattr(module, "decode"):
        raise _wrong(
            config,
            f"the {type(module).__name__} has only one of prefill(self, tokens, lengths, num_slots)"
            " and decode(self, tokens, positions, cache); a cache needs both",
        )
    if getattr(module, "cap_logits", None) is not None:
        _check_cap(config, module)


def _check_cap(config: ModuleConfig, module: Any) -> None:
    logits = jax.ShapeDtypeStruct((2, config.vocab_size), jnp.float32)
    if callable(module.cap_logits):
        program = jax.make_jaxpr(module.cap_logits)(logits)
        results = [(aval.shape, aval.dtype) for aval in program.out_avals]
        # The loss has a gradient of its own, which knows nothing of parameters in here.
        uses_arrays = any(isinstance(const, jax.Array) for const in program.consts)
        if results == [(logits.shape, logits.dtype)] and not uses_arrays:
            return
    raise _wrong(
        config,
        f"the cap_logits of the {type(module).__name__} must be a function of the logits [..., "
        "vocab_size] alone, which keeps their shape and type and uses no parameter",
    )


def _name_axes(config: ModuleConfig, name: str, variable: nnx.Variable) -> None:
    """Check the names that Flax keeps as `out_sharding`, and keep them as `axes`."""
    if not isinstance(variable, nnx.Param):
        raise _wrong(
            config,
            f"{name} is a {type(variable).__name__}, and a checkpoint holds parameters alone; "
            "every variable must be an nnx.Param",
        )
    axes, shape = tuple(variable.get_metadata().get("out_sharding") or ()), variable.shape
    if 0 in shape:
        raise _wrong(
            config,
            f"{name} has the shape {list(shape)}, and a checkpoint has no empty arrays; "
            "leave it out where it would be empty",
        )
    if len(axes) != len(shape):
        raise _wrong(
            config,
            f"{name} has the shape {list(shape)} and the axis names {list(axes)}, where each axis "
            'needs one: nnx.Param(..., out_sharding=("embed", "mlp")), or nnx.with_partitioning '
            "around an initializer; nnx.vmap names its axis by transform_metadata="
            '{nnx.PARTITION_NAME: "layers"}',
        )
    unknown = [axis for axis in axes if axis is not None and axis not in _NAMES]
    if unknown:
        raise _wrong(
            config,
            f"an axis of {name} has the name {unknown[0]!r}; there are {', '.join(_NAMES)}, and "
            "None for an axis that is not split",
        )
    split = [axis for axis in RULES.spec(*axes) if axis is not None]
    if len(set(split)) < len(split):
        raise _wrong(
            config,
            f"two axes of {name}, of {list(axes)}, would be split over the same axis of the mesh; "
            "name one of them None",
        )
    # Without Flax's name, which it takes for axes of the mesh wherever there is one.
    variable.set_metadata(axes=axes, out_sharding=None)


@dataclass(frozen=True)
class OwnModel:
    """A module of the user's own, as training, evaluation and generation use it."""

    config: ModuleConfig
    module: nnx.Module

    def __call__(
        self,
        tokens: Integer[Array | np.ndarray, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token at every position; see `GPT2.__call__`."""
        tokens = jnp.asarray(tokens, jnp.int32)
        return self.logits(self.hidden(tokens, segment_ids=segment_ids, positions=positions))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What the module returns: the last hidden states, before the output head.

        Raises:
          ValueError: a row without `positions` is longer than `max_seq_len`, or the module returns
            something else.
        """
        if positions is None and tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than model.max_seq_len="
                f"{self.config.max_seq_len}."
            )
        module: Any = self.module
        x = module(tokens, segment_ids=segment_ids, positions=positions)
        shape = _shape_of_floats(x)
        if shape is None or len(shape) != 3 or shape[:2] != tokens.shape:
            raise _wrong(
                self.config,
                f"for tokens of the shape {list(tokens.shape)} the {type(module).__name__} returned"
                f" {_described(x)}; it must return hidden states [rows, tokens, width]",
            )
        return constrain(x, "batch", "length", None)

    def output_embedding(self, dtype: Any) -> Float[Array, "V D"]:
        """The output head in the type of matrix products, gathered over `fsdp`.

        Raises:
          ValueError: it is no array [rows, width] with a row for each token.
        """
        module: Any = self.module
        found = module.output_embedding
        if callable(found) and not isinstance(found, nnx.Variable):
            found = found()
        if isinstance(found, nnx.Variable):
            found = found[...]
        shape = _shape_of_floats(found)
        if shape is None or len(shape) != 2 or shape[0] < self.config.vocab_size:
            raise _wrong(
                self.config,
                f"the output_embedding of the {type(module).__name__} is {_described(found)}; it "
                f"must have the shape [model.vocab_size={self.config.vocab_size} or more, width]",
            )
        return gathered(found.astype(dtype), ("vocab", "embed"))

    @property
    def has_cache(self) -> bool:
        """Whether the module has `prefill` and `decode`."""
        return hasattr(self.module, "prefill")

    def prefill(
        self, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
    ) -> tuple[Float[Array, "B D"], Any]:
        """The module's `prefill`; see `kv_cache.prefill`."""
        module: Any = self.module
        return self._checked("prefill", len(tokens), module.prefill(tokens, lengths, num_slots))

    def decode(
        self, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: Any
    ) -> tuple[Float[Array, "B D"], Any]:
        """The module's `decode` of a token of each row at its position in the row.

        Raises:
          ValueError: it returns something else than hidden states and a cache like the one before.
        """
        module: Any = self.module
        x, new = self._checked("decode", len(tokens), module.decode(tokens, positions, cache))
        before, after = (jax.tree.map(_described, tree) for tree in (cache, new))
        if before != after:
            raise _wrong(
                self.config,
                f"the decode of the {type(module).__name__} was given the cache {before}, and "
                f"returned {after}; its shapes and types must stay",
            )
        return x, new

    def _checked(self, name: str, rows: int, found: Any) -> tuple[Any, Any]:
        pair = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        shape = _shape_of_floats(pair[0])
        if shape is None or len(shape) != 2 or shape[0] != rows:
            returned = ", ".join(map(_described, found if isinstance(found, tuple) else [found]))
            raise _wrong(
                self.config,
                f"the {name} of the {type(self.module).__name__} returned {returned}; it must "
                f"return hidden states [{rows} rows, width] and the cache",
            )
        return pair

    @property
    def cap_logits(self) -> Callable[[jax.Array], jax.Array] | None:
        """The module's soft cap of the logits; None without one."""
        return getattr(self.module, "cap_logits", None)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Output head: hidden states times the transposed `output_embedding`, under the module's
        cap, padding masked."""
        head = self.output_embedding(x.dtype)
        return cross_entropy.logits(x, head, self.config.vocab_size, self.cap_logits)


def _shape_of_floats(found: Any) -> Sequence[int] | None:
    """The shape of an array of floating-point numbers; None of anything else."""
    is_array = isinstance(found, jax.Array) and jnp.issubdtype(found.dtype, jnp.floating)
    return found.shape if is_array else None


def _described(found: Any) -> str:
    if isinstance(found, jax.Array):
        return f"an array of {found.dtype} with the shape {list(found.shape)}"
    return f"a {type(found).__name__}"
