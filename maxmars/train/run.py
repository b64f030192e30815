"""Opening of a run: check, lock, restore, and open the files that grow.

`open_run` calls the four. `_check` finds all errors of config, data and workdir before anything is
written, so that a refused command leaves no trace. `_lock` locks the workdir and writes the files
that describe the run. `_restore` reads or makes the first state. An exit stack closes everything in
reverse order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from maxmars.checkpoint import Checkpoint, Checkpointer
from maxmars.checkpoint.digest import combine, digest
from maxmars.checkpoint.environment import changes_since, environment
from maxmars.checkpoint.journal import (
    Began,
    Rewound,
    line_of,
    read_journal,
    rewound_to,
    session_starts,
)
from maxmars.config import ModuleConfig, TrainConfig, to_dict
from maxmars.config.chips import chip_name
from maxmars.config.train import with_own_defaults
from maxmars.config.user_code import sources_in
from maxmars.data.batches import (
    DataSplit,
    TrainBatches,
    ValidationBatches,
    open_validation,
    vocabulary_hint,
)
from maxmars.data.token_files import TokenFile
from maxmars.data.tokenizer import copy_tokenizer, tokenizer_of_tokens
from maxmars.data.verification import Verification, own_share
from maxmars.distributed import processes, sharding
from maxmars.distributed.files import is_remote, write_bytes, write_json
from maxmars.distributed.progress import HostLog, Progress
from maxmars.distributed.recorded_code import keep_code
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
from maxmars.eval.validation import (
    bytes_of_data,
    make_eval_step,
    sees_later_tokens,
    validation_loss,
)
from maxmars.model.parameters import Parameters
from maxmars.train import compile_cache
from maxmars.train.agreement import check_agreement
from maxmars.train.auto import check_memory, gathered_bytes, slow_network_warning
from maxmars.train.clock import Clock
from maxmars.train.init_from import InitFrom, Initial, load_initial
from maxmars.train.journal import Journal
from maxmars.train.metrics import validation_keys, validation_losses
from maxmars.train.optimizer import describe_parameters, note_on_package, summarize_rules
from maxmars.train.resolve import Recorded, resolve_config
from maxmars.train.resume import check_data, continued_config, read_newest, rounding_message
from maxmars.train.sinks import Sinks, check_trackers, open_sinks
from maxmars.train.step import TrainState, TrainStep, abstract_train_state, saved_state
from maxmars.train.training import Training, open_training


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that a run makes at step 0, every `every` steps and after the last step."""

    name: str
    every: int
    metric: str
    """Key of a metric from this evaluation; if a step has it, the evaluation was made."""
    measure: Callable[[Any, Callable[[], None]], tuple[dict[str, float], str]]
    """Function from the parameters to metrics and a line of text. It calls its second argument
    before each batch, which may raise to end the evaluation."""


@dataclass(kw_only=True)
class Run:
    """An open run: its parts, and its state at `step`."""

    workdir: epath.Path
    clock: Clock
    progress: Progress
    training: Training
    evaluations: Sequence[Evaluation]
    state: TrainState
    step: int
    batches: TrainBatches
    checkpointer: Checkpointer
    verification: Verification
    journal: Journal
    sinks: Sinks

    @property
    def config(self) -> TrainConfig:
        """The resolved config."""
        return self.training.config

    @property
    def train_step(self) -> TrainStep:
        return self.training.step


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """Results of `_check`."""

    training: Training
    environment: Mapping[str, Any]
    evaluations: Sequence[Evaluation]
    files: Sequence[TokenFile]
    """Token files of training and evaluations."""
    saved: Checkpoint | None
    """Metadata of the newest checkpoint; None for a new run."""
    initial: Initial | None
    """Initial state from `--init-from`; None for random weights."""
    rewound: Rewound | None
    """Rewind from which the run continues; None without one."""
    messages: Sequence[str]
    """Lines to print once the log of this host is open."""


