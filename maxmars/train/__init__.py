"""Training: `train` runs the loop, and `TrainResult` says what a run came to."""

from maxmars.train.init_from import InitFrom
from maxmars.train.loop import TrainResult, train

__all__ = ["InitFrom", "TrainResult", "train"]
