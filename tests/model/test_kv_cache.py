import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, random_params
from trees import mesh_of

from maxmars.model.language_model import make_model
from maxmars.model.parameters import Parameters
from maxmars.plan.collectives import collectives

pytestmark = pytest.mark.smoke
LENGTHS = np.array([3, 5, 9, 1], np.int32)
NEW, SLOTS, PROMPT = 6, 16, 10
BASE = dataclasses.replace(MODEL, use_bias=False, scale_attn_by_inverse_layer_idx=True)
TOKENS = np.random.default_rng(0).integers(0, 20, (4, 16)).astype(np.int32)


def uncached_logits(config, params):
    """Plain reference: the logits after each prompt and each new token, by full forward passes."""
    logits = jax.jit(lambda params: make_model(config, params)(jnp.asarray(TOKENS)))(params)
    return np.stack([logits[i, n - 1 : n + NEW] for i, n in enumerate(LENGTHS)])


def cached(config):
    """A function of the parameters: the same logits by `prefill` and `decode`."""
    new = np.stack([row[n : n + NEW] for row, n in zip(TOKENS, LENGTHS, strict=True)])
    prompts = np.where(np.arange(PROMPT) < LENGTHS[:, None], TOKENS[:, :PROMPT], 7)

    def run(params):
        model = make_model(config, params)
        hidden, cache = model.prefill(jnp.asarray(prompts), jnp.asarray(LENGTHS), SLOTS)

        def step(cache, tokens):
            hidden, cache = model.decode(tokens, cache)
            return cache, hidden

        cache, more = jax.lax.scan(step, cache, new.T)
        hidden = jnp.concatenate([hidden[:, None], more.swapaxes(0, 1)], axis=1)
        return model.logits(hidden), cache

    return run


@pytest.fixture(scope="module")
def params():
    return random_params(BASE)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 2e-5),
        # Attention weights and activations are rounded to 8 bits in both, in another order.
        ({"compute_dtype": "bfloat16"}, 0.1),
    ],
    ids=["float32", "bfloat16"],
)
def test_logits_equal_those_of_the_uncached_model(params, changes, tolerance):
    config = dataclasses.replace(BASE, **changes)
    expected = uncached_logits(config, params)
    result, cache = jax.jit(cached(config))(params)
    assert expected[..., : config.vocab_size].std() > 1
    np.testing.assert_allclose(result, expected, atol=tolerance)
    assert cache.module_cache.keys.dtype == cache.module_cache.values.dtype == config.compute_dtype
    assert int(cache.num_new) == NEW


def test_a_cache_over_heads_and_rows_stays_where_it_is(params):
    mesh = mesh_of(data=2, tensor=4)
    shardings = Parameters(BASE, mesh).shardings
    with jax.set_mesh(mesh):
        compiled = jax.jit(cached(BASE), in_shardings=(shardings,)).lower(params).compile()
        result, cache = compiled(jax.device_put(params, shardings))
    np.testing.assert_allclose(result, uncached_logits(BASE, params), atol=2e-5)
    for part in (cache.module_cache.keys, cache.module_cache.values):
        rows, heads = part.shape[1] // 2, part.shape[2] // 4
        assert part.sharding.shard_shape(part.shape)[1:3] == (rows, heads)
    # Sums of activations over the heads' devices; keys and values never travel.
    assert {collective.op for collective in collectives(compiled, mesh)} == {"all-reduce"}
