"""What `maxmars compare` compares, as a value: a config file's `get_comparison` returns it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import arg

from maxmars.config.checks import CheckedConfig, Positive, require
from maxmars.config.train import TrainConfig

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class SearchConfig(CheckedConfig):
    """How each contender is tuned, and with how many seeds the best settings run."""

    tune: Annotated[tuple[str, ...], arg(metavar="FIELD ...")] = ("learning_rate",)
    """Fields to tune, in this order: of the optimizer's config, such as weight_decay, b1, b2 and
    gamma, or an option of your own function, or warmup. A contender that lacks one is tuned over
    the others, and named before the first run."""
    budget: Annotated[Positive[int] | None, arg(metavar="N")] = None
    """Most trials that the search of each contender takes; None is 4, and 4 more for each field."""
    confirm: Annotated[Positive[int], arg(metavar="N")] = 1
    """Seeds with which a setting must be better before the search moves there, of its budget. With
    one seed a rate at the edge of stability may be lucky; with 3 it seldom is."""
    finalists: Annotated[Positive[int], arg(metavar="N")] = 2
    """The best settings of each contender, which run with all seeds."""
    seeds: Annotated[Positive[int], arg(metavar="N")] = 3
    """Seeds of the best settings: the config's seed, with which all settings are tried, and those
    that follow it."""
    baseline: Annotated[str | None, arg(metavar="NAME")] = None
    """The contender that the others are tested against; None is the first."""


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig(SearchConfig):
    """Contenders and what is tuned of each.

    Raises:
      ValueError: a name is none for a directory, or names no contender.
    """

    contenders: dict[str, TrainConfig]
    """By name, of letters, digits, `.`, `_` and `-`."""
    grids: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    """Contender -> field -> values to try; `()` are those around the config's own. A field that
    `tune` lacks is tuned after the others, for this contender alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.contenders), "a comparison needs contenders.")
        for name in self.contenders:
            require(
                _NAME.fullmatch(name) is not None,
                f"the contender {name!r} names a directory: write letters, digits, . _ and -.",
            )
        named = [("grids", name) for name in self.grids]
        named += [("baseline", self.baseline)] if self.baseline is not None else []
        for where, name in named:
            require(
                name in self.contenders,
                f"{where}: {name!r} is none of the contenders {', '.join(self.contenders)}.",
            )
        require(
            self.confirm <= self.seeds,
            f"confirm={self.confirm} is more than seeds={self.seeds}, of which the search uses the "
            "first.",
        )
