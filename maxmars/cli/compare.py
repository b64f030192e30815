"""`maxmars compare`: which optimizer is better, each tuned? `maxmars report`: curves of runs."""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from maxmars.cli.parse import (
    ConfigArguments,
    parse_arguments,
    parse_first,
    parse_options,
    split_config,
)
from maxmars.config import OptaxConfig, Source, TrainConfig
from maxmars.config.checks import CheckedConfig, UsageError
from maxmars.config.comparison import ComparisonConfig, SearchConfig
from maxmars.config.load import load_comparison

if TYPE_CHECKING:
    from maxmars.compare.grids import Number
    from maxmars.compare.trials import Comparison, Contender

_PROG = "maxmars compare"


@dataclass(frozen=True, kw_only=True)
class CompareArguments(ConfigArguments, SearchConfig):
    """Compare optimizers fairly: tune each with the same budget, then train with several seeds.

    Each word of --optimizers makes a contender: CONFIG with its choice `optimizer` set to a name of
    the config file, or to FILE.py:make, an optimizer of your own. A config file may also say the
    whole comparison, of any configs and with values to try, in a function get_comparison. All start
    from the same weights and read the same tokens. Each is tuned with one seed, by the fields that
    --tune names; its best settings run with more seeds, and a test says which is better. Any field
    of the configs can be changed for all, such as --num-steps 500 or --eval.every 100.

    Each combination of contender, setting and seed is an ordinary run in DIR/cells. Finished ones
    are kept: after Ctrl-C (exit code 75) or a kill the same command continues. Any number of
    processes or machines that give the same command for the same DIR share the runs. DIR gets
    report.md, tables and figures; `maxmars compare verify DIR` repeats a result anywhere, and
    `maxmars report DIR DIR` puts comparisons, say of several sizes of the model, into one report.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars compare compare_tiny --optimizers adamw mars muon --workdir runs/which",
        "maxmars compare quickstart:data=data/mine --optimizers muon my_optim.py:make \\",
        "  --tune learning_rate weight_decay --budget 20 --seeds 5 --workdir runs/tuned",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "workdir",
        "optimizers",
        "learning-rates",
        "tune",
        "budget",
        "seeds",
        "num-steps",
        "dry-run",
        "baseline",
        "schedule.warmup-steps",
        "data.path",
    )

    workdir: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of this comparison, on a disk (required). Its finished trials are kept."""
    optimizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="A B ...")] = ()
    """Values of the config file's choice `optimizer`, each of which makes a contender. That of
    FILE.py:make, whose path is relative to the working directory, is called FILE."""
    learning_rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE ...")] = ()
    """Learning rates that all contenders try first, such as 1e-3 3e-3. Those of none are the
    config's own rate times 1/2, 1, 2 and 4."""
    start_from: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """A finished comparison of the same contenders, say of a smaller model: each search begins at
    the best setting there, with 1/2, 1 and 2 times its learning rate."""
    dry_run: bool = False
    """Only say which contenders are tuned over which fields, where each search begins, and how many
    runs there are at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_words("--tune", self.tune)


@dataclass(frozen=True)
class _Named:
    """The option that says which configs to load, which is parsed before those of the configs."""

    optimizers: tuple[str, ...] | None = None


def run(argv: list[str]) -> int:
    """Run `maxmars compare`."""
    if argv[:1] == ["verify"]:
        return _verify(parse_options(VerifyArguments, argv[1:], prog=f"{_PROG} verify"))
    arguments, comparison = _plan(argv)
    workdir = _workdir(arguments)
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.compare.figures import why_no_figures
        from maxmars.compare.report import print_plan, print_report
        from maxmars.compare.run import compare
        from maxmars.compare.trials import check_continues, read_rows
        from maxmars.distributed import processes
        from maxmars.distributed.exits import EXIT_CODE

    check_continues(comparison, workdir)
    print_plan(comparison, read_rows(comparison, workdir))
    if why_none := why_no_figures():
        print(why_none)
    if arguments.dry_run:
        return 0
    processes.check_accelerators()
    summary = compare(comparison, workdir)
    if summary is None:
        return EXIT_CODE
    print_report({"": summary}, workdir)
    return 0


def _plan(argv: list[str]) -> tuple[CompareArguments, Comparison]:
    """The comparison that a command line asks for."""
    # Two ways to say who takes part:
    #
    #   compare_tiny                                       a file's get_comparison()
    #   gpt2 --optimizers adamw mars my_opt.py:make        one CONFIG, with each choice `optimizer`
    #
    # The options, such as --num-steps 500, are parsed once for each contender, on top of its own
    # config.
    named, argv = parse_first(_Named, argv)
    optimizers = named.optimizers or ()
    _check_words("--optimizers", optimizers)
    if named.optimizers == () or not all(optimizers) or len({*optimizers}) < len(optimizers):
        raise UsageError(f"--optimizers {' '.join(optimizers)} must name optimizers, each once.")
    spec, options = split_config(argv, _PROG)
    if spec is not None and options and not options[0].startswith("-"):
        raise UsageError(
            f"{_PROG} {spec} {options[0]}: one CONFIG makes a comparison. Name contenders by "
            "--optimizers A B, or return them from get_comparison() in a file."
        )
    in_file = None if optimizers or spec is None else load_comparison(spec)
    if in_file is not None:
        parsed = _of_file(in_file, options, f"{_PROG} {spec}")
    else:
        parsed = _of_words(argv, optimizers)
    arguments = next(iter(parsed.values()))
    given = {name: getattr(arguments, name) for name in _SHARED}
    try:
        config = ComparisonConfig(
            contenders={name: _prepare(a.config) for name, a in parsed.items()},
            grids={} if in_file is None else in_file.grids,
            **given,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    contenders = _contenders(config, arguments)
    # Imported late: they load JAX.
    from maxmars.compare.trials import Comparison

    first = contenders[0].config.seed
    num_fields = max(len(contender.grids) for contender in contenders)
    comparison = Comparison(
        contenders=contenders,
        baseline=config.baseline or contenders[0].name,
        seeds=tuple(range(first, first + config.seeds)),
        budget=config.budget or 4 + 4 * num_fields,
        finalists=config.finalists,
        confirm=config.confirm,
    )
    warmup = max(c.config.schedule.warmup_steps for c in contenders)
    num_steps, every = contenders[0].config.num_steps, contenders[0].config.eval.every
    if 2 * warmup > num_steps:
        print(
            f"maxmars: warning: schedule.warmup_steps={warmup} is most of num_steps={num_steps}: "
            "the runs hardly reach their learning rates; give --schedule.warmup-steps too.",
            file=sys.stderr,
        )
    if every is not None and every >= num_steps:
        print(
            f"maxmars: warning: eval.every={every} is not below num_steps={num_steps}: the curves "
            "have nothing but their ends; give --eval.every too.",
            file=sys.stderr,
        )
    return arguments, comparison


def _workdir(arguments: CompareArguments) -> Path:
    """The directory of the comparison."""
    if arguments.workdir is None:
        raise UsageError(f"{_PROG} needs --workdir DIR, where finished trials are kept.")
    return _on_disk("--workdir", arguments.workdir)


def _on_disk(option: str, path: str) -> Path:
    """The directory that an option names, on a disk."""
    from maxmars.distributed.files import is_remote, resolve

    if is_remote(path):
        raise UsageError(f"{option} {path} must be on a disk of this machine.")
    return Path(resolve(path))


_SHARED = [field.name for field in dataclasses.fields(SearchConfig)]
"""Options that a comparison of a config file has too; what is typed counts more."""


def _of_file(
    config: ComparisonConfig, options: Sequence[str], prog: str
) -> dict[str, CompareArguments]:
    """The command line read for each contender of a config file."""
    shared = {name: getattr(config, name) for name in _SHARED}
    return {
        name: parse_options(
            CompareArguments,
            options,
            prog=prog,
            default=CompareArguments(config=contender, **shared),
        )
        for name, contender in config.contenders.items()
    }


def _of_words(argv: Sequence[str], optimizers: Sequence[str]) -> dict[str, CompareArguments]:
    """The command line read for each word of `--optimizers`, or for CONFIG alone."""
    parse = functools.partial(
        parse_arguments, CompareArguments, argv, prog=_PROG, example="compare_tiny"
    )
    if not optimizers:
        arguments = parse()
        return {arguments.config.name: arguments}
    words: dict[str, str] = {}
    for word in optimizers:
        name = Source.parse(word).short if ":" in word else word
        if name in words:
            raise UsageError(f"--optimizers {words[name]} {word}: both are called {name!r}.")
        words[name] = word
    return {name: parse(choices={"optimizer": word}) for name, word in words.items()}


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(CheckedConfig):
    """Compute a run of a comparison again, and compare the digest of its end, else the losses.

    On the same machine, versions and number of CPU cores everything is equal bit by bit, elsewhere
    up to rounding. Exits with 1 where the result is refused.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars compare verify runs/which",
        "maxmars compare verify runs/which --contender mars --seed 1",
    )

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory of a comparison, or a copy of its compare.json, rows.jsonl and sources."""
    contender: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Whose run, at its best setting; None is the best contender's."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="S")] = None
    """With this seed; None is the first."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of the tokens here, if it is not that of the comparison."""
    workdir: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep the run there, where the same command continues it; None keeps nothing."""


def _verify(arguments: VerifyArguments) -> int:
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.compare.verify import verify

    with tempfile.TemporaryDirectory(prefix="maxmars-verify-") as scratch:
        verdict = verify(
            _on_disk("DIR", arguments.directory),
            _on_disk("--workdir", scratch if arguments.workdir is None else arguments.workdir),
            contender=arguments.contender,
            seed=arguments.seed,
            data_path=arguments.data,
            log=lambda text: print(text, flush=True),
        )
    print(verdict.text)
    return 1 if verdict.problem else 0


@dataclass(frozen=True, kw_only=True)
class ReportArguments(CheckedConfig):
    """Draw losses, rates and norms of runs, as figures and one Markdown page.

    A RUN is a working directory of `maxmars train`, also in a bucket, or of `maxmars compare`, of
    which each contender is drawn at its best setting. Comparisons alone get their whole report
    again, also before they are complete; that of several has a column for them. curves.csv has what
    is drawn, and more, as numbers. Figures need matplotlib (extra `report`).
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars report runs/quickstart",
        "maxmars report runs/a runs/b --labels AdamW MARS --out reports/ab",
    )

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """What to draw, such as runs/quickstart."""
    labels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")] = ()
    """What tables and figures call the RUNs, one label each; none are the names of directories."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for report.md, tables and figures; None is RUN/report, or the comparison
    itself, on a disk. Only an earlier report of the same runs is written anew there."""
    format: Literal["png", "pdf", "svg"] = "png"
    """Of the figures."""


