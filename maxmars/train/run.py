"""Opening a run in four phases: check, lock, restore, open.

`check` finds everything that can be wrong with config, data and workdir before anything is written.
`lock` takes the workdir and describes the run there. `restore` reads or makes the state that it
begins with. `open_run` runs the three and opens the files that grow while the run trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from maxmars.checkpoint import Checkpoint, Checkpointer
from maxmars.checkpoint.digest import combine, digest
from maxmars.checkpoint.environment import changes_since, environment
from maxmars.config import TrainConfig, differences, to_dict
from maxmars.config.chips import chip_name
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
from maxmars.distributed import processes, programs, sharding
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
from maxmars.eval.validation import make_eval_step, validation_loss
from maxmars.model.parameters import Parameters
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
from maxmars.train.journal import Journal
from maxmars.train.metrics import MetricsWriter
from maxmars.train.optimizer import describe_parameters, summarize_rules
from maxmars.train.resume import (
    check_data,
    continued_config,
    is_same_place,
    rounding_change,
    saved_run,
)
from maxmars.train.steering import Order, Steering, open_order
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
    """An open run, and where it stands."""

    config: TrainConfig
    workdir: Workdir
    mesh: Mesh
    train_step: TrainStep
    batches: TrainBatches
    evaluations: Sequence[Evaluation]
    checkpointer: Checkpointer
    data_digest: str
    verification: Verification
    clock: Clock
    journal: Journal
    writer: MetricsWriter
    progress: Progress
    tokens: Callable[[int], int]
    """From a step to the tokens that the run has trained on after it."""
    state: TrainState
    step: int


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A run that can be opened; nothing is written yet."""

    config: TrainConfig
    """With everything chosen that was `auto`."""
    saved: Checkpoint | None
    """The newest checkpoint, to continue from; None for a new run."""
    mesh: Mesh
    environment: Mapping[str, Any]
    train_step: TrainStep
    tokens: SplitTokens
    data_digest: str
    evaluations: Sequence[Evaluation]
    initial: Initial | None
    """The weights that a new run starts from; None draws them at random."""
    order: Order | None
    """How the run is steered by hand, where that is still to be done."""
    messages: Sequence[str]
    """Lines about choices, to print once the log of this host is open."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The state, step and data position that the run goes on from."""

    state: TrainState
    step: int
    position: int
    tokens: int
    """Trained on so far; in earlier sessions a step may have had more or fewer."""
    digest: str
    """Of the state."""
    checkpoint: Checkpoint | None
    """What was restored; None for a new run."""


def open_run(
    config: TrainConfig,
    workdir: Workdir,
    *,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    steering: Steering,
    clock: Clock,
    command: str | None,
    stack: contextlib.ExitStack,
    memory_bytes: int | None = None,
    quiet: bool = False,
) -> Run:
    """Open a run to begin or to continue it; see `loop.train` for arguments and errors.

    The open files, the lock and the threads are closed by `stack`.
    """
    progress = stack.enter_context(Progress(quiet=quiet))
    with progress.waiting("opening the run"):
        checked = check(
            config,
            workdir,
            init_from,
            resume_overrides,
            steering,
            clock,
            progress.message,
            memory_bytes,
        )
        checkpointer = lock(checked, workdir, progress, stack)
        start = restore(checked, workdir, checkpointer, clock, progress.message)
    config, owner = checked.config, checkpointer.check_owner
    batches = TrainBatches(checked.tokens, config, checked.mesh, position=start.position)
    stack.callback(batches.close)
    verification = Verification(
        own_share(checked.tokens.files) if config.data.verify else (),
        workdir / of_process(VERIFIED, jax.process_index(), ".jsonl"),
        may_write=owner,
    )

    def tokens(step: int) -> int:
        return start.tokens + (step - start.step) * config.tokens_per_step

    trackers = open_trackers(config, workdir, start.step, log=progress.message)
    told = None if start.checkpoint is None else start.checkpoint.journal
    began = {
        "step": start.step,
        "digest": start.digest,
        "position": start.position,
        "command": command,
        "config": to_dict(config),
        "data": checked.data_digest,
        "environment": checked.environment,
        "earlier": start.checkpoint is not None and told is None,
        "order": checked.order,
    }
    if start.checkpoint is None:  # a run that goes on has the origin of its first session
        began["init_from"] = None if checked.initial is None else checked.initial.origin
    journal = Journal(workdir, clock, began, checkpoint=told, may_write=owner)
    writer = MetricsWriter(
        workdir,
        start.step,
        tokens=tokens,
        may_write=owner,
        trackers=trackers,
        on_write=journal.add,
    )
    return Run(
        config=config,
        workdir=workdir,
        mesh=checked.mesh,
        train_step=checked.train_step,
        batches=batches,
        evaluations=checked.evaluations,
        checkpointer=checkpointer,
        data_digest=checked.data_digest,
        verification=stack.enter_context(verification),
        clock=clock,
        journal=stack.enter_context(journal),
        writer=stack.enter_context(writer),
        progress=progress,
        tokens=tokens,
        state=start.state,
        step=start.step,
    )


