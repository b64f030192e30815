"""Optimizers as optax gradient transformations, usable in any optax program.

```python
from maxmars.optim import mars
tx = mars(3e-3, weight_decay=0.01)
```
"""

from maxmars.optim._exchange import MatrixGroup, on_whole_matrices
from maxmars.optim._mars import (
    ClipByMatrixNormState,
    CorrectedEmaState,
    CorrectGradientState,
    ScaleByAmsgradState,
    clip_by_matrix_norm,
    correct_gradient,
    corrected_ema,
    mars,
    mars_over,
    moonlight,
    muon,
    scale_by_mars,
)
from maxmars.optim._matrices import MatrixSpec, describe, resolve_specs
from maxmars.optim._newton_schulz import COEFFICIENTS, newton_schulz
from maxmars.optim._orthogonalize import (
    orthogonalization_groups,
    orthogonalize,
    scale_by_orthogonalization,
)
from maxmars.optim._soap import ScaleBySoapState, scale_by_soap, soap, soap_shardings
from maxmars.optim._sophia import (
    ScaleBySophiaState,
    needs_sampled_grads,
    scale_by_sophia,
    sophia,
    sophia_state,
)

__all__ = [
    "COEFFICIENTS",
    "ClipByMatrixNormState",
    "CorrectGradientState",
    "CorrectedEmaState",
    "MatrixGroup",
    "MatrixSpec",
    "ScaleByAmsgradState",
    "ScaleBySoapState",
    "ScaleBySophiaState",
    "clip_by_matrix_norm",
    "correct_gradient",
    "corrected_ema",
    "describe",
    "mars",
    "mars_over",
    "moonlight",
    "muon",
    "needs_sampled_grads",
    "newton_schulz",
    "on_whole_matrices",
    "orthogonalization_groups",
    "orthogonalize",
    "resolve_specs",
    "scale_by_mars",
    "scale_by_orthogonalization",
    "scale_by_soap",
    "scale_by_sophia",
    "soap",
    "soap_shardings",
    "sophia",
    "sophia_state",
]
