"""`--init-from`: start a new run from the weights of another run or of a Hugging Face model.

The new run takes the weights that the other run evaluates (its EMA, for example), and nothing else:
step, data and schedule begin at 0, and the optimizer, also of another kind, has no updates and zero
moments. So the first step of MARS, approximate or exact, compares its gradient with zero
(c = (1 + κ) g, as in the official code), and the previous parameters of exact MARS are at first the
weights themselves.

With `InitFrom.optimizer_state` the run takes the trained parameters instead, with the optimizer's
moments and count of updates, and MARS's last gradient (exact MARS: the previous parameters).

The run saves this state as step 0. After that it continues from its own checkpoints, like any
other, and no longer needs the other run.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxmars.checkpoint import Checkpoint, load_arrays
from maxmars.checkpoint.digest import combine, digest, leaf_types
from maxmars.config import GPT2Config, ModelConfig, TrainConfig, differences
from maxmars.data.batches import UNKNOWN_TOKENIZER
from maxmars.data.tokenizer import JsonTokenizer, Vocabulary, difference
from maxmars.distributed import processes
from maxmars.distributed.files import resolve
from maxmars.eval.trained_model import Target, find_target
from maxmars.model import hub
from maxmars.train.resume import first_misfit, misfit_of_kernels
from maxmars.train.step import TrainState, TrainStep, init_train_state

_LOGGER = logging.getLogger(__name__)
# Fields of the model that must be equal. The padding of the vocabulary may differ, see `_padded`.
_FIELDS_OF_WEIGHTS = (
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
_WITH_OPTIMIZER = ("params", "opt_state", "prev_params")  # fields of the state


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """The source of a new run's initial weights."""

    path: str
    """A run's working directory, its directory of checkpoints or one checkpoint, also on `gs://`; a
    local directory with a Hugging Face GPT-2; or `hf:OWNER/NAME[@REVISION]`."""
    optimizer_state: bool = False
    """Take the optimizer's state too; both optimizers must be of one kind."""


@dataclass(frozen=True, kw_only=True)
class Initial:
    """Initial state of a new run, with its origin."""

    state: TrainState
    origin: dict[str, Any]
    """JSON-ready: `path` as given, `weights` (path of the checkpoint or directory, or
    `hf:OWNER/NAME@COMMIT`), `optimizer_state`, and `params_digest`."""


def load_initial(step: TrainStep, init_from: InitFrom, vocabulary: Vocabulary) -> Initial:
    """Read weights, compare them with their digests, and make a new run's state with them; all
    processes must call.

    Args:
      step: train step of the new run, on its mesh. The weights may come from another mesh.
      init_from: source of the weights.
      vocabulary: vocabulary of the new run's training tokens.

    Raises:
      FileNotFoundError: there are no weights at the path.
      ValueError: the weights are damaged, or the model, the optimizer or the tokenizer differ from
        those of the new run.
      Other errors of `hub.fetch`.
    """
    config, abstract = step.config, step.abstract_state
    path = init_from.path if hub.is_on_hub(init_from.path) else str(resolve(init_from.path))
    if init_from.optimizer_state and hub.is_on_hub(path):
        raise _no_optimizer_state(path)  # before a download
    target = find_target(path)
    if init_from.optimizer_state and target.checkpoints is None:
        raise _no_optimizer_state(path)
    _check_tokenizer(path, target, vocabulary)
    optimizer_state = init_from.optimizer_state
    fields, weights = _read_fields(target, config, abstract, optimizer_state=optimizer_state)
    fields["params"] = _padded(fields["params"], abstract.params, config.model)
    origin = {
        "path": path,
        "weights": weights,
        "optimizer_state": optimizer_state,
        "params_digest": combine(digest({"params": fields["params"]})),
    }
    state = init_train_state(config, step.parameters, fields)
    return Initial(state=state, origin=origin)


def _read_fields(
    target: Target, config: TrainConfig, abstract: TrainState, *, optimizer_state: bool
) -> tuple[dict[str, Any], str]:
    """Fields of the state from a target, by name, and the path that they were read from."""

    def read_from(saved: Checkpoint | None) -> tuple[dict[str, Any], str]:
        model, origin = target.recorded_config(saved), target.origin(saved)
        _check_model(origin, model, config.model)
        if saved is None:  # a Hugging Face model has no padding, and gets ours when it is read
            padding = getattr(config.model, "vocab_pad_multiple", 1)
            model = dataclasses.replace(model, vocab_pad_multiple=padding)
        if not optimizer_state or saved is None:
            as_stored = _as_stored(abstract.params, model)
            return {"params": target.params(saved, model, as_stored)}, origin
        wanted = {name: getattr(abstract, name) for name in _WITH_OPTIMIZER}
        _check_optimizer(saved, config, leaf_types(wanted))
        return load_arrays(saved, wanted), origin

    return target.first_sound(read_from)


