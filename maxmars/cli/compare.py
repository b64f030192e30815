"""`maxmars compare`: tune optimizers and compare them. `maxmars report`: curves of runs.

The work is in `maxmars.compare`. Here a command line becomes a `Comparison`: the options are parsed
once for each contender, on top of its own config, since contenders may have different fields. After
that come `compare verify` and `report`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from maxmars.cli import parse
from maxmars.config import OptaxConfig, Source, TrainConfig
from maxmars.config.checks import CheckedConfig, UsageError
from maxmars.config.comparison import ComparisonConfig, SearchConfig
from maxmars.config.load import load_comparison

if TYPE_CHECKING:
    from maxmars.compare.grids import Number
    from maxmars.compare.trials import Comparison, Contender

_PROG = "maxmars compare"


@dataclass(frozen=True, kw_only=True)
class CompareArguments(parse.ConfigArguments, SearchConfig):
    """Compare optimizers fairly: tune each with the same budget, then train with several seeds.

    Each word of --optimizers makes a contender: CONFIG with its choice `optimizer` set to a name of
    the config file, or to FILE.py:make, an optimizer of your own. A config file may also return a
    whole comparison, of any configs and with values to try, from a function get_comparison. All
    contenders start from the same weights and read the same tokens. Each is tuned with one seed,
    over the fields that --tune names; then its best settings run with more seeds, and a statistical
    test says which contender is better. Any field of the configs can be changed for all contenders,
    such as --num-steps 500 or --eval.every 100.

    Each combination of contender, setting and seed is a trial: an ordinary run in DIR/cells. After
    Ctrl-C (exit code 75) or a kill the same command continues with the trials that are missing.
    Several processes or machines that give the same command for the same DIR share the trials. DIR
    gets report.md, tables and figures; `maxmars compare verify DIR` repeats a result anywhere, and
    `maxmars report DIR DIR` puts several comparisons, such as of several model sizes, into one
    report.
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
    """Directory of the comparison, on a disk (required)."""
    optimizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="A B ...")] = ()
    """Values of the config file's choice `optimizer`; each makes a contender. FILE.py:make, with a
    path relative to the working directory, makes a contender called FILE."""
    learning_rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE ...")] = ()
    """Learning rates that all contenders try first, such as 1e-3 3e-3. Without this option each
    contender tries its own learning rate times 1/2, 1, 2 and 4."""
    start_from: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of a complete comparison of the same contenders, such as with a smaller model: each
    search begins at the best setting there, with 1/2, 1 and 2 times its learning rate."""
    dry_run: bool = False
    """Only show which fields of each contender are tuned, where its search begins, and the largest
    number of trials; run nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_commas("--tune", self.tune)


@dataclass(frozen=True)
class _Optimizers:
    """The option that decides which configs are loaded; it is parsed before their options."""

    optimizers: tuple[str, ...] | None = None


def run(argv: list[str]) -> int:
    """Run `maxmars compare`."""
    if argv[:1] == ["verify"]:
        return _verify(parse.parse_options(VerifyArguments, argv[1:], prog=f"{_PROG} verify"))
    arguments, comparison = _make_comparison(argv)
    if arguments.workdir is None:
        raise UsageError(f"{_PROG} needs --workdir DIR, where finished trials are kept.")
    # Processes divide the trials among them by locks of files, which buckets lack.
    workdir = _local_path("--workdir", arguments.workdir)
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


