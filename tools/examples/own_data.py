"""Training windows of your own: three functions for `GrainConfig(source="own_data.py:NAME")`.

Each returns a finite `grain.MapDataset` whose elements are windows of `length` + 1 tokens. A run
shuffles and repeats it, and finds its place again after a kill by the number of an element alone.
Tokens here are bytes, and 256 stands before a text and after its end.
"""

from typing import Any

import grain
import numpy as np

END = 256


def from_tfds(*, split: str, length: int, path: str) -> grain.MapDataset:
    """The `tokens` of a TFDS dataset in ArrayRecord files: its records are one stream.

    The split `val` is the dataset's `val`, `validation` or `test`, the first that it has.
    """
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(path)
    names = ("val", "validation", "test") if split == "val" else (split,)
    name = next((name for name in names if name in builder.info.splits), None)
    if name is None:
        raise ValueError(f"{path} has no split {' or '.join(names)}.")
    records = builder.as_data_source(split=name)
    (size,) = builder.info.features["tokens"].shape  # None where records differ, and are counted
    sizes = [size] * len(records) if size else [len(record["tokens"]) for record in records]
    ends = np.cumsum(sizes)

    def window(index: int) -> np.ndarray:
        start, end = index * length, index * length + length + 1
        first, last = np.searchsorted(ends, [start, end - 1], "right").tolist()
        tokens = np.concatenate([records[i]["tokens"] for i in range(first, last + 1)])
        begin = start - (int(ends[first - 1]) if first else 0)
        return tokens[begin : begin + length + 1]

    return grain.MapDataset.range((int(ends[-1]) - 1) // length).map(window)


def from_hugging_face(*, split: str, length: int, path: str) -> grain.MapDataset:
    """The texts of a Hugging Face dataset, one a window, tokenised on the way.

    A long text is cut off; a short one is filled up with tokens that do not count as targets.
    """
    import datasets

    # Or, from the hub, datasets.load_dataset("roneneldan/TinyStories", split=split).
    texts: Any = datasets.load_from_disk(path)[split]

    def window(row: dict[str, str]) -> dict[str, np.ndarray]:
        tokens = np.array([END, *row["text"].encode()[:length], END])[: length + 1]
        filling = length + 1 - len(tokens)
        mask = np.arange(length + 1) < len(tokens)
        return {"tokens": np.pad(tokens, (0, filling), constant_values=END), "mask": mask}

    return grain.MapDataset.source(texts).map(window)


class Additions:
    """Windows of problems such as `12+30=42;`, each a segment whose answer is to be predicted."""

    def __init__(self, length: int, count: int, seed: int) -> None:
        self.length, self.count, self.seed = length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        # Element i is a function of i alone: so any process can make it, in any order.
        rng = np.random.default_rng([self.seed, int(index)])
        tokens, answers, segments = [], [], []
        while len(tokens) <= self.length:
            a, b = rng.integers(0, 100, 2)
            question, answer = f"{a}+{b}=".encode(), f"{a + b};".encode()
            segments += [segments[-1] + 1 if segments else 0] * len(question + answer)
            tokens += question + answer
            answers += [False] * len(question) + [True] * len(answer)
        window = slice(self.length + 1)
        return {
            "tokens": np.array(tokens[window]),
            "mask": np.array(answers[window]),
            "segment_ids": np.array(segments[window]),
        }


def additions(*, split: str, length: int, count: int = 10_000) -> grain.MapDataset:
    """A source of your own: anything with a length and an index."""
    return grain.MapDataset.source(Additions(length, count, seed=0 if split == "train" else 1))
