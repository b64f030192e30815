"""Starting a new run from weights that are there: of another run, or of a Hugging Face model.

The new run takes the weights and nothing else: it is at step 0, at the first example of its data
and at the beginning of its schedule. Its optimizer, which may be another one, starts as in any new
run: no updates counted, moments zero. The first step of MARS, approximate or exact, then compares
its gradient with zero (c = (1 + κ) g, as in the official code), so that exact MARS does not read
parameters from before the first step.

With `InitFrom.optimizer_state` the optimizer goes on instead: moments, MARS's last gradient (of
exact MARS the parameters of the step before) and the number of updates, which corrects the bias of
the moments, are the source's. Step, data and schedule start anew all the same.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxmars import distributed, hf
from maxmars.checkpoint import Saved, find, load_parts
from maxmars.checkpoint.directory import resolve
from maxmars.config import GPT2Config, TrainConfig, differences
from maxmars.digest import combine, digest, leaf_types
from maxmars.metrics import write_json
from maxmars.train_step import TrainState, abstract_train_state, init_train_state
from maxmars.trained_model import HFTarget, find_target
from maxmars.workdir import Workdir, is_remote, read_text

_RECORD = "init_from.json"

# Fields of the model without which its weights mean something else. Of the vocabulary's padding the
# weights are independent.
_SAME = (
    "num_layers",
    "num_heads",
    "embed_dim",
    "max_seq_len",
    "vocab_size",
    "use_bias",
    "scale_attn_by_inverse_layer_idx",
    "layer_norm_epsilon",
    "param_dtype",
)
_WITH_OPTIMIZER = ("params", "opt_state", "prev_params")


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """What a new run starts from."""

    path: str
    """A run's working directory, its directory of checkpoints or one of them, also on `gs://`; or a
    local directory with a Hugging Face GPT-2."""
    optimizer_state: bool = False
    """Also take the state of the optimizer, which must be of the same kind."""


@dataclass(frozen=True, kw_only=True)
class Initial:
    """The state that a new run starts from, and where it is from."""

    state: TrainState
    origin: dict[str, Any]
    """JSON-ready: `path` as it was asked for, `weights`, the checkpoint or directory that was read,
    `optimizer_state`, and `params_digest`, the digest of the parameters."""

    @property
    def text(self) -> str:
        """For people."""
        what = "weights and optimizer state" if self.origin["optimizer_state"] else "weights"
        return f"starting from the {what} of {self.origin['weights']}"


def load_initial(config: TrainConfig, mesh: Mesh, source: InitFrom) -> Initial:
    """Read the weights, compare them with their digests, and make a state around them.

    Args:
      config: the new run's.
      mesh: where the state goes; the source may have been trained on any other.
      source: what to read.

    Raises:
      FileNotFoundError: there are no weights at the path.
      ValueError: they are damaged, or of another model or optimizer than `config` says.
    """
    path, found = resolve(source.path), find(source.path)
    abstract = abstract_train_state(config, mesh)
    if found is not None:
        directory, step = found
        parts, saved = load_parts(
            directory, lambda saved: _choose(saved, source, config, abstract), step
        )
        weights = saved.path
    else:
        parts, weights = {"params": _load_hugging_face(path, source, config, abstract)}, path
    parts["params"] = _padded(parts["params"], abstract.params, config.model)
    origin = {
        "path": str(path),
        "weights": str(weights),
        "optimizer_state": source.optimizer_state,
        "params_digest": combine(digest({"params": parts["params"]})),
    }
    return Initial(state=init_train_state(config, mesh, parts), origin=origin)


def check_origin(workdir: Workdir, source: InitFrom | None, *, continues: bool) -> None:
    """Check that a run that started before in `workdir` did so from `source`.

    One that continues need not name its source again. One that has saved nothing must, since it
    starts anew; from another source it may.

    Raises:
      ValueError: it did not, or must; every process of the run raises.
    """
    problem = None
    if distributed.is_primary():
        problem = _other_origin(workdir, source) if continues else _forgotten(workdir, source)
    if not distributed.everywhere(problem is None):
        raise ValueError(problem or "process 0 refuses --init-from; it says why.")


def record_origin(workdir: Workdir, initial: Initial) -> None:
    """Write `init_from.json` into the directory of a new run; only the primary process does."""
    if distributed.is_primary():
        write_json(workdir / _RECORD, initial.origin)


def _forgotten(workdir: Workdir, source: InitFrom | None) -> str | None:
    """What is wrong with starting from random weights where another start was recorded."""
    record = workdir / _RECORD
    text = read_text(record)
    if source is not None or text is None:
        return None
    return (
        f"the run in {workdir} was to start from {json.loads(text)['path']} and has "
        "saved nothing yet: give the same --init-from again. To start from random weights, delete "
        f"{record}, or choose another --workdir."
    )


def _other_origin(workdir: Workdir, source: InitFrom | None) -> str | None:
    """What is wrong with continuing a run as one that started from `source`."""
    if source is None:
        return None
    origin = json.loads(read_text(workdir / _RECORD) or "null")
    if origin is None:
        how = f"random weights, not from {source.path}"
    elif origin["path"] != str(resolve(source.path)):
        how = f"{origin['path']}, not from {source.path}"
    elif origin["optimizer_state"] != source.optimizer_state:
        preposition = "with" if origin["optimizer_state"] else "without"
        how = f"{origin['path']} {preposition} its optimizer state"
    else:
        return None
    return (
        f"the run in {workdir} started from {how}. Leave --init-from and --init-optimizer-state "
        "out to continue it, or choose another --workdir."
    )


def _choose(
    saved: Saved, source: InitFrom, config: TrainConfig, abstract: TrainState
) -> dict[str, Any]:
    """What to read of a checkpoint, if it fits."""
    theirs = saved.config
    model = theirs.model if isinstance(theirs, TrainConfig) else theirs
    _check_model(saved.path, model, config.model)
    if not source.optimizer_state:
        return {"params": _as_stored(abstract.params, model)}
    if not isinstance(theirs, TrainConfig):
        raise _no_optimizer_state(saved.path)
    parts = {name: getattr(abstract, name) for name in _WITH_OPTIMIZER}
    _check_optimizer(saved, theirs, config, leaf_types(parts))
    return parts


def _load_hugging_face(
    path: Any, source: InitFrom, config: TrainConfig, abstract: TrainState
) -> dict[str, Any]:
    if is_remote(path):
        raise FileNotFoundError(f"{path} holds no checkpoints; check the path.")
    target = find_target(source.path)
    assert isinstance(target, HFTarget), "a run would have been found before"
    directory = target.directory
    if source.optimizer_state:
        raise _no_optimizer_state(path)
    model = hf.load_config(directory)
    _check_model(directory, model, config.model)
    model = dataclasses.replace(model, vocab_pad_multiple=config.model.vocab_pad_multiple)
    return hf.load_params(directory, model, abstract.params)


def _no_optimizer_state(path: Any) -> ValueError:
    return ValueError(
        f"{path} has weights alone and no optimizer state; leave out --init-optimizer-state."
    )


def _check_model(path: Any, theirs: GPT2Config, ours: GPT2Config) -> None:
    changed = [(field, old, new) for field, old, new in differences(theirs, ours) if field in _SAME]
    if changed:
        rows = ", ".join(
            f"model.{name} is {old} there and {new} here" for name, old, new in changed
        )
        flags = " ".join(f"--model.{name.replace('_', '-')} {old}" for name, old, _ in changed)
        raise ValueError(
            f"the weights in {path} are of another model: {rows}. Train that model ({flags}), or "
            "start from other weights."
        )


def _check_optimizer(
    saved: Saved, theirs: TrainConfig, ours: TrainConfig, wanted: dict[str, str]
) -> None:
    """Check that a checkpoint's optimizer state, written under the config `theirs`, fits `ours`."""
    way_out = "leave out --init-optimizer-state to start with a new one"
    before, after = (type(config.optimizer) for config in (theirs, ours))
    if before is not after:  # two optimizers may have the same arrays
        raise ValueError(
            f"the optimizer state in {saved.path} is of {before.__name__}, but optimizer is "
            f"{after.__name__} here; {way_out}."
        )
    names = [n for n in {**wanted, **saved.types} if n.partition("/")[0] in _WITH_OPTIMIZER]
    wrong = [name for name in names if saved.types.get(name) != wanted.get(name)]
    if wrong:
        rows = differences(theirs, ours)
        fields = [
            row for row in rows if row[0].startswith(("optimizer.", "model.vocab_pad_multiple"))
        ]
        changed = ", ".join(f"{name} is {old} there and {new} here" for name, old, new in fields)
        there, here = (types.get(wrong[0], "absent") for types in (saved.types, wanted))
        raise ValueError(
            f"the optimizer state in {saved.path} does not fit: {wrong[0]} is {there} there and "
            f"{here} here ({changed}). Take the values there, or {way_out}."
        )


