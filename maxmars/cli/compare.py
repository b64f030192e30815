"""`maxmars compare`: which optimizer is better for a model and its data, each tuned."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from maxmars import cpu_settings
from maxmars.cli.config_file import (
    ConfigArguments,
    UsageError,
    parse_arguments,
    split_positionals,
)
from maxmars.config import TrainConfig

if TYPE_CHECKING:
    from maxmars.compare.cells import Contender

_USAGE = """\
usage: maxmars compare CONFIG [CONFIG ...] --workdir DIR [--optimizers A,B] [--learning-rates ...]
                       [--seeds 3] [--steps N] [--baseline NAME] [--FIELD VALUE ...]

Train each contender over a grid of learning rates with one seed, then with more seeds around its
best rate, all from the same weights on the same tokens, and test which one is better.

  maxmars compare configs/compare_tiny.py --optimizers adamw,mars,mars_shampoo,muon --workdir DIR
  maxmars compare a.py b.py --learning-rates 1e-3,3e-3 --steps 500 --workdir DIR

A contender is a CONFIG, or with --optimizers a CONFIG with its choice `optimizer` set to each.
Learning rates are those of --learning-rates, for all (1e-3,3e-3) or by name
(adamw=1e-3,3e-3,mars=6e-3); else those that DIR has, or the config's own times 1/2, 1, 2 and 4.
Any field of the configs can be changed for all of them, such as --eval.every 100.

Finished cells are kept: after Ctrl-C (exit code 75) or a kill the same command continues.
DIR gets report.html, report.md, report.json and figures/."""

_PROG = "maxmars compare"
_FACTORS = (0.5, 1.0, 2.0, 4.0)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class CompareArguments(ConfigArguments):
    """Tune contenders over learning rates and compare them over seeds."""

    workdir: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of this comparison, on a disk; its finished cells are kept."""
    optimizers: Annotated[str | None, tyro.conf.arg(metavar="A,B,...")] = None
    """Values of the config file's choice `optimizer`, each of which makes a contender."""
    learning_rates: Annotated[str | None, tyro.conf.arg(metavar="RATES")] = None
    """Grid for all, 1e-3,3e-3, or by name, adamw=1e-3,3e-3,mars=6e-3; the others' are those of the
    workdir's comparison so far, or the config's own rate times 1/2, 1, 2 and 4."""
    seeds: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Seeds at the best rate: the config's seed and those that follow it; the first scans the
    grid."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Steps of each run, over which the schedule decays; None is the config's num_steps."""
    baseline: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The contender that the others are tested against; None is the first."""


def run(argv: list[str]) -> int:
    """Run `maxmars compare`."""
    specs, options = split_positionals(argv)
    if not specs and {"-h", "--help"} & set(options):
        print(_USAGE)
        sys.exit(0)
    if not specs:
        raise UsageError(f"{_PROG} needs a config file: `{_PROG} CONFIG`. See `{_PROG} --help`.")
    parsed = {
        spec: parse_arguments(CompareArguments, [spec, *options], prog=_PROG)
        for spec in _with_optimizers(specs, _option(options, "optimizers"))
    }
    arguments = next(iter(parsed.values()))
    if arguments.workdir is None:
        raise UsageError(f"{_PROG} needs --workdir DIR, where finished cells are kept.")
    if arguments.seeds < 1:
        raise UsageError(f"--seeds {arguments.seeds} must be at least 1.")
    if arguments.steps is not None and arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps} must be at least 1.")
    configs = _by_name({spec: _prepare(a) for spec, a in parsed.items()})
    baseline = arguments.baseline or next(iter(configs))
    if baseline not in configs:
        raise UsageError(f"--baseline {baseline} is none of {', '.join(configs)}.")
    given = _given_rates(arguments.learning_rates, list(configs))
    cpu_settings.prepare(configs[baseline])
    # Imported late: they load JAX.
    from maxmars.compare.comparison import compare
    from maxmars.compare.record import Comparison, recorded_rates
    from maxmars.preemption import EXIT_CODE
    from maxmars.workdir import is_remote, resolve

    if is_remote(resolve(arguments.workdir)):
        raise UsageError(f"--workdir {arguments.workdir} must be on a disk of this machine.")
    workdir = Path(arguments.workdir).expanduser().absolute()
    # So that a grid is extended by naming the new rates alone.
    contenders = _contenders(configs, recorded_rates(workdir) | given)
    first = contenders[0].config.seed
    comparison = Comparison(
        contenders=contenders,
        baseline=baseline,
        seeds=tuple(range(first, first + arguments.seeds)),
    )
    for warning in _warnings(contenders):
        print(f"maxmars: warning: {warning}", file=sys.stderr)
    if not compare(comparison, workdir):
        return EXIT_CODE
    from maxmars.compare.terminal import print_summary

    print_summary(workdir)
    return 0


def _option(options: Sequence[str], name: str) -> str | None:
    """The value of an option, before the configs are there that say what the others are."""
    for index, word in enumerate(options):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == f"--{name}":
            return value if equals else next(iter(options[index + 1 :]), None)
    return None


def _with_optimizers(specs: Sequence[str], optimizers: str | None) -> list[str]:
    """Each CONFIG with each optimizer as its choice."""
    if optimizers is None:
        return list(specs)
    names = [name.strip() for name in optimizers.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--optimizers {optimizers!r} must name optimizers, each once.")
    for spec in specs:
        if re.search(r"[:,]optimizer=", spec):
            raise UsageError(f"{spec} names an optimizer itself; leave that or --optimizers out.")
    return [
        f"{spec}{':' if spec.endswith('.py') else ','}optimizer={name}"
        for spec in specs
        for name in names
    ]


def _prepare(arguments: CompareArguments) -> TrainConfig:
    """The config of a contender: with the steps asked for, and always with an evaluation."""
    config = arguments.config
    if arguments.steps is not None:
        config = dataclasses.replace(config, num_steps=arguments.steps)
    evaluation = dataclasses.replace(config.eval, hellaswag_every=None)
    if evaluation.every is None:
        evaluation = dataclasses.replace(evaluation, every=config.num_steps)
    return dataclasses.replace(config, eval=evaluation)


def _by_name(configs: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """Names of the contenders: their optimizers where one file has them all, else the configs'."""
    chosen = [re.search(r"[:,]optimizer=([^,]*)", spec) for spec in configs]
    files = {re.sub(r"[:,]optimizer=[^,]*", "", spec) for spec in configs}
    names = [config.name for config in configs.values()]
    if len(files) == 1 and all(chosen):
        names = [match[1] for match in chosen if match]
    if len(set(names)) < len(names):
        raise UsageError(f"the contenders must have different names, but are {', '.join(names)}.")
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} names a directory here; take letters, digits, . _ and -.")
    return dict(zip(names, configs.values(), strict=True))