def run_report(argv: list[str]) -> int:
    """Run `maxmars report`."""
    arguments = parse_options(ReportArguments, argv, prog="maxmars report")
    if not arguments.runs:
        raise UsageError("maxmars report needs a RUN, such as runs/quickstart.")
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.compare.curves import read_run
        from maxmars.compare.report import best_lines, print_report, write_report
        from maxmars.compare.run_report import (
            check_out,
            origin_of,
            print_lines,
            print_where,
            write_run_report,
        )
        from maxmars.compare.summary import summarize
        from maxmars.compare.trials import COMPARISON
        from maxmars.distributed.files import is_remote, resolve

    runs = {text: resolve(text) for text in arguments.runs}
    if len(set(runs.values())) < len(arguments.runs):
        raise UsageError(f"maxmars report {' '.join(arguments.runs)}: name each RUN once.")
    first = next(iter(runs.values()))
    if arguments.out is None and (len(runs) > 1 or is_remote(first)):
        raise UsageError(
            "maxmars report of several runs, or of one in a bucket, needs --out DIR, where the "
            "report goes."
        )
    labels = arguments.labels or _run_names(list(runs.values()))
    if len(labels) != len(runs) or len(set(labels)) < len(labels):
        raise UsageError(
            f"--labels {' '.join(labels)}: give each of the {len(runs)} RUNs one label of its own."
        )
    runs = dict(zip(labels, runs.values(), strict=True))
    out = Path(first) if arguments.out is None else _on_disk("--out", arguments.out)
    compared = {
        name: summarize(Path(path))
        for name, path in runs.items()
        if not is_remote(path) and (path / COMPARISON).is_file()
    }
    if len(compared) == len(runs):
        named = compared if len(runs) > 1 else {"": next(iter(compared.values()))}
        summaries = dict(sorted(named.items(), key=lambda item: item[1].num_parameters))
        origin = ""
        if arguments.out is not None:
            origin = origin_of(runs.values())
            check_out(out, origin)
        write_report(summaries, out, arguments.format, origin)
        print_report(summaries, out)
        return 0
    lines, workdirs = [], {}
    for name, path in runs.items():
        if name not in compared:
            lines.append(read_run(path, name))
            workdirs[name] = path
            continue
        for outcome in compared[name].outcomes:
            if outcome.best is None:
                print(f"{name}: {outcome.contender.name} has no finished run, and is not drawn")
        for line in best_lines(compared[name]):
            own = f"{name}: {line.name}"
            lines.append(dataclasses.replace(line, name=own))
            workdirs[own] = path
    if arguments.out is None:
        out = out / "report"
    write_run_report(lines, out, workdirs, arguments.format)
    print_lines(lines)
    print_where(out)
    return 0


