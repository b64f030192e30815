"""The training loop: `train` opens a run, takes steps, and evaluates and saves on the way.

Metrics of step t - 1 are fetched after step t is dispatched, so the device never waits for the
host. In each step, stop comes first, then the save, then evaluations; comments in the loop say why.
All processes take the same branches: `stop_due`, `is_due` and evaluations agree between them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from etils import epath

from maxmars.config import TrainConfig
from maxmars.distributed import processes
from maxmars.distributed.files import resolve
from maxmars.distributed.run_process import RunProcess, StopRequestedError
from maxmars.train.auto import noting_less_memory
from maxmars.train.clock import Clock
from maxmars.train.init_from import InitFrom
from maxmars.train.metrics import validation_losses
from maxmars.train.norms import relative_distance
from maxmars.train.reporter import StepReporter
from maxmars.train.run import Evaluation, Run, open_run
from maxmars.train.step import evaluated_params, saved_state
from maxmars.train.summary import write_summary
from maxmars.train.tracer import StepTracer


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of `train`."""

    done: bool
    """Whether all steps and evaluations are made. If not, SIGTERM or Ctrl-C stopped the run after a
    save; the same call continues the run."""
    step: int
    """Number of steps taken, in this and earlier calls."""
    train_loss: float | None
    """Last training loss in the metrics, nats a token; None without one. Only the primary process
    has metrics."""
    eval_loss: float | None
    """Last validation loss in the metrics, nats a token; None as for `train_loss`."""
    workdir: epath.Path
    """Directory of the run, with a complete checkpoint of `step`."""


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    *,
    init_from: InitFrom | None = None,
    resume_overrides: Sequence[str] = (),
    profile: tuple[int, int] | None = None,
    process: RunProcess | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Begin a run, or continue the one in `workdir`; all processes of a run must call.

    `distributed/workdir.py` names the files of `workdir`.

    Args:
      config: what to train.
      workdir: directory of the run, on a disk or `gs://`.
      init_from: source of a new run's initial weights; None draws random ones. A run that
        continues ignores the argument.
      resume_overrides: dotted names of fields that change on purpose when the run continues (see
        `resume`).
      profile: first and last step to trace into `<workdir>/profile`; None traces no step.
      process: an entered `RunProcess` that outlives the run; None makes one for this call.
      quiet: print only the live line of a terminal; `logs/` has all lines in any case.

    Raises:
      ValueError: mesh, data and model do not fit together; `workdir` holds another run, or a run on
        other data; a file of tokens does not match its checksum; or `profile` names steps that the
        run does not make.
      DivergedError: more steps in a row were skipped than `config.guard` allows.
      FileNotFoundError: there are no data, or no weights at `init_from`.
      OSError, ImportError: `workdir` cannot be written to; see `files.require_access`.
    """
    workdir = resolve(workdir)
    tracer = StepTracer(profile, workdir)
    tracer.check(0, config.num_steps)  # before anything is written
    with contextlib.ExitStack() as stack:
        if process is None:
            process = stack.enter_context(RunProcess())
        clock = stack.enter_context(Clock(config.hang_timeout_s))
        run = open_run(
            config,
            workdir,
            init_from=init_from,
            resume_overrides=resume_overrides,
            clock=clock,
            command=process.command,
            stack=stack,
            quiet=quiet,
        )
        # Entered last, so that it ends a process before the files are closed, which may wait for
        # the lost peer.
        stack.enter_context(process.ending_if_peer_is_lost())
        num_steps, first_step = run.config.num_steps, run.step
        missing = _missing_evaluations(run)  # after a stop or a kill in or before them
        if run.step >= num_steps and not missing:
            run.progress.message(
                f"{workdir}: all {run.step} steps are done. Train longer with --num-steps, or "
                "start anew with another --workdir."
            )
            return _result(run, done=True)
        tracer.check(run.step, num_steps)
        run.journal.begin(run.sinks.file.previous_lines)
        run.sinks.file.previous_lines.clear()
        process.started()
        run.verification.start(on_damage=process.request_stop)
        if init_from is not None and run.checkpointer.latest_step() is None:
            _save(run)  # a restart continues from this, without `init_from`
        stack.callback(tracer.close)
        reporter = StepReporter(run)
        steps = range(run.step + 1, num_steps + 1)
        compiling = run.progress.waiting("compiling and making the first step")
        if steps and not _evaluate(run, missing, process):
            steps = range(0)  # a stop was requested meanwhile

        for step in steps:
            with clock("data_wait", f"reading the tokens of step {step}", kind="tokens"):
                batch = next(run.batches)

            # `reporter.add` fetches and writes the metrics of the step before, while this step
            # runs. The processes also agree on what comes next within the step's interval: it is
            # communication, and shares the timeout.
            status = compiling if step == steps.start else contextlib.nullcontext()
            interval = clock("steps", f"step {step}", kind="step")
            with interval, status, noting_less_memory(run.train_step):
                tracer.before(step, run.state)
                run.state, metrics = run.train_step(run.state, batch)
                run.step = step
                reporter.add(step, metrics)
                stop = step == num_steps or process.stop_due()
                due = [] if stop else _evaluations_at(run, step)
                save_due = not stop and run.checkpointer.is_due(step)
                if stop or due or save_due:
                    reporter.flush()
            if step == tracer.last:
                with clock("other"):
                    run.progress.message(tracer.end(metrics))

            # Stop before an evaluation: there may be little time left to save, and the same command
            # makes the evaluation. Save before an evaluation, in which a kill or an error may come;
            # the next save deletes by its loss. While steps are skipped, save nothing: it might
            # delete a better checkpoint.
            if stop:
                break
            if save_due and not reporter.is_skipping:
                _save(run)
            if not _evaluate(run, due, process):  # a stop was requested within
                break

        # Save before the last evaluations: a kill there loses no step. Verify data before the save:
        # a run on damaged data is not saved.
        run.verification.check(timeout_s=5.0 if run.step >= num_steps else 0.0)
        if run.step > first_step:  # else the run continued from a checkpoint of this step
            _save(run, wait=True)
        done = run.step >= num_steps
        if done:
            done = _evaluate(run, _missing_evaluations(run), process)
        run.sinks.sync()  # the summary reads the metrics
        journal_hash = run.journal.ended(run.step, done=done)
        run.progress.close()
        run.progress.message(write_summary(run, done=done, journal=journal_hash))
        return _result(run, done=done)


def _evaluations_at(run: Run, step: int) -> list[Evaluation]:
    return [e for e in run.evaluations if step % e.every == 0 or step == run.config.num_steps]


def _missing_evaluations(run: Run) -> list[Evaluation]:
    """The evaluations of the run's step that are not in its metrics."""
    primary = processes.is_primary()  # the only process with metrics
    return [
        evaluation
        for evaluation in _evaluations_at(run, run.step)
        if not processes.all_processes(
            not primary or run.sinks.file.latest.get(evaluation.metric, (None, 0))[0] == run.step
        )
    ]