def _contenders(
    configs: Mapping[str, TrainConfig], rates: Mapping[str, tuple[float, ...]]
) -> tuple[Contender, ...]:
    """The contenders, with the config's own grid where there are no rates."""
    from maxmars.compare.cells import Contender

    return tuple(
        Contender(
            name=name,
            config=config,
            learning_rates=rates.get(name)
            or tuple(float(f"{config.optimizer.learning_rate * f:.6g}") for f in _FACTORS),
        )
        for name, config in configs.items()
    )


def _given_rates(text: str | None, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Learning rates by contender; a name holds for all rates up to the next one."""
    if text is None:
        return {}
    found: dict[str, set[float]] = {}
    owners: Sequence[str] = names
    for item in text.split(","):
        name, equals, number = item.rpartition("=")
        if equals and name not in names:
            raise UsageError(f"--learning-rates {text}: {name!r} is none of {', '.join(names)}.")
        owners = [name] if equals else owners
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise UsageError(
                f"--learning-rates {text}: {number!r} is no positive number; write 1e-3,3e-3 for "
                "all or adamw=1e-3,3e-3,mars=6e-3."
            )
        for owner in owners:
            found.setdefault(owner, set()).add(rate)
    return {name: tuple(sorted(rates)) for name, rates in found.items()}


def _warnings(contenders: Sequence[Contender]) -> list[str]:
    config = contenders[0].config
    warmup = max(c.config.schedule.warmup_steps for c in contenders)
    found = []
    if 2 * warmup > config.num_steps:
        found.append(
            f"schedule.warmup_steps={warmup} is most of num_steps={config.num_steps}: the runs "
            "hardly reach their learning rates; give --schedule.warmup-steps too."
        )
    return found
