"""Check by its receipts that a run is one trajectory: what is in its workdir was computed in order.

The chain of receipts (see `receipts.py`) is followed from the newest checkpoint back to the first
step. Each checkpoint that is still there must be one of the chain, and hold the arrays that its
receipt names; the metrics must be those that the receipts vouch for, without a step that is missing
or double; each session must have a receipt, and no line of the receipts may be missing or foreign.
`--replay` computes some steps again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from maxmars.checkpoint import Checkpoint, array_keys, find, list_steps, load_arrays, read
from maxmars.checkpoint.environment import changes_since
from maxmars.checkpoint.reader import DamagedError
from maxmars.checkpoint.writer import Retention
from maxmars.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, differences
from maxmars.config.user_code import sources_in, split_source, text_digests
from maxmars.distributed.files import is_remote, resolve, write_text
from maxmars.distributed.sharding import training_mesh
from maxmars.eval.trained_model import MODEL_SOURCE, check_code
from maxmars.train.auto import with_remat
from maxmars.train.bookkeeping import OPTIMIZER_SOURCE
from maxmars.train.loop import train
from maxmars.train.metrics import read_metrics, read_sessions
from maxmars.train.receipts import (
    FILE,
    Receipt,
    chain_to,
    read_receipts,
    unvouched,
)
from maxmars.train.resume import (
    fixed_schedule,
    is_same_place,
    read_changes,
    rounding_changes,
)

_READ_BYTES = 2**30  # of arrays that are compared at a time
_WIDE = {"float64", "int64", "uint64"}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of `audit`, JSON-ready by `dataclasses.asdict`."""

    workdir: str
    last_step: int
    """Of the newest checkpoint."""
    first_step: int
    """Where the receipts begin."""
    receipts: int
    """Links of the chain."""
    sessions: int
    """Sessions of the chain."""
    changes: list[str]
    """What changed on the way that may change the rounding, and at which step."""
    config_changes: list[str]
    """Which fields of the config changed, and at which step, by `config_changes.jsonl`."""
    problems: list[str]
    """Where the run is not one trajectory; empty if it is."""
    uncovered_metrics: int
    """Lines of metrics after the last receipt, which vouches for none of them."""
    replayed: str | None
    """The steps that were computed again, in words."""

    @property
    def verdict(self) -> str:
        """`one trajectory`, `one trajectory up to rounding`, or `broken`."""
        if self.problems:
            return "broken"
        return "one trajectory up to rounding" if self.changes else "one trajectory"

    @property
    def text(self) -> str:
        """The result, in lines for people."""
        lines = [f"{self.workdir}: {self.verdict}"]
        lines[0] += f", steps {self.first_step} to {self.last_step}"
        lines[0] += f" (sessions: {self.sessions}, receipts: {self.receipts})"
        lines += [f"  broken: {problem}" for problem in self.problems]
        lines += [f"  changed: {change}" for change in self.changes]
        lines += [f"  config changed: {change}" for change in self.config_changes]
        if self.first_step:
            lines.append(f"  no receipts of the steps before {self.first_step}")
        if self.uncovered_metrics:
            lines.append(
                f"  {self.uncovered_metrics} lines of metrics after step {self.last_step} are not "
                "saved yet: the next start makes their steps again"
            )
        return "\n".join([*lines, *([f"  {self.replayed}"] if self.replayed else [])])


