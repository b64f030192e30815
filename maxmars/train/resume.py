"""Rules for continuing a run: which fields of the config may change, and how.

Some fields may change freely. The others define the run: they change only on purpose, by name in
`--resume-overrides`, and only if the checkpoint has the arrays that they need: the model keeps its
size, and the optimizer its moments. The position in the data counts examples, so that another batch
size repeats and skips none. Data are compared by digest, not by path (`check_data`).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from maxmars.checkpoint import Checkpoint, read
from maxmars.checkpoint.digest import leaf_paths, leaf_types
from maxmars.config import (
    GPT2Config,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    differences,
    to_dict,
)
from maxmars.config.user_code import Source
from maxmars.distributed.workdir import SOURCES
from maxmars.model.attention import choose_attention
from maxmars.model.gpt2 import blocks_at_once
from maxmars.model.parameters import Parameters
from maxmars.train.step import abstract_train_state, match_by_type

_PATH_OF_DATA = re.compile(r"data(\.parts\.\d+)?\.(path|source)")
_MAY_CHANGE = re.compile(
    r"(name|num_steps|num_microbatches|hang_timeout_s"
    r"|schedule\.decay_steps|data(\.parts\.\d+)?\.(verify|num_workers)"
    r"|model\.(attention|remat|scan_unroll)|guard\.max_consecutive_skips)$"
    r"|(mesh|eval|checkpoint|log)\."
)


def read_newest(checkpoints: epath.Path, overrides: Sequence[str]) -> Checkpoint | None:
    """Read the metadata of the newest checkpoint; None if there are no checkpoints.

    Raises:
      ValueError: none of the checkpoints can be read, or there are overrides and no checkpoints.
    """
    try:
        return read(checkpoints)
    except FileNotFoundError:
        if overrides:
            raise ValueError(
                f"--resume-overrides {','.join(overrides)} is for a run that continues, but there "
                f"is no checkpoint in {checkpoints}; leave it out, or check --workdir."
            ) from None
        return None


def continued_config(
    saved: Checkpoint,
    config: TrainConfig,
    *,
    parameters: Parameters,
    overrides: Sequence[str],
    new_optimizer_state: bool = False,
    log: Callable[[str], None],
) -> TrainConfig:
    """Check the config that a run is to continue with, and return it with the decay steps of the
    saved schedule, unless it sets its own.

    Args:
      saved: the newest checkpoint.
      config: config to continue with; it fits the mesh.
      parameters: parameters of the model, on the mesh.
      overrides: dotted names of fields, or groups of fields, that change on purpose.
      new_optimizer_state: the run gets a new optimizer state, so the saved one need not fit.
      log: prints a message.

    Raises:
      ValueError: a field that defines the run differs and is not in `overrides`; `overrides` has an
        unknown name; or the checkpoint's arrays do not fit.
    """
    before = saved.config
    known = [name for some in (before, config) for name in _names(to_dict(some))]
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"--resume-overrides {name}: the config has no such field"
                f"{f' (did you mean {close[0]}?)' if close else ''}; name fields or their groups, "
                "such as optimizer.learning_rate,schedule."
            )
    # Data are compared by digest (`check_data`), so paths do not count. `auto` is no change of the
    # compute dtype: `resolve_config` takes the recorded one.
    changes = [
        (name, old, new)
        for name, old, new in differences(before, config)
        if not _may_change(name, old, new, config) and not _PATH_OF_DATA.fullmatch(name)
        if name != "model.compute_dtype" or new != "auto"
    ]
    if changes:
        misfit = None
        if any(name.partition(".")[0] in ("model", "optimizer") for name, _, _ in changes):
            misfit = _misfit(saved, config, parameters, new_optimizer_state=new_optimizer_state)
        _check_changes(saved, changes, misfit, overrides)
        texts = (f"{name} from {old} to {new}" for name, old, new in changes)
        log(f"changed on purpose: {', '.join(texts)}")
    steps = fixed_schedule(before).decay_steps
    if steps is not None and config.schedule.decay_steps is None and config.decay_steps != steps:
        log(
            f"num_steps is now {config.num_steps}; the learning rate still follows the schedule "
            f"over {steps} steps (change it with --schedule.decay-steps)."
        )
        schedule = dataclasses.replace(config.schedule, decay_steps=steps)
        asked = {"schedule.decay_steps": None}
        config = dataclasses.replace(config, schedule=schedule, asked=asked)
    return config


def _may_change(name: str, old: Any, new: Any, config: TrainConfig) -> bool:
    """Whether a field, by its dotted name, may change freely from `old` to `new`."""
    if name == "model.attention" and getattr(config.model, "dropout", 0) and "plain" in (old, new):
        return False  # only plain attention drops attention weights
    return _MAY_CHANGE.match(name) is not None


def fixed_schedule(config: TrainConfig) -> ScheduleConfig:
    """The schedule of a config with its decay steps written out, so that another number of steps
    does not change them.

    They stay open in a run that ends within its warmup: no step has decayed yet.
    """
    if config.decay_steps <= config.schedule.warmup_steps:
        return config.schedule
    return dataclasses.replace(config.schedule, decay_steps=config.decay_steps)


def rounding_of(config: TrainConfig, platform: str | None) -> dict[str, Any]:
    """Fields of a config, by dotted name, whose change affects rounding alone."""
    model = config.model
    fields: dict[str, Any] = {"num_microbatches": config.microbatches, "model.remat": model.remat}
    if isinstance(model, GPT2Config):
        fields["model.compute_dtype"] = model.compute_dtype
        fields["model.attention"] = choose_attention(model, platform).implementation
        fields["model.scan_unroll"] = blocks_at_once(model, platform)
    return fields


def rounding_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Differences in words between two results of `rounding_of`, in fields that both have."""
    return [
        f"{name} {value} -> {after[name]}"
        for name, value in before.items()
        if value != after.get(name, value)
    ]