def open_run(
    requested: TrainConfig,
    workdir: epath.Path,
    *,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    clock: Clock,
    command: str | None,
    stack: contextlib.ExitStack,
    quiet: bool = False,
) -> Run:
    """Begin or continue a run; see `loop.train` for arguments and errors.

    `stack` closes files, lock and threads.
    """
    progress = stack.enter_context(Progress(quiet=quiet))
    with progress.waiting("opening the run"):
        checked = _check(requested, workdir, init_from, resume_overrides, clock, progress)
        checkpointer = _lock(checked, workdir, progress, stack)
        with clock("start", "reading the checkpoint"):
            saved, state, position = _restore(checked, checkpointer, progress.message)
    training, may_write = checked.training, checkpointer.check_owner
    config = training.config
    step, tokens_before, journal_hash = 0, 0, None
    if saved is not None:
        # Tokens are counted from the checkpoint, as earlier steps may have had another batch size.
        step, tokens_before, journal_hash = saved.step, saved.tokens, saved.journal or ""
        state_digest = saved.digest
    else:
        with clock("start", "making the digest of the state"):
            state_digest = combine(digest(saved_state(training.step, state)))
    batches = training.batches(position)
    stack.callback(batches.close)
    verification = Verification(
        own_share(checked.files) if config.data.verify else (),
        workdir / of_process(VERIFIED, jax.process_index(), ".jsonl"),
        may_write=may_write,
    )
    stack.enter_context(verification)
    sinks = open_sinks(
        config,
        workdir,
        None if saved is None else step,
        tokens=lambda later: tokens_before + (later - step) * config.tokens_per_step,
        progress=progress,
        may_write=may_write,
    )
    stack.enter_context(sinks)
    began = Began(
        step=step,
        start=clock.start,
        digest=state_digest,
        position=position,
        command=command,
        config=to_dict(config),
        data=training.data_digest,
        environment=checked.environment,
        init_from=None if checked.initial is None else checked.initial.origin,
    )
    journal = Journal(
        workdir,
        clock,
        began,
        checkpoint=journal_hash,
        prefix=lambda: sinks.file.prefix,
        may_write=may_write,
    )
    stack.enter_context(journal)
    losses = validation_losses(sinks.file.previous_lines, config.checkpoint.keep_best_of)
    # Every process chooses the checkpoints to keep, and only the primary has metrics.
    losses = processes.from_primary(list(losses.items()))
    checkpointer.evaluated(dict(losses))
    return Run(
        workdir=workdir,
        clock=clock,
        progress=progress,
        training=training,
        evaluations=checked.evaluations,
        state=state,
        step=step,
        batches=batches,
        checkpointer=checkpointer,
        verification=verification,
        journal=journal,
        sinks=sinks,
    )