def audit(
    workdir: str | os.PathLike[str],
    *,
    replay: int | None = None,
    compare_arrays: bool = True,
    trust_code: bool = False,
    log: Callable[[str], None] = print,
) -> Audit:
    """Check a run.

    Args:
      workdir: directory of the run, or of its checkpoints, on a disk or `gs://`.
      replay: compute so many steps again from a checkpoint, on this machine, and compare the
        digests; the run must have saved the step where they end.
      compare_arrays: read the arrays of every checkpoint and compare them with their digests.
        Without it a second or two are enough, and what the checkpoints say of themselves counts.
      trust_code: do not compare the user's own files that the run keeps with the record of them.
      log: gets a line for what takes a while.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: no checkpoint can be read, or compared without 64-bit JAX; a file of the user's
        own that the run keeps is not the recorded one; or no `replay` steps can be computed again.
    """
    directory = resolve(workdir)
    found = find(directory)
    if found is None or found[1] is not None:
        raise FileNotFoundError(f"{directory} is not the directory of a run with checkpoints.")
    directory = resolve(found[0].parent)  # of the run, also where its checkpoints were named
    steps = list_steps(found[0])
    newest = read(found[0])
    wide = {kind.partition("[")[0] for kind in newest.types.values()} & _WIDE
    if compare_arrays and wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{directory} has arrays of {min(wide)}, which needs 64-bit JAX: set the environment "
            "variable JAX_ENABLE_X64=1."
        )
    if not trust_code and isinstance(newest.config, TrainConfig):
        _check_kept_code(directory, newest.config)
    receipts = read_receipts(directory)
    chain, problems = _chain(newest, receipts)
    by_hash = {receipt["hash"]: receipt for receipt in chain}
    problems += _check_links(chain)
    kept = _kept(found[0], steps, newest)
    for step in steps:
        is_older = not chain or step <= chain[0]["step"]
        try:
            checkpoint = read(found[0], step)
            problems += _check_checkpoint(checkpoint, step, by_hash, is_older=is_older)
            if compare_arrays:
                log(f"checkpoint {step}: comparing the arrays with their digests")
                for part in _parts(checkpoint):
                    load_arrays(checkpoint, unflatten_dict(part))
        except (ValueError, DamagedError) as error:
            if step in kept:
                problems.append(f"the checkpoint of step {step} is damaged: {error}")
            else:
                log(f"checkpoint {step} is not whole: the run was killed while it was deleted")
    rows = read_metrics(directory)
    last = chain[-1]["step"] if chain else newest.step
    problems += _check_metrics(rows, chain, receipts)
    problems += _check_sessions(directory, chain, receipts)
    replayed = None
    if replay is not None and not problems:
        replayed, problem = _replay(found[0], steps, chain, replay, log)
        problems += [problem] if problem else []
    began = [receipt for receipt in chain if receipt["kind"] == "began"]
    return Audit(
        workdir=str(directory),
        last_step=newest.step,
        first_step=chain[0]["step"] if chain else newest.step,
        receipts=len(chain),
        sessions=len(began),
        changes=_changes(began),
        config_changes=[
            f"at step {step}: {told}"
            for step, told in read_changes(directory, before=newest.step).items()
        ],
        problems=problems,
        uncovered_metrics=sum(row["step"] > last for row in rows),
        replayed=replayed,
    )


def _chain(newest: Checkpoint, receipts: Sequence[Receipt]) -> tuple[list[Receipt], list[str]]:
    """The receipts that lead to the newest checkpoint, in order, and where the chain breaks."""
    if not newest.receipt:
        return [], [f"the checkpoint of step {newest.step} has no receipt"]
    chain, missing = chain_to(newest.receipt, receipts)
    if missing is None:
        return chain, []
    before = f"before step {chain[0]['step']}" if chain else f"of step {newest.step}"
    return chain, [f"{FILE} lacks the receipt {before} ({missing[:16]})"]


def _check_kept_code(workdir: Any, config: TrainConfig) -> None:
    """Compare the user's own files that a run keeps with the SHA-256 that it recorded of each."""
    parts = {MODEL_SOURCE: config.model, OPTIMIZER_SOURCE: config.optimizer, "sources": config.data}
    for folder, part in parts.items():
        for source in sources_in(part):
            kept = workdir / folder / split_source(source)[0].name
            if kept.is_file():
                check_code(kept, source, workdir)


def _check_links(chain: Sequence[Receipt]) -> list[str]:
    """Each receipt goes on from the state, and the data, of the one before."""
    problems, batch_size = [], 0
    for before, after in zip([None, *chain], chain, strict=False):
        same = before is not None and after["kind"] == "began"
        if same and (before["step"], before["digest"]) != (after["step"], after["digest"]):
            problems.append(f"the session that began at step {after['step']} had another state")
        if same and before["position"] != after["position"]:
            problems.append(f"the session that began at step {after['step']} had other data")
        if after["kind"] == "began":
            batch_size = after["batch_size"]
        elif before is not None:
            taken = after["position"] - before["position"]
            if taken != (after["step"] - before["step"]) * batch_size:
                problems.append(
                    f"{taken} examples were read between steps {before['step']} and {after['step']}"
                )
    data = {receipt["data"] for receipt in chain if receipt["kind"] == "began"}
    if len(data) > 1:
        problems.append(f"the sessions read {len(data)} different data")
    return problems


def _kept(directory: Any, steps: Sequence[int], newest: Checkpoint) -> set[int]:
    """The steps that the run keeps; a kill may have come while another one was being deleted."""
    retention = Retention(newest.run_config().checkpoint)
    for step in steps:
        with contextlib.suppress(ValueError):  # damaged: it is none of the best
            retention.record(step, read(directory, step).metrics)
    return retention.kept(steps)