def rounding_message(
    saved: Checkpoint, config: TrainConfig, environment: Mapping[str, Any]
) -> str | None:
    """A message on changes that affect rounding, of mesh and config; None without changes."""
    changes = []
    if (old := saved.environment.get("mesh", {})) and old != (new := environment["mesh"]):
        meshes = (" ".join(f"{a}={n}" for a, n in shape.items()) for shape in (old, new))
        changes.append("mesh {} -> {}".format(*meshes))
    before = rounding_of(saved.config, saved.environment.get("platform"))
    changes += rounding_changes(before, rounding_of(config, environment["platform"]))
    if not changes:
        return None
    effect = "the loss goes on as before, up to rounding"
    return f"since step {saved.step}: {', '.join(changes)}; {effect}"


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of fields and groups of fields in a result of `to_dict`."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        if key != "type":
            yield f"{prefix}{key}"
            if isinstance(child, dict | list):
                yield from _names(child, f"{prefix}{key}.")


def _misfit(
    saved: Checkpoint, config: TrainConfig, parameters: Parameters, *, new_optimizer_state: bool
) -> str | None:
    """The reason why a checkpoint does not fit a config, in words; None if it fits."""
    state, before = abstract_train_state(config, parameters), saved.config.optimizer

    def first_misfit_of(*parts: str) -> str | None:
        there, here = (
            {name: kind for name, kind in types.items() if name.startswith(parts)}
            for types in (saved.types, leaf_types(state))
        )
        return first_misfit(there, here)

    misfit = first_misfit_of("params/")
    if misfit is not None or new_optimizer_state:
        return misfit
    if type(before) is not type(config.optimizer):
        return "that is another optimizer"  # even if all arrays agree in name and type
    if (misfit := misfit_of_kernels(before, config.optimizer)) is not None:
        return misfit
    if isinstance(before, OptaxConfig):  # its former code may be gone, so only types are compared
        return first_misfit_of("opt_state/", "prev_params/")
    stored = abstract_train_state(dataclasses.replace(config, optimizer=before), parameters)
    # A dry run of `step.restore_state`: leaves that it would not take from the checkpoint are those
    # of `state` itself.
    restored = match_by_type(stored.opt_state, state.opt_state)
    names, fresh = leaf_paths({"opt_state": restored}), jax.tree.leaves(state.opt_state)
    for name, leaf, new in zip(names, jax.tree.leaves(restored), fresh, strict=True):
        if leaf is new and leaf.ndim:  # metrics and counts may begin at 0, moments may not
            return f"{name} is absent there"
    return None


