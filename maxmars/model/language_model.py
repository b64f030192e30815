"""What every model is to training, evaluation and generation: hidden states, logits, loss.

A model is a Flax NNX module, `GPT2` or one of the user's own, inside a `LanguageModel`. Everything
asks modules for the same things, and for what a module may do besides by `supports`, never for its
class. Parameters are nested dicts of arrays.

Shape letters: B batch, T length, D embed, V padded vocabulary, P shards of the batch; of a cache P
tokens of the longest prompt, padded, and S slots.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, Shaped

from maxmars.config import ModelConfig
from maxmars.distributed.sharding import batch_shards, constrain, copies, gathered
from maxmars.model import cross_entropy
from maxmars.model.own_model import described, shape_of_floats, wrong
from maxmars.model.parameters import Parameters, abstract_module

Ability = Literal["cap_logits", "decode", "continuation_ids", "tables", "export", "remat_policies"]
"""What a module may have.

Each has `__call__(tokens, segment_ids=None, positions=None)`, which returns the last hidden states
[B, T, D], and `output_embedding` [V, D].

cap_logits: a function of each logit without parameters, such as 30 tanh(logits / 30), which loss,
  evaluation and generation apply. A head with a bias has it as one more column of
  `output_embedding`, against a 1 in the hidden states.
decode: with `prefill`, a cache of earlier tokens, any tree of arrays whose shapes and types stay:
  `prefill(tokens [B, P], lengths [B], num_slots)` and `decode(tokens [B], positions [B], cache)`
  return hidden states [B, D] and the cache; see the methods of `LanguageModel`. Without them,
  generation runs whole rows for every token.
continuation_ids: an argument of `__call__`, int32 [B, T] or None, for rows that hold a context, 0,
  and several continuations of it, 1, 2, ..., whose `positions` count from its end. A token sees
  earlier tokens of its own number and of 0. Such a row may be longer than `max_seq_len`. HellaSwag
  then computes a context once for its four endings.
tables: an argument of `__call__`, the `sharding.copies` [P, V, D] of `output_embedding` that the
  loss uses, in the type `table_dtype` of the module; None outside of the loss. A module that reads
  the same table for its input takes them, so that one gradient of the table crosses devices.
export: the model in Hugging Face's terms; the fields of `config.json`, such as `architectures` and
  `model_type`, and the arrays by name. Of GPT-2 `huggingface.gpt2_model` knows them.
remat_policies: the names of its policies of rematerialisation, from the least arithmetic to the
  least memory. Its attribute `remat` is then the one to use, or None for none.
"""
Window = Int[Array, "B window"]
"""Rows of T + 1 numbers: T inputs, and each but the first a target."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """What is kept of the tokens of every row."""

    kept: Any
    """What the module's `prefill` and `decode` return, or else the tokens, int32 [B, S]."""
    lengths: Int[Array, " B"]
    """Tokens of each prompt."""
    num_new: Int[Array, ""]
    """New tokens of each row in the cache."""


