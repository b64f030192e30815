import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from tiny import MODEL, trained_model
from trees import mesh_of

from maxmars.data.tokenizer import ByteTokenizer
from maxmars.eval.generate import (
    GREEDY,
    Sampling,
    choose,
    generate_texts,
    generate_tokens,
    stream_tokens,
)
from maxmars.model.language_model import make_model

ALL = Sampling(temperature=1.0, top_k=None)
RNG = np.random.default_rng(0)
# One of them is longer than the context of 16 tokens.
PROMPTS = [RNG.integers(0, 257, n).astype(np.int32) for n in (3, 7, 1, 40)]


def generate(model, prompts=PROMPTS, sampling=ALL, **options):
    return generate_tokens(model, prompts, **({"max_new_tokens": 24} | options), sampling=sampling)


@pytest.fixture(scope="module")
def sampled(model):
    return generate(model)


def assert_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def uncached(model, prompt, count):
    """Plain reference: the likeliest tokens, each by a full forward pass over what is seen."""
    logits = jax.jit(lambda params, tokens: make_model(MODEL, params)(tokens))
    longest = MODEL.max_seq_len
    tokens, start = prompt.tolist(), max(0, len(prompt) - longest)
    for _ in range(count):
        if len(tokens) - start > longest:
            start = len(tokens) - longest // 2
        seen = tokens[start:]
        filled = jnp.array([seen + [0] * (longest - len(seen))])  # causal: the rest is not seen
        tokens.append(int(jnp.argmax(logits(model.params, filled)[0, len(seen) - 1, :257])))
    return tokens[len(prompt) :]


@pytest.mark.smoke
@pytest.mark.seconds
def test_greedy_tokens_are_those_of_the_uncached_model_also_beyond_its_context(model):
    greedy = generate(model, sampling=GREEDY)
    assert_equal(greedy, [uncached(model, prompt, 24) for prompt in PROMPTS])
    assert_equal(generate(model, sampling=Sampling(temperature=3.0, top_k=1)), greedy)


@pytest.mark.seconds
def test_what_a_prompt_gets_does_not_depend_on_the_others_or_the_mesh(model, sampled):
    assert_equal(generate(model, PROMPTS[2:0:-1], batch_size=1), sampled[2:0:-1])
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    assert_equal(generate(trained_model(mesh)), sampled)


def test_a_seed_repeats_itself_and_a_prompt_that_is_repeated_gets_another_sample(model, sampled):
    first, second, other = generate(model, [PROMPTS[0], PROMPTS[0], PROMPTS[1]])
    assert_equal([first, other], sampled[:2])
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, generate(model, PROMPTS[:1], seed=1)[0])


def test_stopping(model, sampled):
    stop = int(sampled[0][20])
    expected = [t[: t.tolist().index(stop)] if stop in t else t for t in sampled]
    assert len(expected[0]) <= 20
    assert_equal(generate(model, stop=stop), expected)

    def is_complete(tokens):
        return stop in tokens

    drawn = generate(model, is_complete=is_complete)
    assert_equal(drawn, [whole[: len(cut)] for cut, whole in zip(drawn, sampled, strict=True)])
    assert all(stop in cut or len(cut) == 24 for cut in drawn)
    assert len(drawn[0]) < 24
    assert generate(model, []) == []


def test_tokens_that_come_one_by_one_are_the_same(model, sampled):
    stop, joined, ends = int(sampled[0][20]), [[] for _ in PROMPTS], {}
    for piece in stream_tokens(
        model, PROMPTS, max_new_tokens=24, sampling=ALL, stop=stop, batch_size=3, chunk=1
    ):
        assert piece.index not in ends
        assert len(piece.tokens) + (piece.end == "end_of_text") == 1
        joined[piece.index] += piece.tokens.tolist()
        if piece.end is not None:
            ends[piece.index] = piece.end
    assert_equal(joined, generate(model, stop=stop))
    assert ends == {i: "end_of_text" if len(f) < 24 else "length" for i, f in enumerate(joined)}


def test_a_context_that_gets_full_compiles_nothing(model):
    compiled = []

    def count(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    options = {"max_new_tokens": 70, "chunk": 1}
    for prompt in (PROMPTS[0], PROMPTS[3]):
        # Another way to draw makes new programs.
        stream = stream_tokens(model, [prompt], sampling=Sampling(top_k=len(prompt)), **options)
        next(stream)
        assert compiled
        compiled.clear()
        assert len(list(stream)) == 69  # of a context of 16
        assert not compiled


def test_tokens_that_the_tokenizer_does_not_know_are_not_drawn(model):
    class FewBytes(ByteTokenizer):
        vocab_size = 10

    for tokens in generate(dataclasses.replace(model, tokenizer=FewBytes())):
        assert tokens.max() < 10


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (generate_texts, "max_new_tokens", 0),
        (generate_texts, "batch_size", 0),
        (generate_texts, "seed", -1),
        (Sampling, "temperature", float("nan")),
        (Sampling, "top_k", 0),
        (Sampling, "top_p", 0.0),
    ],
)
def test_refusals(model, make, name, value):
    arguments = [] if make is Sampling else [model, ["x"]]
    with refused(ValueError, f"{name}={value}"):
        make(*arguments, **{name: value})


# --- drawing one token

PROBABILITIES = np.array([0.05, 0.4, 0.02, 0.3, 0.13, 0.1])
LOGITS = np.log(PROBABILITIES).astype(np.float32) + 3
DRAWS = 4000


def frequencies(sampling):
    """How often each id is drawn by as many rows, each with its own key."""
    logits = jnp.tile(LOGITS, (DRAWS, 1))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.jit(lambda logits, keys: choose(logits, keys, sampling))(logits, keys)
    return np.bincount(drawn, minlength=len(PROBABILITIES)) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "kept", "temperature"),
    [
        (Sampling(temperature=0.5, top_k=None), [0, 1, 2, 3, 4, 5], 0.5),
        # The third of them reaches 0.75.
        (Sampling(temperature=1.0, top_k=None, top_p=0.75), [1, 3, 4], 1.0),
        # 0.4 / 0.7 of the two likeliest is 0.57, so that the likeliest alone has 0.5.
        (Sampling(temperature=1.0, top_k=2, top_p=0.5), [1], 1.0),
        # A higher temperature flattens the distribution before it is cut.
        (Sampling(temperature=4.0, top_k=None, top_p=0.75), [1, 3, 4, 5], 4.0),
        (Sampling(temperature=1e-6, top_k=None), [1], 1.0),
        (GREEDY, [1], 1.0),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should_be(sampling, kept, temperature):
    expected = np.zeros(len(PROBABILITIES))
    expected[kept] = PROBABILITIES[kept] ** (1 / temperature)
    expected /= expected.sum()
    shares = frequencies(sampling)
    assert set(np.flatnonzero(shares)) == set(kept)
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / DRAWS**0.5)
