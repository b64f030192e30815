"""Training: `train` runs the loop, and `TrainResult` says what a run came to."""

from maxmars.train.init_from import InitFrom
from maxmars.train.loop import TrainResult, train
from maxmars.train.steering import Steering

__all__ = ["InitFrom", "Steering", "TrainResult", "train"]
