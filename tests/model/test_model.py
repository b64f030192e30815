import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpt2_reference import Reference
from refusals import refused
from tiny import MODEL
from trees import assert_close, mesh_of

from maxmars.config import GPT2Config
from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import Parameters, init_params
from maxmars.plan.compile import matmul_flops


@functools.cache
def compiled(config):
    """The logits, and the loss with its gradients, of parameters and tokens."""
    loss = jax.value_and_grad(lambda p, t: mean_loss(make_model(config, p), t))
    return jax.jit(lambda p, t: make_model(config, p)(t)), jax.jit(loss)


def apply(config, params, tokens):
    return compiled(config)[0](params, tokens)


def loss_and_grads(config, params, tokens):
    return compiled(config)[1](params, tokens)


@functools.cache
def initial_params(config):
    return jax.jit(lambda: init_params(config, 0))()


def random_tokens(config, rows=2, length=None, seed=0):
    shape = (rows, length or config.max_seq_len)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, shape)
    return tokens.astype(np.int32)


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        # Hugging Face's gpt2, gpt2-medium, gpt2-large and gpt2-xl.
        (GPT2Config.small(), 124_439_808),
        (GPT2Config.medium(), 354_823_168),
        (GPT2Config.large(), 774_030_080),
        (GPT2Config.xl(), 1_557_611_200),
    ],
    ids=["small", "medium", "large", "xl"],
)
def test_parameter_counts(preset, count):
    assert Parameters(preset).count == count
    per_layer = 10 * preset.embed_dim + 3 * preset.embed_dim  # biases and LayerNorm biases
    without = dataclasses.replace(preset, use_bias=False)
    assert count - Parameters(without).count == (
        preset.num_layers * (per_layer - 2 * preset.embed_dim) + preset.embed_dim
    )


@pytest.mark.smoke
def test_logits_and_gradients_equal_the_official_model_in_float64(official_dir, x64):
    reference = Reference(official_dir)
    config = reference.model_config("float64")
    params = jax.tree.map(jnp.asarray, reference.tree("params0"))
    tokens = reference.arrays["batches"][0, 0].astype(np.int32)

    logits = apply(config, params, tokens[:, :-1])
    assert logits.dtype == jnp.float64
    theirs = reference.arrays["logits"]  # of the first windows
    np.testing.assert_allclose(logits[: len(theirs)], theirs, rtol=0, atol=1e-10)

    loss, grads = loss_and_grads(config, params, tokens)
    np.testing.assert_allclose(loss, reference.arrays["loss"], rtol=0, atol=1e-12)
    grads = jax.device_get(grads)
    for ours, theirs in zip(
        jax.tree.leaves(grads), jax.tree.leaves(reference.tree("grad")), strict=True
    ):
        assert np.linalg.norm(ours - theirs) <= 1e-9 * np.linalg.norm(theirs)


def test_initial_values():
    params = jax.device_get(initial_params(dataclasses.replace(MODEL, embed_dim=256)))
    h = params["h"]
    assert np.std(params["wte"]["embedding"]) == pytest.approx(0.02, rel=0.02)
    assert np.std(h["attn"]["c_attn"]["kernel"]) == pytest.approx(0.02, rel=0.02)
    residual = 0.02 / np.sqrt(2 * MODEL.num_layers)
    assert np.std(h["attn"]["c_proj"]["kernel"]) == pytest.approx(residual, rel=0.02)
    assert np.std(h["mlp"]["c_proj"]["kernel"]) == pytest.approx(residual, rel=0.02)
    assert not np.any(h["mlp"]["c_fc"]["bias"])
    assert np.all(h["ln_1"]["scale"] == 1)
    kernels = h["mlp"]["c_fc"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])


