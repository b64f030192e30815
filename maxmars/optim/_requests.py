"""Requests of an optimizer for further gradients, which any training loop can read and compute.

Exact MARS requests the gradient at the previous parameters, and Sophia (`tools/examples/sophia.py`)
one on sampled labels. A train step computes what is requested, and knows no optimizer by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optax

from maxmars.optim._rules import Tree, check_choice


@dataclass(frozen=True, kw_only=True)
class GradientRequest:
    """A gradient of the loss on this step's batch that `update` takes beside the usual one.

    Raises:
      ValueError: `at` or `targets` is none of its words.
    """

    name: str
    """The keyword of `update` that gets the gradient, a tree like the parameters."""
    at: Literal["params", "prev_params"] | Callable[[Any, Tree], Tree] = "params"
    """The parameters at which the gradient is taken: the present ones, those before the last update
    (before the first update the present ones), or `at(opt_state, params)`, a tree like them."""
    targets: Literal["data", "sampled"] = "data"
    """The labels of the loss: the batch's, or independent draws from the model's own predictions,
    which count as constants."""
    due: Callable[[Any], Any] | None = None
    """Function from the optimizer's state to a bool []: whether the next update uses the gradient.
    Otherwise zeros may stand in for it. None: every update uses it."""

    def __post_init__(self) -> None:
        if not callable(self.at):
            check_choice("at", self.at, ("params", "prev_params"))
        check_choice("targets", self.targets, ("data", "sampled"))


class RequestingTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with requests; see `with_requests`."""

    requests: Sequence[GradientRequest]


def with_requests(
    tx: optax.GradientTransformation, requests: Sequence[GradientRequest]
) -> RequestingTransformation:
    """The transformation `tx` with requests: its `update` takes these gradients by their names.

    Apply it last: optax's wrappers (`optax.chain` and others) make a transformation without
    requests, and `at` and `due` get the state of the outermost one.

    Raises:
      ValueError: two requests have one name.
    """
    names = [request.name for request in requests]
    if len(set(names)) < len(names):
        raise ValueError(f"requests={names}: each gradient needs a name of its own.")
    # optax's class is a NamedTuple; an instance of a subclass has room for an attribute.
    requesting = RequestingTransformation(*optax.with_extra_args_support(tx))
    requesting.requests = tuple(requests)
    return requesting


def requests_of(tx: optax.GradientTransformation) -> Sequence[GradientRequest]:
    """The further gradients that the `update` of `tx` takes; none without requests."""
    return tx.requests if isinstance(tx, RequestingTransformation) else ()
