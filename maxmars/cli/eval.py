"""`maxmars eval`: scores of one trained model, or of two on the same data.

Of the two backends, native and lm-evaluation-harness, each refuses the options of the other. Data,
functions and number of windows that no option names are those of the run's config. All processes of
a cluster take part; process 0 prints and writes.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import rich
import tyro

from maxmars.cli.output import why_no_output
from maxmars.cli.parse import parse_options
from maxmars.config import MeshConfig, ValidationSet
from maxmars.config.checks import CheckedConfig, Count, NotNegative, Positive, UsageError
from maxmars.config.data import require_distinct
from maxmars.config.user_code import Source

_NATIVE_TASKS = ("loss", "hellaswag", "own")


@dataclass(frozen=True, kw_only=True)
class DataArguments(CheckedConfig):
    """Data of the validation loss."""

    path: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]PLACE ...")] = ()
    """Data to score: `PLACE`, or several `NAME=PLACE`. PLACE is a directory of tokens, of which the
    validation split is scored, a file of text, or a function of your own, `FILE.py:NAME`. Without
    this option it is the validation split of the run's data, and its sets in eval.data."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Tokenizer of token files of other programs in --data.path, if it is not GPT-2's: byte, gpt2,
    or the path of a tokenizer.json."""
    vocab_size: Annotated[Count[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of token ids in such files; None is the tokenizer's."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of a token in such files of nanoGPT."""
    num_windows: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of sequences of the model's context to score; None is the run's number, else 512."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct([(one.name, f"data.path={one.spec}") for one in self.sets])

    @property
    def sets(self) -> tuple[ValidationSet, ...]:
        """The data as sets with names."""
        return tuple(map(ValidationSet.parse, self.path))


@dataclass(frozen=True, kw_only=True)
class HellaSwagArguments(CheckedConfig):
    """HellaSwag questions to score. A context that is too long for the model loses its beginning, a
    question with an ending that is too long is left out, and both are counted."""

    path: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the questions: hellaswag_val.jsonl, also with .gz or .zst, or the .parquet of the
    hub; None downloads it once into the cache directory (MAXMARS_CACHE, default
    ~/.cache/maxmars)."""
    num_questions: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of questions to score, the first ones; None scores all (10,042)."""


@dataclass(frozen=True, kw_only=True)
class LMEvalArguments(CheckedConfig):
    """Options of `--backend lm-eval`."""

    limit: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of questions of each task to score, the first ones; None scores all."""
    num_fewshot: Annotated[NotNegative[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of solved examples before each question; None is the number of the task, mostly 0."""
    include_path: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory with more YAML files of tasks."""
    seed: int = 1234
    """Seed of the choice of examples and of sampling; the default is lm-evaluation-harness's."""