def _check(
    requested: TrainConfig,
    workdir: epath.Path,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    clock: Clock,
    progress: Progress,
) -> _Checked:
    """Find all errors before anything is written, and resolve the config."""
    # A config from a record may have `asked`: here its fields are requested themselves.
    requested = dataclasses.replace(with_own_defaults(requested), asked={})
    check_agreement(requested, init_from, resume_overrides)
    if not is_remote(workdir) and workdir.exists() and not workdir.is_dir():
        raise ValueError(f"--workdir {workdir} is a file; name a directory, or one to be made.")
    mesh = sharding.training_mesh(requested.mesh, requested.model)
    parameters, here = Parameters(requested.model, mesh), environment(mesh)
    # First, as everything after may allocate; the abstract state also checks mesh and batch.
    check_memory(requested, mesh, abstract_train_state(requested, parameters))
    check_trackers(requested.log, workdir)
    saved, rewound = read_newest(workdir / CHECKPOINTS, resume_overrides), None
    if saved is not None:
        rewound = _read_rewind(workdir, saved.step)
        requested = continued_config(
            saved,
            requested,
            parameters=parameters,
            overrides=resume_overrides,
            new_optimizer_state=rewound is not None and rewound.new_optimizer_state,
            log=progress.message,
        )
    elif init_from is None:
        _check_begins_at_random(workdir)
    recorded = None if saved is None else Recorded(saved.config, saved.environment)
    resolved = resolve_config(requested, parameters, recorded=recorded)
    training = open_training(resolved)
    config, data = training.config, training.data
    next(training.batches(prefetch=False))  # raises for unreadable or too few tokens
    messages = []
    if (warmup := config.schedule.warmup_steps) > config.num_steps:
        messages.append(
            f"warning: schedule.warmup_steps={warmup} exceeds num_steps={config.num_steps}: the "
            f"learning rate comes to {config.num_steps / warmup:.0%} of its peak; lower "
            "--schedule.warmup-steps, or continue later with more --num-steps"
        )
    if saved is not None:
        check_data(saved, training.data_digest)
        changes = changes_since(saved.environment, here)
        if changes:
            messages.append(f"changed since step {saved.step}: {', '.join(changes)}")
        if init_from is not None:
            messages.append(f"the run continues, so --init-from {init_from.path} is left aside")
    elif hint := vocabulary_hint(data, config.model):
        messages.append(hint)
    if not config.data.verify:
        messages.append("data.verify is off: files are not compared with their checksums")
    messages += resolved.messages
    messages += _slow_network(config, parameters)
    if saved is not None and (message := rounding_message(saved, config, here)):
        messages.append(message)
    compile_cache.keep_beside(workdir, mesh.devices.flat[0].platform)  # before the first program
    config, validation = _open_validation(config, data, saved)
    if validation and "" not in validation:
        messages.append("the training data have no split `val`, so there is no eval/loss")
    # Digests of validation sets do not change the train step, which stays.
    training = dataclasses.replace(training, step=dataclasses.replace(training.step, config=config))
    evaluations = list(make_evaluations(config, mesh, data, validation, progress.message))
    scored = [f for split in validation.values() for f in split.files if f.split == "val"]
    initial = None
    if saved is None and init_from is not None:
        with clock("start", "reading the weights to start from"):
            initial = load_initial(training.step, init_from, data.vocabulary)
    return _Checked(
        training=training,
        environment=here,
        evaluations=evaluations,
        files=[*data.files, *scored],
        saved=saved,
        initial=initial,
        rewound=rewound,
        messages=messages,
    )


def _open_validation(
    config: TrainConfig, data: DataSplit, saved: Checkpoint | None
) -> tuple[TrainConfig, dict[str, DataSplit]]:
    """Open the validation sets, and add their digests to the config.

    Raises:
      ValueError: `keep_best` has no loss to choose by.
      Other errors of `open_validation` and `check_data`.
    """
    sets, splits, checkpoint = config.eval.data, {}, config.checkpoint
    if config.eval.every is not None:
        tokenizer = functools.partial(tokenizer_of_tokens, data.vocabulary)
        splits = open_validation(config.data, sets, tokenizer, config.model, opened=data)
        if checkpoint.keep_best is not None and (checkpoint.keep_best_of or "") not in splits:
            raise ValueError(
                f"checkpoint.keep_best={checkpoint.keep_best} chooses by the loss of the split "
                "`val`, which the training data lack; name a set of eval.data by "
                "checkpoint.keep_best_of."
            )
    digests = {} if saved is None else {one.name: one.digest for one in saved.config.eval.data}
    for name in splits and [one.name for one in sets]:  # none is open without `eval.every`
        digests[name] = digest = processes.text_from_primary(splits[name].digest) or ""
        if saved is not None:
            check_data(saved, digest, name)
    sets = [dataclasses.replace(one, digest=digests.get(one.name)) for one in sets]
    evaluation = dataclasses.replace(config.eval, data=tuple(sets))
    return dataclasses.replace(config, eval=evaluation), splits


