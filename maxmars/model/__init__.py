"""GPT-2 and models of the user's own in Flax NNX: parameters, attention, loss, generation."""

from maxmars.model.gpt2 import GPT2
from maxmars.model.language_model import make_model, mean_loss, token_losses
from maxmars.model.parameters import Parameters, init_params

__all__ = ["GPT2", "Parameters", "init_params", "make_model", "mean_loss", "token_losses"]
