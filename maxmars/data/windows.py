"""The windows of a split by number: what training and validation read, whatever lies below.

    window i of a stream, T = max_seq_len:

    stream    ... | d o g s . T h e   c | a t ...       stream[i * T : i * T + T + 1]
    inputs          d o g s . T h e                     window[:-1], T tokens
    targets           o g s . T h e   c                 window[1:], so the last token is also the
                                                        first of window i + 1

`TokenWindows` are the windows of a `TokenStream`, `OwnWindows` those of a user's function
(`own_data`). Shuffling and mixing (`sampling`) see the numbers of windows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Bool, Int32, Int64

from maxmars.config import Packing
from maxmars.data.token_files import TokenFile, TokenStream
from maxmars.data.tokenizer import Vocabulary, end_of_text

Batch = dict[str, np.ndarray]
"""Arrays of one shape, by name: `tokens`, and any of `mask`, `segment_ids` and `positions`."""

Types = dict[str, type]
"""The types of a batch's arrays, by name."""

TYPES: Types = {
    "tokens": np.int32,
    "mask": np.bool,
    "segment_ids": np.int32,
    "positions": np.int32,
}
"""The arrays that a batch may have. A `mask` of weights, from a user's function, is float32."""

PACKED: dict[Packing, Types] = {
    "none": {"tokens": np.int32},
    "split": {"tokens": np.int32, "segment_ids": np.int32, "positions": np.int32},
}
"""The arrays of `TokenWindows`, by their packing."""


class TokenWindows:
    """The windows of a stream of tokens, numbered from 0: `length` inputs and one more token each.

    With `packing="split"` each end-of-text token is the first of a new segment, as it is the first
    token of a generated text. So it is predicted from the document that it ends, and the first
    token of a document is predicted from it alone.

    Args:
      stream: the tokens.
      length: tokens of a window that are predicted.
      packing: whether attention stays within the documents that share a window (`split`).
      stride: tokens from the beginning of a window to that of the next, by default `length`: two
        neighbours share one token, so each token but the first is predicted once.

    Raises:
      ValueError: the stream is too short for one window, or the end-of-text token is not known.
    """

    def __init__(
        self,
        stream: TokenStream,
        length: int,
        *,
        packing: Packing = "none",
        stride: int | None = None,
    ) -> None:
        self.length, self.types = length, PACKED[packing]
        self.stream, self._stride = stream, stride or length
        self._end_of_text = end_of_text(stream.vocabulary) if packing == "split" else None
        if len(self) < 1:
            raise ValueError(
                f"split {self.split!r} of {self.path} has {stream.num_tokens} tokens, too few for "
                f"one window of {length} + 1; prepare more text or lower model.max_seq_len."
            )

    def __len__(self) -> int:
        # A window needs length + 1 tokens.
        return (self.stream.num_tokens - 1 - self.length) // self._stride + 1

    @property
    def path(self) -> epath.Path:
        """The directory of the tokens."""
        return self.stream.directory.path

    @property
    def split(self) -> str:
        """The name of the split."""
        return self.stream.split

    @property
    def vocabulary(self) -> Vocabulary:
        """What the ids of the tokens mean."""
        return self.stream.vocabulary

    @property
    def files(self) -> Sequence[TokenFile]:
        """The files of the directory, of every split."""
        return self.stream.directory.files

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        """The arrays [windows, length + 1] of the windows with these numbers, all read at once.

        Raises:
          See `TokenStream.read_pieces`.
        """
        tokens = self.stream.read_windows(numbers * self._stride, self.length + 1)
        if self._end_of_text is None:
            return {"tokens": tokens}
        return {"tokens": tokens, **segments_and_positions(tokens == self._end_of_text)}

    def digest(self) -> str:
        """SHA-256 that identifies the tokens, wherever the directory is, in hex."""
        return self.stream.directory.digest()

    def describe(self) -> dict[str, Any]:
        """`num_tokens`, `num_documents` and `source` of the data, JSON-ready; the last two are None
        for files of other programs."""
        metadata = self.stream.directory.metadata
        return {
            "num_tokens": self.stream.num_tokens,
            "num_documents": metadata and metadata.splits[self.split].num_documents,
            "source": metadata and metadata.source,
        }


def segments_and_positions(
    begins: Bool[np.ndarray, "*rows window"],
) -> dict[str, Int32[np.ndarray, "*rows window"]]:
    """`segment_ids`, counted from 0 in each row, and `positions`, counted from 0 in each segment.

    Args:
      begins: whether a token is the first of a segment; the first of a row always is.
    """
    # The index of each token's segment start is the last start so far: a running maximum.
    index = np.arange(begins.shape[-1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=-1)
    return {"segment_ids": np.cumsum(begins, axis=-1, dtype=np.int32), "positions": index - first}
