"""Packed continuations score as they do one by one."""

import dataclasses

import jax
import numpy as np
import pytest
from plain_scores import plain_scorer
from refusals import refused
from tiny import MODEL, random_params
from trees import mesh_of

from maxmars.config import ModuleConfig
from maxmars.eval.loglikelihood import Choices, LogLikelihoods, pack_choices, padded_length
from maxmars.model.parameters import Parameters

pytestmark = pytest.mark.smoke
# The 16 tokens of this model's context make the longer items lose some of theirs.
LENGTHS = [(3, (4, 2, 5, 1)), (9, (3, 3, 7, 2)), (12, (2, 6, 4, 16)), (40, (1, 9)), (1, (16,))]


@pytest.fixture(scope="module")
def choices():
    rng = np.random.default_rng(0)

    def tokens(count):
        return rng.integers(0, MODEL.vocab_size, count)

    items = [Choices(context=tokens(n), continuations=[*map(tokens, c)]) for n, c in LENGTHS]
    first = items[0]
    twice = Choices(context=first.context, continuations=[*first.continuations] * 2)
    return [*items, twice]


def scored(params, choices, mesh=None, batch_size=None, model=MODEL, progress=None):
    mesh = mesh or mesh_of()
    placed = jax.device_put(params, Parameters(model, mesh).shardings)
    score = LogLikelihoods(model, mesh, batch_size=batch_size)
    return score(placed, pack_choices(choices, model), progress)


CAPPED = """
import jax, jax.numpy as jnp
from flax import nnx

class Bigrams(nnx.Module):
    def __init__(self, rngs):
        values = 9 * jax.random.normal(rngs.params(), (300, 16))
        self.table = nnx.Param(values[:257], out_sharding=("vocab", "embed"))
        self.output_embedding = nnx.Param(values, out_sharding=("vocab", "embed"))

    def __call__(self, tokens, segment_ids=None, positions=None):
        return 30 * self.table[...][tokens]

    def cap_logits(self, logits):
        return 5 * jnp.tanh(logits / 5)

def make(*, rngs, vocab_size, max_seq_len):
    return Bigrams(rngs)
"""


@pytest.mark.parametrize("is_capped", [False, True])
def test_packed_continuations_equal_separate_rows(is_capped, tmp_path, choices):
    """Also by a model of the user's own, whose cap counts."""
    (tmp_path / "own.py").write_text(CAPPED)
    own = ModuleConfig(make=f"{tmp_path / 'own.py'}:make", vocab_size=257, max_seq_len=16)
    gpt2 = dataclasses.replace(MODEL, scale_attn_by_inverse_layer_idx=True, use_bias=False)
    model = own if is_capped else gpt2
    params = random_params(model)
    scores, plain_score = scored(params, choices, model=model), plain_scorer(model, params)
    assert [len(nats) for nats in scores.log_likelihoods] == [4, 4, 4, 2, 1, 8]
    for nats, greedy, item in zip(scores.log_likelihoods, scores.is_greedy, choices, strict=True):
        plain = [plain_score(item.context, tokens) for tokens in item.continuations]
        np.testing.assert_allclose(nats, [nats for nats, _ in plain], rtol=1e-5)
        assert greedy.tolist() == [is_greedy for _, is_greedy in plain]


@pytest.mark.slow
def test_mesh_batch_size_and_order_change_nothing_but_rounding(choices):
    params = random_params(MODEL)
    plain = scored(params, choices).log_likelihoods
    np.testing.assert_array_equal(plain[-1][:4], plain[-1][4:])  # equal continuations tie exactly
    expected, seen = np.concatenate(plain), []

    def progress(done, total):
        seen.append((done, total))

    for batch_size in (4, 64):
        scores = scored(params, choices[::-1], batch_size=batch_size, progress=progress)
        found = np.concatenate(scores.log_likelihoods[::-1])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    # In rows: the third item has one for each ending, since they cut its context differently.
    assert seen == [(4, 10), (8, 10), (10, 10), (10, 10)]
    for sizes in ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        found = np.concatenate(scored(params, choices, mesh_of(**sizes)).log_likelihoods)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_few_programs_and_little_padding():
    lengths = [padded_length(size) for size in range(1, 513)]
    assert len(set(lengths)) <= 15
    assert all(size <= length <= 1.15 * size + 32 for size, length in enumerate(lengths, 1))


@pytest.mark.parametrize(
    ("context", "continuation", "named"),
    [(0, 3, "context of 0"), (3, 0, "continuation of 0"), (3, 17, "max_seq_len=16")],
)
def test_clear_errors(context, continuation, named):
    item = Choices(context=np.arange(context), continuations=[np.arange(continuation)])
    with refused(ValueError, named):
        pack_choices([item], MODEL)
    with refused(ValueError, "batch_size=0"):
        LogLikelihoods(MODEL, mesh_of(), batch_size=0)