def _run_names(paths: Sequence[PurePath]) -> list[str]:
    """Names of runs and comparisons: of a run within a comparison with its contender, and with as
    many directories before as tell it from the others."""
    is_trial = [path.parts[-3:-2] == ("cells",) for path in paths]
    lengths = [2 if within else 1 for within in is_trial]
    while True:
        names = ["/".join(p.parts[-n:]) for p, n in zip(paths, lengths, strict=True)]
        if len(set(names)) == len(names):
            return names
        lengths = [n + (names.count(name) > 1) for n, name in zip(lengths, names, strict=True)]


def _check_words(flag: str, words: Sequence[str]) -> None:
    for word in words:
        if "," in word:
            raise UsageError(f"{flag} {word}: write {' '.join(word.split(','))}")


def _prepare(config: TrainConfig) -> TrainConfig:
    """The config of a contender: always with the validation loss, and with nothing else that would
    be evaluated in each trial."""
    evaluation = dataclasses.replace(config.eval, hellaswag_every=None, own=None, data=())
    if evaluation.every is None:
        evaluation = dataclasses.replace(evaluation, every=config.num_steps)
    checkpoint = dataclasses.replace(config.checkpoint, keep_best_of=None)
    return dataclasses.replace(config, eval=evaluation, checkpoint=checkpoint)