def _evaluate(run: Run, evaluations: Sequence[Evaluation], process: RunProcess) -> bool:
    """Evaluate the run's step, and record the metrics; False if a stop was requested meanwhile.

    Where other parameters than the trained ones are evaluated, such as the EMA,
    `eval/params_distance` is the norm of the difference over the norm of the trained parameters.
    """
    if not evaluations:
        return True
    params, distance = run.state.params, {}
    if run.train_step.evaluated is not None:
        params = evaluated_params(run.train_step, run.state)
        distance = {"eval/params_distance": relative_distance(params, run.state.params).item()}
    for evaluation in evaluations:
        # The default binds this iteration's name.
        def before_batch(batch: str = f"a batch of the evaluation {evaluation.name}") -> None:
            run.clock.lap(batch)
            process.check_stop()

        status = run.progress.waiting(f"step {run.step}: {evaluation.name}")
        with run.clock("evaluation", evaluation.name), status:
            try:
                metrics, text = evaluation.measure(params, before_batch)
            except StopRequestedError:
                return False
        run.sinks.write(run.step, metrics | distance)
        run.progress.message(f"step {run.step}: {text}")
        best_of = run.config.checkpoint.keep_best_of
        run.checkpointer.evaluated(validation_losses([{"step": run.step} | metrics], best_of))
    return True


def _save(run: Run, *, wait: bool = False) -> None:
    """Save a checkpoint of the run's step."""
    with run.clock("checkpoint", f"writing the checkpoint of step {run.step}"):
        run.sinks.sync()  # a complete checkpoint implies the metrics of its steps
        blocked_s = run.checkpointer.save(
            run.step,
            saved_state(run.train_step, run.state),
            data_position=run.batches.position,
            tokens=run.sinks.tokens(run.step),
            journal=run.journal.saved,
            wait=wait,
        )
    if blocked_s is not None:
        run.sinks.write(run.step, {"perf/checkpoint_blocking_time": blocked_s})


def _result(run: Run, *, done: bool) -> TrainResult:
    losses = {
        key: float(value) for key, (_, value) in run.sinks.file.latest.items() if "loss" in key
    }
    return TrainResult(
        done=done,
        step=run.step,
        train_loss=losses.get("train/loss"),
        eval_loss=losses.get("eval/loss"),
        workdir=run.workdir,
    )
