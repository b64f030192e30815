"""The options of XLA's compiler with which the train step is compiled on TPUs and GPUs.

They belong to the step alone: nothing is set for the process, for which LIBTPU_INIT_ARGS does it
and, for GPUs, XLA_FLAGS. What they bring, by estimates, is in plan/README.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from maxmars.config import GPT2Config, TrainConfig
from maxmars.distributed.sharding import GPUS

Options = Mapping[str, object]

# Of how many MiB a product's operands must be for XLA to take the product apart into a loop, whose
# collectives then overlap with its parts. The parts of a weight gradient are small, and their rows
# are padded to whole tiles; a step's collectives are 1 % of it.
_WHOLE_PRODUCTS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}

# Two products in a row as one operation. From this width on, the windows of the MLP's would each
# normalise their input again; below it the compiler does so without harm, or not at all.
_PRODUCTS_APART: Options = {"xla_tpu_dot_dot_fusion": False}
_LEAST_WIDTH_APART = 1280

# A product takes in a factor or a sum of its own shape, such as a GELU's slope. JAX 0.12 has it by
# default: remove it when that is the oldest version.
_FACTORS_IN_PRODUCTS: Options = {"xla_gpu_experimental_gemm_fusion_v2": True}


def compiler_options(config: TrainConfig, platform: str | None) -> dict[str, object] | None:
    """The options for the train step of a config on a platform (`jax.Device.platform`), for
    `jax.jit(compiler_options=...)`; None elsewhere. A model of the user's own has no width here.

    An option that LIBTPU_INIT_ARGS or XLA_FLAGS names is left to it, as the step's would override
    it.
    """
    model = config.model
    options: Options = {}
    if platform == "tpu":
        is_wide = isinstance(model, GPT2Config) and model.embed_dim >= _LEAST_WIDTH_APART
        options = {**_WHOLE_PRODUCTS, **(_PRODUCTS_APART if is_wide else {})}
    elif platform in GPUS and jax.__version_info__ < (0, 12):
        options = _FACTORS_IN_PRODUCTS
    given = os.environ.get("LIBTPU_INIT_ARGS", "") + os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given} or None
