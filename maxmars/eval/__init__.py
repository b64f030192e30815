"""What a trained model is worth: validation, HellaSwag, lm-evaluation-harness, generation."""

from maxmars.eval.trained_model import TrainedModel, load

__all__ = ["TrainedModel", "load"]