def _as_stored(params: dict[str, Any], model: GPT2Config) -> dict[str, Any]:
    """Abstract parameters with as many rows of the token embedding as `model` has; unless these
    are the same, its rows stay together, since the mesh need not divide them."""
    table = params["wte"]["embedding"]
    rows, width = model.padded_vocab_size, table.shape[1]
    if rows == table.shape[0]:
        return params
    whole_rows = NamedSharding(table.sharding.mesh, PartitionSpec(None, table.sharding.spec[1]))
    stored = jax.ShapeDtypeStruct((rows, width), table.dtype, sharding=whole_rows)
    return params | {"wte": params["wte"] | {"embedding": stored}}


def _padded(params: dict[str, Any], abstract: dict[str, Any], model: GPT2Config) -> dict[str, Any]:
    """The parameters with the padding of `abstract`; rows that only pad are zero."""
    table, wanted = params["wte"]["embedding"], abstract["wte"]["embedding"]
    if table.shape == wanted.shape:
        return params
    missing = wanted.shape[0] - model.vocab_size
    pad = jax.jit(
        lambda table: jnp.pad(table[: model.vocab_size], ((0, missing), (0, 0))),
        out_shardings=wanted.sharding,
    )
    return params | {"wte": params["wte"] | {"embedding": pad(table)}}