@dataclass(frozen=True, kw_only=True)
class EvalArguments(CheckedConfig):
    """Score a trained model, or two on the same data."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars eval runs/quickstart",
        "maxmars eval runs/a --against runs/b --output scores.json",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "tasks",
        "against",
        "output",
        "data.path",
        "data.num-windows",
        "hellaswag.path",
        "hellaswag.num-questions",
        "batch-size",
        "backend",
    )

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Model to score: the working directory of a run, such as runs/quickstart, one of its
    checkpoints, a Hugging Face directory, or hf:OWNER/NAME[@REVISION] on the hub."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="A,B,...")] = None
    """Scores to compute, among loss, hellaswag and own. None computes hellaswag, loss if there is
    validation data, and own if there are functions of your own (--own). With --backend lm-eval:
    tasks, groups and patterns of lm-evaluation-harness, YAML files, or mars_paper, the nine tasks
    of the MARS paper."""
    backend: Literal["native", "lm-eval"] = "native"
    """Program that scores; `lm-eval` is lm-evaluation-harness (extra `eval`)."""
    against: Annotated[str | None, tyro.conf.arg(metavar="TARGET")] = None
    """A second model to score on the same data; a test says if the difference may be chance."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """File for the scores; those of each question go to FILE.hellaswag.jsonl beside it."""
    own: tuple[Source | str, ...] | None = None
    """Functions of your own, `FILE.py:NAME`, each called as `NAME(trained)` with the result of
    `maxmars.eval.load`; None takes those of the run (eval.own)."""
    batch_size: Annotated[Count[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of rows scored at once, over all devices; None chooses by the device. The scores do
    not depend on it."""
    hellaswag: HellaSwagArguments = field(default_factory=HellaSwagArguments)
    data: DataArguments = field(default_factory=DataArguments)
    lm_eval: LMEvalArguments = field(default_factory=LMEvalArguments)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, if several score together; goes with the next two options."""
    num_processes: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes."""
    process_id: Annotated[NotNegative[int] | None, tyro.conf.arg(metavar="I")] = None
    """Number of this process, from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own is not None:
            own = (Source.parse(s, field="--own", example="my_eval.py:rhyme") for s in self.own)
            object.__setattr__(self, "own", tuple(own))


def run(argv: list[str]) -> int:
    """Run `maxmars eval`."""
    arguments = parse_options(EvalArguments, argv, prog="maxmars eval")
    tasks = _check_tasks(arguments)
    # Imported late, so that --help and wrong arguments answer at once.
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.distributed import processes, sharding

    cluster = arguments.coordinator, arguments.num_processes, arguments.process_id
    open_port = processes.initialize(*cluster)
    processes.check_accelerators()
    # Only now, as all processes must agree to stop.
    if problem := processes.text_from_primary(lambda: why_no_output(arguments.output)):
        raise UsageError(problem)
    mesh = sharding.make_mesh(arguments.mesh)
    processes.warn_once(open_port)
    if arguments.backend == "lm-eval":
        _run_lm_eval(arguments, tasks, mesh)
    else:
        _run_native(arguments, tasks, mesh)
        if arguments.output is arguments.against is None and processes.is_primary():
            command = shlex.join(["maxmars", "eval", *argv])
            print(f"next: {command} --against OTHER_MODEL --output scores.json")
    return 0


def _check_tasks(arguments: EvalArguments) -> list[str]:
    """The names in --tasks; [] if there are none.

    Raises:
      UsageError: a task is unknown, or an option belongs to the other backend.
    """
    backend = arguments.backend
    tasks = [name.strip() for name in (arguments.tasks or "").split(",") if name.strip()]
    if backend == "lm-eval":
        if not tasks:
            raise UsageError(
                "--backend lm-eval needs --tasks, such as arc_easy,piqa or mars_paper."
            )
        others = {
            "--against": arguments.against is not None,
            "--hellaswag.*": arguments.hellaswag != HellaSwagArguments(),
            "--own": arguments.own is not None,
            "--data.*": arguments.data != DataArguments(),
        }
    else:
        others = {"--lm-eval.*": arguments.lm_eval != LMEvalArguments()}
        unknown = [name for name in tasks if name not in _NATIVE_TASKS]
        if unknown or (arguments.tasks is not None and not tasks):
            what = f"there is no task {unknown[0]!r}" if unknown else "no task is named"
            raise UsageError(
                f"--tasks {arguments.tasks!r}: {what}; the tasks are {', '.join(_NATIVE_TASKS)}; "
                "--backend lm-eval has those of lm-evaluation-harness."
            )
    for option, is_given in others.items():
        if is_given:
            other = "native" if backend == "lm-eval" else "lm-eval"
            raise UsageError(
                f"{option} belongs to --backend {other}, not to {backend}; leave it out."
            )
    return tasks


def _token_files(options: DataArguments) -> dict[str, Any]:
    """The given options of --data that describe tokens of other programs, by name."""
    names = ("tokenizer", "vocab_size", "dtype")
    files = {name: value for name in names if (value := getattr(options, name)) is not None}
    places = [one.place for one in options.sets if isinstance(one.place, str)]
    if files and all(Path(place).is_file() for place in places):
        flag = next(iter(files)).replace("_", "-")
        raise UsageError(
            f"--data.{flag} says what the tokens of a directory in --data.path are; name one there."
        )
    return files


def _run_native(arguments: EvalArguments, tasks: list[str], mesh: Any) -> None:
    from maxmars.distributed import processes
    from maxmars.distributed.progress import Progress, loading_jax

    with loading_jax():
        from maxmars.data.batches import open_validation
        from maxmars.distributed.recorded_code import recorded_code
        from maxmars.distributed.workdir import EVAL_SOURCE
        from maxmars.eval.hellaswag import load_questions
        from maxmars.eval.report import score_models
        from maxmars.eval.trained_model import find_target

    files, own, questions, chosen = _token_files(arguments.data), (), [], tasks or _NATIVE_TASKS
    names = (arguments.target, arguments.against)
    targets = [find_target(name) for name in names if name is not None]
    # Data, functions and tokenizer are those of the first model: both are scored on the same.
    first, data, sets = targets[0], None, arguments.data.sets
    evaluation = first.evaluation()
    # Of `tasks`, which the user named, none may lack its data; of `chosen` such ones are left out.
    if not sets and "loss" in chosen:
        data = first.data()
        sets = recorded_code(evaluation.data, first.directory, EVAL_SOURCE)  # copies in sources/
    if data is None and not sets and "loss" in tasks:
        raise UsageError(
            f"{first.path} does not say on which data it was trained, as a run does; name a "
            "directory of tokens (--data.path DIR), or leave the loss out (--tasks hellaswag)."
        )
    if "own" in chosen:
        own = arguments.own
        if own is None:
            own = recorded_code(evaluation.own or (), first.directory, EVAL_SOURCE)
        if not own and tasks:
            raise UsageError(
                f"{first.path} names no function to evaluate it by, as eval.own of a run does; "
                "name some by --own my_eval.py:rhyme, or leave own out of --tasks."
            )
    if "hellaswag" in chosen:
        path, count = arguments.hellaswag.path, arguments.hellaswag.num_questions
        with Progress(stderr=True) as progress, progress.waiting("reading HellaSwag"):
            questions = load_questions(path, num_questions=count)  # may download 12 MB
    path = arguments.data.path
    # One PLACE without a name gives the metric `loss`, not `NAME/loss`.
    is_nameless = len(path) == 1 and not path[0].startswith(f"{sets[0].name}=")

    def open_splits(model: Any) -> dict[str, Any]:
        # The tokenizer is opened for files of text alone, as a model may lack it.
        splits = open_validation(
            data, sets, lambda: first.tokenizer(first.config()), model, files=files
        )
        return {"": splits[sets[0].name]} if is_nameless else splits

    report = score_models(
        targets,
        mesh,
        data=open_splits if "loss" in chosen and (data is not None or sets) else None,
        num_windows=arguments.data.num_windows or evaluation.num_windows,
        questions=questions,
        own=own,
        batch_size=arguments.batch_size,
    )
    if processes.is_primary():
        rich.print(report.table())
        for note in report.notes():
            print(note)
    if arguments.output is not None:
        report.write(arguments.output)


def _run_lm_eval(arguments: EvalArguments, tasks: list[str], mesh: Any) -> None:
    from maxmars.checkpoint.environment import environment
    from maxmars.distributed import processes
    from maxmars.distributed.files import write_json
    from maxmars.eval import load
    from maxmars.eval.lm_eval import run_lm_eval
    from maxmars.eval.report import harness_table

    model = load(arguments.target, mesh=mesh)
    options = arguments.lm_eval
    report = run_lm_eval(
        model,
        tasks,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        include_path=options.include_path,
        batch_size=arguments.batch_size,
        seed=options.seed,
    )
    if processes.is_primary():
        rich.print(harness_table(model.name, report))
        print(f"{report['harness']}; ± is one standard error")
        if arguments.output is not None:
            about = {"target": arguments.target, "name": model.name, "digest": model.digest}
            fields = about | report
            write_json(arguments.output, fields | {"environment": environment(mesh)})
