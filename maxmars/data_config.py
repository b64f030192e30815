"""Configuration of what a run reads: token directories, mixtures of them, Python's own sources.

Like `config`, nothing but frozen dataclasses and their validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maxmars.config_checks import require, require_positive

Order = Literal["shuffled", "sequential", "random_windows"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What all kinds of data share."""

    order: Order = "shuffled"
    """`shuffled` visits every window once an epoch, in a new random order each time; `sequential`
    in the order of the text; `random_windows` starts each window at a random token, with
    replacement, as nanoGPT and the official MARS code do."""
    verify: bool = False
    """Before training starts, compare every file with its checksum; of a format that has none, read
    every token."""


@dataclass(frozen=True, kw_only=True)
class TokenShardsConfig(DataOptions):
    """Tokens on disk: a directory written by `maxmars data prepare`, or one of nanoGPT, llm.c or
    TFDS as it is."""

    path: str
    """Directory of tokens; its format is recognised."""
    cache_dir: str | None = None
    """Copy the files of `path`, such as a mounted bucket, into this local directory first, once a
    host, and read the copies; None reads them where they are."""


@dataclass(frozen=True, kw_only=True)
class PythonSourcesConfig(DataOptions):
    """The running interpreter's standard library as text, one token a byte. Needs no download:
    it is prepared once into the cache directory (MAXMARS_CACHE, default ~/.cache/maxmars)."""


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One directory of a mixture."""

    path: str
    """Directory of tokens; its format is recognised."""
    weight: float
    """Share of the examples, relative to the other parts."""

    def __post_init__(self) -> None:
        """Reject empty shares."""
        require_positive(self, "weight")
        require(self.weight < float("inf"), f"MixturePart.weight={self.weight} must be finite.")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DataOptions):
    """Several directories of tokens, interleaved so that any run of examples has each part's share
    to within a few; each part goes through epochs of its own.

    Validation interleaves the parts' validation windows by the same rule, so that its loss is that
    of the mixture."""

    parts: tuple[MixturePart, ...]
    """Directories and weights; all must have the same tokenizer."""
    cache_dir: str | None = None
    """Copy the files of every part into this local directory first; see TokenShardsConfig."""

    def __post_init__(self) -> None:
        """Reject a mixture of nothing."""
        require(bool(self.parts), "a MixtureConfig needs at least one part.")


DataConfig = TokenShardsConfig | PythonSourcesConfig | MixtureConfig
