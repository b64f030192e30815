"""Optimizers as optax gradient transformations, usable in any optax program.

```python
from maxmars.optim import mars
tx = mars(3e-3, weight_decay=0.01)
```
"""

from maxmars.optim._exchange import MatrixGroup, on_whole_matrices
from maxmars.optim._mars import (
    ClipByMatrixNormState,
    CorrectGradientState,
    ScaleByAmsgradState,
    clip_by_matrix_norm,
    correct_gradient,
    mars,
    mars_over,
    moonlight,
    muon,
    scale_by_adam_of,
    scale_by_mars,
)
from maxmars.optim._matrices import MatrixSpec, describe, resolve_specs
from maxmars.optim._momentum import MomentumKernelState, kernel_preset, momentum_kernel
from maxmars.optim._newton_schulz import COEFFICIENTS, newton_schulz
from maxmars.optim._orthogonalize import (
    RowNormalizationState,
    orthogonalization_groups,
    orthogonalize,
    scale_by_orthogonalization,
)
from maxmars.optim._requests import GradientRequest, requests_of, with_requests
from maxmars.optim._rules import DescendState, WeightUpdate, check_no_zero_matrix, descend
from maxmars.optim._soap import ScaleBySoapState, scale_by_soap, soap, soap_shardings

__all__ = [
    "COEFFICIENTS",
    "ClipByMatrixNormState",
    "CorrectGradientState",
    "DescendState",
    "GradientRequest",
    "MatrixGroup",
    "MatrixSpec",
    "MomentumKernelState",
    "RowNormalizationState",
    "ScaleByAmsgradState",
    "ScaleBySoapState",
    "WeightUpdate",
    "check_no_zero_matrix",
    "clip_by_matrix_norm",
    "correct_gradient",
    "descend",
    "describe",
    "kernel_preset",
    "mars",
    "mars_over",
    "momentum_kernel",
    "moonlight",
    "muon",
    "newton_schulz",
    "on_whole_matrices",
    "orthogonalization_groups",
    "orthogonalize",
    "requests_of",
    "resolve_specs",
    "scale_by_adam_of",
    "scale_by_mars",
    "scale_by_orthogonalization",
    "scale_by_soap",
    "soap",
    "soap_shardings",
    "with_requests",
]
