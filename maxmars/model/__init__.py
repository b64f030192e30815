"""GPT-2 in Flax NNX: the model, attention, the loss, cached keys and values, Hugging Face."""

from maxmars.model.gpt2 import (
    GPT2,
    graph_and_abstract_params,
    init_params,
    logical_axes,
    mean_loss,
    num_parameters,
    token_losses,
)

__all__ = [
    "GPT2",
    "graph_and_abstract_params",
    "init_params",
    "logical_axes",
    "mean_loss",
    "num_parameters",
    "token_losses",
]