def _check_checkpoint(
    checkpoint: Checkpoint, step: int, chain: dict[str, Receipt], *, is_older: bool
) -> list[str]:
    """A checkpoint, whose directory is that of `step`, is one that the chain names.

    One that is older than the chain may have no receipt.
    """
    receipt = chain.get(checkpoint.receipt.get("hash", ""))
    if receipt is None and (checkpoint.receipt or not is_older):
        return [f"the checkpoint of step {step} is not of this run: {FILE} does not lead to it"]
    said = checkpoint.step, checkpoint.digest, checkpoint.data_position
    told = said if receipt is None else (receipt["step"], receipt["digest"], receipt["position"])
    if said != told or step != said[0]:
        return [f"the checkpoint of step {step} is not the one of its receipt"]
    return []


def _parts(checkpoint: Checkpoint) -> Iterator[dict[tuple[str, ...], jax.ShapeDtypeStruct]]:
    """The arrays of a checkpoint by their keys, as many at a time as the memory easily holds.

    Raises:
      DamagedError: one is missing.
    """
    part, size, keys = {}, 0, array_keys(checkpoint)
    for name, kind in checkpoint.types.items():
        dtype, _, shape = kind.partition("[")
        sizes = tuple(int(number) for number in shape.rstrip("]").split(",") if number)
        leaf = jax.ShapeDtypeStruct(sizes, dtype)
        if name not in keys:
            raise DamagedError(f"state has no array {name}")
        part[keys[name]] = leaf
        size += leaf.size * leaf.dtype.itemsize
        if size > _READ_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _check_metrics(
    rows: Sequence[dict[str, Any]], chain: Sequence[Receipt], receipts: Sequence[Receipt]
) -> list[str]:
    """The metrics are those that the receipts vouch for, each step's loss once and in order."""
    losses = [row["step"] for row in rows if "train/loss" in row]
    problems = [
        f"metrics.jsonl has the training loss of step {step} {count} times"
        for step, count in Counter(losses).items()
        if count > 1
    ]
    if losses != sorted(losses):
        problems.append("the training losses in metrics.jsonl are out of order")
    for first, last in unvouched(rows, chain, receipts):
        where = f"of step {last}" if first == last else f"between steps {first} and {last}"
        problems.append(f"metrics.jsonl is not what was recorded {where}")
    return problems


def _check_sessions(
    workdir: Any, chain: Sequence[Receipt], receipts: Sequence[Receipt]
) -> list[str]:
    """Each session of `sessions.jsonl` has a receipt where it began, and one where it ended if it
    completed the run; and no receipt is missing or foreign.

    Sessions before the first receipt have none in a run that is older than receipts.
    """
    problems, sessions = [], read_sessions(workdir)
    begun: list[float] = []
    ended: set[float] = set()
    for receipt in receipts:
        if receipt["kind"] == "began":
            begun.append(receipt["session"])
        elif receipt["kind"] == "ended":
            ended |= {*begun[-1:]}
    oldest = min(begun, default=math.inf) if chain and chain[0]["step"] else 0.0
    if begun:
        problems += [
            f"sessions.jsonl has a session of steps {s.first_step} to {s.last_step} without a "
            "receipt"
            for s in sessions
            if s.start >= oldest and s.start not in begun
        ]
    problems += [
        f"{FILE} lacks the end of the session that began at step {s.first_step}"
        for s in sessions
        if s.done and s.start in begun and s.start not in ended
    ]
    path = workdir / FILE
    damaged = path.read_bytes().count(b"\n") - len(receipts) if path.is_file() else 0
    if damaged:
        problems.append(f"{FILE} has lines ({damaged}) that cannot be read, or have a wrong hash")
    above = [None, *(receipt["hash"] for receipt in receipts)]
    problems += [
        f"{FILE} is not whole: its line `{receipt['kind']}` of step {receipt['step']} was not "
        "written after the line above it"
        for before, receipt in zip(above, receipts, strict=False)
        if receipt["above"] != before
    ]
    return problems


def _changes(began: Sequence[Receipt]) -> list[str]:
    changes = []
    for before, after in itertools.pairwise(began):
        earlier, now = before["environment"], after["environment"]
        found = changes_since(earlier, now)
        for name in ("mesh", "device_kinds", "num_devices", "num_processes"):
            if earlier.get(name) != now.get(name):
                found.append(f"{name} {earlier.get(name)} -> {now.get(name)}")
        if before["batch_size"] != after["batch_size"]:
            found.append(f"global_batch_size {before['batch_size']} -> {after['batch_size']}")
        found += rounding_changes(_rounding(before), _rounding(after))
        changes += [f"at step {after['step']}: {', '.join(found)}"] if found else []
    return changes


def _rounding(began: Receipt) -> dict[str, Any]:
    """What `rounding_of` said where a session began; older sessions recorded less."""
    older = {"num_microbatches": began["microbatches"]} if "microbatches" in began else {}
    return began.get("rounding", older)


