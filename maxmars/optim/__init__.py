"""Optimizers as optax gradient transformations, usable in any optax program.

```python
from maxmars.optim import mars
tx = mars(3e-3, weight_decay=0.01)
```
"""

from maxmars.optim.mars import ScaleByMarsState, mars, scale_by_mars
from maxmars.optim.matrix_spec import MatrixSpec
from maxmars.optim.schedules import warmup_cosine

__all__ = ["MatrixSpec", "ScaleByMarsState", "mars", "scale_by_mars", "warmup_cosine"]
