import shutil

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tiny import MODEL, tiny_config

from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import load_tokenizer, saved_tokenizer
from maxmars.data_config import TokenShardsConfig
from maxmars.generate import generate_text, sample
from maxmars.model import graph_and_abstract_params, init_params
from maxmars.train import train

ALL = {"max_new_tokens": 24, "temperature": 1.0, "top_k": None, "seed": 0, "num_tokens": 257}


@pytest.fixture(scope="module")
def params():
    # Larger weights than at initialisation, so that the distribution is far from uniform.
    return jax.tree.map(lambda x: 8 * x, init_params(MODEL, 0))


@pytest.fixture(scope="module")
def greedy(params):
    """The likeliest token after some tokens, by a full forward pass."""
    graph, _ = graph_and_abstract_params(MODEL)
    logits = jax.jit(lambda tokens: nnx.merge(graph, params)(tokens))

    def greedy(tokens):
        filled = np.zeros((1, MODEL.max_seq_len), np.int32)
        filled[0, : len(tokens)] = tokens  # causal: what follows does not matter
        return int(np.argmax(logits(filled)[0, len(tokens) - 1, :257]))

    return greedy


def test_greedy_sampling_takes_the_likeliest_token_also_beyond_the_context(params, greedy):
    prompt = np.array([5, 6, 7], np.int32)
    options = ALL | {"temperature": 0.0}
    new = sample(MODEL, params, prompt, stop=-1, **options)
    assert len(new) == 24
    tokens = prompt.tolist()
    for token in new:
        assert token == greedy(tokens[-MODEL.max_seq_len :])
        tokens.append(int(token))


def test_top_1_is_greedy_and_a_seed_repeats_itself(params):
    prompt = np.array([5], np.int32)
    expected = sample(MODEL, params, prompt, stop=-1, **(ALL | {"temperature": 0.0}))
    np.testing.assert_array_equal(
        sample(MODEL, params, prompt, stop=-1, **(ALL | {"top_k": 1})), expected
    )
    first = sample(MODEL, params, prompt, stop=-1, **ALL)
    np.testing.assert_array_equal(sample(MODEL, params, prompt, stop=-1, **ALL), first)
    other = sample(MODEL, params, prompt, stop=-1, **(ALL | {"seed": 1}))
    assert not np.array_equal(first, other)


def test_stop_and_unknown_tokens(params):
    prompt = np.array([5], np.int32)
    tokens = sample(MODEL, params, prompt, stop=-1, **ALL)
    stopped = sample(MODEL, params, prompt, stop=int(tokens[3]), **ALL)
    np.testing.assert_array_equal(stopped, tokens[: tokens.tolist().index(tokens[3])])
    few = sample(MODEL, params, prompt, stop=-1, **(ALL | {"num_tokens": 10}))
    assert few.max() < 10


def test_text_from_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    train(tiny_config(num_steps=2), tmp_path / "run")
    text = generate_text(tmp_path / "run", "def ", max_new_tokens=5)
    assert isinstance(text, str)
    assert text
    assert text == generate_text(tmp_path / "run", "def ", max_new_tokens=5)
    assert generate_text(tmp_path / "run", "", max_new_tokens=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        generate_text(tmp_path, "x", **options)


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        generate_text(tmp_path, "x")


def test_a_run_on_a_tokenizer_of_the_users_own_samples_with_it(tmp_path):
    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    text = "To be, or not to be, that is the question. " * 200
    vocabulary.train_from_iterator(
        [text], tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<end>"])
    )
    vocabulary.save(str(tmp_path / "own.json"))
    tokenizer = load_tokenizer(tmp_path / "own.json", eot_token="<end>")
    tokens = tmp_path / "tokens"
    prepare([("1", text)], tokens, tokenizer=tokenizer, source="a test", workers=0)
    config = tiny_config(
        num_steps=1,
        data=TokenShardsConfig(path=str(tokens), cache_dir=str(tmp_path / "local")),
    )
    train(config, tmp_path / "run")
    shutil.rmtree(tokens)
    shutil.rmtree(tmp_path / "local")
    found = generate_text(tmp_path / "run", "To be", max_new_tokens=5, temperature=0.0)
    assert isinstance(found, str)
    saved = saved_tokenizer(tmp_path / "run" / "tokenizer")
    assert saved.digest == tokenizer.digest
    assert saved.decode(saved.encode("not to be")) == "not to be"
