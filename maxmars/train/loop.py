"""The training loop. `train` opens a run, takes its steps, and evaluates and saves on the way."""

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
    """What a run came to."""

    done: bool
    """Whether all steps and evaluations are made. If not, SIGTERM or Ctrl-C stopped the run, whose
    last step is saved; the same call continues it."""
    step: int
    """Number of steps taken, in this and earlier calls."""
    train_loss: float | None
    """Training loss in the last line of the metrics, nats a token."""
    eval_loss: float | None
    """Last validation loss, nats a token. Of several processes only the first, which keeps the
    metrics, has the two losses; None also where a run recorded none."""
    workdir: epath.Path
    """Directory of the run; `<workdir>/checkpoints/<step>` is complete."""


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
    """Train as `config` says, or continue the run in `workdir`.

    `distributed/workdir.py` names the files that it writes into `workdir`. Every process of a
    distributed run calls this.

    Args:
      config: what to train.
      workdir: directory of the run, on a disk or `gs://`.
      init_from: weights that a new run starts from, which the journal records; None draws them
        at random. A run that continues leaves it aside.
      resume_overrides: dotted names of fields that change on purpose when the run continues (see
        `resume`); the journal records the changes.
      profile: first and last step to trace, into `<workdir>/profile/host_000` of each process;
        None traces none.
      process: this process, inside its `with` block, where it outlives the run; None makes one
        for this call.
      quiet: print nothing but the live line of a terminal; `logs/` has all lines in any case.

    Raises:
      ValueError: the mesh, the data and the model do not fit together, `workdir` holds another run
        or one on other data, a file of tokens does not match its checksum,
        or the run does not make the steps to trace.
      DivergedError: more steps in a row were skipped than `config.guard` allows.
      FileNotFoundError: there is no data, or nothing to start from.
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
        # Before the files are closed, which may wait for the lost process.
        stack.enter_context(process.ending_if_peer_is_lost())
        num_steps, first_step = run.config.num_steps, run.step
        missing = _missing_evaluations(run)  # a stop or a kill may have come before them
        if run.step >= num_steps and not missing:
            run.progress.message(
                f"{workdir}: all {run.step} steps are done. Train longer with --num-steps, or "
                "start anew with another --workdir."
            )
            return _result(run, done=True)
        tracer.check(run.step, num_steps)
        run.journal.begin(run.writer.file.previous_lines)
        run.writer.file.previous_lines.clear()
        process.started()
        run.verification.start(on_damage=process.request_stop)
        if init_from is not None and run.checkpointer.latest_step() is None:
            _save(run)  # from here on the run continues like any other, without its source
        stack.callback(tracer.close)
        reporter = StepReporter(run)
        steps = range(run.step + 1, num_steps + 1)
        compiling = run.progress.waiting("compiling and making the first step")
        if steps and not _evaluate(run, missing, process):
            steps = range(0)  # it was to stop meanwhile

        for step in steps:
            with clock("data_wait", f"reading the tokens of step {step}", kind="tokens"):
                batch = next(run.batches)

            # The step is dispatched, and the metrics of the step before are fetched and reported
            # while it runs. What comes after it all processes ask each other, as part of it.
            shown = compiling if step == steps.start else contextlib.nullcontext()
            watched = clock("steps", f"step {step}", kind="step")
            with watched, shown, noting_less_memory(run.train_step):
                tracer.before(step, run.state)
                run.state, metrics = run.train_step(run.state, batch)
                run.step = step
                reporter.add(step, metrics)
                stop = step == num_steps or process.stop_due()
                due = [] if stop else _evaluations_at(run, step)
                save_due = not stop and run.checkpointer.is_due(step)
                if stop or due or save_due:
                    reporter.flush()  # a complete checkpoint implies the metrics of its steps
            if step == tracer.last:
                with clock("other"):
                    run.progress.message(tracer.end(metrics))

            # Stop before an evaluation, as there may be little time left to save; the same command
            # makes the evaluation. Save before it, as a kill or an error may come within it; which
            # checkpoints are the best is asked at the next save. While steps are skipped nothing is
            # saved, as it may delete a better one.
            if stop:
                break
            if save_due and not reporter.is_skipping:
                _save(run)
            if not _evaluate(run, due, process):  # stopped within it
                break

        # The last save comes before the last evaluations: a kill there loses no step. Nothing is
        # saved of a run whose data turned out to be damaged.
        run.verification.check(timeout_s=5.0 if run.step >= num_steps else 0.0)
        if run.step > first_step:  # else it went on from a checkpoint of this step
            _save(run, wait=True)
        done = run.step >= num_steps
        if done:
            done = _evaluate(run, _missing_evaluations(run), process)
        run.writer.sync()  # the summary reads the metrics
        told = run.journal.ended(run.step, done=done)
        run.progress.close()
        run.progress.message(write_summary(run, done=done, journal=told))
        return _result(run, done=done)


def _evaluations_at(run: Run, step: int) -> list[Evaluation]:
    return [e for e in run.evaluations if step % e.every == 0 or step == run.config.num_steps]


def _missing_evaluations(run: Run) -> list[Evaluation]:
    """The evaluations of the step where the run stands that its metrics do not have."""
    primary = processes.is_primary()  # only this process has the metrics
    return [
        evaluation
        for evaluation in _evaluations_at(run, run.step)
        if not processes.all_processes(
            not primary or run.writer.file.last.get(evaluation.metric, (None, 0))[0] == run.step
        )
    ]


def _evaluate(run: Run, evaluations: Sequence[Evaluation], process: RunProcess) -> bool:
    """Evaluate the step where the run stands, and record the metrics; False if it was to stop
    meanwhile.

    Where others than the trained parameters are evaluated, `eval/params_distance` is their distance
    from these, relative to the norm of these.
    """
    if not evaluations:
        return True
    params, told = run.state.params, {}
    if run.train_step.evaluated is not None:
        params = evaluated_params(run.train_step, run.state)
        distance = relative_distance(params, run.state.params)
        told = {"eval/params_distance": distance.item()}
    for evaluation in evaluations:

        def before_batch(batch: str = f"a batch of the evaluation {evaluation.name}") -> None:
            run.clock.lap(batch)
            process.check_stop()

        shown = run.progress.waiting(f"step {run.step}: {evaluation.name}")
        with run.clock("evaluation", evaluation.name), shown:
            try:
                metrics, text = evaluation.measure(params, before_batch)
            except StopRequestedError:
                return False
        run.writer.write(run.step, metrics | told)
        run.progress.message(f"step {run.step}: {text}")
        best_of = run.config.checkpoint.keep_best_of
        run.checkpointer.evaluated(validation_losses([{"step": run.step} | metrics], best_of))
    return True


def _save(run: Run, *, wait: bool = False) -> None:
    """Save the step where the run stands."""
    with run.clock("checkpoint", f"writing the checkpoint of step {run.step}"):
        run.writer.sync()  # a resume from this checkpoint finds the metrics of its steps
        blocked_s = run.checkpointer.save(
            run.step,
            saved_state(run.train_step, run.state),
            data_position=run.batches.position,
            tokens=run.writer.tokens(run.step),
            journal=run.journal.saved,
            wait=wait,
        )
    if blocked_s is not None:
        run.writer.write(run.step, {"perf/checkpoint_blocking_time": blocked_s})


def _result(run: Run, *, done: bool) -> TrainResult:
    losses = {
        key: float(value) for key, (_, value) in run.writer.file.last.items() if "loss" in key
    }
    return TrainResult(
        done=done,
        step=run.step,
        train_loss=losses.get("train/loss"),
        eval_loss=losses.get("eval/loss"),
        workdir=run.workdir,
    )