def _contenders(config: ComparisonConfig, arguments: CompareArguments) -> tuple[Contender, ...]:
    """The contenders with the grids of the fields that they have."""
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.compare.grids import LEARNING_RATE, make_grid, value_of
        from maxmars.compare.trials import Contender

    for name in config.tune:
        if all(value_of(each, name) is None for each in config.contenders.values()):
            raise UsageError(
                f"--tune {name}: no contender has a number {name!r}; name fields of the "
                "optimizers, such as learning_rate, weight_decay and b1, or warmup."
            )
    rates = arguments.learning_rates
    if rates and LEARNING_RATE not in config.tune:
        raise UsageError(f"--learning-rates: name {LEARNING_RATE} in --tune too.")
    # For `--tune learning_rate weight_decay` and a file with grids={"mars": {"gamma": (0, 0.025)}}:
    #
    #   fields   adamw: learning_rate, weight_decay     mars: learning_rate, weight_decay, gamma
    #   grids    mars: gamma 0, 0.025; all others are made around the config's own value
    #
    # A contender without a field of --tune gets no grid of it (None); one without a field for which
    # the file gives it values is an error.
    own = {name: config.grids.get(name, {}) for name in config.contenders}
    fields = {name: [*dict.fromkeys([*config.tune, *grids])] for name, grids in own.items()}
    starts = _starts(arguments.start_from, fields)
    contenders = []
    for name, each in config.contenders.items():
        grids = {**own[name], **({LEARNING_RATE: rates} if rates else {})}
        try:
            if lacking := [field for field in grids if value_of(each, field) is None]:
                raise ValueError(f"it has no number {lacking[0]!r}, of which there is a grid.")
            made = [
                make_grid(each, field, sorted(set(grids.get(field, ()))), starts[name].get(field))
                for field in fields[name]
            ]
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
        swept = tuple(grid for grid in made if grid is not None)
        contenders.append(Contender(name=name, config=each, grids=swept))
    most = max(len(contender.grids) for contender in contenders)
    for contender in contenders:
        tuned = [grid.field for grid in contender.grids]
        if lacking := [field for field in config.tune if field not in tuned]:
            way_out = _way_out(contender.config, tuned, lacking) if len(tuned) < most else ""
            print(
                f"maxmars: {contender.name} lacks {', '.join(lacking)}: it is tuned over "
                f"{', '.join(tuned) or 'nothing'}.{way_out}",
                file=sys.stderr,
            )
    return tuple(contenders)