def _make_comparison(argv: list[str]) -> tuple[CompareArguments, Comparison]:
    """Make the comparison that a command line describes."""
    # Two ways to name the contenders:
    #
    #   compare_tiny                                       a file's get_comparison()
    #   gpt2 --optimizers adamw mars my_opt.py:make        one CONFIG, with each choice `optimizer`
    first_options, argv = parse.parse_first(_Optimizers, argv)
    optimizers = first_options.optimizers or ()
    _refuse_commas("--optimizers", optimizers)
    # An empty variable of a shell gives no word, or in quotes an empty one.
    is_empty = first_options.optimizers == () or not all(optimizers)
    if is_empty or len({*optimizers}) < len(optimizers):
        raise UsageError(f"--optimizers {' '.join(optimizers)} must name optimizers, each once.")
    spec, options = parse.split_config(argv, _PROG)
    if spec is not None and options and not options[0].startswith("-"):
        raise UsageError(
            f"{_PROG} {spec} {options[0]}: one CONFIG makes a comparison. Name contenders by "
            "--optimizers A B, or return them from get_comparison() in a file."
        )
    from_file = None if optimizers or spec is None else load_comparison(spec)
    if from_file is not None:
        parsed = _parse_for_file(from_file, options, f"{_PROG} {spec}")
    else:
        parsed = _parse_for_optimizers(argv, optimizers)
    arguments = next(iter(parsed.values()))  # all but `config` is equal in all of them
    try:
        config = ComparisonConfig(
            contenders={name: _without_evaluations(a.config) for name, a in parsed.items()},
            grids={} if from_file is None else from_file.grids,
            **{name: getattr(arguments, name) for name in _SEARCH_FIELDS},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    contenders = _make_contenders(config, arguments)
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


def _local_path(option: str, path: str) -> Path:
    """The directory that an option names; a UsageError if it is in a bucket."""
    from maxmars.distributed.files import is_remote, resolve

    if is_remote(path):
        raise UsageError(f"{option} {path} must be on a disk of this machine.")
    return Path(resolve(path))


_SEARCH_FIELDS = [field.name for field in dataclasses.fields(SearchConfig)]
"""Options that also are fields of a file's `get_comparison`; the command line overrides them."""


def _parse_for_file(
    config: ComparisonConfig, options: Sequence[str], prog: str
) -> dict[str, CompareArguments]:
    """Parse the options once for each contender of a config file."""
    search_options = {name: getattr(config, name) for name in _SEARCH_FIELDS}
    return {
        name: parse.parse_options(
            CompareArguments,
            options,
            prog=prog,
            default=CompareArguments(config=contender, **search_options),
        )
        for name, contender in config.contenders.items()
    }


def _parse_for_optimizers(
    argv: Sequence[str], optimizers: Sequence[str]
) -> dict[str, CompareArguments]:
    """Parse the command line once for each word of `--optimizers`, or for CONFIG alone."""
    parse_line = functools.partial(
        parse.parse_arguments, CompareArguments, argv, prog=_PROG, example="compare_tiny"
    )
    if not optimizers:
        arguments = parse_line()
        return {arguments.config.name: arguments}
    words: dict[str, str] = {}
    for word in optimizers:
        name = Source.parse(word).short if ":" in word else word
        if name in words:
            raise UsageError(f"--optimizers {words[name]} {word}: both are called {name!r}.")
        words[name] = word
    return {name: parse_line(choices={"optimizer": word}) for name, word in words.items()}


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(CheckedConfig):
    """Repeat a run of a comparison, and compare the digest of its last state, else the losses.

    With the same machine, versions and number of CPU cores all are equal bit by bit, elsewhere up
    to rounding. The exit code is 1 if the result is not confirmed.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars compare verify runs/which",
        "maxmars compare verify runs/which --contender mars --seed 1",
    )

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory of a comparison, or of copies of its compare.json, rows.jsonl and sources."""
    contender: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Contender to run, at its best setting; None is the best contender."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="S")] = None
    """Seed of the run; None is the first seed."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of the tokens on this machine, if it is not that of the comparison."""
    workdir: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory to keep the run in, where the same command continues it; None keeps nothing."""


def _verify(arguments: VerifyArguments) -> int:
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.compare.verify import verify

    with tempfile.TemporaryDirectory(prefix="maxmars-verify-") as scratch:
        verdict = verify(
            _local_path("DIR", arguments.directory),
            _local_path("--workdir", scratch if arguments.workdir is None else arguments.workdir),
            contender=arguments.contender,
            seed=arguments.seed,
            data_path=arguments.data,
            log=lambda text: print(text, flush=True),
        )
    print(verdict.text)
    return 1 if verdict.problem else 0


@dataclass(frozen=True, kw_only=True)
class ReportArguments(CheckedConfig):
    """Draw losses, learning rates and norms of runs, as figures and one Markdown page.

    A RUN is the working directory of a `maxmars train`, also in a bucket, or of a `maxmars
    compare`, whose contenders are drawn at their best settings. If all RUNs are comparisons, also
    incomplete ones, the report is that of `maxmars compare`. curves.csv has the numbers of the
    curves, and more. Figures need matplotlib (extra `report`).
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars report runs/quickstart",
        "maxmars report runs/a runs/b --labels AdamW MARS --out reports/ab",
    )

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directories of runs and comparisons, such as runs/quickstart."""
    labels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")] = ()
    """Names of the RUNs in tables and figures, one for each; by default the directories'."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for report.md, tables and figures; None is RUN/report, or the directory of the
    comparison, on a disk. Only an earlier report of the same runs is overwritten."""
    format: Literal["png", "pdf", "svg"] = "png"
    """File format of the figures."""


def _labelled_runs(arguments: ReportArguments) -> dict[str, Any]:
    """Directories of the RUNs, by label."""
    from maxmars.distributed.files import is_remote, resolve

    paths = [resolve(text) for text in arguments.runs]
    if len(set(paths)) < len(paths):
        raise UsageError(f"maxmars report {' '.join(arguments.runs)}: name each RUN once.")
    if arguments.out is None and (len(paths) > 1 or is_remote(paths[0])):
        raise UsageError(
            "maxmars report of several runs, or of one in a bucket, needs --out DIR, where the "
            "report goes."
        )
    labels = arguments.labels or _default_labels(paths)
    if len(labels) != len(paths) or len(set(labels)) < len(labels):
        raise UsageError(
            f"--labels {' '.join(labels)}: give each of the {len(paths)} RUNs one label of its own."
        )
    return dict(zip(labels, paths, strict=True))


def run_report(argv: list[str]) -> int:
    """Run `maxmars report`."""
    arguments = parse.parse_options(ReportArguments, argv, prog="maxmars report")
    if not arguments.runs:
        raise UsageError("maxmars report needs a RUN, such as runs/quickstart.")
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.compare import curves, report, summary, trials
        from maxmars.compare import run_report as pages
        from maxmars.distributed.files import is_remote

    runs = _labelled_runs(arguments)
    paths = list(runs.values())
    out = Path(paths[0]) if arguments.out is None else _local_path("--out", arguments.out)
    comparisons = {
        name: summary.summarize(Path(path))
        for name, path in runs.items()
        if not is_remote(path) and (path / trials.COMPARISON).is_file()
    }
    if len(comparisons) == len(runs):
        if len(runs) == 1:  # a report without a column of names
            comparisons = {"": next(iter(comparisons.values()))}
        summaries = dict(sorted(comparisons.items(), key=lambda item: item[1].num_parameters))
        origin = ""
        if arguments.out is not None:
            origin = pages.origin_of(paths)
            pages.check_out(out, origin)
        report.write_report(summaries, out, arguments.format, origin)
        report.print_report(summaries, out)
        return 0
    lines, workdirs = [], {}
    for name, path in runs.items():
        if name not in comparisons:
            lines.append(curves.read_run(path, name))
            workdirs[name] = path
            continue
        for outcome in comparisons[name].outcomes:
            if outcome.best is None:
                print(f"{name}: {outcome.contender.name} has no finished run, and is not drawn")
        for line in report.best_lines(comparisons[name]):
            label = f"{name}: {line.name}"
            lines.append(dataclasses.replace(line, name=label))
            workdirs[label] = path
    if arguments.out is None:
        out = out / "report"
    pages.write_run_report(lines, out, workdirs, arguments.format)
    pages.print_lines(lines)
    pages.print_where(out)
    return 0


def _default_labels(paths: Sequence[PurePath]) -> list[str]:
    """Names of runs and comparisons: the last parts of each path, as many as make it unique; at
    least two, with the contender, for a trial of a comparison."""
    lengths = [2 if path.parts[-3:-2] == ("cells",) else 1 for path in paths]
    while True:
        names = ["/".join(p.parts[-n:]) for p, n in zip(paths, lengths, strict=True)]
        if len(set(names)) == len(names):
            return names
        lengths = [n + (names.count(name) > 1) for n, name in zip(lengths, names, strict=True)]


def _refuse_commas(flag: str, words: Sequence[str]) -> None:
    for word in words:
        if "," in word:
            raise UsageError(f"{flag} {word}: write {' '.join(word.split(','))}")


def _without_evaluations(config: TrainConfig) -> TrainConfig:
    """The config of a contender for trials, whose only evaluation is the validation loss."""
    evaluation = dataclasses.replace(config.eval, hellaswag_every=None, own=None, data=())
    if evaluation.every is None:  # the search needs the loss at the end
        evaluation = dataclasses.replace(evaluation, every=config.num_steps)
    # It would name one of the sets that the line above has taken away.
    checkpoint = dataclasses.replace(config.checkpoint, keep_best_of=None)
    return dataclasses.replace(config, eval=evaluation, checkpoint=checkpoint)


def _make_contenders(
    config: ComparisonConfig, arguments: CompareArguments
) -> tuple[Contender, ...]:
    """Make the contenders, with a grid for each tuned field that the contender has."""
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
    # `make_grid` returns None for a field of --tune that the contender lacks.
    file_grids = {name: config.grids.get(name, {}) for name in config.contenders}
    fields = {name: [*dict.fromkeys([*config.tune, *grids])] for name, grids in file_grids.items()}
    starts = _start_values(arguments.start_from, fields)
    contenders = []
    for name, each in config.contenders.items():
        grids = {**file_grids[name], **({LEARNING_RATE: rates} if rates else {})}
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
            way_out = _advise_fields(contender.config, tuned, lacking) if len(tuned) < most else ""
            print(
                f"maxmars: {contender.name} lacks {', '.join(lacking)}: it is tuned over "
                f"{', '.join(tuned) or 'nothing'}.{way_out}",
                file=sys.stderr,
            )
    return tuple(contenders)


def _advise_fields(config: TrainConfig, tuned: Sequence[str], lacking: Sequence[str]) -> str:
    """Advice for a contender that is tuned over fewer fields than others: how it gets as many."""
    from maxmars.compare.grids import fields_of

    if isinstance(config.optimizer, OptaxConfig):
        make = config.optimizer.source
        defaults = ", ".join(f"{field}=NUMBER" for field in lacking)
        if make.file:
            function = f"{make.function} of {make.file}"
            return f" To tune it too, give {function} the keyword defaults {defaults}."
    others = [field for field in fields_of(config) if field not in tuned]
    return f" To tune it as much as others, add some of its own to --tune: {', '.join(others)}."


def _start_values(
    directory: str | None, fields: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Number]]:
    """Values of each contender's best setting in the comparison of `--start-from`."""
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
        config, setting = outcome.contender.config, dict(outcome.best.setting)
        # An earlier search there, over other fields, may have found the best setting.
        changed = [field for field, value in setting.items() if value != value_of(config, field)]
        tried = list(dict.fromkeys([*(g.field for g in outcome.contender.grids), *changed]))
        if missing := [field for field in tried if field not in tuned]:
            raise UsageError(
                f"--start-from {directory}: {name} was tuned over {', '.join(missing)} too; name "
                "the same fields in --tune."
            )
        best = with_values(config, setting)
        values = {field: value_of(best, field) for field in tried}
        starts[name] = {field: value for field, value in values.items() if value is not None}
    return starts
