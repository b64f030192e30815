"""Training of a run: `train` is the loop, `TrainResult` its result. `README.md` describes a run."""

from maxmars.train.init_from import InitFrom
from maxmars.train.loop import TrainResult, train

__all__ = ["InitFrom", "TrainResult", "train"]
