"""Plain reference: a continuation's log-likelihood by a row and a forward pass of its own."""

import jax
import numpy as np

from maxmars.model.cross_entropy import cross_entropy
from maxmars.model.language_model import make_model


def plain_scorer(model, params):
    """A function of the tokens of a context and a continuation: nats, and whether it is greedy."""

    @jax.jit
    def forward(params, tokens):
        logits = make_model(model, params)(tokens[None, :-1])[0]
        return cross_entropy(logits, tokens[1:]), logits.argmax(axis=-1) == tokens[1:]

    def score(context, continuation):
        seen = np.concatenate([context, continuation])[-(model.max_seq_len + 1) :]
        tokens = np.zeros(model.max_seq_len + 1, np.int32)
        tokens[: len(seen)] = seen  # causal: what follows is not seen
        losses, likeliest = jax.device_get(forward(params, tokens))
        own = slice(len(seen) - 1 - len(continuation), len(seen) - 1)
        return -float(losses[own].sum()), bool(likeliest[own].all())

    return score