def _check_changes(
    saved: Checkpoint,
    changes: Sequence[tuple[str, Any, Any]],
    misfit: str | None,
    overrides: Sequence[str],
) -> None:
    """Check that `overrides` name every change, and that there is no `misfit`."""
    names = [name for name, _, _ in changes]
    refused = [n for n in names if not any(n == o or n.startswith(f"{o}.") for o in overrides)]
    if not refused and misfit is None:
        return
    workdir = saved.path.parent.parent  # of <workdir>/checkpoints/STEP
    differing = ", ".join(
        f"{name} ({old} there, {new} here)"
        for name, old, new in changes
        if name in refused or not refused
    )
    if refused:
        problem = f"{workdir} holds another run: it differs in {differing}"
    else:
        problem = f"--resume-overrides cannot change {differing}: {misfit}"
    way_out = "Continue it with its own values, or choose another --workdir"
    if any(isinstance(old, Source) for _, old, _ in changes):  # a file of the user's changed
        way_out = f"{workdir / SOURCES} keeps the code of before. {way_out}"
    if misfit is None:
        wanted = ",".join([*overrides, *refused])
        way_out += f", or change on purpose with --resume-overrides {wanted}"
    elif not any(name.partition(".")[0] == "model" for name in names):
        way_out += (
            f" and start there from its weights with --init-from {workdir}, or go on here after "
            f"`maxmars rewind {workdir} --to {saved.step} --new-optimizer-state`"
        )
    raise ValueError(f"{problem}. {way_out}.")


def misfit_of_kernels(there: OptimizerConfig, here: OptimizerConfig) -> str | None:
    """The reason why buffers of two momentum kernels differ in meaning, in words; None if they do
    not. Their types may agree all the same."""
    kernels = [getattr(optimizer, "momentum_kernel", None) for optimizer in (there, here)]
    a, b = (kernel and (kernel.preset, kernel.decays, kernel.weights) for kernel in kernels)
    return None if a == b else "the optimizer's state is that of another momentum kernel"


def first_misfit(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first array whose type differs between two states, in words; None if all types agree.

    Args:
      there: types of the saved arrays by path; see `digest.leaf_types`.
      here: types of the wanted arrays by path.
    """
    for name in {**there, **here}:  # in order of the saved arrays, unlike a set
        a, b = there.get(name, "absent"), here.get(name, "absent")
        if a != b:
            return f"{name} is {a} there and {b} here"
    return None


def check_data(saved: Checkpoint, digest: str, name: str = "") -> None:
    """Compare the digest of the training data with the run's record; with a name, the digest of
    this set of `eval.data`, if the run had it before.

    Raises:
      ValueError: the digests differ.
    """
    recorded, workdir, use = saved.data_digest, saved.path.parent.parent, "trained"
    way_out = f"with --init-from {workdir} and another --workdir"
    way_out = f"start a new run on these from its weights {way_out}"
    if name:
        recorded = {one.name: one.digest for one in saved.config.eval.data}.get(name) or digest
        use, way_out = f"evaluated by the name {name}", "give these another name"
    if recorded != digest:
        raise ValueError(
            f"{workdir} was {use} on other data: their digest is {str(recorded)[:16]}, and that of "
            f"the data here is {digest[:16]}. Continue with the data of before, or {way_out}."
        )
