"""The training loop: open a run, step, and run hooks.

Hooks are a list of (every, function): evaluation and checkpoints now, anything else later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from maxmars import distributed
from maxmars.config import TrainConfig
from maxmars.cpu_settings import give_back_freed_memory
from maxmars.goodput import Goodput
from maxmars.init_from import InitFrom
from maxmars.metrics import recorded_steps
from maxmars.preemption import StopRequests
from maxmars.run import Run, open_run
from maxmars.run_summary import write_summary
from maxmars.step_reporter import StepReporter
from maxmars.step_trace import StepTracer
from maxmars.watchdog import Watchdog
from maxmars.workdir import is_remote, resolve


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    *,
    init_from: InitFrom | None = None,
    resume_overrides: Sequence[str] = (),
    profile: tuple[int, int] | None = None,
) -> bool:
    """Train as `config` says, or continue the run in `workdir`.

    Writes `config.json`, `environment.json`, `tokenizer/`, `metrics.jsonl`, `sessions.jsonl`,
    `summary.json`, `checkpoints/` and `logs/` into `workdir`. Every process of a distributed run
    calls this.

    Args:
      config: what to train.
      workdir: directory of the run, on a disk or `gs://`.
      init_from: weights that a new run starts from, recorded in `init_from.json`; None draws them
        at random. Of a run that continues it must be what it started from, or None.
      resume_overrides: dotted names of fields that change on purpose when the run continues, which
        otherwise refuses (see `resume`); what changed is recorded in `config_changes.jsonl`.
      profile: first and last step to trace, into `<workdir>/profile/host_000` of each process, with
        a table of what took the time; None traces none.

    Returns:
      Whether all steps are done. They are not after SIGTERM or Ctrl-C, which end the step that is
      under way, save, and return (see `preemption`).

    Raises:
      ValueError: the mesh, the data and the model do not fit together, `workdir` holds another run,
        the loss is no longer finite, or the run does not make the steps to trace.
      FileNotFoundError: there is no data, or nothing to start from.
      OSError, ImportError: `workdir` cannot be written to; see `workdir.require_access`.
    """
    started, goodput = time.monotonic(), Goodput()
    workdir = resolve(workdir)
    if profile is not None:
        _check_profile(profile, 0, config.num_steps, workdir)  # before anything is written
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.hang_timeout_s, workdir / "checkpoints"))
        run = open_run(config, workdir, init_from, resume_overrides, watchdog, stack)
        stack.push(watchdog.leave_if_others_are_gone)
        if run.step >= run.config.num_steps:
            run.progress.message(
                f"{workdir}: all {run.step} steps are done. Train longer with --num-steps, or "
                "start anew with another --workdir."
            )
            return True
        assert run.checkpointer is not None
        goodput.record(workdir, run.step, run.checkpointer.check_owner)
        run.goodput = stack.enter_context(goodput)
        tracer = _make_tracer(run, profile, stack)
        stops = stack.enter_context(StopRequests())
        done = take_steps(run, stops, started, tracer)
        _save(run, wait=True)
        goodput.reached(run.step, done=done)
        run.progress.finish(write_summary(run, done=done))
        return done


def take_steps(
    run: Run, stops: StopRequests, started: float, tracer: StepTracer | None = None
) -> bool:
    """Take the steps that an open run lacks, with its evaluations, also at step 0 and the end.

    Args:
      run: the run; its last state is not saved.
      stops: may ask for an earlier end.
      started: when the run was started (monotonic).
      tracer: traces some of the steps.

    Returns:
      Whether all steps were taken.

    Raises:
      DivergedError: too many steps in a row were not finite, or spikes.
    """
    opened = time.monotonic()
    if _is_missing(run, run.config.eval.every, "eval/loss"):
        evaluate(run)
    if _is_missing(run, run.config.eval.hellaswag_every, "eval/hellaswag_acc_norm"):
        _score_hellaswag(run)
    reporter = StepReporter(run, started + time.monotonic() - opened)
    run.goodput.begin("compile")
    done = _loop(run, _hooks(run), stops, reporter, tracer)
    run.goodput.begin("other")
    if not done:
        return False
    evaluate(run)
    _score_hellaswag(run)
    return True


Hooks = Sequence[tuple[int | None, Callable[[Run], None]]]


def _hooks(run: Run) -> Hooks:
    config = run.config
    return [
        (config.eval.every, evaluate),
        (config.eval.hellaswag_every, _score_hellaswag),
        (config.checkpoint.every, _save),
    ]


def _check_profile(
    profile: tuple[int, int], step: int, num_steps: int, workdir: str | os.PathLike[str]
) -> None:
    first, last = profile
    if not step + 2 <= first <= last <= num_steps:
        raise ValueError(
            f"--profile {first}:{last} must name steps of this run from step {step + 2} on, "
            f"after the one that compiles, to {num_steps}."
        )
    if is_remote(workdir):
        raise ValueError(
            f"--profile {first}:{last} writes into the workdir, and {workdir} is a bucket; "
            "trace in a short run with a --workdir on a disk."
        )


def _make_tracer(
    run: Run, profile: tuple[int, int] | None, stack: contextlib.ExitStack
) -> StepTracer | None:
    if profile is None:
        return None
    _check_profile(profile, run.step, run.config.num_steps, run.workdir)
    directory = Path(run.workdir) / "profile" / f"host_{jax.process_index():03d}"
    tracer = StepTracer(*profile, directory)
    stack.callback(tracer.close)
    return tracer


def _loop(
    run: Run,
    hooks: Hooks,
    stops: StopRequests,
    reporter: StepReporter,
    tracer: StepTracer | None,
) -> bool:
    """Step until `num_steps`; hooks run between steps, not after the last one.

    Returns:
      Whether it got there; if not, it was asked to stop.
    """
    while run.step < run.config.num_steps:
        run.watchdog.begin(f"reading the tokens of step {run.step + 1}", "tokens")
        if tracer is not None:
            tracer.begin(run.step + 1)
        with reporter.waiting():
            tokens = next(run.batches)
        run.watchdog.begin(f"step {run.step + 1}", "step")
        run.state, metrics = run.train_step(run.state, tokens)
        run.step += 1
        reporter.add(run.step, metrics)
        if tracer is not None and run.step == tracer.last:
            run.watchdog.rest()
            with reporter.paused(), run.goodput.during("other"):
                run.progress.message(tracer.end(metrics, run.train_step.text))
        if run.step == run.config.num_steps:
            break
        if stops.due(run.step):  # before the hooks: there may be little time left to save
            break
        due = [hook for every, hook in hooks if every is not None and run.step % every == 0]
        by_time = run.checkpointer is not None and run.checkpointer.is_due(run.step)
        if by_time and _save not in due:
            due.append(_save)
        if due:
            reporter.flush()  # a checkpoint must not be complete before its step's metrics are
            run.watchdog.rest()
            with reporter.paused():
                for hook in due:
                    hook(run)
    reporter.flush()
    run.watchdog.rest()
    return run.step == run.config.num_steps


def _is_missing(run: Run, every: int | None, key: str) -> bool:
    """Whether the step to start from is one to evaluate at, and it never was: at step 0, or after
    a run that was stopped before it could."""
    if every is None or run.step % every:
        return False
    primary = distributed.is_primary()  # the one that has the file
    known = not primary or run.step in recorded_steps(run.workdir, key)
    return not distributed.everywhere(known)


def evaluate(run: Run) -> None:
    """Record the validation loss at the step where a run stands, once."""
    if run.evaluate is None or run.eval_step == run.step:
        return
    with run.goodput.during("evaluation"), _given_back(run):
        run.eval_loss, run.eval_step = run.evaluate(run.state.params), run.step
    run.writer.write(run.step, {"eval/loss": run.eval_loss})
    run.progress.message(f"step {run.step}: validation loss {run.eval_loss:.4f} nats a token")


@contextlib.contextmanager
def _given_back(run: Run) -> Iterator[None]:
    """Before what is done now and then, and after it, a CPU's kept memory is given back."""
    give_back_freed_memory(run.state)
    yield
    give_back_freed_memory(run.state)


def _score_hellaswag(run: Run) -> None:
    if run.hellaswag is not None:
        evaluation = run.goodput.during("evaluation")
        with run.watchdog.watching("HellaSwag"), evaluation, _given_back(run):
            found = run.hellaswag(run.state.params)
        run.writer.write(run.step, found.metrics)
        run.progress.message(f"step {run.step}: {found.text}")


def _save(run: Run, *, wait: bool = False) -> None:
    if run.checkpointer is None:
        return
    fresh = run.eval_loss is not None and run.eval_step == run.step
    watching = run.watchdog.watching(f"writing the checkpoint of step {run.step}")
    with watching, run.goodput.during("checkpoint"), _given_back(run):
        run.goodput.reached(run.step, write=True)
        run.writer.sync()  # a resume from this checkpoint shall find the lines of its steps
        blocked_s = run.checkpointer.save(
            run.step,
            run.state,
            data_position=run.batches.position,
            metrics={"eval/loss": run.eval_loss} if fresh else None,
            wait=wait,
        )
    if blocked_s is not None:
        run.writer.write(run.step, {"perf/checkpoint_blocking_time": blocked_s})
