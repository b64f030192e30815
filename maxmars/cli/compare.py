"""`maxmars compare`: which optimizer is better, each tuned? `maxmars report`: curves of runs."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from maxmars.config import TrainConfig
from maxmars.config.command_line import (
    ConfigArguments,
    UsageError,
    parse_arguments,
    parse_options,
    split_positionals,
)

_USAGE = """\
usage: maxmars compare CONFIG [CONFIG ...] --workdir DIR [--optimizers A,B] [--learning-rates ...]
                       [--seeds 3] [--steps N] [--baseline NAME] [--FIELD VALUE ...]

Train each contender over a grid of learning rates with one seed, then with more seeds around its
best rate, all from the same weights on the same tokens, and test which one is better.

  maxmars compare compare_tiny --optimizers adamw,mars,mars_shampoo,muon --workdir DIR
  maxmars compare a.py b.py --learning-rates 1e-3,3e-3 --steps 500 --workdir DIR

A contender is a CONFIG, or with --optimizers a CONFIG with its choice `optimizer` set to each.
Learning rates are those of --learning-rates, for all (1e-3,3e-3) or by name
(adamw=1e-3,3e-3,mars=6e-3); else those that DIR has, or the config's own times 1/2, 1, 2 and 4.
Any field of the configs can be changed for all of them, such as --eval.every 100.

Each combination of contender, rate and seed is a cell, an ordinary run in DIR/cells. Finished cells
are kept: after Ctrl-C (exit code 75) or a kill the same command continues.
DIR gets report.md, report.json and figures/."""

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
        raise UsageError(
            f"{_PROG} needs a config, for example `{_PROG} compare_tiny`. See `{_PROG} --help`."
        )
    parsed = {
        spec: parse_arguments(CompareArguments, [spec, *options], prog=_PROG)
        for spec in _with_optimizers(specs, _optimizers(options))
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
    # Imported late: they load JAX.
    from maxmars.compare.cells import Comparison, Contender, recorded_rates
    from maxmars.compare.report import print_summary
    from maxmars.compare.run import compare
    from maxmars.compare.summary import summarize
    from maxmars.distributed.exits import EXIT_CODE
    from maxmars.distributed.files import is_remote, resolve

    if is_remote(resolve(arguments.workdir)):
        raise UsageError(f"--workdir {arguments.workdir} must be on a disk of this machine.")
    workdir = Path(arguments.workdir).expanduser().absolute()
    rates = recorded_rates(workdir) | given
    contenders = tuple(
        Contender(
            name=name,
            config=config,
            learning_rates=rates.get(name)
            or tuple(float(f"{config.optimizer.learning_rate * f:.6g}") for f in _FACTORS),
        )
        for name, config in configs.items()
    )
    first = contenders[0].config.seed
    comparison = Comparison(
        contenders=contenders,
        baseline=baseline,
        seeds=tuple(range(first, first + arguments.seeds)),
    )
    warmup = max(c.config.schedule.warmup_steps for c in contenders)
    num_steps = contenders[0].config.num_steps
    if 2 * warmup > num_steps:
        print(
            f"maxmars: warning: schedule.warmup_steps={warmup} is most of num_steps={num_steps}: "
            "the runs hardly reach their learning rates; give --schedule.warmup-steps too.",
            file=sys.stderr,
        )
    if not compare(comparison, workdir):
        return EXIT_CODE
    print_summary(summarize(workdir), workdir)
    return 0


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Draw the losses of runs against tokens and time, as figures and one Markdown page.

    A RUN is a working directory of `maxmars train`, or of `maxmars compare`, of which each
    contender is drawn at its best rate. One comparison alone gets its whole report again, also
    before it is complete.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """What to draw, such as runs/quickstart."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for report.md, report.json and figures; None is RUN/report, or the comparison
    itself. Only an earlier report of the same runs is written anew there."""


def run_report(argv: list[str]) -> int:
    """Run `maxmars report`."""
    arguments = parse_options(ReportArguments, argv, prog="maxmars report")
    from maxmars.compare.cells import COMPARISON
    from maxmars.compare.curves import Line, read_run
    from maxmars.compare.report import (
        best_lines,
        print_summary,
        write_report,
        write_run_report,
    )
    from maxmars.compare.summary import summarize

    runs = [Path(name).expanduser().absolute() for name in arguments.runs]
    if not runs:
        raise UsageError("maxmars report needs a RUN: the working directory of one.")
    if len(runs) == 1 and arguments.out is None and (runs[0] / COMPARISON).is_file():
        print_summary(write_report(runs[0]), runs[0])
        return 0
    if len(runs) > 1 and arguments.out is None:
        raise UsageError("maxmars report of several runs needs --out DIR, where the report goes.")
    names = [path.name for path in runs]
    if len(set(names)) < len(names):
        names = list(arguments.runs)
    if len(set(runs)) < len(runs):
        raise UsageError(f"maxmars report {' '.join(names)}: name each RUN once.")
    lines, workdirs = [], {}
    for path, name in zip(runs, names, strict=True):
        if not (path / COMPARISON).is_file():
            lines.append(Line(name=name, curves=(read_run(path),)))
            workdirs[name] = path
            continue
        summary = summarize(path)
        for outcome in summary.outcomes:
            if outcome.best is None:
                print(f"{name}: {outcome.contender.name} has no finished run, and is not drawn")
        for line in best_lines(summary):
            own = line.name if len(runs) == 1 else f"{name}: {line.name}"
            lines.append(dataclasses.replace(line, name=own))
            workdirs[own] = path
    out = Path(arguments.out).expanduser().absolute() if arguments.out else runs[0] / "report"
    write_run_report(lines, out, workdirs)
    print(f"report: {out / 'report.md'}")
    return 0


def _optimizers(options: Sequence[str]) -> str | None:
    """The value of `--optimizers`, which says which configs to load before the options of these
    can be read."""
    for index, word in enumerate(options):
        key, equals, value = word.partition("=")
        if key == "--optimizers":
            return value if equals else next(iter(options[index + 1 :]), None)
    return None


def _with_optimizers(specs: Sequence[str], optimizers: str | None) -> list[str]:
    """Each CONFIG with each optimizer as its choice `optimizer`."""
    if optimizers is None:
        return list(specs)
    names = [name.strip() for name in optimizers.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--optimizers {optimizers!r} must name optimizers, each once.")
    for spec in specs:
        if re.search(r"[:,]optimizer=", spec):
            raise UsageError(f"{spec} names an optimizer itself; leave that or --optimizers out.")
    # To choices such as those of gpt2:size=small one more is added.
    joins = ["," if re.search(r":\w+=", spec) else ":" for spec in specs]
    return [
        f"{spec}{join}optimizer={name}"
        for spec, join in zip(specs, joins, strict=True)
        for name in names
    ]


def _prepare(arguments: CompareArguments) -> TrainConfig:
    """The config of a contender: with --steps, without HellaSwag, and always with an evaluation."""
    config = arguments.config
    if arguments.steps is not None:
        config = dataclasses.replace(config, num_steps=arguments.steps)
    evaluation = dataclasses.replace(config.eval, hellaswag_every=None)
    if evaluation.every is None:
        evaluation = dataclasses.replace(evaluation, every=config.num_steps)
    return dataclasses.replace(config, eval=evaluation)


def _by_name(configs: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """Names of the contenders: their optimizers if all come from one file, else their configs'."""
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


def _given_rates(text: str | None, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Learning rates by contender: a name owns the rates up to the next name, and rates before the
    first name are for all."""
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