def check(
    config: TrainConfig,
    workdir: Workdir,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    steering: Steering,
    clock: Clock,
    log: Callable[[str], None],
    memory_bytes: int | None,
) -> Checked:
    """Find everything that can be wrong before anything is written, and choose what was not set."""
    check_agreement(config, init_from, resume_overrides, steering)
    given = config
    if not is_remote(workdir) and workdir.exists() and not workdir.is_dir():
        raise ValueError(f"--workdir {workdir} is a file; name a directory, or one to be made.")
    mesh = sharding.training_mesh(config)
    parameters = Parameters(config.model, mesh)
    state, here = abstract_train_state(config, parameters), environment(mesh)
    check_trackers(config.log, workdir)
    order = open_order(workdir, steering, given)
    back = None if order is None else order["rewind"]
    saved = saved_run(workdir / CHECKPOINTS, resume_overrides, back)
    if saved is not None:
        config = continued_config(
            saved,
            config,
            parameters=parameters,
            overrides=resume_overrides,
            new_optimizer_state=order is not None and order["new_optimizer_state"],
            log=log,
        )
    messages: list[str] = []
    warmup = config.schedule.warmup_steps
    if warmup > config.num_steps:
        messages.append(
            f"warning: schedule.warmup_steps={warmup} exceeds num_steps={config.num_steps}: the "
            f"learning rate comes to {config.num_steps / warmup:.0%} of its peak; lower "
            "--schedule.warmup-steps, or continue later with more --num-steps"
        )
    kept = None
    if saved is not None and is_same_place(saved.environment, here):
        kept = saved.run_config()
        kept = kept if kept.global_batch_size == config.global_batch_size else None
    check_memory(config, mesh, state)
    check_origin(workdir, init_from, continues=saved is not None)
    tokens = open_data(config.data, "train", model=config.model)
    data_digest = processes.text_from_primary(tokens.digest) or ""
    if saved is not None:
        check_data(saved, data_digest, messages.append)
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
    programs.keep_beside(workdir, mesh.devices.flat[0].platform)
    with clock("start", "choosing precision, microbatches and rematerialisation"):
        train_step = prepare(
            config,
            parameters,
            tokens.types,
            log=messages.append,
            kept=kept,
            memory_bytes=memory_bytes,
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
    evaluations = list(make_evaluations(config, mesh, tokens, clock, log))
    initial = None
    if saved is None and init_from is not None:
        init_from = fetch_source(workdir, init_from)
        with clock("start", "reading the weights to start from"):
            initial = load_initial(config, train_step, init_from)
    return Checked(
        config=config,
        saved=saved,
        mesh=mesh,
        environment=here,
        train_step=train_step,
        tokens=tokens,
        data_digest=data_digest,
        evaluations=evaluations,
        initial=initial,
        order=order,
        messages=messages,
    )


def lock(
    checked: Checked, workdir: Workdir, progress: Progress, stack: contextlib.ExitStack
) -> Checkpointer:
    """Take the workdir, so that no other run writes there, and describe this run in it."""
    config, mesh, tokens = checked.config, checked.mesh, checked.tokens
    data = tokens.describe()
    parameters = checked.train_step.parameters
    table = describe_parameters(config.optimizer, parameters)
    rules = summarize_rules(config.optimizer, parameters)
    checkpointer = Checkpointer(
        workdir / CHECKPOINTS, config, mesh=mesh, data_digest=checked.data_digest
    )
    stack.enter_context(checkpointer)
    if processes.is_primary():
        copy_tokenizer(tokens.origin, workdir / TOKENIZER)
        write_json(workdir / CONFIG, to_dict(config))
        write_json(workdir / ENVIRONMENT, checked.environment)
        write_json(workdir / DATA, data)
        write_bytes(workdir / PARAMETERS, f"{table}\n".encode())
        for folder, part in KEPT_SOURCES.items():
            for source in sources_in(getattr(config, part)):
                write_bytes(workdir / folder / Path(source.file).name, source.text())
    host_log = HostLog(workdir, jax.process_index(), may_write=checkpointer.check_owner)
    progress.copy_to(stack.enter_context(host_log).write)
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    progress.message(
        f"{config.name}: {parameters.count / 1e6:.2f}M parameters on "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({axes}), "
        f"{config.tokens_per_step:,} tokens a step, {data['num_tokens']:,} training tokens"
    )
    progress.message(f"{rules}; parameters.txt says which")
    if checked.train_step.evaluated is not None:
        progress.message(f"evaluated and exported: {checked.train_step.evaluated}")
    for text in checked.messages:
        progress.message(text)
    return checkpointer


def restore(
    checked: Checked,
    workdir: Workdir,
    checkpointer: Checkpointer,
    clock: Clock,
    log: Callable[[str], None],
) -> Start:
    """Read the state from the newest sound checkpoint or make a new one.

    Raises:
      ValueError: no checkpoint is sound.
    """
    train_step, initial = checked.train_step, checked.initial
    step, position, tokens, saved = 0, 0, 0, None
    with clock("start", "reading the checkpoint"):
        if checked.saved is not None:
            order: Order = checked.order or dataclasses.asdict(Steering())
            is_new = order["new_optimizer_state"]
            restored = checkpointer.restore(
                abstract_saved_state(train_step, checked.saved, new_optimizer_state=is_new),
                order["rewind"],
                whole=not is_new,
            )
            saved = restored.checkpoint
            step, position, tokens = saved.step, saved.data_position, saved.tokens
            log(f"continuing from step {step}")
            if order["skip_examples"]:
                position += order["skip_examples"]
                log(f"examples {saved.data_position:,} to {position:,} are left out")
            if is_new:
                log("the optimizer's state is made anew")
            state = continued_state(train_step, restored.state)
        elif initial is not None:
            taken = (
                "weights and optimizer state" if initial.origin["optimizer_state"] else "weights"
            )
            log(f"starting from the {taken} of {initial.origin['weights']}")
            state = initial.state
        else:
            state = init_train_state(checked.config, train_step.parameters)
        if saved is None:
            state_digest = combine(digest(saved_state(train_step, state)))
        else:
            state_digest = saved.digest
    return Start(
        state=state,
        step=step,
        position=position,
        tokens=tokens,
        digest=state_digest,
        checkpoint=saved,
    )


def make_evaluations(
    config: TrainConfig,
    mesh: Mesh,
    tokens: SplitTokens,
    clock: Clock,
    log: Callable[[str], None],
) -> Iterator[Evaluation]:
    """The evaluations that the config asks for: validation loss, HellaSwag, the user's own.

    `tokens`, of training, have the tokenizer that the last two take. `log` is told if the data has
    no split `val`, or fewer windows than the config asks for.

    Raises:
      ValueError, FileNotFoundError, ImportError: see `open_data`, `ValidationBatches`,
        `HellaSwagInLoop` and `OwnEvaluation`.
    """
    if config.eval.every is not None:
        validation = open_data(config.data, "val", model=config.model)
        for origin in validation.origins:
            if origin.split != "val":
                log(f"validation takes split {origin.split!r} of {origin.directory}")
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

        def measure_loss(
            params: Any, before_batch: Callable[[], None]
        ) -> tuple[dict[str, float], str]:
            watched = clock.over(batches, "evaluation", "batch of the evaluation")
            loss = validation_loss(eval_step, mesh, params, watched, before_batch).loss
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
