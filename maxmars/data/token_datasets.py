"""Grain datasets whose elements are read from directories of tokens.

They differ from Grain's own in two ways: the elements of a batch are read at once, which a bucket
needs, and the datasets carry tokenizer, files and digest of their tokens. A run finds them below
the maps of a user's own data (`token_datasets`), and takes tokenizer, checksums and digest there.
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
"""From the numbers of elements to the elements, all read at once."""


class TokenDataset(grain.MapDataset[Any]):
    """Elements by number; all elements of a batch are read at once.

    Args:
      numbers: the number of each element, as `read` takes it.
      read: reads elements.
      vocabulary: what the ids of the tokens mean.
      files: the files of the directory, of every split.
      digest: SHA-256 that identifies the data, in hex.
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
        # Grain calls this method, if a dataset has it, for several elements at once. From a bucket,
        # one element takes as long as a batch.
        return self._read(np.array([self._numbers[index] for index in indices]))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens.

        Raises:
          ValueError, ImportError, OSError: see `tokenizer_of_tokens`.
        """
        return tokenizer_of_tokens(self.vocabulary)


class DocumentDataset(TokenDataset):
    """Documents: arrays of tokens, each with its end-of-text token."""

    lengths: Int64[np.ndarray, " documents"]
    """Number of tokens of each document, known without reading one."""


def token_datasets(dataset: Any) -> list[TokenDataset]:
    """The `TokenDataset`s below the maps and mixtures of a Grain dataset."""
    if isinstance(dataset, TokenDataset):
        return [dataset]
    parents = getattr(dataset, "parents", ())
    return [below for parent in parents for below in token_datasets(parent)]
