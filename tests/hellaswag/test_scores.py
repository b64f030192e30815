"""Both protocols against a plain scorer of hand-written texts, and against the peers' numbers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hellaswag_questions import (
    BRACKETS,
    LM_EVAL_CONTEXT,
    LM_EVAL_ENDINGS,
    SHORT,
    fields_of,
    write_questions_file,
)
from tiny import MODEL

from maxmars.config import MeshConfig
from maxmars.cross_entropy import cross_entropy
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.hellaswag import PROTOCOLS, HellaSwag, Scores, load_questions, write_questions
from maxmars.model import graph_and_abstract_params, init_params
from maxmars.sharding import make_mesh
from maxmars.trained_model import open_trained_model

LONG = dataclasses.replace(MODEL, max_seq_len=160)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 8 * x, init_params(LONG, 0))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    rows = [*(fields_of(i, *question) for i, question in enumerate(SHORT)), BRACKETS]
    return load_questions(write_questions_file(tmp_path_factory.mktemp("q") / "q.jsonl", rows))


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def plain_texts(protocol):
    """Context and endings of each question, written out; the endings with what is before them."""
    if protocol == "lm_eval":
        for activity, sentences, begun, endings, _ in SHORT:
            context = f"{activity}: {sentences} {begun.capitalize()}".strip()
            yield context, [f" {ending}" for ending in endings], endings
        endings = [f"  {ending}" for ending in LM_EVAL_ENDINGS]
        yield LM_EVAL_CONTEXT.removesuffix(" "), endings, LM_EVAL_ENDINGS
    else:
        for _, sentences, begun, endings, _ in SHORT:
            yield f"{sentences} {begun}".strip(), [f" {ending}" for ending in endings], endings
        yield BRACKETS["ctx"], [f" {ending}" for ending in BRACKETS["endings"]], None


def plain_scores(params, protocol):
    graph, _ = graph_and_abstract_params(LONG)
    logits = jax.jit(lambda tokens: nnx.merge(graph, params)(tokens))
    found = []
    for context, endings, _ in plain_texts(protocol):
        for ending in endings:
            window = [*context.encode(), *ending.encode()]
            tokens = np.zeros((1, LONG.max_seq_len), np.int32)
            tokens[0, : len(window)] = window
            nats = cross_entropy(logits(tokens)[0, :-1], jnp.asarray(tokens[0, 1:]))
            found.append(-float(nats[len(context.encode()) - 1 : len(window) - 1].sum()))
    return np.array(found).reshape(-1, 4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocol_equals_its_texts_scored_one_by_one(params, questions, protocol):
    score = HellaSwag(LONG, one_device(), ByteTokenizer(), questions, protocols=[protocol])
    found = score(params)[protocol]
    expected = plain_scores(params, protocol)
    np.testing.assert_allclose(found.log_likelihoods, expected, rtol=2e-5)
    for lengths, (_, endings, cleaned) in zip(found.lengths, plain_texts(protocol), strict=True):
        texts = [e.encode() for e in endings] if protocol == "completion" else cleaned
        assert lengths.tolist() == [len(text) for text in texts]
    labels = np.array([*(label for *_, label in SHORT), 1])
    summary = found.summary()
    assert summary["acc"] == np.mean(expected.argmax(1) == labels)
    assert summary["acc_norm"] == np.mean((expected / found.lengths).argmax(1) == labels)
    assert summary["num_questions"] == 6


def test_both_protocols_at_once_on_eight_devices(params, questions):
    apart = {
        protocol: HellaSwag(LONG, one_device(), ByteTokenizer(), questions, protocols=[protocol])
        for protocol in PROTOCOLS
    }
    mesh = make_mesh(MeshConfig())
    together = HellaSwag(LONG, mesh, ByteTokenizer(), questions, batch_size=64)(params)
    assert mesh.size == 8
    assert [*together] == [*PROTOCOLS]
    for protocol, score in apart.items():
        found, expected = together[protocol], score(params)[protocol]
        np.testing.assert_allclose(found.log_likelihoods, expected.log_likelihoods, rtol=1e-5)
        assert found.summary() == expected.summary()


def test_accuracies_and_their_standard_errors():
    scores = Scores(
        log_likelihoods=np.array([[-4.0, -3.0, -3.0, -9.0], [-1.0, -2.0, -3.0, -2.0]]),
        lengths=np.array([[1, 1, 1, 9], [1, 1, 0, 8]]),  # cleaning may leave nothing of an ending
        labels=np.array([1, 3]),
    )
    assert scores.choices.tolist() == [1, 0]  # the first of equals
    assert scores.choices_norm.tolist() == [3, 3]
    assert scores.summary() == {
        "acc": 0.5,
        "acc_stderr": pytest.approx(np.std([0, 1], ddof=1) / 2**0.5),
        "acc_norm": 0.5,
        "acc_norm_stderr": pytest.approx(0.5),
        "num_questions": 2,
    }


def test_each_question_is_written(params, questions, tmp_path):
    scores = HellaSwag(LONG, one_device(), ByteTokenizer(), questions)(params)
    write_questions(tmp_path / "out" / "q.jsonl", questions, scores)
    rows = [json.loads(line) for line in (tmp_path / "out" / "q.jsonl").read_text().splitlines()]
    assert [row["ind"] for row in rows] == [question.index for question in questions]
    for protocol, found in scores.items():
        summary = found.summary()
        right = [row[protocol]["choice_norm"] == row["label"] for row in rows]
        assert np.mean(right) == summary["acc_norm"]
        assert [row[protocol]["log_likelihoods"] for row in rows] == found.log_likelihoods.tolist()


def test_what_does_not_fit_the_model(questions):
    few = dataclasses.replace(LONG, vocab_size=256)
    with pytest.raises(ValueError, match=r"byte has 257 tokens, more than .* vocab_size=256"):
        HellaSwag(few, one_device(), ByteTokenizer(), questions)
    with pytest.raises(ValueError, match=r"question 4 has an ending of 42 tokens .*max_seq_len=16"):
        HellaSwag(MODEL, one_device(), ByteTokenizer(), questions[-1:], protocols=["completion"])


@pytest.fixture(scope="module")
def reference(reference_dir):
    directory = reference_dir / "reference"
    return np.load(directory / "hellaswag_reference.npz"), json.loads(
        (directory / "hellaswag_reference.json").read_text()
    )


def score_reference(reference_dir, monkeypatch, mesh, count, **options):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
    questions = load_questions(
        reference_dir / "data" / "hellaswag_val_600.jsonl", num_questions=count
    )
    model = open_trained_model(reference_dir / "reference" / "hf_gpt2_tiny", mesh=mesh)
    return HellaSwag(model.config, mesh, model.tokenizer, questions, **options)(model.params)


def check_reference(scores, arrays, count):
    found, limit = scores["lm_eval"].log_likelihoods, {"rtol": 0, "atol": 2e-3}
    np.testing.assert_allclose(found, arrays["lm_eval_loglikelihood"][:count], **limit)
    completion = scores["completion"]
    nats = -completion.log_likelihoods
    np.testing.assert_allclose(nats, arrays["completion_sum_loss"][:count], **limit)
    means = nats / completion.lengths
    np.testing.assert_allclose(means, arrays["completion_mean_loss"][:count], **limit)
    np.testing.assert_array_equal(completion.labels, arrays["labels"][:count])


def test_the_peers_log_likelihoods_of_a_few_questions(reference_dir, reference, monkeypatch):
    scores = score_reference(reference_dir, monkeypatch, one_device(), 8, batch_size=16)
    check_reference(scores, reference[0], 8)


@pytest.mark.parametrize(
    ("mesh_config", "batch_size"),
    [
        pytest.param(None, None, marks=pytest.mark.long),
        pytest.param(MeshConfig(), 64, marks=pytest.mark.slow),
        pytest.param(MeshConfig(fsdp=4), 1, marks=pytest.mark.long),
    ],
    ids=["1 device", "8 devices", "8 devices, batch 1"],
)
def test_the_peers_scores_of_600_questions(
    reference_dir, reference, monkeypatch, mesh_config, batch_size
):
    mesh = one_device() if mesh_config is None else make_mesh(mesh_config)
    scores = score_reference(reference_dir, monkeypatch, mesh, None, batch_size=batch_size)
    arrays, accuracies = reference
    check_reference(scores, arrays, 600)
    for protocol in PROTOCOLS:
        summary = scores[protocol].summary()
        found = {metric: summary[metric] for metric in ("acc", "acc_norm")}
        assert found == accuracies[protocol], protocol