def _read_rewind(workdir: epath.Path, step: int) -> Rewound | None:
    """The rewind from which a run at `step` continues; process 0 reads it for all processes."""

    def rewind_text() -> str:
        rewound = rewound_to(read_journal(workdir), step)
        return "null" if rewound is None else rewound.text

    values = json.loads(processes.text_from_primary(rewind_text) or "null")
    line = None if values is None else line_of(values)
    assert line is None or isinstance(line, Rewound)
    return line


def _check_begins_at_random(workdir: epath.Path) -> None:
    """Refuse random weights if the run's last start had `--init-from` and saved nothing. Process 0
    reads the journal, and every process raises."""

    def check() -> None:
        began = session_starts(read_journal(workdir))
        if began and began[-1].init_from is not None:
            raise ValueError(
                f"the run in {workdir} was to start from {began[-1].init_from['path']} and has "
                "saved nothing yet: give the same --init-from again, or choose another --workdir."
            )

    processes.text_from_primary(check)


def _slow_network(config: TrainConfig, parameters: Parameters) -> list[str]:
    """`slow_network_warning` for a mesh of GPUs, as a list of at most one."""
    mesh = parameters.mesh
    device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return []
    warning = slow_network_warning(
        config,
        mesh,
        sharding.fast_networks(list(mesh.devices.flat)),
        topology=f"{chip_name(device.device_kind) or 'NAME'}:{mesh.size}",
        sent=f"about {gathered_bytes(config, parameters) / 1e9:.1f} GB a GPU and step",
    )
    return [] if warning is None else [warning]


def _lock(
    checked: _Checked, workdir: epath.Path, progress: Progress, stack: contextlib.ExitStack
) -> Checkpointer:
    """Lock the workdir against other runs, and write the files that describe this run."""
    training, log = checked.training, progress.message
    config, mesh, parameters = training.config, training.mesh, training.step.parameters
    data = training.data.describe() | {"digest": training.data_digest}
    table = describe_parameters(config.optimizer, parameters)
    rules = summarize_rules(config.optimizer, parameters)
    checkpointer = Checkpointer(
        workdir / CHECKPOINTS, config, mesh=mesh, data_digest=training.data_digest
    )
    stack.enter_context(checkpointer)
    if checked.saved is None and checkpointer.latest_step() is not None:  # between check and lock
        raise ValueError(
            f"another start has saved in {workdir} meanwhile; the same command now continues it."
        )
    if processes.is_primary():
        copy_tokenizer(training.data.vocabulary, workdir / TOKENIZER)
        write_json(workdir / CONFIG, to_dict(config))
        write_json(workdir / ENVIRONMENT, checked.environment)
        write_json(workdir / DATA, data)
        write_bytes(workdir / PARAMETERS, f"{table}\n".encode())
        for folder, part in KEPT_SOURCES.items():
            for source in sources_in(getattr(config, part)):
                keep_code(source, workdir, folder)
    host_log = HostLog(workdir, jax.process_index(), may_write=checkpointer.check_owner)
    progress.copy_to(stack.enter_context(host_log).write)
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    log(
        f"{config.name}: {parameters.count / 1e6:.2f}M parameters on "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({axes}), "
        f"{config.tokens_per_step:,} tokens a step, {data['num_tokens']:,} training tokens"
    )
    log(f"{rules}; parameters.txt says which")
    note = note_on_package(config.optimizer)
    if note is not None and checked.saved is None:
        log(note)
    if training.step.evaluated is not None:
        log(f"evaluated and exported: {training.step.evaluated}")
    for text in checked.messages:
        log(text)
    return checkpointer


