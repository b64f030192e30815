"""Options of XLA's compiler for the train step on TPUs and GPUs.

The options apply to the step alone, by `jax.jit(compiler_options=...)`. For the whole process a
user sets LIBTPU_INIT_ARGS (TPUs) or XLA_FLAGS (GPUs), which take precedence. plan/README.md has
estimates of the gains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from maxmars.config import GPT2Config, TrainConfig
from maxmars.distributed.sharding import GPUS

Options = Mapping[str, object]

# Size of operands from which XLA splits a matmul into a loop (windowed einsum), to overlap
# collectives with the parts. A weight gradient has small parts, whose rows are padded to whole
# tiles: that costs more than the collectives, 1 % of a step. This value turns the loops off.
_NO_WINDOWED_EINSUM: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}

# Fusion of two matmuls in a row. From this width on, each window of the fused MLP would normalise
# its input again; below it fusion does no harm, or does not happen.
_NO_DOT_FUSION: Options = {"xla_tpu_dot_dot_fusion": False}
_MIN_WIDTH_NO_DOT_FUSION = 1280

# Fusion of a matmul with elementwise operations, such as the slope of a GELU. JAX 0.12 has the
# option by default: remove it when that is the oldest version.
_GEMM_FUSION: Options = {"xla_gpu_experimental_gemm_fusion_v2": True}


def compiler_options(config: TrainConfig, platform: str | None) -> dict[str, object] | None:
    """The options of the train step on a platform (`jax.Device.platform`), for
    `jax.jit(compiler_options=...)`; None on other platforms.

    Options that LIBTPU_INIT_ARGS or XLA_FLAGS names are left out: those of the step would override
    the user's.
    """
    model = config.model
    options: Options = {}
    if platform == "tpu":
        is_wide = isinstance(model, GPT2Config) and model.embed_dim >= _MIN_WIDTH_NO_DOT_FUSION
        options = {**_NO_WINDOWED_EINSUM, **(_NO_DOT_FUSION if is_wide else {})}
    elif platform in GPUS and jax.__version_info__ < (0, 12):
        options = _GEMM_FUSION
    given = os.environ.get("LIBTPU_INIT_ARGS", "") + os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given} or None
