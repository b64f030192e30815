"""The texts and the accuracies of the two protocols."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from jaxtyping import Integer

from maxmars.data.tokenizer import Tokenizer
from maxmars.hellaswag.questions import Question
from maxmars.loglikelihood import Choices

Protocol = Literal["lm_eval", "completion"]


@dataclass(frozen=True, kw_only=True)
class EncodedQuestion:
    """A question as a protocol gives it to the model."""

    choices: Choices
    lengths: tuple[int, ...]
    """What `acc_norm` divides each ending's log-likelihood by: characters or tokens."""


def _encode_lm_eval(question: Question, tokenizer: Tokenizer) -> EncodedQuestion:
    """As lm-evaluation-harness 0.4 does (its task `hellaswag`, version 1.0).

    Context and ending are encoded together, and the tokens beyond as many as the context alone has
    are the ending's. White space at the end of a context goes to the endings.
    """
    sentence = f"{question.context_a} {question.context_b.capitalize()}"
    context = _clean(f"{question.activity}: {sentence}")
    endings = [_clean(ending) for ending in question.endings]
    stripped = context.rstrip()
    between = context[len(stripped) :] + " "
    alone = len(tokenizer.encode(stripped))
    wholes = [tokenizer.encode(f"{stripped}{between}{ending}") for ending in endings]
    continuations = [whole[alone:] for whole in wholes]
    return EncodedQuestion(
        choices=Choices(context=_context(stripped, tokenizer), continuations=continuations),
        lengths=tuple(map(len, endings)),
    )


def _clean(text: str) -> str:
    # The WikiHow half of the data set has headings and the like in brackets.
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _encode_completion(question: Question, tokenizer: Tokenizer) -> EncodedQuestion:
    """As nanoGPT's and llm.c's scripts do: context and ending are encoded apart."""
    endings = [tokenizer.encode(f" {ending}") for ending in question.endings]
    return EncodedQuestion(
        choices=Choices(context=_context(question.context, tokenizer), continuations=endings),
        lengths=tuple(map(len, endings)),
    )


def _context(text: str, tokenizer: Tokenizer) -> Integer[np.ndarray, " context"]:
    return tokenizer.encode(text) if text else np.array([tokenizer.eot])


PROTOCOLS: Mapping[Protocol, Callable[[Question, Tokenizer], EncodedQuestion]] = MappingProxyType(
    {"lm_eval": _encode_lm_eval, "completion": _encode_completion}
)


def encode_questions(
    questions: Sequence[Question], protocol: Protocol, tokenizer: Tokenizer, max_seq_len: int
) -> list[EncodedQuestion]:
    """Questions as a protocol gives them to a model whose context is `max_seq_len` tokens.

    An empty context becomes the token that ends a document.

    Raises:
      ValueError: an ending alone is longer than the model's context, or adds no token.
    """
    encoded = [PROTOCOLS[protocol](question, tokenizer) for question in questions]
    for question, found in zip(questions, encoded, strict=True):
        for tokens in found.choices.continuations:
            if not 0 < len(tokens) <= max_seq_len:
                raise ValueError(
                    f"HellaSwag question {question.index} has an ending of {len(tokens)} tokens "
                    f"({tokenizer.name}, protocol {protocol}); there must be 1 to "
                    f"model.max_seq_len={max_seq_len}. A model with a longer context, or whose "
                    "tokens are longer, can be scored."
                )
    return encoded
