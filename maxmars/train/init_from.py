"""How a new run starts from the weights of another run or of a Hugging Face model (`--init-from`).

The new run takes the weights and nothing else: it is at step 0, at the first example of its data
and at the beginning of its schedule. Its optimizer, which may be another one, starts as in any new
run: no updates counted, moments zero. The first step of MARS, approximate or exact, then compares
its gradient with zero (c = (1 + κ) g, as in the official code). What exact MARS keeps as the
parameters of the step before are at first the weights themselves. Of a run with an average of its
parameters, or whose optimizer names others to evaluate, the weights are those that are evaluated.
With `InitFrom.optimizer_state` the optimizer goes on instead, with its moments, its count of
updates, MARS's last gradient (in exact MARS the parameters of the step before) and the parameters
that were trained; step, data and schedule start anew all the same.

The run saves this state as that of step 0. From then on it continues from its own checkpoints, like
any other, and does not look at its source again.
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
# Fields of the model that its weights depend on. The vocabulary's padding is not among them.
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
    """The weights that a new run starts from."""

    path: str
    """A run's working directory, its directory of checkpoints or one of them, also on `gs://`; a
    local directory with a Hugging Face GPT-2; or `hf:OWNER/NAME[@REVISION]`."""
    optimizer_state: bool = False
    """Also take the state of the optimizer, which must be of the same kind."""


@dataclass(frozen=True, kw_only=True)
class Initial:
    """The state that a new run starts from, and its origin."""

    state: TrainState
    origin: dict[str, Any]
    """JSON-ready: `path` as given, `weights` (the checkpoint or directory that was read, or
    `hf:OWNER/NAME@COMMIT`), `optimizer_state`, and `params_digest`."""


def load_initial(step: TrainStep, source: InitFrom, vocabulary: Vocabulary) -> Initial:
    """Read the weights, compare them with their digests, and make a state around them; every
    process calls.

    Args:
      step: of the new run, on its mesh; the source may have been trained on another one.
      source: what to read.
      vocabulary: of the tokens that the run trains on.

    Raises:
      FileNotFoundError: there are no weights at the path.
      ValueError: they are damaged, or of another model or optimizer than the config says, or of
        another tokenizer than the tokens; or see `hub.fetch`, as for the errors of other types.
    """
    config, abstract = step.config, step.abstract_state
    path = source.path if hub.is_on_hub(source.path) else str(resolve(source.path))
    if source.optimizer_state and hub.is_on_hub(path):
        raise _no_optimizer_state(path)  # before the model is fetched
    target = find_target(path)
    if source.optimizer_state and target.checkpoints is None:
        raise _no_optimizer_state(path)
    _check_tokenizer(path, target, vocabulary)
    parts, weights = _read_parts(target, config, abstract, optimizer_state=source.optimizer_state)
    parts["params"] = _padded(parts["params"], abstract.params, config.model)
    start = {
        "path": path,
        "weights": weights,
        "optimizer_state": source.optimizer_state,
        "params_digest": combine(digest({"params": parts["params"]})),
    }
    state = init_train_state(config, step.parameters, parts)
    return Initial(state=state, origin=start)


def _read_parts(
    target: Target, config: TrainConfig, abstract: TrainState, *, optimizer_state: bool
) -> tuple[dict[str, Any], str]:
    """The fields of the state that come from a target, and where they were read."""

    def read_fields(saved: Checkpoint | None) -> tuple[dict[str, Any], str]:
        model, origin = target.recorded_config(saved), target.origin(saved)
        _check_model(origin, model, config.model)
        if saved is None:  # is read with our padding
            padding = getattr(config.model, "vocab_pad_multiple", 1)
            model = dataclasses.replace(model, vocab_pad_multiple=padding)
        if not optimizer_state or saved is None:
            as_stored = _as_stored(abstract.params, model)
            return {"params": target.params(saved, model, as_stored)}, origin
        wanted = {name: getattr(abstract, name) for name in _WITH_OPTIMIZER}
        _check_optimizer(saved, config, leaf_types(wanted))
        return load_arrays(saved, wanted), origin

    return target.first_sound(read_fields)


def _no_optimizer_state(path: Any) -> ValueError:
    return ValueError(
        f"{path} has weights alone and no optimizer state that this version reads; leave out "
        "--init-optimizer-state."
    )


def _check_tokenizer(path: str, target: Target, vocabulary: Vocabulary) -> None:
    """Refuse weights for tokens of another tokenizer; where one of the two has none, say so."""
    if vocabulary.tokenizer == UNKNOWN_TOKENIZER:
        return
    try:
        theirs = target.tokenizer(target.recorded_config())
        what = difference(theirs, vocabulary)
    except (ImportError, OSError) as error:
        if processes.is_primary():
            _LOGGER.warning("the tokenizer of %s is not compared with the tokens: %s", path, error)
        return
    if what is not None:
        name = str(target.tokenizer_place) if theirs.name == JsonTokenizer.name else theirs.name
        raise ValueError(
            f"the weights in {path} are of another tokenizer than the tokens: {what}. Prepare the "
            f"text with theirs (--tokenizer {name}), or start from other weights."
        )


def _check_model(path: Any, theirs: ModelConfig, ours: ModelConfig) -> None:
    if type(theirs) is not type(ours):
        raise ValueError(
            f"the weights in {path} are of a {type(theirs).__name__}, and model is a "
            f"{type(ours).__name__} here; start from weights of the same model."
        )
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


def _check_optimizer(saved: Checkpoint, config: TrainConfig, wanted: dict[str, str]) -> None:
    """Check that a checkpoint has the arrays `wanted`, and that they mean the same."""
    way_out = "leave out --init-optimizer-state to start with a new one"
    before, after = (type(some.optimizer) for some in (saved.config, config))
    if before is not after:  # two optimizers may have the same arrays
        raise ValueError(
            f"the optimizer state in {saved.path} is of {before.__name__}, but optimizer is "
            f"{after.__name__} here; {way_out}."
        )
    theirs = {name: t for name, t in saved.types.items() if name.startswith(_WITH_OPTIMIZER)}
    misfit = misfit_of_kernels(saved.config.optimizer, config.optimizer)
    misfit = misfit or first_misfit(theirs, wanted)
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
    """Abstract parameters whose token embedding has the rows of `model`, which may have another
    `vocab_pad_multiple`. Other rows are not split over the mesh, which need not divide them."""
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
    """The parameters with the padding of `abstract`; the rows that pad are zero."""
    if not isinstance(model, GPT2Config):
        return params
    embedding, wanted = params["wte"]["embedding"], abstract["wte"]["embedding"]
    if embedding.shape == wanted.shape:
        return params
    missing = wanted.shape[0] - model.vocab_size
    pad = jax.jit(
        lambda rows: jnp.pad(rows[: model.vocab_size], ((0, missing), (0, 0))),
        out_shardings=wanted.sharding,
    )
    return params | {"wte": params["wte"] | {"embedding": pad(embedding)}}
