"""Opening a run in four phases: check, lock, restore, open.

`check` finds everything that can be wrong with config, data and workdir before anything is written.
`lock` takes the workdir and describes the run there. `restore` reads or makes the state that it
begins with. `open_files` opens the files that grow while the run trains. Each sets its fields of
`Run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from maxmars.checkpoint import Checkpoint, Checkpointer
from maxmars.checkpoint.digest import combine, digest
from maxmars.checkpoint.environment import changes_since, environment
from maxmars.checkpoint.journal import Line, read_journal
from maxmars.config import ModuleConfig, TrainConfig, differences, to_dict
from maxmars.config.chips import chip_name
from maxmars.config.train import with_own_defaults
from maxmars.config.user_code import sources_in
from maxmars.data.batches import (
    SplitTokens,
    TrainBatches,
    ValidationBatches,
    open_data,
    vocabulary_hint,
)
from maxmars.data.tokenizer import copy_tokenizer
from maxmars.data.verification import Verification, own_share
from maxmars.distributed import processes, sharding
from maxmars.distributed.files import Workdir, is_remote, write_bytes, write_json
from maxmars.distributed.progress import HostLog, Progress
from maxmars.distributed.workdir import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    ENVIRONMENT,
    KEPT_SOURCES,
    PARAMETERS,
    TOKENIZER,
    VERIFIED,
    of_process,
)
from maxmars.eval.hellaswag import HellaSwagInLoop
from maxmars.eval.own_evaluation import OwnInLoop
from maxmars.eval.validation import make_eval_step, sees_later_tokens, validation_loss
from maxmars.model.parameters import Parameters
from maxmars.train import compile_cache
from maxmars.train.agreement import check_agreement
from maxmars.train.auto import (
    check_memory,
    gathered_bytes,
    prepare,
    slow_network_warning,
)
from maxmars.train.clock import Clock
from maxmars.train.init_from import (
    InitFrom,
    Initial,
    check_origin,
    fetch_source,
    load_initial,
)
from maxmars.train.journal import Journal, rewound_to
from maxmars.train.metrics import MetricsWriter, validation_losses
from maxmars.train.optimizer import describe_parameters, note_on_package, summarize_rules
from maxmars.train.resume import (
    check_data,
    continued_config,
    is_same_place,
    rounding_change,
    saved_run,
)
from maxmars.train.step import (
    TrainState,
    TrainStep,
    abstract_saved_state,
    abstract_train_state,
    continued_state,
    init_train_state,
    saved_state,
)
from maxmars.train.trackers import check_trackers, open_trackers


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that a run makes at step 0, every `every` steps and after the last step."""

    name: str
    every: int
    metric: str
    """A metric that every such evaluation records."""
    measure: Callable[[Any, Callable[[], None]], tuple[dict[str, float], str]]
    """From the parameters to metrics, and to one line for people. The second argument is called
    before each batch, and may end the evaluation by an exception."""


@dataclass(kw_only=True)
class Run:
    """A run, and where it stands: `check` makes it, and the phases after that fill it."""

    config: TrainConfig
    """With everything chosen that was `auto`."""
    workdir: Workdir
    clock: Clock
    progress: Progress
    environment: Mapping[str, Any]
    train_step: TrainStep
    data: SplitTokens
    data_digest: str
    evaluations: Sequence[Evaluation]
    saved: Checkpoint | None
    """What it continues from; None for a new run."""
    initial: Initial | None
    """The weights that a new run starts from; None draws them at random."""
    rewound: Line | None
    """The line of the rewind that it goes on from; None without one."""
    messages: Sequence[str]
    """Lines about choices, to print once the log of this host is open."""

    checkpointer: Checkpointer = field(init=False)

    state: TrainState = field(init=False)
    step: int = field(init=False)
    batches: TrainBatches = field(init=False)

    verification: Verification = field(init=False)
    journal: Journal = field(init=False)
    writer: MetricsWriter = field(init=False)
    tokens: Callable[[int], int] = field(init=False)
    """From a step to the tokens that the run has trained on after it."""