def _restore(
    checked: _Checked, checkpointer: Checkpointer, log: Callable[[str], None]
) -> tuple[Checkpoint | None, TrainState, int]:
    """Restore the newest undamaged checkpoint, or make the state of a new run; return checkpoint
    (None for a new run), state, and position in the data.

    Raises:
      ValueError: all checkpoints are damaged.
    """
    training, rewound = checked.training, checked.rewound
    if checked.saved is None and checked.initial is not None:
        origin = checked.initial.origin
        what = "weights and optimizer state" if origin["optimizer_state"] else "weights"
        log(f"starting from the {what} of {origin['weights']}")
        return None, checked.initial.state, 0
    if checked.saved is None:
        return None, training.new_state(), 0
    is_new = rewound is not None and rewound.new_optimizer_state
    restored = training.restore(
        functools.partial(
            checkpointer.restore,
            # After a rewind, no older checkpoint may stand in for a damaged one.
            step=None if rewound is None else rewound.step,
            whole=not is_new,
        ),
        skip_examples=0 if rewound is None else rewound.skip_examples,
        new_optimizer_state=is_new,
    )
    saved, position = restored.checkpoint, restored.position
    log(f"continuing from step {saved.step}")
    if position > saved.data_position:
        log(f"examples {saved.data_position:,} to {position:,} are left out")
    if is_new:
        log("the optimizer's state is made anew")
    return saved, restored.state, position


def make_evaluations(
    config: TrainConfig,
    mesh: Mesh,
    data: DataSplit,
    validation: Mapping[str, DataSplit],
    log: Callable[[str], None],
) -> Iterator[Evaluation]:
    """The evaluations of a config: validation losses, HellaSwag, the user's own.

    All use the tokenizer of `data`, the training tokens. `log` gets a line for each validation set
    with fewer windows than `eval.num_windows`.

    Raises:
      ValueError, FileNotFoundError, ImportError: see `HellaSwagInLoop` and `OwnEvaluation`.
    """
    if config.eval.every is not None:
        eval_step = make_eval_step(config.model, mesh, bytes_of_data(data.vocabulary, log))
        is_causal = not isinstance(config.model, ModuleConfig)  # else the first evaluation checks

        def measure_loss(
            batches: ValidationBatches,
            keys: tuple[str, str],
            of: str,
            params: Any,
            before_batch: Callable[[], None],
        ) -> tuple[dict[str, float], str]:
            nonlocal is_causal
            if not is_causal:
                before_batch()
                if sees_later_tokens(eval_step, mesh, params, next(iter(batches))):
                    assert isinstance(config.model, ModuleConfig)
                    raise ValueError(
                        f"model.make={config.model.make!r}: the loss of a token depends on tokens "
                        "after it, which it is to predict; mask them, in attention and elsewhere."
                    )
                is_causal = True
            result = validation_loss(eval_step, mesh, params, batches, before_batch)
            values = zip(keys, (result.loss, result.bits_per_byte), strict=True)
            metrics = {key: value for key, value in values if value is not None}
            return metrics, f"validation loss{of} {result}"

        for name, split in validation.items():
            of, keys = f" of {name}" if name else "", validation_keys(name)
            batches = ValidationBatches(
                split,
                mesh,
                num_windows=config.eval.num_windows,
                batch_size=config.eval_batch_size,
            )
            if batches.num_windows < config.eval.num_windows:
                log(
                    f"the validation split{of} has {batches.num_windows} windows, fewer than "
                    f"eval.num_windows={config.eval.num_windows}; all are scored."
                )
            yield Evaluation(
                name=f"validation{of}",
                every=config.eval.every,
                metric=keys[0],
                measure=functools.partial(measure_loss, batches, keys, of),
            )
    if config.eval.hellaswag_every is not None:
        yield Evaluation(
            name="HellaSwag",
            every=config.eval.hellaswag_every,
            metric="eval/hellaswag_acc_norm",
            measure=HellaSwagInLoop(config, mesh, data),
        )
    if config.eval.every is not None:
        for source in config.eval.own or ():
            own = OwnInLoop(source, config, mesh, data)
            yield Evaluation(
                name=own.name, every=config.eval.every, metric=own.time_metric, measure=own
            )
