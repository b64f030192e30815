"""`maxmars eval`: scores of one trained model, or of two on the same data."""

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

_TASKS = ("loss", "hellaswag", "own")


@dataclass(frozen=True, kw_only=True)
class DataArguments(CheckedConfig):
    """The data of the validation loss."""

    path: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]PLACE ...")] = ()
    """`PLACE`, or several `NAME=PLACE`: directories of tokens, whose validation split is taken,
    files of text, or functions of your own, `FILE.py:NAME`. Without it the loss is measured on the
    validation split of the run's data and on its sets (eval.data)."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Of other programs' files there that are not GPT-2's: byte, gpt2, or the path of a
    tokenizer.json."""
    vocab_size: Annotated[Count[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of token ids of such files; None is the tokenizer's."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of a token in such files of nanoGPT."""
    num_windows: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of sequences of the model's context to score; None takes as many as the run, or
    512."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct([(one.name, f"data.path={one.spec}") for one in self.sets])

    @property
    def sets(self) -> tuple[ValidationSet, ...]:
        """The data by name."""
        return tuple(map(ValidationSet.parse, self.path))


@dataclass(frozen=True, kw_only=True)
class HellaSwagArguments(CheckedConfig):
    """The HellaSwag questions that are scored. Contexts too long for the model are cut at their
    beginning, questions with an ending too long for it left out, and both are counted."""

    path: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The file hellaswag_val.jsonl, also with .gz or .zst, or the .parquet of the hub; None
    downloads it once into the cache directory (MAXMARS_CACHE, default ~/.cache/maxmars)."""
    num_questions: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Score this number of questions only, the first ones; None scores all (10,042)."""


@dataclass(frozen=True, kw_only=True)
class LMEvalArguments(CheckedConfig):
    """Options of `--backend lm-eval`."""

    limit: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Score this number of questions of each task only, the first ones."""
    num_fewshot: Annotated[NotNegative[int] | None, tyro.conf.arg(metavar="N")] = None
    """Solved examples before each question; None is what the task says, mostly 0."""
    include_path: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of more task YAML files."""
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
    """The working directory of a run, such as runs/quickstart, one of its checkpoints, a Hugging
    Face directory, or hf:OWNER/NAME[@REVISION] on the hub."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="A,B,...")] = None
    """What to measure, of loss, hellaswag and own. None takes hellaswag, where there is validation
    data loss, and where there are functions of your own (--own) own. With --backend lm-eval, tasks
    of lm-evaluation-harness, its groups and patterns, YAML files, or mars_paper, the nine of the
    MARS paper."""
    backend: Literal["native", "lm-eval"] = "native"
    """`lm-eval` runs the tasks of lm-evaluation-harness (extra `eval`)."""
    against: Annotated[str | None, tyro.conf.arg(metavar="TARGET")] = None
    """Also score this one on the same data, and say whether the difference may be chance."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write the scores here, and those of each question beside it (FILE.hellaswag.jsonl)."""
    own: tuple[Source | str, ...] | None = None
    """Functions of your own, `FILE.py:NAME`, each called as `NAME(trained)` with what
    `maxmars.eval.load` returns; None takes those of the run (eval.own)."""
    batch_size: Annotated[Count[int] | None, tyro.conf.arg(metavar="N")] = None
    """Rows scored at once, over all devices; None takes what suits the device. The scores do not
    depend on it."""
    hellaswag: HellaSwagArguments = field(default_factory=HellaSwagArguments)
    data: DataArguments = field(default_factory=DataArguments)
    lm_eval: LMEvalArguments = field(default_factory=LMEvalArguments)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, where several processes score together; goes with the next two."""
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
    # Imported late, as --help and wrong arguments need not wait for them.
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.distributed import processes, sharding

    cluster = arguments.coordinator, arguments.num_processes, arguments.process_id
    open_port = processes.initialize(*cluster)
    processes.check_accelerators()
    if arguments.output is not None:
        _check_output(arguments.output)
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
    """The names in --tasks; none if there are none. Refuses options of the other backend."""
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
        unknown = [name for name in tasks if name not in _TASKS]
        if unknown or (arguments.tasks is not None and not tasks):
            what = f"there is no task {unknown[0]!r}" if unknown else "no task is named"
            raise UsageError(
                f"--tasks {arguments.tasks!r}: {what}; the tasks are {', '.join(_TASKS)}; "
                "--backend lm-eval has those of lm-evaluation-harness."
            )
    for option, is_given in others.items():
        if is_given:
            other = "native" if backend == "lm-eval" else "lm-eval"
            raise UsageError(
                f"{option} belongs to --backend {other}, not to {backend}; leave it out."
            )
    return tasks


def _check_output(output: Path) -> None:
    """Refuse, in every process, a file that process 0 could not write after all the work."""
    from maxmars.distributed import processes

    problem = processes.text_from_primary(lambda: why_no_output(output))
    if problem is not None:
        raise UsageError(problem)


def _token_files(options: DataArguments) -> dict[str, Any]:
    """What --data says of the tokens of other programs."""
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

    files, own, questions, wanted = _token_files(arguments.data), (), [], tasks or _TASKS
    given = (arguments.target, arguments.against)
    targets = [find_target(target) for target in given if target is not None]
    first, data, sets = targets[0], None, arguments.data.sets
    evaluation = first.evaluation()
    if not sets and "loss" in wanted:
        data = first.data()
        sets = recorded_code(evaluation.data, first.directory, EVAL_SOURCE)
    if data is None and not sets and "loss" in tasks:
        raise UsageError(
            f"{first.path} does not say on which data it was trained, as a run does; name a "
            "directory of tokens (--data.path DIR), or leave the loss out (--tasks hellaswag)."
        )
    if "own" in wanted:
        own = arguments.own
        if own is None:
            own = recorded_code(evaluation.own or (), first.directory, EVAL_SOURCE)
        if not own and tasks:
            raise UsageError(
                f"{first.path} names no function to evaluate it by, as eval.own of a run does; "
                "name some by --own my_eval.py:rhyme, or leave own out of --tasks."
            )
    if "hellaswag" in wanted:
        path, count = arguments.hellaswag.path, arguments.hellaswag.num_questions
        with Progress(stderr=True) as progress, progress.waiting("reading HellaSwag"):
            questions = load_questions(path, num_questions=count)  # may download 12 MB
    path = arguments.data.path
    is_nameless = len(path) == 1 and not path[0].startswith(f"{sets[0].name}=")

    def open_(model: Any) -> dict[str, Any]:
        splits = open_validation(
            data, sets, lambda: first.tokenizer(first.config()), model, files=files
        )
        return {"": splits[sets[0].name]} if is_nameless else splits

    report = score_models(
        targets,
        mesh,
        data=open_ if "loss" in wanted and (data is not None or sets) else None,
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
