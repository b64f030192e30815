"""Data of a run: directories of tokens, functions of the user's own, mixtures, validation sets.

Bases of several classes: `DataOptions` (every kind), `TokenOptions` (streams of tokens) and
`TokenFilesConfig` (a directory, alone or as a part of a mixture).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, Literal

from maxmars.config.checks import (
    CheckedConfig,
    Count,
    NotEmpty,
    NotNegative,
    Positive,
    Rule,
    require,
)
from maxmars.config.user_code import Source, parse_function

Order = Literal["shuffled", "sequential", "random_windows"]
Packing = Literal["none", "split"]

# Endings of the files of text that `maxmars data prepare` and `eval.data` read.
TEXT, LINES, JSON = (".txt",), (".jsonl", ".ndjson"), (".json",)
DELIMITED, TABLES = (".csv", ".tsv"), (".parquet", ".arrow", ".feather")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS = (*TEXT, *LINES, *JSON, *DELIMITED, *TABLES)
ENDING = re.compile(
    "({})({})?$".format(*("|".join(map(re.escape, names)) for names in (KINDS, COMPRESSIONS))), re.I
)


@dataclass(frozen=True, kw_only=True)
class DataOptions(CheckedConfig):
    """Options of every kind of data."""

    order: Order = "shuffled"
    """Order of the training windows: `shuffled` visits each once an epoch, in a new random order
    every time; `sequential` follows the text; `random_windows` starts each window at a random
    token, with replacement, as nanoGPT and the official MARS code do."""
    verify: bool = True
    """Compare the files with their checksums: on a disk while training starts, each file once for a
    working directory; in a bucket before the first step, by checksums that the bucket stores."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions(DataOptions):
    """Options of directories of tokens."""

    packing: Packing = "none"
    """How documents share a window. `none`: a window is a piece of the stream of all documents, and
    attention crosses their borders, as in nanoGPT; `split`: the same windows, but attention stays
    within each document, where positions count from 0."""


@dataclass(frozen=True, kw_only=True)
class TokenFilesConfig(CheckedConfig):
    """A directory of tokens, with the facts that files of other programs lack.

    `maxmars data prepare` writes them to `meta.json`; its directories need only the path."""

    path: str
    """Directory of tokens, on a disk or `gs://`; the format is recognised."""
    tokenizer: str | None = None
    """Tokenizer of files of other programs: `byte`, `gpt2`, the path of a `tokenizer.json` or its
    directory, or `unknown`. None takes the one named by a header of llm.c or by a `tokenizer.json`
    beside nanoGPT's files, else `unknown` if `vocab_size` is set, else GPT-2's."""
    vocab_size: Count[int] | None = None
    """Number of token ids in files of other programs. None is the tokenizer's."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of a token in nanoGPT's files, which have no header. None is uint16, or uint32 where the
    vocabulary needs it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.tokenizer != "unknown" or self.vocab_size is not None,
            "tokens of an unknown tokenizer need vocab_size, the number of its ids "
            "(--data.vocab-size N).",
        )


@dataclass(frozen=True, kw_only=True)
class TokenShardsConfig(TokenFilesConfig, TokenOptions):
    """A directory of tokens that `maxmars data prepare` wrote, on a disk or in a bucket, or one of
    nanoGPT, build-nanogpt or llm.c, unchanged, on a disk."""


@dataclass(frozen=True, kw_only=True)
class PythonSourcesConfig(TokenOptions):
    """Source code of the running Python's standard library, one token a byte. Without a download:
    the tokens are prepared once in the cache (MAXMARS_CACHE, default ~/.cache/maxmars)."""


@dataclass(frozen=True, kw_only=True)
class GrainSource(CheckedConfig):
    """A function of the user's own that returns a Grain dataset of training windows."""

    source: Source | str
    """Function `FILE.py:NAME`; the path is relative to the config file, or on the command line to
    the working directory. The run calls `NAME(split=..., length=..., **options)`, which returns a
    finite `grain.MapDataset`. Elements are integer arrays of `length` + 1 tokens, or dicts of such
    arrays: `tokens`, and any of `mask` (which tokens count as targets: booleans, or floats from 0
    to 1 that weight their losses), `segment_ids` and `positions`. The run itself shuffles and
    repeats the dataset."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, JSON values."""
    tokenizer: str = "unknown"
    """Tokenizer of the tokens, for `maxmars generate` and HellaSwag: `byte`, `gpt2`, a directory of
    tokens or a `tokenizer.json`. `unknown` takes the tokenizer of the `maxmars.data.dataset` or
    `documents` that the function maps, if it maps one."""
    num_workers: NotNegative[int] = 0
    """Number of processes that read batches ahead, for functions that take much CPU time; 0 reads
    in a thread."""

    def __post_init__(self) -> None:
        parse_function(self, "source", field="source", example="my_data.py:f")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class GrainConfig(DataOptions, GrainSource):
    """Training windows from a function of the user's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.order != "random_windows",
            "data.order=random_windows starts windows anywhere in a stream of tokens, and "
            "data.source makes the windows itself; choose shuffled or sequential.",
        )


@dataclass(frozen=True, kw_only=True)
class MixturePart(TokenFilesConfig):
    """A directory of tokens as a part of a mixture."""

    weight: NotNegative[float]
    """Share of the examples, relative to the other parts."""


@dataclass(frozen=True, kw_only=True)
class GrainPart(GrainSource):
    """A function of the user's own as a part of a mixture."""

    weight: NotNegative[float]
    """Share of the examples, relative to the other parts."""


