"""The options of XLA's compiler with which the train step is compiled on TPUs.

They belong to the step alone: nothing is set for the process. What they bring, by the compiler's
own estimates, is in plan/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxmars.config import GPT2Config, TrainConfig
from maxmars.distributed import sharding

Options = Mapping[str, bool | int | float | str]

# Of how many MiB a product's operands must be for XLA to take the product apart into a loop, whose
# collectives then overlap with its parts. The parts of a weight gradient are small, and their rows
# are padded to whole tiles; a step's collectives are 1 % of it.
_WHOLE_PRODUCTS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}

# Two products in a row as one operation. From this width on, the windows of the MLP's would each
# normalise their input again; below it the compiler does so without harm, or not at all.
_PRODUCTS_APART: Options = {"xla_tpu_dot_dot_fusion": False}
_LEAST_WIDTH_APART = 1280


def compiler_options(config: TrainConfig, platform: str | None) -> dict[str, object] | None:
    """The options for the train step of a config on a platform (`jax.Device.platform`), for
    `jax.jit(compiler_options=...)`; None off TPUs. A model of the user's own has no width here."""
    given = config.tpu_compiler_options
    if platform != "tpu" or given is None:
        return None
    if given != "auto":
        return dict(given)
    model = config.model
    is_wide = isinstance(model, GPT2Config) and model.embed_dim >= _LEAST_WIDTH_APART
    return {**_WHOLE_PRODUCTS, **(_PRODUCTS_APART if is_wide else {})}


def checked_compiler_options(config: TrainConfig, mesh: Mesh) -> dict[str, object] | None:
    """`compiler_options`, of which those that the config gives are checked by a program of nothing:
    the step compiles minutes later.

    Raises:
      ValueError: the compiler of the mesh's devices does not know one of them, or its value.
    """
    options = compiler_options(config, mesh.devices.flat[0].platform)
    if options is None or config.tpu_compiler_options == "auto":
        return options
    nothing = jax.jit(
        lambda: jnp.zeros([]),
        out_shardings=sharding.replicated(mesh),
        compiler_options=options,
    )
    try:
        nothing.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"tpu_compiler_options: {error}") from error
    return options