def _way_out(config: TrainConfig, tuned: Sequence[str], lacking: Sequence[str]) -> str:
    """How a contender that is tuned over fewer fields than others gets as many."""
    from maxmars.compare.grids import fields_of

    if isinstance(config.optimizer, OptaxConfig):
        make = config.optimizer.source
        given = ", ".join(f"{field}=NUMBER" for field in lacking)
        if make.file:
            named = f"give {make.function} of {make.file}"
            return f" To tune it too, {named} the keyword defaults {given}."
    others = [field for field in fields_of(config) if field not in tuned]
    return f" To tune it as much as others, add some of its own to --tune: {', '.join(others)}."


def _starts(
    directory: str | None, fields: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Number]]:
    """The values of each contender's best setting in the comparison of `--start-from`."""
    if directory is None:
        return {name: {} for name in fields}
    # Imported late: they load JAX.
    from maxmars.compare.grids import value_of, with_values
    from maxmars.compare.summary import summarize

    try:
        summary = summarize(Path(directory).expanduser())
    except ValueError as error:
        raise UsageError(f"--start-from: {error}") from error
    if summary.num_missing:
        raise UsageError(f"--start-from {directory}: that comparison is not complete; finish it.")
    outcomes = {outcome.contender.name: outcome for outcome in summary.outcomes}
    starts = {}
    for name, tuned in fields.items():
        outcome = outcomes.get(name)
        if outcome is None or outcome.best is None:
            raise UsageError(f"--start-from {directory}: {name} has no result there.")
        own, setting = outcome.contender.config, dict(outcome.best.setting)
        # An earlier search there, over other fields, may have found the best setting.
        changed = [field for field, value in setting.items() if value != value_of(own, field)]
        tried = list(dict.fromkeys([*(g.field for g in outcome.contender.grids), *changed]))
        if missing := [field for field in tried if field not in tuned]:
            raise UsageError(
                f"--start-from {directory}: {name} was tuned over {', '.join(missing)} too; name "
                "the same fields in --tune."
            )
        best = with_values(own, setting)
        values = {field: value_of(best, field) for field in tried}
        starts[name] = {field: value for field, value in values.items() if value is not None}
    return starts
