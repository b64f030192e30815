"""A comparison as a value: contenders, and how each is tuned.

The command line of `maxmars compare` makes one, and so may the function `get_comparison` of a
config file. The fields of `SearchConfig` are options of the command, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import arg

from maxmars.config.checks import CheckedConfig, Positive, require
from maxmars.config.train import TrainConfig

_NAME = re.compile(r"[A-Za-z0-9._-]+")  # a contender's, which is also a directory's


@dataclass(frozen=True, kw_only=True)
class SearchConfig(CheckedConfig):
    """How each contender is tuned, and with how many seeds the best settings run."""

    tune: Annotated[tuple[str, ...], arg(metavar="FIELD ...")] = ("learning_rate",)
    """Fields to tune, in this order: fields of the optimizer's config, such as weight_decay, b1, b2
    and gamma, options of your own function, or warmup. A contender without one of them is tuned
    over the others, and a line says so before the first run."""
    budget: Annotated[Positive[int] | None, arg(metavar="N")] = None
    """Most trials in the search of each contender; None is 4, and 4 more for each field."""
    confirm: Annotated[Positive[int], arg(metavar="N")] = 1
    """Seeds with which a setting must be better before the search moves to it; these runs count in
    the budget. With one seed an unstable learning rate may be lucky; with 3 it seldom is."""
    finalists: Annotated[Positive[int], arg(metavar="N")] = 2
    """Number of best settings of each contender that run with all seeds."""
    seeds: Annotated[Positive[int], arg(metavar="N")] = 3
    """Number of seeds for the best settings: the config's own, with which every setting is tried,
    and the numbers after it."""
    baseline: Annotated[str | None, arg(metavar="NAME")] = None
    """Contender that the others are tested against; None is the first."""


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig(SearchConfig):
    """Contenders and what is tuned of each.

    Raises:
      ValueError: the name of a contender cannot be a directory's, grids or baseline name no
        contender, or confirm exceeds seeds.
    """

    contenders: dict[str, TrainConfig]
    """Config of each contender, by a name of letters, digits, `.`, `_` and `-`."""
    grids: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    """Contender -> field -> values to try; `()` means values around the config's own. A field that
    is not in `tune` is tuned after the others, for this contender alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.contenders), "a comparison needs contenders.")
        for name in self.contenders:
            require(
                _NAME.fullmatch(name) is not None,
                f"the contender {name!r} names a directory: write letters, digits, . _ and -.",
            )
        mentions = [("grids", name) for name in self.grids]
        mentions += [("baseline", self.baseline)] if self.baseline is not None else []
        for field_name, name in mentions:
            require(
                name in self.contenders,
                f"{field_name}: {name!r} is none of the contenders {', '.join(self.contenders)}.",
            )
        require(
            self.confirm <= self.seeds,
            f"confirm={self.confirm} is more than seeds={self.seeds}, of which the search uses the "
            "first.",
        )
