"""Where the tokens of a run come from: directories of tokens, data of the user's own, a mixture."""

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
from maxmars.config.user_code import Source, with_tuples

Order = Literal["shuffled", "sequential", "random_windows"]
Packing = Literal["none", "split"]

# The files of text that can be read, by the endings of their names.
TEXT, LINES, JSON = (".txt",), (".jsonl", ".ndjson"), (".json",)
DELIMITED, TABLES = (".csv", ".tsv"), (".parquet", ".arrow", ".feather")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS = (*TEXT, *LINES, *JSON, *DELIMITED, *TABLES)
ENDING = re.compile(
    "({})({})?$".format(*("|".join(map(re.escape, names)) for names in (KINDS, COMPRESSIONS))), re.I
)


@dataclass(frozen=True, kw_only=True)
class DataOptions(CheckedConfig):
    """The options of every kind of data."""

    order: Order = "shuffled"
    """`shuffled` visits every window once an epoch, in a new random order each time; `sequential`
    in the order of the text; `random_windows` starts each window at a random token, with
    replacement, as nanoGPT and the official MARS code do."""
    verify: bool = True
    """Compare the files with their checksums: on a disk while training starts, each file once a
    working directory; in a bucket by the checksums that the bucket keeps, before the first step."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions(DataOptions):
    """The options of directories of tokens."""

    packing: Packing = "none"
    """How documents share a window. `none`: the window is a piece of the stream of all documents,
    and attention crosses their borders, as in nanoGPT; `split`: the same windows, but attention
    stays within each document, in which positions count from 0."""


@dataclass(frozen=True, kw_only=True)
class TokenFilesConfig(CheckedConfig):
    """A directory of tokens, and what the files of other programs do not say of their tokens.

    `meta.json` of `maxmars data prepare` says it all: there, all but the path stay None."""

    path: str
    """Directory of tokens, on a disk or `gs://`; its format is recognised."""
    tokenizer: str | None = None
    """Of other programs' files: `byte`, `gpt2`, the path of a `tokenizer.json` or of its directory,
    or `unknown`. None is what a header of llm.c or a `tokenizer.json` beside nanoGPT's files says,
    `unknown` where `vocab_size` is set, else GPT-2's."""
    vocab_size: Count[int] | None = None
    """Number of token ids of other programs' files. None is the tokenizer's."""
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
    """Tokens: a directory that `maxmars data prepare` wrote, on a disk or in a bucket, or a
    directory of nanoGPT, build-nanogpt or llm.c as it is, on a disk."""


@dataclass(frozen=True, kw_only=True)
class PythonSourcesConfig(TokenOptions):
    """The running interpreter's standard library as text, one token a byte. Needs no download:
    it is prepared once into the cache directory (MAXMARS_CACHE, default ~/.cache/maxmars)."""


@dataclass(frozen=True, kw_only=True)
class GrainSource(CheckedConfig):
    """A function of the user's own that returns a Grain dataset of training windows."""

    source: Source | str
    """`FILE.py:NAME`, relative to the config file, or to where it is typed. It is called as
    `windows(split=..., length=..., **options)` and returns a finite `grain.MapDataset`. Elements
    are integer arrays of `length` + 1 tokens, or dicts of such arrays: `tokens`, and any of `mask`
    (which tokens count as targets: booleans, or floats from 0 to 1 that weight their losses),
    `segment_ids` and `positions`. Leave out shuffle and repeat, which the run does."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, JSON values."""
    tokenizer: str = "unknown"
    """The tokenizer of the tokens, for `maxmars generate` and HellaSwag: `byte`, `gpt2`, a
    directory of tokens or a `tokenizer.json`. `unknown` takes that of a `maxmars.data.dataset` or
    `documents` which the function maps."""
    num_workers: NotNegative[int] = 0
    """Processes that read batches ahead, for functions that take much CPU time; 0 reads in a
    thread."""

    def __post_init__(self) -> None:
        source = Source.parse(self.source, field="source", example="my_data.py:f")
        object.__setattr__(self, "source", source)
        super().__post_init__()
        # So that a run that continues finds them unchanged.
        options = with_tuples(self.options, f"{type(self).__name__}.options")
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, kw_only=True)
class GrainConfig(DataOptions, GrainSource):
    """Training windows from a function of the user's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.order != "random_windows",
            "data.order=random_windows starts windows anywhere in a stream of tokens, and a source "
            "has windows of its own; choose shuffled or sequential.",
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
    """Other weights of a mixture from some example on."""

    at_example: Positive[int]
    """The first example with these weights. Step s, from 0 on, begins with example
    s * global_batch_size."""
    weights: tuple[float, ...]
    """Share of each part, in the order of `parts`."""


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(TokenOptions):
    """Several sources of tokens, interleaved by weight: in any range of examples the count of each
    part differs from its share by a few at most. Each part has epochs of its own.

    The validation windows of the parts are interleaved by the same rule, so that the validation
    loss is the loss of the mixture; the weights there are always those of `parts`."""

    parts: tuple[MixturePart | GrainPart, ...]
    """Sources and weights; all must have the same tokenizer. A part of weight 0 is for a change."""
    changes: tuple[MixtureChange, ...] = ()
    """Changes of the weights, in the order of their examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.parts), "a MixtureConfig needs at least one part.")
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
            "GrainPart has windows of its own; choose shuffled or sequential.",
        )


DataConfig = TokenShardsConfig | PythonSourcesConfig | GrainConfig | MixtureConfig


@dataclass(frozen=True, kw_only=True)
class ValidationSet(CheckedConfig):
    """Validation data beside the split of the training data, which `NAME=PLACE` names."""

    name: Annotated[str, Rule(re.compile(r"[\w.-]+").fullmatch, "must be letters, digits, _ . -")]
    """What its metrics are called by."""
    place: Source | NotEmpty
    """A directory of tokens, whose split `val` is taken; a file of text, which is taken whole, in
    the tokenizer of the model; or a function, `FILE.py:NAME`, see `GrainSource`."""
    digest: str | None = None
    """Of the data. Only a run sets this."""

    def __post_init__(self) -> None:
        if isinstance(self.place, str) and ".py:" in self.place:
            source = Source.parse(self.place, field=f"the data {self.name}")
            object.__setattr__(self, "place", source)
        super().__post_init__()

    @classmethod
    def parse(cls, text: str) -> ValidationSet:
        """The set that `NAME=PLACE` names, or `PLACE` alone, whose last part, without the ending of
        a text, is then the name."""
        name, equals, place = text.partition("=")
        if not equals or "/" in name:
            last = text.rpartition(":")[2] if ".py:" in text else PurePath(text).name
            name, place = ENDING.sub("", last), text
        return cls(name=name, place=place)

    @property
    def written(self) -> str:
        """`NAME=PLACE`, as a user writes it."""
        place = self.place.written if isinstance(self.place, Source) else self.place
        return f"{self.name}={place}"


def require_distinct(named: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError unless the names of what a model is evaluated by are different; beside each
    stands how it was set."""
    for (name, one), (other, two) in itertools.combinations(named, 2):
        require(name != other, f"{one} and {two} have the same name; give one another than {name}.")
