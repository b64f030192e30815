"""GPT-2 and models of the user's own in Flax NNX: parameters, attention, loss, generation."""

from maxmars.model.gpt2 import GPT2
from maxmars.model.language_model import (
    graph_and_abstract_params,
    init_params,
    logical_axes,
    make_model,
    mean_loss,
    num_parameters,
    token_losses,
)

__all__ = [
    "GPT2",
    "graph_and_abstract_params",
    "init_params",
    "logical_axes",
    "make_model",
    "mean_loss",
    "num_parameters",
    "token_losses",
]
