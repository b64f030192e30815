"""`maxmars eval`: the scores of trained models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from maxmars.cli.config_file import UsageError
from maxmars.config import MeshConfig

_TASKS = ("loss", "hellaswag")


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Where the validation loss is measured."""

    path: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of tokens, whose validation split is taken; None takes that of the run."""
    num_windows: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of sequences of the model's context to score; None takes as many as the run, or
    512."""


@dataclass(frozen=True, kw_only=True)
class HellaSwagArguments:
    """Which HellaSwag questions are scored."""

    path: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The file hellaswag_val.jsonl; None downloads it once into the cache directory (MAXMARS_CACHE,
    default ~/.cache/maxmars)."""
    num_questions: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score this number of questions only, the first ones; None scores all (10,042)."""


@dataclass(frozen=True, kw_only=True)
class LMEvalArguments:
    """What `--backend lm-eval` takes."""

    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score this number of questions of each task only, the first ones."""
    num_fewshot: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Solved examples before each question; None is what the task says, mostly 0."""
    include_path: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of more task YAML files."""
    seed: int = 1234
    """Seed of the choice of examples and of sampling; the default is lm-evaluation-harness's."""


@dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Score a trained model, or two on the same data.

    TARGET is the working directory of a run, one of its checkpoints, or a Hugging Face directory.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """What to score, such as runs/quickstart."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="A,B,...")] = None
    """One or more of loss and hellaswag; None takes hellaswag and, where there is validation data,
    loss. With --backend lm-eval, tasks of lm-evaluation-harness, its groups and patterns, YAML
    files, or mars_paper, the nine of the MARS paper."""
    backend: Literal["native", "lm-eval"] = "native"
    """`lm-eval` runs the tasks of lm-evaluation-harness (extra `eval`)."""
    against: Annotated[str | None, tyro.conf.arg(metavar="TARGET")] = None
    """Also score this one on the same data, and say whether the difference may be chance."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write the scores here, and those of each question beside it (FILE.hellaswag.jsonl)."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Rows scored at once, over all devices; None takes what suits the device. The scores do not
    depend on it."""
    hellaswag: HellaSwagArguments = field(default_factory=HellaSwagArguments)
    data: DataArguments = field(default_factory=DataArguments)
    lm_eval: LMEvalArguments = field(default_factory=LMEvalArguments)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, where several processes score together; goes with the next two."""
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes."""
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    """Number of this process, from 0."""


def run(argv: list[str]) -> int:
    """Run `maxmars eval`."""
    arguments = tyro.cli(
        EvalArguments, args=argv, prog="maxmars eval", config=(tyro.conf.AvoidSubcommands,)
    )
    _check_backend(arguments)
    if arguments.backend == "lm-eval":
        return _run_lm_eval(arguments)
    tasks = _parse_tasks(arguments.tasks)
    from maxmars import distributed, sharding  # these load JAX
    from maxmars.eval_report import HellaSwagOptions, LossOptions, evaluate
    from maxmars.eval_table import ProgressBars, print_report

    distributed.initialize(arguments.coordinator, arguments.num_processes, arguments.process_id)
    against = () if arguments.against is None else (arguments.against,)
    with ProgressBars() as progress:
        report = evaluate(
            (arguments.target, *against),
            sharding.make_mesh(arguments.mesh),
            tasks=tasks,
            loss=LossOptions(path=arguments.data.path, num_windows=arguments.data.num_windows),
            hellaswag=HellaSwagOptions(
                path=arguments.hellaswag.path, num_questions=arguments.hellaswag.num_questions
            ),
            batch_size=arguments.batch_size,
            progress=progress,
        )
    if distributed.is_primary():
        print_report(report)
    if arguments.output is not None:
        report.write(arguments.output)
    return 0


def _check_backend(arguments: EvalArguments) -> None:
    """Reject options of the other backend.

    Raises:
      UsageError: there are such, or tasks are missing that the backend does not choose itself.
    """
    harness = arguments.backend == "lm-eval"
    if harness and arguments.tasks is None:
        raise UsageError("--backend lm-eval needs --tasks, such as arc_easy,piqa or mars_paper.")
    given = {
        "--against": arguments.against is not None,
        "--hellaswag.*": arguments.hellaswag != HellaSwagArguments(),
        "--data.*": arguments.data != DataArguments(),
    }
    if not harness:
        given = {"--lm-eval.*": arguments.lm_eval != LMEvalArguments()}
    for option, is_given in given.items():
        if is_given:
            other = "native" if harness else "lm-eval"
            raise UsageError(
                f"{option} belongs to --backend {other}, not to {arguments.backend}; leave it out."
            )


def _run_lm_eval(arguments: EvalArguments) -> int:
    from maxmars import distributed, sharding  # these load JAX
    from maxmars.eval_table import print_harness_scores
    from maxmars.lm_eval_adapter import run_lm_eval
    from maxmars.metrics import environment, write_json
    from maxmars.trained_model import open_trained_model

    distributed.initialize(arguments.coordinator, arguments.num_processes, arguments.process_id)
    mesh, options = sharding.make_mesh(arguments.mesh), arguments.lm_eval
    model = open_trained_model(arguments.target, mesh=mesh)
    found = run_lm_eval(
        model,
        _names(arguments.tasks or ""),
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        include_path=options.include_path,
        batch_size=arguments.batch_size,
        seed=options.seed,
    )
    if distributed.is_primary():
        print_harness_scores(model.name, found)
        if arguments.output is not None:
            fields = {"target": arguments.target, "name": model.name, **found}
            write_json(arguments.output, fields | {"environment": environment(mesh)})
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_tasks(text: str | None) -> tuple[Literal["loss", "hellaswag"], ...] | None:
    if text is None:
        return None
    names = _names(text)
    unknown = [name for name in names if name not in _TASKS]
    if unknown or not names:
        what = f"there is no task {unknown[0]!r}" if unknown else "no task is named"
        raise UsageError(
            f"--tasks {text!r}: {what}; the tasks are {', '.join(_TASKS)}; "
            "--backend lm-eval has those of lm-evaluation-harness."
        )
    return tuple(name for name in _TASKS if name in names)