def _replay(
    directory: Any,
    steps: Sequence[int],
    chain: Sequence[Receipt],
    count: int,
    log: Callable[[str], None],
) -> tuple[str | None, str | None]:
    """Compute steps again; what was done, and what came out wrong."""
    if is_remote(directory):
        raise ValueError(f"--replay {count} needs the run on a disk; copy {directory} there.")
    saved = {receipt["step"]: receipt for receipt in chain if receipt["kind"] == "saved"}
    starts = [step for step in steps if step + count in saved]
    if not starts:
        known = sorted({last - first for first in steps for last in saved if last > first})
        if not known:
            raise ValueError(
                f"--replay {count}: no checkpoint that is still there is before a saved one; train "
                "on, or keep more by checkpoint.keep_last."
            )
        raise ValueError(
            f"--replay {count}: no checkpoint that is still there is {count} steps before a saved "
            f"one; take one of {', '.join(map(str, known))}."
        )
    tried = (
        (first, _replay_config(directory, steps, chain, first, first + count))
        for first in reversed(starts)
    )
    first, config = next((found for found in tried if found[1] is not None), (0, None))
    if config is None:
        end = min(step for step in steps if step >= starts[-1] + count)
        began = _began_between(chain, starts[-1] + 1, end)
        raise ValueError(
            f"--replay {count}: the config changed on the way, at step "
            f"{' or '.join(map(str, began))}; take another K."
        )
    last = first + count
    _check_own_code(chain, first, saved[last], config)
    checkpoint = read(directory, first)
    before, _ = chain_to(checkpoint.receipt, chain) if checkpoint.receipt else ([], None)
    changed = [name for name, _, _ in differences(checkpoint.run_config(), config)]
    log(f"computing steps {first + 1} to {last} again")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(directory / str(first), folder / "checkpoints" / str(first))
        # Without the receipts and metrics of before, the run would say that they are lost.
        write_text(folder / FILE, "".join(json.dumps(receipt) + "\n" for receipt in before))
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(directory.parent / "metrics.jsonl", folder)
        train(config, folder, resume_overrides=changed, quiet=True)
        digest = read(folder / "checkpoints", last).digest
    if digest == saved[last]["digest"]:
        return f"steps {first + 1} to {last}, computed again: the same digest", None
    return None, (
        f"steps {first + 1} to {last}, computed again on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, end with the digest {digest[:16]}, not "
        f"{saved[last]['digest'][:16]}"
    )


def _check_own_code(
    chain: Sequence[Receipt], first: int, end: Receipt, config: TrainConfig
) -> None:
    """The user's own files that a config names are those that made the steps from `first` on.

    Sessions that are older than this record name no files.

    Raises:
      ValueError: one has another text.
    """
    here, own_code = text_digests(config), {}
    for receipt in chain[: chain.index(end) + 1]:
        if receipt["kind"] == "began":
            own_code = receipt.get("own_code", {})
            continue
        changed = [name for name, there in own_code.items() if here.get(name) not in (there, None)]
        if receipt["step"] > first and changed:
            raise ValueError(
                f"--replay {end['step'] - first}: step {receipt['step']} was made with another "
                f"text of {changed[0]} (SHA-256 {own_code[changed[0]][:16]}) than is there now; "
                "put that text there, or take another K."
            )


def _replay_config(
    directory: Any, steps: Sequence[int], chain: Sequence[Receipt], first: int, last: int
) -> TrainConfig | None:
    """The config that the steps after `first` up to `last` were made with, to make them again.

    A checkpoint holds the config of the session that saved it. None where it changed on the way, or
    where checkpoints that are gone would have to tell it.
    """
    after = min(step for step in steps if step >= last)
    if not _began_between(chain, first, last):
        after = first
    made, other = read(directory, after), read(directory, first)
    config, before = (_short_config(checkpoint, last) for checkpoint in (made, other))
    return (
        config
        if not _began_between(chain, first + 1, after) or not differences(config, before)
        else None
    )


def _began_between(chain: Sequence[Receipt], first: int, end: int) -> list[int]:
    """The steps from `first` on and before `end` at which sessions began."""
    began = (receipt["step"] for receipt in chain if receipt["kind"] == "began")
    return sorted({step for step in began if first <= step < end})


def _short_config(checkpoint: Checkpoint, last: int) -> TrainConfig:
    """The config of a checkpoint, to train up to step `last` as it did, and nothing else."""
    config = checkpoint.run_config()
    if is_same_place(checkpoint, config, training_mesh(config)):
        config = dataclasses.replace(config, num_microbatches=config.microbatches)
    else:  # what was chosen there need not fit here
        config = dataclasses.replace(config, num_microbatches=None)
        if "model.remat" in config.asked:
            config = with_remat(config, "auto")
    return dataclasses.replace(
        config,
        num_steps=last,
        schedule=fixed_schedule(config),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=1),
    )