def open_run(
    config: TrainConfig,
    workdir: Workdir,
    *,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    clock: Clock,
    command: str | None,
    stack: contextlib.ExitStack,
    quiet: bool = False,
) -> Run:
    """Open a run to begin or to continue it; see `loop.train` for arguments and errors.

    The open files, the lock and the threads are closed by `stack`.
    """
    progress = stack.enter_context(Progress(quiet=quiet))
    with progress.waiting("opening the run"):
        run = check(
            config,
            workdir,
            init_from,
            resume_overrides,
            clock,
            progress,
        )
        lock(run, stack)
        restore(run, stack)
    open_files(run, command, stack)
    return run


def check(
    config: TrainConfig,
    workdir: Workdir,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    clock: Clock,
    progress: Progress,
) -> Run:
    """Find everything that can be wrong before anything is written, and choose what was not set."""
    config = with_own_defaults(config)
    check_agreement(config, init_from, resume_overrides)
    given = config
    if not is_remote(workdir) and workdir.exists() and not workdir.is_dir():
        raise ValueError(f"--workdir {workdir} is a file; name a directory, or one to be made.")
    mesh = sharding.training_mesh(config)
    parameters = Parameters(config.model, mesh)
    state, here = abstract_train_state(config, parameters), environment(mesh)
    check_trackers(config.log, workdir)
    saved, rewound = saved_run(workdir / CHECKPOINTS, resume_overrides), None
    if saved is not None:
        rewound = _rewound(workdir, saved.step)
        config = continued_config(
            saved,
            config,
            parameters=parameters,
            overrides=resume_overrides,
            new_optimizer_state=rewound is not None and rewound["new_optimizer_state"],
            log=progress.message,
        )
    messages: list[str] = []
    warmup = config.schedule.warmup_steps
    if warmup > config.num_steps:
        messages.append(
            f"warning: schedule.warmup_steps={warmup} exceeds num_steps={config.num_steps}: the "
            f"learning rate comes to {config.num_steps / warmup:.0%} of its peak; lower "
            "--schedule.warmup-steps, or continue later with more --num-steps"
        )
    recorded = None
    if saved is not None and is_same_place(saved.environment, here):
        recorded = saved.config
        if recorded.global_batch_size != config.global_batch_size:
            recorded = None
    check_memory(config, mesh, state)
    check_origin(workdir, init_from, continues=saved is not None)
    tokens = open_data(config.data, "train", model=config.model)
    data_digest = processes.text_from_primary(tokens.digest) or ""
    if saved is not None:
        check_data(saved, data_digest)
        changes = changes_since(saved.environment, here)
        if changes:
            messages.append(f"changed since step {saved.step}: {', '.join(changes)}")
    elif hint := vocabulary_hint(tokens, config.model):
        messages.append(hint)
    if not config.data.verify:
        messages.append("data.verify is off: files are not compared with their checksums")
    # Enough tokens, and readable? They are the same in any number of microbatches.
    once = dataclasses.replace(config, num_microbatches=1)
    next(TrainBatches(tokens, once, mesh, prefetch_steps=0))
    compile_cache.keep_beside(workdir, mesh.devices.flat[0].platform)
    with clock("start", "choosing precision, microbatches and rematerialisation"):
        train_step = prepare(
            config,
            parameters,
            tokens.types,
            log=messages.append,
            recorded=recorded,
        )
    config, device = train_step.config, mesh.devices.flat[0]
    if device.platform == "gpu":
        warning = slow_network_warning(
            config,
            mesh,
            sharding.fast_networks(list(mesh.devices.flat)),
            topology=f"{chip_name(device.device_kind) or 'NAME'}:{mesh.size}",
            sent=f"about {gathered_bytes(config, parameters) / 1e9:.1f} GB a GPU and step",
        )
        messages += [] if warning is None else [warning]
    asked = {name: old for name, old, _ in differences(given, config)}
    config = dataclasses.replace(config, asked=asked)
    if saved is not None and (change := rounding_change(saved, config, here)):
        messages.append(change)
    evaluations = list(make_evaluations(config, mesh, tokens, progress.message))
    initial = None
    if saved is None and init_from is not None:
        init_from = fetch_source(workdir, init_from)
        with clock("start", "reading the weights to start from"):
            initial = load_initial(config, train_step, init_from, tokens.origin)
    return Run(
        config=config,
        workdir=workdir,
        clock=clock,
        progress=progress,
        environment=here,
        train_step=train_step,
        data=tokens,
        data_digest=data_digest,
        evaluations=evaluations,
        saved=saved,
        initial=initial,
        rewound=rewound,
        messages=messages,
    )