@dataclass(frozen=True)
class LanguageModel:
    """A module, as training, evaluation and generation use it."""

    config: ModelConfig
    module: Any
    """An `nnx.Module`."""

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
        **more: Array,
    ) -> Float[Array, "B T D"]:
        """What the module returns: the last hidden states, before the output head.

        Args:
          tokens: token ids.
          segment_ids: a token attends only to earlier tokens of its own segment; None is one
            segment a row.
          positions: position of each token in its text, below `max_seq_len`; None counts from 0 in
            each row.
          more: arguments that the module `supports`.

        Raises:
          ValueError: a row without `positions` is longer than `max_seq_len`, or the module returns
            something else.
        """
        if positions is None and tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than model.max_seq_len="
                f"{self.config.max_seq_len}."
            )
        x = self.module(tokens, segment_ids=segment_ids, positions=positions, **more)
        shape = shape_of_floats(x)
        if shape is None or len(shape) != 3 or shape[:2] != tokens.shape:
            raise self._wrong(
                f"for tokens of the shape {list(tokens.shape)} the {self._name} returned "
                f"{described(x)}; it must return hidden states [rows, tokens, width]"
            )
        return constrain(x, "batch", "length", None)

    def output_embedding(self, dtype: Any) -> Float[Array, "V D"]:
        """The output head in the type of matrix products, gathered over `fsdp`.

        Raises:
          ValueError: it is no array [rows, width] with a row for each token.
        """
        embedding = self.module.output_embedding
        if callable(embedding) and not isinstance(embedding, nnx.Variable):
            embedding = embedding()
        if isinstance(embedding, nnx.Variable):
            embedding = embedding[...]
        shape = shape_of_floats(embedding)
        if shape is None or len(shape) != 2 or shape[0] < self.config.vocab_size:
            raise self._wrong(
                f"the output_embedding of the {self._name} is {described(embedding)}; it must have "
                f"the shape [model.vocab_size={self.config.vocab_size} or more, width]"
            )
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
        if supports(self.config, "decode"):
            returned = self.module.prefill(tokens, lengths, num_slots)
            x, kept = self._checked("prefill", len(tokens), returned)
        else:
            kept = jnp.pad(tokens, ((0, 0), (0, num_slots - tokens.shape[1])))
            x = self._last_hidden(kept, lengths)
        return x, Cache(kept=kept, lengths=lengths, num_new=jnp.zeros((), jnp.int32))

    def decode(self, tokens: Int[Array, " B"], cache: Cache) -> tuple[Float[Array, "B D"], Cache]:
        """Run one more token of each row; see `prefill` for the result.

        The result of a row beyond `max_seq_len` tokens means nothing, nor does any result where no
        slot was free.

        Raises:
          ValueError: the module returns something else than hidden states and a cache of the same
            shapes and types.
        """
        positions = cache.lengths + cache.num_new
        if supports(self.config, "decode"):
            # A row that has ended may run past the last position; its result is not used.
            positions = jnp.minimum(positions, self.config.max_seq_len - 1)
            returned = self.module.decode(tokens, positions, cache.kept)
            x, kept = self._checked("decode", len(tokens), returned)
            for before, after in zip(_form(cache.kept), _form(kept), strict=True):
                if before != after:
                    raise self._wrong(
                        f"the decode of the {self._name} was given the cache {before}, and "
                        f"returned {after}; its shapes and types must stay"
                    )
        else:
            rows = jnp.arange(len(tokens))
            kept = cache.kept.at[rows, positions].set(tokens, mode="drop")
            x = self._last_hidden(kept, positions + 1)
        return x, dataclasses.replace(cache, kept=kept, num_new=cache.num_new + 1)

    def _last_hidden(
        self, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B D"]:
        last = jnp.minimum(lengths, tokens.shape[1]) - 1
        return jnp.take_along_axis(self.hidden(tokens), last[:, None, None], axis=1)[:, 0]

    def _checked(self, method: str, rows: int, value: Any) -> tuple[Any, Any]:
        pair = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
        shape = shape_of_floats(pair[0])
        if shape is None or len(shape) != 2 or shape[0] != rows:
            returned = ", ".join(map(described, value if isinstance(value, tuple) else [value]))
            raise self._wrong(
                f"the {method} of the {self._name} returned {returned}; it must return hidden "
                f"states [{rows} rows, width] and the cache"
            )
        return pair

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _wrong(self, problem: str) -> ValueError:
        return wrong(self.config, problem)


def _form(tree: Any) -> tuple[list[str], jax.tree_util.PyTreeDef]:
    leaves, structure = jax.tree.flatten(tree)
    return [described(leaf) for leaf in leaves], structure


def supports(config: ModelConfig, ability: Ability) -> bool:
    """Whether a model's module has an attribute of this name, or its `__call__` an argument."""
    module: Any = abstract_module(config)
    arguments = inspect.signature(module.__call__).parameters
    return getattr(module, ability, None) is not None or ability in arguments


# --- a model of parameters ------------------------------------------------------------------------


def make_model(config: ModelConfig, params: Any) -> LanguageModel:
    """The model with these parameters, a nested dict of arrays; also inside `jax.jit`."""
    return LanguageModel(config, nnx.merge(_graph(config), params))


@functools.cache
def _graph(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(abstract_module(config), nnx.Param)[0]


@functools.cache
def check_model(parameters: Parameters) -> None:
    """Find by shapes alone whether a module of the user's own can be trained on a mesh.

    Raises:
      FileNotFoundError, ValueError: it is not as it should be, or the mesh does not divide it. Any
        other exception was raised by the user's code.
    """
    config, mesh = parameters.model, parameters.mesh
    if config.make is None:
        return
    _ = parameters.shardings
    tokens = jax.ShapeDtypeStruct((batch_shards(mesh), config.max_seq_len), jnp.int32)

    def outputs(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = make_model(config, params)
        rows = tokens[:, 0]
        model.decode(rows, model.prefill(tokens, rows, config.max_seq_len)[1])
        x = model.hidden(tokens)
        return x, model.output_embedding(x.dtype)

    with jax.set_mesh(mesh):
        x, embedding = jax.eval_shape(outputs, parameters.abstract, tokens)
    if x.shape[-1] != embedding.shape[-1]:
        raise ValueError(
            f"model.make={config.make!r}: the hidden states have {x.shape[-1]} columns, and the "
            f"output_embedding {embedding.shape[-1]}; both must have the same."
        )
    if embedding.shape[0] % mesh.shape["tensor"]:
        raise ValueError(
            f"mesh.tensor={mesh.shape['tensor']} does not divide the {embedding.shape[0]} rows of "
            f"the output_embedding of model.make={config.make!r}; pad them to a multiple of "
            f"{mesh.shape['tensor']}: rows from vocab_size on are masked."
        )


# --- loss -----------------------------------------------------------------------------------------


def token_losses(
    model: LanguageModel,
    tokens: Window,
    *,
    segment_ids: Window | None = None,
    positions: Window | None = None,
) -> Float[Array, "B window-1"]:
    """Loss of each token but the first of a row, in nats; see `mean_loss` for the arguments."""
    x, tables = _hidden_and_tables(model, tokens, segment_ids, positions)
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
) -> Float[Array, ""]:
    """Mean of `token_losses` times `mask`, with a cheaper gradient.

    Args:
      model: the model.
      tokens: each token but the first of a row is predicted from those before it.
      mask: factor of each token's loss; that of a row's first token is not used. The mean is over
        all predicted tokens, so a mask whose mean is 1 gives the mean over the tokens that count.
        None counts all.
      segment_ids: see `LanguageModel.hidden`. They do not change the mask: the first token of a
        segment is predicted from the segment before it, and counts unless the mask says otherwise.
      positions: see `LanguageModel.hidden`.
      uniforms: random numbers from [0, 1), by which the targets are then drawn from the model's own
        predictions, which count as constants, and are not `tokens`. The squares of such gradients
        estimate the diagonal of the Gauss-Newton matrix.
    """
    x, tables = _hidden_and_tables(model, tokens, segment_ids, positions)
    size, wide = model.config.vocab_size, jnp.promote_types(x.dtype, jnp.float32)
    targets, cap = tokens[:, 1:], model.cap_logits
    if uniforms is not None:
        constants = jax.lax.stop_gradient((x, tables))
        targets = cross_entropy.draw_targets(*constants, uniforms, size, cap=cap)
    weights = None if mask is None else mask[:, 1:].astype(wide)
    with jax.named_scope("loss"):  # by which `maxmars plan` tells the loss from the layers
        return cross_entropy.mean_loss(x, tables, targets, size, cap=cap, weights=weights)


def _hidden_and_tables(
    model: LanguageModel, tokens: Window, segment_ids: Window | None, positions: Window | None
) -> tuple[Float[Array, "B window-1 D"], Float[Array, "P V D"]]:
    """The hidden states of all tokens but the last of a row, which predicts nothing, and the output
    head for each shard of the batch."""
    segment_ids, positions = (None if a is None else a[:, :-1] for a in (segment_ids, positions))
    rows: Any = {"segment_ids": segment_ids, "positions": positions}
    if supports(model.config, "tables"):
        tables = copies(model.output_embedding(model.module.table_dtype))
        return model.hidden(tokens[:, :-1], **rows, tables=tables), tables
    x = model.hidden(tokens[:, :-1], **rows)
    return x, copies(model.output_embedding(x.dtype))
