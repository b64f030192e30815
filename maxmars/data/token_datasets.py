"""Grain datasets whose elements are read from directories of tokens.

A run finds them below the maps of a user's own data, and takes their tokenizer, their checksums and
their digest from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64

from maxmars.data.token_files import TokenFile
from maxmars.data.tokenizer import Tokenizer, Vocabulary, tokenizer_of_tokens

Elements = Callable[[Int64[np.ndarray, " elements"]], Sequence[Any]]
"""Reads the elements with these numbers, all at once."""


class TokenDataset(grain.MapDataset[Any]):
    """Elements by number, of which those of a whole batch are read at once.

    Args:
      numbers: the number of each element.
      read: reads elements.
      vocabulary: what the ids of the tokens mean.
      files: the files that they are read from, of every split.
      digest: SHA-256, in hex, that tells the data from others.
    """

    def __init__(
        self,
        numbers: grain.MapDataset[int],
        read: Elements,
        *,
        vocabulary: Vocabulary,
        files: Sequence[TokenFile],
        digest: str,
    ) -> None:
        super().__init__(numbers)
        self._numbers, self._read = numbers, read
        self.vocabulary, self.files, self.digest = vocabulary, files, digest

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> Sequence[Any]:
        # By this name Grain's datasets ask for several elements at once; one from a bucket takes as
        # long as a batch.
        return self._read(np.array([self._numbers[index] for index in indices]))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens.

        Raises:
          ValueError, ImportError, OSError: see `tokenizer_of_tokens`.
        """
        return tokenizer_of_tokens(self.vocabulary)


class DocumentDataset(TokenDataset):
    """Documents: arrays of tokens, each with the token that ends it."""

    lengths: Int64[np.ndarray, " documents"]
    """Tokens of each document, which takes no reading."""


def token_datasets(dataset: Any) -> list[TokenDataset]:
    """The datasets of tokens that a dataset is made of."""
    if isinstance(dataset, TokenDataset):
        return [dataset]
    parents = getattr(dataset, "parents", ())
    return [found for parent in parents for found in token_datasets(parent)]