def _no_optimizer_state(path: Any) -> ValueError:
    return ValueError(
        f"{path} has weights alone and no optimizer state that this version reads; leave out "
        "--init-optimizer-state."
    )


def _check_tokenizer(path: str, target: Target, vocabulary: Vocabulary) -> None:
    """Refuse weights of another tokenizer; warn where the weights' tokenizer cannot be read."""
    if vocabulary.tokenizer == UNKNOWN_TOKENIZER:
        return
    try:
        tokenizer = target.tokenizer(target.recorded_config())
        mismatch = difference(tokenizer, vocabulary)
    except (ImportError, OSError) as error:  # no `tokenizers` installed, or no file
        if processes.is_primary():
            _LOGGER.warning("the tokenizer of %s is not compared with the tokens: %s", path, error)
        return
    if mismatch is not None:
        name = target.tokenizer_path if tokenizer.name == JsonTokenizer.name else tokenizer.name
        raise ValueError(
            f"the weights in {path} are of another tokenizer than the tokens: {mismatch}. Prepare "
            f"the text with theirs (--tokenizer {name}), or start from other weights."
        )


def _check_model(path: Any, there: ModelConfig, here: ModelConfig) -> None:
    if type(there) is not type(here):
        raise ValueError(
            f"the weights in {path} are of a {type(there).__name__}, and model is a "
            f"{type(here).__name__} here; start from weights of the same model."
        )
    changes = [change for change in differences(there, here) if change[0] in _FIELDS_OF_WEIGHTS]
    if changes:
        changed = ", ".join(f"model.{n} is {old} there and {new} here" for n, old, new in changes)
        flags = " ".join(f"--model.{name.replace('_', '-')} {old}" for name, old, _ in changes)
        raise ValueError(
            f"the weights in {path} are of another model: {changed}. Train that model ({flags}), "
            "or start from other weights."
        )


def _check_optimizer(saved: Checkpoint, config: TrainConfig, wanted: dict[str, str]) -> None:
    """Check that a checkpoint has arrays of the types `wanted`, with the same meaning."""
    way_out = "leave out --init-optimizer-state to start with a new one"
    there, here = (type(some.optimizer) for some in (saved.config, config))
    if there is not here:  # arrays of two optimizers may agree in name and type
        raise ValueError(
            f"the optimizer state in {saved.path} is of {there.__name__}, but optimizer is "
            f"{here.__name__} here; {way_out}."
        )
    types = {name: t for name, t in saved.types.items() if name.startswith(_WITH_OPTIMIZER)}
    misfit = misfit_of_kernels(saved.config.optimizer, config.optimizer)
    misfit = misfit or first_misfit(types, wanted)
    if misfit is not None:
        changed = ", ".join(
            f"{name} is {old} there and {new} here"
            for name, old, new in differences(saved.config, config)
            if name.startswith(("optimizer.", "model.vocab_pad_multiple"))
        )
        raise ValueError(
            f"the optimizer state in {saved.path} does not fit: {misfit} ({changed}). Take the "
            f"values there, or {way_out}."
        )


def _as_stored(params: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Abstract parameters with the token embedding of `model`, whose `vocab_pad_multiple` may
    differ. Then rows are not sharded, as the mesh need not divide their number."""
    if not isinstance(model, GPT2Config):
        return params
    embedding = params["wte"]["embedding"]
    rows, width = model.padded_vocab_size, embedding.shape[1]
    if rows == embedding.shape[0]:
        return params
    columns = PartitionSpec(None, embedding.sharding.spec[1])
    unsplit = NamedSharding(embedding.sharding.mesh, columns)
    stored = jax.ShapeDtypeStruct((rows, width), embedding.dtype, sharding=unsplit)
    return params | {"wte": params["wte"] | {"embedding": stored}}


def _padded(params: dict[str, Any], abstract: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The parameters with as many rows of padding, all zero, as `abstract` has."""
    if not isinstance(model, GPT2Config):
        return params
    # Only the token embedding has padding; the output layer is tied to it.
    embedding, wanted = params["wte"]["embedding"], abstract["wte"]["embedding"]
    if embedding.shape == wanted.shape:
        return params
    num_padding = wanted.shape[0] - model.vocab_size
    pad = jax.jit(
        lambda rows: jnp.pad(rows[: model.vocab_size], ((0, num_padding), (0, 0))),
        out_shardings=wanted.sharding,
    )
    return params | {"wte": params["wte"] | {"embedding": pad(embedding)}}