def _rewound(workdir: Workdir, step: int) -> Line | None:
    """`rewound_to` by the journal, which process 0 reads."""
    text = processes.text_from_primary(lambda: json.dumps(rewound_to(read_journal(workdir), step)))
    return json.loads(text or "null")


def lock(run: Run, stack: contextlib.ExitStack) -> None:
    """Take the workdir, so that no other run writes there, and describe this run in it."""
    config, workdir, mesh = run.config, run.workdir, run.train_step.mesh
    data = run.data.describe() | {"digest": run.data_digest}
    parameters = run.train_step.parameters
    table = describe_parameters(config.optimizer, parameters)
    rules = summarize_rules(config.optimizer, parameters)
    run.checkpointer = Checkpointer(
        workdir / CHECKPOINTS, config, mesh=mesh, data_digest=run.data_digest
    )
    stack.enter_context(run.checkpointer)
    if run.saved is None and run.checkpointer.latest_step() is not None:
        raise ValueError(
            f"another start has saved in {workdir} meanwhile; the same command now continues it."
        )
    if processes.is_primary():
        copy_tokenizer(run.data.origin, workdir / TOKENIZER)
        write_json(workdir / CONFIG, to_dict(config))
        write_json(workdir / ENVIRONMENT, run.environment)
        write_json(workdir / DATA, data)
        write_bytes(workdir / PARAMETERS, f"{table}\n".encode())
        for folder, part in KEPT_SOURCES.items():
            for source in sources_in(getattr(config, part)):
                write_bytes(workdir / folder / Path(source.file).name, source.text())
    host_log = HostLog(workdir, jax.process_index(), may_write=run.checkpointer.check_owner)
    log = run.progress.message
    run.progress.copy_to(stack.enter_context(host_log).write)
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    log(
        f"{config.name}: {parameters.count / 1e6:.2f}M parameters on "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({axes}), "
        f"{config.tokens_per_step:,} tokens a step, {data['num_tokens']:,} training tokens"
    )
    log(f"{rules}; parameters.txt says which")
    note = note_on_package(config.optimizer)
    if note is not None and run.saved is None:
        log(note)
    if run.train_step.evaluated is not None:
        log(f"evaluated and exported: {run.train_step.evaluated}")
    for text in run.messages:
        log(text)


def restore(run: Run, stack: contextlib.ExitStack) -> None:
    """Read the state from the newest sound checkpoint or make a new one, and go to its examples.

    Raises:
      ValueError: no checkpoint is sound.
    """
    train_step, log = run.train_step, run.progress.message
    run.step, position = 0, 0
    with run.clock("start", "reading the checkpoint"):
        if run.saved is not None:
            rewound = run.rewound
            is_new = rewound is not None and rewound["new_optimizer_state"]
            restored = run.checkpointer.restore(
                lambda saved: abstract_saved_state(train_step, saved, new_optimizer_state=is_new),
                None if rewound is None else rewound["step"],  # no older one, if it is damaged
                whole=not is_new,
            )
            run.saved = saved = restored.checkpoint
            run.step, position = saved.step, saved.data_position
            log(f"continuing from step {run.step}")
            if rewound is not None and rewound["skip_examples"]:
                position += rewound["skip_examples"]
                log(f"examples {saved.data_position:,} to {position:,} are left out")
            if is_new:
                log("the optimizer's state is made anew")
            run.state = continued_state(train_step, restored.state)
        elif run.initial is not None:
            start = run.initial.origin
            taken = "weights and optimizer state" if start["optimizer_state"] else "weights"
            log(f"starting from the {taken} of {start['weights']}")
            run.state = run.initial.state
        else:
            run.state = init_train_state(run.config, train_step.parameters)
    run.batches = TrainBatches(run.data, run.config, train_step.mesh, position=position)
    stack.callback(run.batches.close)