@pytest.mark.seconds
def test_vocabulary_padding_does_not_change_the_loss():
    plain = dataclasses.replace(MODEL, vocab_pad_multiple=1)
    padded = dataclasses.replace(MODEL, vocab_pad_multiple=64)
    params = initial_params(plain)
    table = np.asarray(params["wte"]["embedding"])
    extra = np.full((padded.padded_vocab_size - plain.vocab_size, plain.embed_dim), 9.0, np.float32)
    padded_params = params | {"wte": {"embedding": np.concatenate([table, extra])}}
    tokens = random_tokens(plain, length=plain.max_seq_len + 1)
    loss, grads = loss_and_grads(plain, params, tokens)
    padded_loss, padded_grads = loss_and_grads(padded, padded_params, tokens)
    assert padded_loss == pytest.approx(float(loss), abs=1e-6)
    padded_table = jax.device_get(padded_grads["wte"]["embedding"])
    np.testing.assert_allclose(
        padded_table[: plain.vocab_size], grads["wte"]["embedding"], atol=1e-6
    )
    assert not np.any(padded_table[plain.vocab_size :])


@pytest.mark.seconds
def test_remat_and_unroll_change_nothing_but_rounding():
    params = initial_params(MODEL)
    tokens = random_tokens(MODEL, length=MODEL.max_seq_len + 1)
    changed = dataclasses.replace(MODEL, remat="full", scan_unroll=3)
    expected, found = (loss_and_grads(config, params, tokens) for config in (MODEL, changed))
    assert_close(found, expected, 1e-6)


def test_remat_recomputes_no_more_than_it_says():
    def flops(remat):
        config = dataclasses.replace(MODEL, remat=remat)
        abstract = Parameters(config).abstract
        tokens = jax.ShapeDtypeStruct((1, MODEL.max_seq_len + 1), jnp.int32)
        grad = jax.grad(lambda p, t: mean_loss(make_model(config, p), t))
        return sum(matmul_flops(jax.make_jaxpr(grad)(abstract, tokens)).values())

    layers, length, width = MODEL.num_layers, MODEL.max_seq_len, MODEL.embed_dim
    product = 2 * layers * length * width**2  # FLOPs of one [T, D] x [D, D] in each layer
    logits = 2 * layers * length**2 * width
    least = flops(None)
    assert flops("auto") == least
    # What the gradients need again: the weights of attention; under `attention` also its projection
    # and the MLP's hidden layer; under `full` also q, k, v and what attention made of them.
    assert flops("dots") == least + logits
    assert flops("attention") == least + 5 * product + logits
    assert flops("full") == least + 8 * product + 2 * logits


def test_bfloat16_compute_keeps_logits_and_loss_in_float32():
    config = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    params = initial_params(config)
    tokens = random_tokens(config, length=config.max_seq_len + 1)
    assert apply(config, params, tokens[:, :-1]).dtype == jnp.float32
    loss, grads = loss_and_grads(config, params, tokens)
    exact, _ = loss_and_grads(MODEL, params, tokens)
    assert loss.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert float(loss) == pytest.approx(float(exact), abs=5e-3)  # bfloat16 has 8 bits of mantissa


def test_logical_axes_match_the_parameters():
    abstract = Parameters(MODEL).abstract
    axes = Parameters(MODEL).axes
    ndims = jax.tree.map(lambda _, names: len(names), abstract, axes)
    assert ndims == jax.tree.map(lambda p: p.ndim, abstract)
    assert axes["h"]["attn"]["c_attn"]["kernel"] == ("layers", "embed", "qkv", "heads", "head_dim")
    assert axes["h"]["attn"]["c_attn"]["bias"] == ("layers", "qkv", "heads", "head_dim")
    assert axes["ln_f"]["scale"] == ("norm",)


def test_abstract_parameters_do_not_depend_on_the_ambient_mesh():
    config = dataclasses.replace(MODEL, num_layers=5)  # not in the cache yet
    with jax.set_mesh(mesh_of(fsdp=8)):
        abstract = Parameters(config).abstract
    assert {leaf.sharding for leaf in jax.tree.leaves(abstract)} == {None}


def test_clear_errors():
    with refused(ValueError, "JAX_ENABLE_X64=1"):
        init_params(dataclasses.replace(MODEL, param_dtype="float64"), 0)
    with refused(ValueError, "17 tokens", "model.max_seq_len=16"):
        apply(MODEL, initial_params(MODEL), np.zeros((1, 17), np.int32))
