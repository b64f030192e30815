"""The interface of models to training, evaluation and generation: hidden states, logits, loss.

A model is a Flax NNX module, `GPT2` or one of the user's own, inside a `LanguageModel`. Callers
need two things of a module and use optional methods where it has them, and never look at its class.
Parameters are nested dicts of arrays, which `make_model` merges into the module.

Shape letters: B batch, T length, D embed, V padded vocabulary, P shards of the batch; of a cache P
tokens of the longest prompt, padded, and S slots.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, Key, Shaped

from maxmars.config import GPT2Config, ModelConfig, ModuleConfig
from maxmars.config.errors import about
from maxmars.distributed.sharding import batch_shards, constrain, copies, gathered
from maxmars.model import cross_entropy
from maxmars.model.own_model import in_one_line
from maxmars.model.parameters import Parameters, abstract_module


class LanguageModule(Protocol):
    """Protocol of a module: an `nnx.Module` all of whose state is `nnx.Param`s.

    `output_embedding` and the call are required. The methods are optional, and replace calls for
    whole rows where a module has them. It may also have these attributes:

    cap_logits: a function of each logit without parameters, such as 30 tanh(logits / 30), which
      loss, evaluation and generation apply. A head with a bias has it as one more column of
      `output_embedding`, against a 1 in the hidden states.
    dropout_keys: an argument of its call, by default None, for no dropout. Training gives a random
      key for each row [B], a function of seed, step and row, so that a resume and another mesh draw
      the same.
    remat_policies: the names of its policies of rematerialisation, from the least arithmetic to the
      least memory. Its attribute `remat` is then the one to use, or None for none.
    """

    output_embedding: Any
    """The output head [V, D]: a parameter, an array, or a method that returns one."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The last hidden states; see `LanguageModel.hidden` for the arguments."""
        ...

    def prefill(
        self, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
    ) -> tuple[Float[Array, "B D"], Any]:
        """Hidden states and cache of prompts; see `LanguageModel.prefill`. A module that has it
        also has `decode(tokens [B], positions [B], cache)`, which returns the hidden states [B, D]
        of one more token of each row, and the cache: any tree of arrays whose shapes and types
        stay. Without the two, generation runs whole rows for every token."""
        ...

    def continuations(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        continuation_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The hidden states of rows that hold a context, of number 0, and several continuations of
        it, 1, 2, ..., whose positions count from its end. A token sees earlier tokens of its own
        number and of 0. Such a row may be longer than `max_seq_len`. HellaSwag then computes a
        context once for its four endings."""
        ...

    def tables(self) -> Float[Array, "P V D"]:
        """`sharding.copies` of `output_embedding`, for the loss. A module that has it gets them as
        the argument `tables` of its call too, and looks its input up in them, so that one gradient
        of the table crosses devices."""
        ...

    def export(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """The model in Hugging Face's terms: the fields of `config.json`, such as `architectures`
        and `model_type`, and the arrays by name. For GPT-2 see `huggingface.gpt2_model`."""
        ...


Window = Int[Array, "B window"]
"""Rows of T + 1 numbers: T inputs, and each but the first a target."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Stored state of the tokens of every row."""

    module_cache: Any
    """The cache of the module's `prefill` and `decode`; without these the tokens, int32 [B, S]."""
    lengths: Int[Array, " B"]
    """Tokens of each prompt."""
    num_new: Int[Array, ""]
    """New tokens of each row in the cache."""


@dataclass(frozen=True)
class LanguageModel:
    """A module, as training, evaluation and generation use it."""

    config: ModelConfig
    module: Any
    """A `LanguageModule`."""

    def __call__(
        self,
        tokens: Integer[Array | np.ndarray, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token at every position, in float32 at least.

        Columns from `vocab_size` on are padding and hold the lowest finite value. See `hidden` for
        the arguments.

        Raises:
          ValueError: the sequence is longer than `max_seq_len`.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        return self.logits(self.hidden(tokens, segment_ids=segment_ids, positions=positions))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        **others: Array,
    ) -> Float[Array, "B T D"]:
        """The last hidden states, before the output head, as the module returns them.

        Args:
          tokens: token ids.
          segment_ids: a token attends only to earlier tokens of its own segment; None is one
            segment a row.
          positions: position of each token in its text, below `max_seq_len`; None counts from 0 in
            each row.
          others: `tables` and `dropout_keys` of a module that takes them; see `LanguageModule`.

        Raises:
          ValueError: a row without `positions` is longer than `max_seq_len`, or the module returns
            something else.
        """
        if positions is None and tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than model.max_seq_len="
                f"{self.config.max_seq_len}."
            )
        x = self.module(tokens, segment_ids=segment_ids, positions=positions, **others)
        if not isinstance(x, jax.Array) or x.shape[:-1] != tokens.shape:
            what = (
                f"an array {list(x.shape)}" if isinstance(x, jax.Array) else f"a {type(x).__name__}"
            )
            raise ValueError(
                f"for tokens of the shape {list(tokens.shape)} the {type(self.module).__name__} "
                f"returned {what}, not hidden states [rows, length, width]"
            )
        return constrain(x, "batch", "length", None)

    def continuations(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        continuation_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states of rows of a context and its continuations; see `LanguageModule`, whose
        method it needs."""
        x = self.module.continuations(tokens, positions, continuation_ids)
        return constrain(x, "batch", "length", None)

    def output_embedding(self, dtype: Any) -> Float[Array, "V D"]:
        """The output head in the type of matrix products, gathered over `fsdp`."""
        embedding = self.module.output_embedding
        if callable(embedding) and not isinstance(embedding, nnx.Variable):
            embedding = embedding()
        if isinstance(embedding, nnx.Variable):
            embedding = embedding[...]
        return gathered(embedding.astype(dtype), ("vocab", "embed"))

    @property
    def cap_logits(self) -> cross_entropy.Cap | None:
        """The module's soft cap of the logits; None without one."""
        return getattr(self.module, "cap_logits", None)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Output head: hidden states times the transposed `output_embedding`, under the module's
        cap, padding masked."""
        head = self.output_embedding(x.dtype)
        return cross_entropy.logits(x, head, self.config.vocab_size, self.cap_logits)

    def prefill(
        self, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Run prompts.

        Args:
          tokens: prompts, padded on the right with any token.
          lengths: tokens of each prompt, from 1 to P.
          num_slots: S, of the longest prompt and its new tokens together; at least P.

        Returns:
          The last hidden state of each prompt's last token, and the cache. Here and in `decode` the
          hidden states are those of `hidden` for whole rows, to rounding.
        """
        if hasattr(self.module, "prefill"):
            x, stored = self.module.prefill(tokens, lengths, num_slots)
        else:
            stored = jnp.pad(tokens, ((0, 0), (0, num_slots - tokens.shape[1])))
            x = self._last_hidden(stored, lengths)
        return x, Cache(module_cache=stored, lengths=lengths, num_new=jnp.zeros((), jnp.int32))

    def decode(self, tokens: Int[Array, " B"], cache: Cache) -> tuple[Float[Array, "B D"], Cache]:
        """Run one more token of each row; see `prefill` for the result.

        The result of a row beyond `max_seq_len` tokens means nothing, nor does any result where no
        slot was free.
        """
        positions = cache.lengths + cache.num_new
        if hasattr(self.module, "prefill"):
            # A row that has ended may run past the last position; its result is not used.
            positions = jnp.minimum(positions, self.config.max_seq_len - 1)
            x, stored = self.module.decode(tokens, positions, cache.module_cache)
        else:
            rows = jnp.arange(len(tokens))
            stored = cache.module_cache.at[rows, positions].set(tokens, mode="drop")
            x = self._last_hidden(stored, positions + 1)
        return x, dataclasses.replace(cache, module_cache=stored, num_new=cache.num_new + 1)

    def _last_hidden(
        self, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B D"]:
        """Hidden states of each row's last token, of a module without a cache: whole rows."""
        last = jnp.minimum(lengths, tokens.shape[1]) - 1
        return jnp.take_along_axis(self.hidden(tokens), last[:, None, None], axis=1)[:, 0]


# --- a model of parameters ------------------------------------------------------------------------


def make_model(config: ModelConfig, params: Any) -> LanguageModel:
    """The model with these parameters, a nested dict of arrays; also inside of `jax.jit`."""
    # Merging costs nothing in a trace, so that all else can treat parameters as plain trees.
    return LanguageModel(config, nnx.merge(_graph(config), params))


@functools.cache
def _graph(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(abstract_module(config), nnx.Param)[0]


@functools.cache
def check_model(parameters: Parameters) -> None:
    """Check by shapes alone that a module of the user's own can be trained on a mesh.

    Raises:
      FileNotFoundError, ValueError: it is not as it should be, or the mesh does not divide it. Any
        other exception was raised by the user's code.
    """
    config, mesh = parameters.model, parameters.mesh
    if not isinstance(config, ModuleConfig):
        return
    with in_one_line(config):
        _ = parameters.shardings  # raises if the mesh does not divide a parameter
    name = type(abstract_module(config)).__name__
    # The fewest rows that the mesh divides. Nothing is computed, so tokens serve as lengths too.
    rows, length = batch_shards(mesh), config.max_seq_len
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def check(logits: jax.Array, *shape: int) -> None:
        if logits.shape[:-1] != shape or logits.shape[-1] < config.vocab_size:
            raise ValueError(
                f"the logits have the shape {list(logits.shape)}, not {[*shape, config.vocab_size]}"
                f" (model.vocab_size={config.vocab_size} columns or more); hidden states are "
                "[rows, length, width], and the output_embedding [model.vocab_size or more, width]"
            )

    def check_all(params: Any, tokens: jax.Array) -> None:
        model = make_model(config, params)
        with about(f"the {name} and its output_embedding"):
            logits = model(tokens)
            check(logits, rows, length)
        with about(f"the prefill(tokens, lengths, num_slots) of the {name}"):
            x, cache = model.prefill(tokens, tokens[:, 0], length)
            check(model.logits(x[:, None]), rows, 1)

        def step(cache: Cache, tokens: jax.Array) -> tuple[Cache, jax.Array]:
            x, cache = model.decode(tokens, cache)
            return cache, model.logits(x[:, None])

        with about(f"the decode(tokens, positions, cache) of the {name}"):
            check(jax.lax.scan(step, cache, tokens.T)[1], length, rows, 1)
        with about(f"the cap_logits of the {name}"):
            cap = jax.make_jaxpr(model.cap_logits or (lambda logits: logits))(logits)
            # The loss has a gradient of its own, which would not reach them.
            if any(isinstance(const, jax.Array) for const in cap.consts):
                raise ValueError("it must be a function of the logits alone, without parameters")

    with in_one_line(config), jax.set_mesh(mesh):
        jax.eval_shape(check_all, parameters.abstract, tokens)


def takes_dropout(config: ModelConfig) -> bool:
    """Whether the loss takes `dropout_keys` in training."""
    if isinstance(config, GPT2Config):
        return config.dropout > 0
    return "dropout_keys" in inspect.signature(type(abstract_module(config)).__call__).parameters


# --- loss -----------------------------------------------------------------------------------------


def token_losses(
    model: LanguageModel,
    tokens: Window,
    *,
    segment_ids: Window | None = None,
    positions: Window | None = None,
) -> Float[Array, "B window-1"]:
    """Loss of each token but the first of a row, in nats; see `mean_loss` for the arguments."""
    rows = {"segment_ids": segment_ids, "positions": positions}
    x, tables = _hidden_and_tables(model, tokens, rows)
    size, cap = model.config.vocab_size, model.cap_logits
    with jax.named_scope("loss"):
        return cross_entropy.token_losses(x, tables, tokens[:, 1:], size, cap=cap)


def mean_loss(
    model: LanguageModel,
    tokens: Window,
    *,
    mask: Shaped[Array, "B window"] | None = None,
    segment_ids: Window | None = None,
    positions: Window | None = None,
    uniforms: Float[Array, "B window-1"] | None = None,
    dropout_keys: Key[Array, " B"] | None = None,
) -> Float[Array, ""]:
    """Mean of `token_losses` times `mask`, with a cheaper gradient.

    Args:
      model: the model.
      tokens: each token but the first of a row is predicted from those before it.
      mask: factor of each token's loss; a row's first factor is not used. The mean is over all
        predicted tokens, so a mask whose mean is 1 gives the mean over the tokens that count. None
        counts all.
      segment_ids: see `LanguageModel.hidden`. They do not change the mask: the first token of a
        segment is predicted from the segment before it, and counts unless the mask says otherwise.
      positions: see `LanguageModel.hidden`.
      uniforms: random numbers from [0, 1). If given, targets are not `tokens`, but drawn by them
        from the model's own predictions, which count as constants. The squares of such gradients
        estimate the diagonal of the Gauss-Newton matrix.
      dropout_keys: see `LanguageModule`.
    """
    rows = {"segment_ids": segment_ids, "positions": positions}
    others = {} if dropout_keys is None else {"dropout_keys": dropout_keys}
    x, tables = _hidden_and_tables(model, tokens, rows, **others)
    size, wide = model.config.vocab_size, jnp.promote_types(x.dtype, jnp.float32)
    targets, cap = tokens[:, 1:], model.cap_logits
    if uniforms is not None:  # draws are integers, through which no gradient is to be traced
        constants = jax.lax.stop_gradient((x, tables))
        targets = cross_entropy.draw_targets(*constants, uniforms, size, cap=cap)
    weights = None if mask is None else mask[:, 1:].astype(wide)
    with jax.named_scope("loss"):  # by which `maxmars plan` tells the loss from the layers
        return cross_entropy.mean_loss(x, tables, targets, size, cap=cap, weights=weights)


def _hidden_and_tables(
    model: LanguageModel, tokens: Window, rows: Mapping[str, Window | None], **others: Array
) -> tuple[Float[Array, "B window-1 D"], Float[Array, "P V D"]]:
    """The hidden states of all tokens but the last of a row, which predicts nothing, and the output
    head for each shard of the batch."""
    inputs: Any = {name: None if ids is None else ids[:, :-1] for name, ids in rows.items()}
    if hasattr(model.module, "tables"):
        tables = model.module.tables()
        return model.hidden(tokens[:, :-1], **inputs, **others, tables=tables), tables
    x = model.hidden(tokens[:, :-1], **inputs, **others)
    return x, copies(model.output_embedding(x.dtype))