def open_files(run: Run, command: str | None, stack: contextlib.ExitStack) -> None:
    """Open the files that grow while the run trains."""
    config, workdir, saved = run.config, run.workdir, run.saved
    owner, first_step = run.checkpointer.check_owner, run.step
    verification = Verification(
        own_share(run.data.files) if config.data.verify else (),
        workdir / of_process(VERIFIED, jax.process_index(), ".jsonl"),
        may_write=owner,
    )
    run.verification = stack.enter_context(verification)
    if saved is None:
        trained, told = 0, None
        with run.clock("start", "making the digest of the state"):
            state_digest = combine(digest(saved_state(run.train_step, run.state)))
    else:  # a step before may have had more or fewer tokens
        trained, told, state_digest = saved.tokens, saved.journal or "", saved.digest
    run.tokens = lambda step: trained + (step - first_step) * config.tokens_per_step
    began = {
        "step": first_step,
        "digest": state_digest,
        "position": run.batches.position,
        "command": command,
        "config": to_dict(config),
        "data": run.data_digest,
        "environment": run.environment,
    }
    if saved is None:  # a run that goes on has the origin of its first session
        began["init_from"] = None if run.initial is None else run.initial.origin
    run.writer = MetricsWriter(
        workdir,
        first_step,
        tokens=run.tokens,
        may_write=owner,
        trackers=open_trackers(config, workdir, first_step, log=run.progress.message),
    )
    stack.enter_context(run.writer)
    run.journal = Journal(
        workdir,
        run.clock,
        began,
        checkpoint=told,
        mark=lambda: run.writer.mark,
        may_write=owner,
    )
    stack.enter_context(run.journal)
    losses = processes.from_primary(list(validation_losses(run.writer.kept).items()))
    run.checkpointer.evaluated(dict(losses))


def make_evaluations(
    config: TrainConfig,
    mesh: Mesh,
    tokens: SplitTokens,
    log: Callable[[str], None],
) -> Iterator[Evaluation]:
    """The evaluations that the config asks for: validation loss, HellaSwag, the user's own.

    `tokens`, of training, have the tokenizer that the last two take. `log` is told if the data
    have fewer windows than the config asks for.

    Raises:
      ValueError, FileNotFoundError, ImportError: see `open_data`, `ValidationBatches`,
        `HellaSwagInLoop` and `OwnEvaluation`.
    """
    if config.eval.every is not None:
        validation = open_data(config.data, "val", model=config.model)
        batches = ValidationBatches(
            validation,
            mesh,
            num_windows=config.eval.num_windows,
            batch_size=config.eval_batch_size,
        )
        if batches.num_windows < config.eval.num_windows:
            log(
                f"the validation split has {batches.num_windows} windows, fewer than "
                f"eval.num_windows={config.eval.num_windows}; all are scored."
            )
        eval_step = make_eval_step(config.model, mesh)
        is_checked = not isinstance(config.model, ModuleConfig)

        def measure_loss(
            params: Any, before_batch: Callable[[], None]
        ) -> tuple[dict[str, float], str]:
            nonlocal is_checked
            if not is_checked:
                before_batch()
                if sees_later_tokens(eval_step, mesh, params, next(iter(batches))):
                    raise ValueError(
                        f"model.make={config.model.make!r}: the loss of a token depends on tokens "
                        "after it, which it is to predict; mask them, in attention and elsewhere."
                    )
                is_checked = True
            loss = validation_loss(eval_step, mesh, params, batches, before_batch).loss
            return {"eval/loss": loss}, f"validation loss {loss:.4f} nats a token"

        yield Evaluation(
            name="validation", every=config.eval.every, metric="eval/loss", measure=measure_loss
        )
    if config.eval.hellaswag_every is not None:
        yield Evaluation(
            name="HellaSwag",
            every=config.eval.hellaswag_every,
            metric="eval/hellaswag_acc_norm",
            measure=HellaSwagInLoop(config, mesh, tokens),
        )
    if config.eval.every is not None:
        for source in config.eval.own or ():
            own = OwnInLoop(source, config, mesh, tokens)
            yield Evaluation(
                name=own.name, every=config.eval.every, metric=own.time_metric, measure=own
            )
