"""Optimizers as optax gradient transformations, usable in any optax program.

```python
from maxmars.optim import mars
tx = mars(3e-3, weight_decay=0.01)
```
"""

from maxmars.optim.mars import mars, moonlight, muon
from maxmars.optim.matrix_spec import MatrixSpec
from maxmars.optim.newton_schulz import newton_schulz
from maxmars.optim.nnx_specs import matrix_specs_of
from maxmars.optim.orthogonalization_plan import OrthogonalizationPlan, plan_orthogonalization
from maxmars.optim.orthogonalize import orthogonality_error, orthogonalize
from maxmars.optim.scale_by_mars import ScaleByMarsState, scale_by_mars
from maxmars.optim.schedules import (
    warmup_cosine,
    warmup_exponential,
    warmup_linear,
    warmup_stable_decay,
)
from maxmars.optim.soap import ScaleBySoapState, scale_by_soap, soap, soap_shardings
from maxmars.optim.sophia import (
    ScaleBySophiaState,
    needs_sampled_grads,
    scale_by_sophia,
    sophia,
    sophia_state,
)

__all__ = [
    "MatrixSpec",
    "OrthogonalizationPlan",
    "ScaleByMarsState",
    "ScaleBySoapState",
    "ScaleBySophiaState",
    "mars",
    "matrix_specs_of",
    "moonlight",
    "muon",
    "needs_sampled_grads",
    "newton_schulz",
    "orthogonality_error",
    "orthogonalize",
    "plan_orthogonalization",
    "scale_by_mars",
    "scale_by_soap",
    "scale_by_sophia",
    "soap",
    "soap_shardings",
    "sophia",
    "sophia_state",
    "warmup_cosine",
    "warmup_exponential",
    "warmup_linear",
    "warmup_stable_decay",
]
