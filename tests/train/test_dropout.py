"""Dropout: what is drawn, where, and that a step draws the same on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ADAMW, MODEL, batch_of, first_state, random_params, tiny_config

from maxmars.config import MarsConfig, MeshConfig, ModuleConfig
from maxmars.model.language_model import make_model, mean_loss

TOKENS = np.random.default_rng(0).integers(0, 257, (16, 17)).astype(np.int32)
DROPPING = dataclasses.replace(MODEL, dropout=0.4, attention="plain")


def losses_of(config, *, count=2):
    """The losses of the first steps."""
    (step, state), losses = first_state(config), []
    for _ in range(count):
        state, metrics = step(state, batch_of(step, TOKENS))
        losses.append(float(metrics["train/loss"]))
    return losses


def with_model(model, **changes):
    # With no rate to speak of, steps differ by what they drop alone.
    optimizer = dataclasses.replace(ADAMW, learning_rate=1e-30)
    return tiny_config(**{"model": model, "optimizer": optimizer} | changes)


@pytest.mark.seconds
def test_a_step_drops_the_same_on_any_mesh_and_in_any_microbatches():
    expected = losses_of(with_model(DROPPING))
    assert expected[0] != expected[1]
    changes = {"mesh": MeshConfig(data=2, fsdp=2, tensor=2), "num_microbatches": 1}
    np.testing.assert_allclose(losses_of(with_model(DROPPING, **changes)), expected, rtol=2e-6)


@pytest.mark.seconds
def test_rematerialisation_and_exact_mars_drop_the_same():
    def trained(remat):
        model = dataclasses.replace(DROPPING, remat=remat)
        changes = {"optimizer": MarsConfig(exact=True), "num_microbatches": 1}
        return losses_of(with_model(model, **changes), count=4)

    np.testing.assert_allclose(trained("full"), trained(None), rtol=2e-6)


@pytest.mark.seconds
def test_the_mean_over_masks_is_what_nothing_dropped_gives():
    params, tokens = jax.tree.map(jnp.asarray, random_params(MODEL)), jnp.asarray(TOKENS)

    def loss(attention, keys, dropout=0.01):
        config = dataclasses.replace(MODEL, dropout=dropout, attention=attention)
        return mean_loss(make_model(config, params), tokens, dropout_keys=keys)

    def keys(seed):
        return jax.random.split(jax.random.key(seed), len(TOKENS))

    without = loss("plain", None)
    losses = jax.lax.map(lambda seed: loss("plain", keys(seed)), jnp.arange(200))
    assert losses.std() > 1e-3
    assert losses.mean() == pytest.approx(float(without), rel=0.01)
    # The weights of the attention are dropped by the plain formula alone.
    assert loss("blocked", None) == pytest.approx(float(without), rel=1e-5)
    assert abs(loss("blocked", keys(0)) - loss("plain", keys(0))) > 1e-4


@pytest.mark.seconds
def test_a_share_of_numbers_is_dropped():
    # The blocks add nothing, so the sum of the embeddings comes to the last norm, behind which all
    # zeros of a token are one number.
    params = random_params(MODEL)
    for part in ("attn", "mlp"):
        zeros = jax.tree.map(np.zeros_like, params["h"][part]["c_proj"])
        params["h"][part]["c_proj"] = zeros
    params["ln_f"] = {"scale": np.ones(32, np.float32), "bias": np.zeros(32, np.float32)}
    keys = jax.random.split(jax.random.key(0), len(TOKENS))
    params = jax.tree.map(jnp.asarray, params)
    x = make_model(DROPPING, params).hidden(jnp.asarray(TOKENS[:, :-1]), dropout_keys=keys)
    zeros = np.asarray(
        [[np.unique(token, return_counts=True)[1].max() for token in row] for row in x]
    )
    assert zeros.mean() / 32 == pytest.approx(0.4, abs=0.02)
    assert len({row.tobytes() for row in zeros}) == len(TOKENS)  # each row has a mask of its own


OWN = """
import jax, jax.numpy as jnp
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs, vocab_size, max_seq_len):
        table = 0.02 * jax.random.normal(rngs.params(), (vocab_size, 8))
        self.output_embedding = nnx.Param(table, out_sharding=("vocab", "embed"))

    def __call__(self, tokens, segment_ids=None, positions=None, dropout_keys=None):
        x = self.output_embedding[...][tokens]
        if dropout_keys is not None:
            x = x * 1e4 * jax.vmap(jax.random.uniform)(dropout_keys)[:, None, None]
        return x
"""


@pytest.mark.seconds
def test_a_module_of_ones_own_gets_the_keys(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    model = ModuleConfig(make=f"{tmp_path}/own.py:Model", vocab_size=257, max_seq_len=16)
    config = with_model(model)
    losses = losses_of(config)
    assert abs(losses[0] - losses[1]) > 0.01
    (step, _), (_, state) = (first_state(dataclasses.replace(config, seed=n)) for n in (1, 0))
    _, metrics = step(state, batch_of(step, TOKENS))  # the same parameters, other keys
    assert abs(losses[0] - float(metrics["train/loss"])) > 0.01
    again = losses_of(with_model(model, mesh=MeshConfig(data=2, fsdp=2)))
    np.testing.assert_allclose(again, losses, rtol=2e-6)
