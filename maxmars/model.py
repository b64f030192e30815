"""GPT-2 in Flax NNX: stacked layers under `jax.lax.scan`, Hugging Face names, named axes.

Shape letters: B batch, T length, D embed, H heads, K head_dim, F mlp, V padded vocabulary,
L layers. Parameters are named as in Hugging Face (`wte wpe h ln_1 attn.c_attn ...`), with two
differences: all blocks live in one `h` whose leaves have a leading L axis, and `c_attn` is stored
[L, D, 3, H, K] and the attention's `c_proj` [L, H, K, D], since a fused [D, 3D] kernel split by
columns over `tensor` would reshuffle queries, keys and values in every layer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxmars import cross_entropy
from maxmars.attention import RESIDUALS, attention
from maxmars.config import GPT2Config
from maxmars.narrowing_matmul import narrowing_matmul
from maxmars.sharding import ambient_platform, constrain

LAYERS = "layers"
_INIT_STD = 0.02


def _at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


class LayerNorm(nnx.Module):
    """Normalisation over the last axis, computed in float32 at least."""

    def __init__(self, config: GPT2Config):
        """Unit scale and, with `use_bias`, zero bias, both of shape [D]."""
        self.config = config
        shape = (config.embed_dim,)
        self.scale = nnx.Param(jnp.ones(shape, config.param_dtype), axes=("norm",))
        if config.use_bias:
            self.bias = nnx.Param(jnp.zeros(shape, config.param_dtype), axes=("norm",))

    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Normalise x [..., T, D]; the result has x's dtype."""
        y = x.astype(_at_least_float32(x.dtype))
        mean = y.mean(-1, keepdims=True)
        variance = jnp.square(y - mean).mean(-1, keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(variance + self.config.layer_norm_epsilon) * self.scale[...]
        if self.config.use_bias:
            y = y + self.bias[...]
        return y.astype(x.dtype)


class Linear(nnx.Module):
    """A linear map between (groups of) named axes, for example [D] -> [3, H, K]."""

    def __init__(
        self,
        config: GPT2Config,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        std: float = _INIT_STD,
        rngs: nnx.Rngs,
    ):
        """Normal kernel of standard deviation `std`, zero bias.

        Args:
          config: says the dtypes and whether there is a bias.
          inputs: logical name and size of each contracted axis.
          outputs: logical name and size of each new axis.
          std: standard deviation of the initial kernel.
          rngs: source of the initial kernel.
        """
        self.config = config
        self.num_inputs = len(inputs)
        axes, shape = (*inputs, *outputs), (*inputs.values(), *outputs.values())
        kernel = std * jax.random.normal(rngs.params(), shape, config.param_dtype)
        self.kernel = nnx.Param(kernel, axes=axes)
        if config.use_bias:
            zeros = jnp.zeros(tuple(outputs.values()), config.param_dtype)
            self.bias = nnx.Param(zeros, axes=tuple(outputs))

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        """Contract the last axes of x with the kernel, in x's dtype."""
        kernel = self.kernel[...].astype(x.dtype)
        leading, inputs = x.shape[: -self.num_inputs], x.shape[-self.num_inputs :]
        # All tokens on one axis: XLA's CPU backend would write each weight gradient's activations
        # out transposed, element by element, where B and T are contracted as two axes (0.4x).
        x = x.reshape(-1, *inputs)
        narrowing = kernel.ndim == 2 and kernel.shape[0] > kernel.shape[1]
        if narrowing and ambient_platform() == "cpu":
            y = narrowing_matmul(x, kernel)
        else:
            y = jnp.tensordot(x, kernel, axes=self.num_inputs)
        y = y.reshape(*leading, *y.shape[1:])
        if self.config.use_bias:
            y = y + self.bias[...].astype(x.dtype)
        return y


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """`c_attn` [D, 3, H, K] and `c_proj` [H, K, D], the latter scaled down by sqrt(2 L)."""
        self.config = config
        embed = {"embed": config.embed_dim}
        heads = {"heads": config.num_heads, "head_dim": config.head_dim}
        self.c_attn = Linear(config, embed, {"qkv": 3, **heads}, rngs=rngs)
        self.c_proj = Linear(config, heads, embed, std=_residual_std(config), rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer_index: Int[Array, ""],
        documents: Int[Array, "B T"] | None,
        branches: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attend within each sequence of x, and there within each document and branch where they
        are given; `layer_index` counts from 0."""
        q, k, v = self.qkv(x)
        scale = self.scale(layer_index, x.dtype)
        return self.c_proj(attention(self.config, q, k, v, scale, documents, branches))

    def qkv(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], ...]:
        """Queries, keys and values."""
        qkv = checkpoint_name(self.c_attn(x), "qkv")
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]

    def scale(self, layer_index: Int[Array, ""], dtype: Any) -> Float[Array, ""]:
        """Factor of the attention logits, in float32 at least."""
        scale = jnp.asarray(self.config.head_dim, _at_least_float32(dtype)) ** -0.5
        if self.config.scale_attn_by_inverse_layer_idx:
            scale = scale / (layer_index + 1)
        return scale


class MLP(nnx.Module):
    """Two linear layers around a GELU (the tanh approximation, as in GPT-2)."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """`c_fc` [D, F] and `c_proj` [F, D] with F = 4 D."""
        embed, mlp = {"embed": config.embed_dim}, {"mlp": 4 * config.embed_dim}
        self.c_fc = Linear(config, embed, mlp, rngs=rngs)
        self.c_proj = Linear(config, mlp, embed, std=_residual_std(config), rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply to each position."""
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """Attention and MLP, each behind a LayerNorm."""
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer_index: Int[Array, ""],
        documents: Int[Array, "B T"] | None,
        branches: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Add attention and MLP to the residual stream x."""
        x = constrain(x, "batch", "length", None)
        x = x + self.attn(self.ln_1(x), layer_index, documents, branches)
        return x + self.mlp(self.ln_2(x))


class Embedding(nnx.Module):
    """A table of vectors; token embeddings double as the output head."""

    def __init__(self, config: GPT2Config, rows: int, axis: str, *, rngs: nnx.Rngs):
        """Normal table [rows, D]; `axis` names the first axis."""
        table = _INIT_STD * jax.random.normal(
            rngs.params(), (rows, config.embed_dim), config.param_dtype
        )
        self.embedding = nnx.Param(table, axes=(axis, "embed"))


class GPT2(nnx.Module):
    """GPT-2 with tied input and output embeddings."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """Initialise as GPT-2 does: normal of 0.02, residual projections 0.02 / sqrt(2 L).

        Raises:
          ValueError: float64 is asked for while JAX runs in 32 bits.
        """
        if "float64" in (config.param_dtype, config.compute_dtype) and not jax.config.read(
            "jax_enable_x64"
        ):
            raise ValueError(
                "float64 in model.param_dtype or model.compute_dtype needs 64-bit JAX: "
                "set the environment variable JAX_ENABLE_X64=1."
            )
        self.config = config
        self.wte = Embedding(config, config.padded_vocab_size, "vocab", rngs=rngs)
        self.wpe = Embedding(config, config.max_seq_len, "positions", rngs=rngs)

        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.h = blocks(rngs.split(config.num_layers))
        self.ln_f = LayerNorm(config)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of the next token at every position, in float32 at least.

        Columns from `vocab_size` on are padding and hold the lowest finite value.

        Raises:
          ValueError: the sequence is longer than `max_seq_len`.
        """
        return self.logits(self.hidden(tokens))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        branches: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The residual stream after the last LayerNorm.

        Args:
          tokens: token ids.
          positions: place of each token in its text, below `max_seq_len`; None counts from 0 in
            each row.
          branches: where one row holds several continuations of a text: a token sees those before
            it that are of branch 0 or of its own. None is one text a row.

        Raises:
          ValueError: a row without `positions` is longer than `max_seq_len`, or the type to compute
            in was not chosen (see `precision`).
        """
        config, length = self.config, tokens.shape[1]
        if positions is None and length > config.max_seq_len:
            raise ValueError(
                f"a sequence of {length} tokens is longer than model.max_seq_len="
                f"{config.max_seq_len}."
            )
        if config.compute_dtype == "auto":
            raise ValueError("model.compute_dtype=auto must be chosen first: choose_precision.")
        # Gathered over fsdp before the lookup: a lookup in a table split by columns would leave the
        # activations split the same way and reshuffle them.
        x = constrain(self.table(config.compute_dtype)[tokens], "batch", "length", None)
        places = self.wpe.embedding[...]
        if positions is None:
            places = places[:length]
        else:
            places = constrain(places, "positions", None)[positions]  # gathered, as above
        x = x + places.astype(config.compute_dtype)

        documents = document_numbers(tokens, config.document_end_id)

        def block(x: jax.Array, layer: tuple[Block, jax.Array]) -> tuple[jax.Array, None]:
            return layer[0](x, layer[1], documents, branches), None

        layers = (self.h, jnp.arange(config.num_layers))
        x, _ = jax.lax.scan(_remat(block, config), x, layers, unroll=_unroll(config))
        return self.ln_f(constrain(x, "batch", "length", None))

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Output head: x times the transposed token embedding, padding masked."""
        config, table = self.config, self.table(x.dtype)
        wide = _at_least_float32(x.dtype)
        logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=wide)
        logits = constrain(logits, "batch", "length", "vocab")
        if config.padded_vocab_size > config.vocab_size:
            is_token = jnp.arange(config.padded_vocab_size) < config.vocab_size
            logits = jnp.where(is_token, logits, jnp.finfo(wide).min)
        return logits

    def table(self, dtype: Any) -> Float[Array, "V D"]:
        """The token embedding in the type of matrix products, gathered over `fsdp`."""
        return constrain(self.wte.embedding[...].astype(dtype), "vocab", None)


def document_numbers(
    tokens: Int[Array, "B T"], document_end_id: int | None
) -> Int[Array, "B T"] | None:
    """The document of each token, counted within its row; None where they are not told apart.

    The token that ends a document counts as the first of the next one, as it is when a model is
    asked to begin a text: what follows it is predicted from it alone, and it is itself predicted
    from the document that it ends. A row that begins within a document begins with document 0.
    """
    if document_end_id is None:
        return None
    return jnp.cumsum(tokens == document_end_id, axis=-1, dtype=jnp.int32)


def token_losses(model: GPT2, tokens: Int[Array, "B window"]) -> Float[Array, "B window-1"]:
    """Nats of each token given those before it in its row; see `mean_loss` for training."""
    x = model.hidden(tokens[:, :-1])
    return cross_entropy.token_losses(
        x, model.table(x.dtype), tokens[:, 1:], model.config.vocab_size
    )


def mean_loss(model: GPT2, tokens: Int[Array, "B window"]) -> Float[Array, ""]:
    """Mean of `token_losses`, whose gradient is cheaper."""
    x = model.hidden(tokens[:, :-1])
    return cross_entropy.mean_loss(x, model.table(x.dtype), tokens[:, 1:], model.config.vocab_size)


def mean_loss_of_drawn(model: GPT2, tokens: Int[Array, "B window"], key: Any) -> Float[Array, ""]:
    """`mean_loss` with tokens to predict that the model draws itself, as a constant."""
    x = model.hidden(tokens[:, :-1])
    table, size = model.table(x.dtype), model.config.vocab_size
    uniforms = jax.random.uniform(key, x.shape[:2], _at_least_float32(x.dtype))
    constants = jax.lax.stop_gradient((x, table))
    drawn = cross_entropy.draw_targets(*constants, uniforms, size)
    return cross_entropy.mean_loss(x, table, drawn, size)


@functools.cache
def graph_and_abstract_params(config: GPT2Config) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The static part of the model and its parameters as a nested dict of `jax.ShapeDtypeStruct`.

    `nnx.merge(graph, params)` gives a model with these parameters, inside a jitted function too.
    """
    model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model, nnx.Param)
    # Under `jax.set_mesh` the shapes come with shardings on an abstract mesh, which mean nothing to
    # a later caller: the result is cached.
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), nnx.to_pure_dict(state))
    return graph, shapes


def init_params(config: GPT2Config, seed: int | jax.Array) -> dict[str, Any]:
    """Initial parameters as a nested dict; `jax.jit` it with shardings for a large model."""
    model = GPT2(config, rngs=nnx.Rngs(jax.random.key(seed)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@functools.cache
def logical_axes(config: GPT2Config) -> dict[str, Any]:
    """The names of each parameter's axes: a nested dict whose leaves are tuples of str.

    Names: layers, embed, qkv, heads, head_dim, mlp, vocab, positions, norm.
    """
    model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))

    def axes(path: tuple[Any, ...], variable: nnx.Param) -> tuple[str, ...]:
        names = tuple(variable.get_metadata("axes"))
        return (LAYERS, *names) if path[0] == "h" else names

    state = nnx.state(model, nnx.Param)
    flat = {path: axes(path, variable) for path, variable in nnx.to_flat_state(state)}
    return nnx.traversals.unflatten_mapping(flat)


def num_parameters(config: GPT2Config) -> int:
    """Number of parameters, tied embeddings counted once, vocabulary padding included."""
    _, params = graph_and_abstract_params(config)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _residual_std(config: GPT2Config) -> float:
    return _INIT_STD / (2 * config.num_layers) ** 0.5


def _unroll(config: GPT2Config) -> int:
    return min(config.scan_unroll, config.num_layers)


def _remat(block: Any, config: GPT2Config) -> Any:
    policies = jax.checkpoint_policies
    match config.remat:
        case None | "auto":  # which `remat.choose_remat` has replaced where gradients are taken
            return block
        case "full":
            policy = policies.nothing_saveable
        case "attention":
            policy = policies.save_only_these_names("qkv", RESIDUALS)
        case "dots":
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(RESIDUALS)
            )
    return jax.checkpoint(block, policy=policy, prevent_cse=False)
