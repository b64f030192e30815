"""The windows of a split by number: what training and validation read, whatever lies below.

    window i of a stream, T = max_seq_len:

    stream    ... | d o g s . T h e   c | a t ...       stream[i * T : i * T + T + 1]
    inputs          d o g s . T h e                     window[:-1], T tokens
    targets           o g s . T h e   c                 window[1:], so the last token is also the
                                                        first of window i + 1

`TokenWindows` are those of any `TokenStream`, `SegmentedWindows` (`data.packing=split`) keep
attention within the documents that share a window, and `own_data` has the windows of a user's
function. An order of training (`sampling`) is one of numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64

from maxmars.data.token_files import Origin, TokenFile, TokenStream, digest_of

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
"""The arrays that a batch may have. A `mask` of own data that are weights is float32."""

_TOKENS_ALONE: Types = {"tokens": TYPES["tokens"]}
_SEGMENTED: Types = {name: TYPES[name] for name in ("tokens", "segment_ids", "positions")}


@runtime_checkable
class Windows(Protocol):
    """The windows of one split, numbered from 0: `length` inputs and one more token each."""

    length: int
    """Tokens of a window that are predicted."""

    def __len__(self) -> int:
        """Number of windows."""
        ...

    @property
    def types(self) -> Types:
        """Names and types of the arrays of every window."""
        ...

    @property
    def origin(self) -> Origin:
        """Whose windows they are, and what their tokens mean."""
        ...

    @property
    def files(self) -> Sequence[TokenFile]:
        """The files that they are read from, of every split."""
        ...

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        """The arrays [windows, length + 1] of the windows with these numbers, all read at once.

        Raises:
          ValueError: tokens lie outside the vocabulary, a file is damaged, or what the user's
            function gives is not as it should be.
          OSError: a bucket does not answer.
        """
        ...

    def digest(self) -> str:
        """SHA-256, in hex, that tells these data from others, whatever their path."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the data are, JSON-ready: `num_tokens`; of what `maxmars data prepare` wrote also
        `num_documents` and `source`, which are None for others."""
        ...


class TokenWindows:
    """The windows of a stream of tokens; see `Windows`.

    Args:
      stream: the tokens.
      length: tokens of a window that are predicted.
      at_every_token: a window begins at every token. By default it begins where the one before ends
        (they share that token), so each token but the first is predicted once.

    Raises:
      ValueError: the stream is too short for one window.
    """

    types: Types = _TOKENS_ALONE

    def __init__(self, stream: TokenStream, length: int, *, at_every_token: bool = False) -> None:
        self.length, self._stream = length, stream
        self._stride = 1 if at_every_token else length
        if len(self) < 1:
            raise ValueError(
                f"split {stream.split!r} of {stream.directory} has {stream.num_tokens} tokens, too "
                f"few for one window of {length} + 1; prepare more text or lower "
                "model.max_seq_len."
            )

    def __len__(self) -> int:
        return (self._stream.num_tokens - 1 - self.length) // self._stride + 1

    @property
    def origin(self) -> Origin:
        return self._stream

    @property
    def files(self) -> Sequence[TokenFile]:
        return self._stream.files

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        return {"tokens": self._stream.read_windows(numbers * self._stride, self.length + 1)}

    def digest(self) -> str:
        return digest_of(self._stream)

    def describe(self) -> dict[str, Any]:
        metadata = self._stream.metadata
        split = None if metadata is None else metadata.splits[self._stream.split]
        return {
            "num_tokens": self._stream.num_tokens,
            "num_documents": None if split is None else split.num_documents,
            "source": None if metadata is None else metadata.source,
        }


class SegmentedWindows(TokenWindows):
    """The windows of a stream, in which a segment begins at each token that ends a document.

    A generated text begins with that token as well, so it is the first of the next segment: it is
    predicted from the document that it ends, and the first token of a document from it alone.

    Args:
      stream, length, at_every_token: see `TokenWindows`.
      end_of_text: the token that ends a document.
    """

    types: Types = _SEGMENTED

    def __init__(
        self, stream: TokenStream, length: int, end_of_text: int, *, at_every_token: bool = False
    ) -> None:
        super().__init__(stream, length, at_every_token=at_every_token)
        self._end_of_text = end_of_text

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        batch = super().read(numbers)
        return batch | segments_and_positions(batch["tokens"] == self._end_of_text)


def segments_and_positions(
    begins: Bool[np.ndarray, "*rows window"],
) -> dict[str, Int32[np.ndarray, "*rows window"]]:
    """`segment_ids`, counted from 0 in each row, and `positions`, counted from 0 in each segment.

    Args:
      begins: whether a token is the first of a segment; the first of a row always is.
    """
    index = np.arange(begins.shape[-1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=-1)
    return {"segment_ids": np.cumsum(begins, axis=-1, dtype=np.int32), "positions": index - first}