@dataclass(frozen=True, kw_only=True)
class MixtureChange(CheckedConfig):
    """Other weights of a mixture from an example on."""

    at_example: Positive[int]
    """Number of the first example with these weights. Step s, from 0 on, begins with example
    s * global_batch_size."""
    weights: tuple[float, ...]
    """Share of each part, in the order of `parts`."""


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(TokenOptions):
    """Several parts, interleaved by weight: in any range of examples the count of each part differs
    from its share by a few at most. Each part has epochs of its own.

    The validation windows of the parts are interleaved by the same rule, so that the validation
    loss is the loss of the mixture; there the weights are always those of `parts`."""

    parts: tuple[MixturePart | GrainPart, ...]
    """Parts with their weights; all must have the same tokenizer. A part of weight 0 waits for a
    change of the weights."""
    changes: tuple[MixtureChange, ...] = ()
    """Changes of the weights, in the order of their examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.parts), "a MixtureConfig needs at least one part.")
        # `data/sampling.py` finds the weights of an example by bisection.
        begins = [change.at_example for change in self.changes]
        require(
            begins == sorted(set(begins)),
            f"the changes of a mixture must be in the order of at_example, which is {begins}.",
        )
        stages = [tuple(part.weight for part in self.parts), *(c.weights for c in self.changes)]
        for weights in stages:
            require(
                len(weights) == len(self.parts) and min(weights) >= 0 < sum(weights),
                f"the weights {weights} of a mixture must be {len(self.parts)} finite numbers, "
                "none negative and one above zero.",
            )
        for part, weights in zip(self.parts, zip(*stages, strict=True), strict=True):
            name = part.path if isinstance(part, MixturePart) else part.source
            require(
                any(weights), f"the part {str(name)!r} never has a weight above 0; leave it out."
            )
        require(
            self.order != "random_windows"
            or not any(isinstance(part, GrainPart) for part in self.parts),
            "data.order=random_windows starts windows anywhere in a stream of tokens, and a "
            "GrainPart makes its windows itself; choose shuffled or sequential.",
        )


DataConfig = TokenShardsConfig | PythonSourcesConfig | GrainConfig | MixtureConfig


@dataclass(frozen=True, kw_only=True)
class ValidationSet(CheckedConfig):
    """Validation data besides the validation split of the training data, typed as `NAME=PLACE`."""

    name: Annotated[str, Rule(re.compile(r"[\w.-]+").fullmatch, "must be letters, digits, _ . -")]
    """Name of the set in its metrics."""
    place: Source | NotEmpty
    """A directory of tokens, of which the split `val` is scored; a file of text, scored whole with
    the model's tokenizer; or a function `FILE.py:NAME`, see `GrainSource`."""
    digest: str | None = None
    """Digest of the data. Only a run sets this."""

    def __post_init__(self) -> None:
        if isinstance(self.place, str) and ".py:" in self.place:
            source = Source.parse(self.place, field=f"the data {self.name}")
            object.__setattr__(self, "place", source)
        super().__post_init__()

    @classmethod
    def parse(cls, text: str) -> ValidationSet:
        """Parse `NAME=PLACE`, or `PLACE`, whose last part without a text's ending is the name."""
        name, equals, place = text.partition("=")
        if not equals or "/" in name:  # in a path such as a/b=c the sign names nothing
            last = text.rpartition(":")[2] if ".py:" in text else PurePath(text).name
            name, place = ENDING.sub("", last), text
        return cls(name=name, place=place)

    @property
    def spec(self) -> str:
        """The set as a user types it, `NAME=PLACE`."""
        place = self.place.spec if isinstance(self.place, Source) else self.place
        return f"{self.name}={place}"


def require_distinct(names: Sequence[tuple[str, str]]) -> None:
    """Raise a ValueError if two sets or functions of an evaluation have one name, as their metrics
    would collide. Each name comes with the option that sets it, for the message."""
    for (name, a), (other_name, b) in itertools.combinations(names, 2):
        require(name != other_name, f"{a} and {b} have the same name; rename one of them.")
