"""Windows of whole documents by best fit, for `GrainConfig(source="best_fit.py:windows")`.

Each document goes, from the longest on, into the fullest window that has room for it; the rest of a
window is padding, which is no target. Only documents longer than a window are cut. Each part but
the first begins with the last token of the part before it, which is context there: every token is
predicted once. A million documents take some seconds of each process at its start.
"""

import bisect
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from maxmars.data import documents
from maxmars.data.windows import segments_and_positions


def windows(*, split: str, length: int, path: str) -> grain.MapDataset:
    """The documents of a directory of tokens, packed into windows of `length` + 1 tokens."""
    return BestFit(documents(path, split), length)


class BestFit(grain.MapDataset):
    """Windows of documents; the dataset of these is its parent."""

    def __init__(self, parent, length: int) -> None:
        super().__init__(parent)
        self.documents, self.length, self.end = parent, length, parent.tokenizer.eot
        self.windows: list[list[tuple[int, int]]] = []  # pieces: a document, and the first token
        pieces = [
            (min(length, size - first), document, first)
            for document, size in enumerate(parent.lengths.tolist())
            for first in range(0, max(size - 1, 1), length - 1)
        ]
        rooms: list[int] = []  # that windows have, ascending
        by_room: dict[int, list[int]] = {}  # the windows with so much room
        for size, document, first in sorted(pieces, reverse=True):
            tightest = bisect.bisect_left(rooms, size)
            if tightest < len(rooms):
                room = rooms[tightest]
                window = by_room[room].pop()
                if not by_room[room]:
                    del rooms[tightest]
            else:
                room, window = length, len(self.windows)
                self.windows.append([])
            self.windows[window].append((document, first))
            if not by_room.setdefault(room - size, []):
                bisect.insort(rooms, room - size)
            by_room[room - size].append(window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        # All documents of a batch are read at once.
        windows = [self.windows[index % len(self)] for index in indices]
        read = iter(self.documents._getitems([number for w in windows for number, _ in w]))
        return [self._window(w, read) for w in windows]

    def _window(self, pieces, read):
        tokens = np.full(self.length + 1, self.end, np.int32)  # begins with the end of a document
        mask, begins = np.zeros((2, self.length + 1), bool)
        at = 1
        for (_, first), document in zip(pieces, read, strict=False):
            piece = document[first : first + self.length]
            tokens[at : at + len(piece)], mask[at : at + len(piece)] = piece, True
            mask[at], begins[at] = first == 0, first > 0
            at += len(piece)
        return {
            "tokens": tokens,
            "mask": mask,
            **segments_and_positions(begins | (tokens == self.end)),
        }
