"""Questions, both protocols against a plain scorer and the peers, and two models compared."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import json
import urllib.request

import http_server
import jax
import numpy as np
import pyarrow.parquet
import pytest
from hellaswag_questions import (
    BRACKETS,
    LM_EVAL_CONTEXT,
    LM_EVAL_ENDINGS,
    SHORT,
    fields_of,
    write_questions_file,
)
from plain_scores import plain_scorer
from refusals import refused
from tiny import MODEL
from trees import mesh_of

from maxmars.config import MeshConfig
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed.sharding import make_mesh
from maxmars.eval import load
from maxmars.eval.hellaswag import (
    PROTOCOLS,
    HellaSwag,
    Scores,
    download,
    load_questions,
    paired_difference,
    write_scores,
)
from maxmars.model.parameters import init_params

# --- questions


ROW = fields_of(7, *SHORT[0])


def test_the_original_format(tmp_path):
    path = write_questions_file(tmp_path / "q.jsonl", [ROW, BRACKETS])
    path.write_text(path.read_text().replace("\n", "\n\n"))
    first, second = load_questions(path)
    assert first.index == 7
    assert (first.activity, first.context_a, first.context_b) == SHORT[0][:3]
    assert first.context == "A man cuts dough. he"
    assert first.endings == tuple(SHORT[0][3])
    assert (first.label, second.label) == (2, 1)  # some copies of the data have text for a number
    assert load_questions(path, num_questions=1) == [first]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# How a file is written, and how its copy of the data gives a label and leaves out `ind`.
COPIES = {
    "validation-00000-of-00001.parquet": (
        lambda rows, path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
        str,
        {},
    ),
    "q.jsonl.gz": (lambda rows, path: path.write_bytes(gzip.compress(as_lines(rows))), float, {}),
    "q.jsonl.zst": (
        lambda rows, path: path.write_bytes(pyarrow.compress(as_lines(rows), "zstd", asbytes=True)),
        lambda label: f"{label}.0",
        {"ind": None},
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_data_in_other_formats(tmp_path, name):
    write, label, index = COPIES[name]
    rows = [fields_of(number, *question) for number, question in enumerate(SHORT)]
    expected = load_questions(write_questions_file(tmp_path / "own.jsonl", rows))
    bare = [{k: v for k, v in row.items() if k != "ind"} | index for row in rows]
    path = tmp_path / name
    write([row | {"label": label(row["label"])} for row in bare], path)
    assert load_questions(path) == expected
    assert load_questions(path, num_questions=2) == expected[:2]
    write([row | {"label": ""} for row in rows], path)
    with refused(ValueError, path, "validation set"):
        load_questions(path)
    path.write_bytes(path.read_bytes()[:-20])
    with refused((ValueError, OSError), name):
        load_questions(path)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2"),
        ("[]", "[]"),
        ({name: ROW[name] for name in ROW if name != "ctx"}, "'ctx'"),
        (ROW | {"ctx_b": None}, "context_b: null"),
        (ROW | {"endings": ["a", "b", "c"]}, "('a', 'b', 'c')"),
        (ROW | {"label": 4}, "label=4"),
        (ROW | {"label": None}, "validation set"),
        (ROW | {"label": 1.5}, "1.5"),
        (ROW | {"ind": "x"}, "'x'"),
    ],
)
def test_a_malformed_line(tmp_path, line, named):
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "q.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{text}\n")
    with refused((ValueError, KeyError), f"{path}, line 2", named):
        load_questions(path)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """Serves the files of `tmp_path / "served"`; its address."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "served"))
    with http_server.serving(handler) as server:
        yield server.url


def test_a_download_appears_whole_or_not_at_all(tmp_path, server):
    content = as_lines([ROW] * 300)
    (tmp_path / "served" / "q.jsonl").write_bytes(content)
    path, digest = tmp_path / "cache" / "q.jsonl", hashlib.sha256(content).hexdigest()
    with refused(ValueError, f"{server}/q.jsonl", digest, "0" * 64):
        download(f"{server}/q.jsonl", path, sha256="0" * 64)
    with pytest.raises(OSError, match="404"):  # kept by nothing, as it holds a socket
        download(f"{server}/other.jsonl", path, sha256=digest)
    assert list(path.parent.iterdir()) == []
    download(f"{server}/q.jsonl", path, sha256=digest)
    assert len(load_questions(path)) == 300


def test_the_cache_and_a_message_without_network(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "hellaswag_val.jsonl"
    monkeypatch.setenv("MAXMARS_CACHE", str(cache.parent))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "")
    urllib.request.install_opener(None)  # the one in use knows the proxies of before
    with refused(FileNotFoundError, cache, "refused", "https://", "--hellaswag.path"):
        load_questions()
    urllib.request.install_opener(None)
    write_questions_file(cache)
    assert len(load_questions()) == 5


# --- scores


LONG = dataclasses.replace(MODEL, max_seq_len=160)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: jax.tree.map(lambda x: 8 * x, init_params(LONG, 0)))()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    rows = [*(fields_of(i, *question) for i, question in enumerate(SHORT)), BRACKETS]
    return load_questions(write_questions_file(tmp_path_factory.mktemp("q") / "q.jsonl", rows))


@pytest.fixture(scope="module")
def scored(params, questions):
    """The scores of both protocols at once, on eight devices."""
    return HellaSwag(LONG, make_mesh(MeshConfig()), ByteTokenizer(), questions, batch_size=64)(
        params
    )


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


@pytest.mark.smoke
def test_protocols_equal_their_texts_scored_one_by_one(params, questions, scored, tmp_path):
    score = plain_scorer(LONG, params)
    labels = np.array([*(label for *_, label in SHORT), 1])
    write_scores(tmp_path / "out" / "q.jsonl", questions, scored)
    rows = [json.loads(line) for line in (tmp_path / "out" / "q.jsonl").read_text().splitlines()]
    assert [row["ind"] for row in rows] == [question.index for question in questions]
    assert [*scored] == [*PROTOCOLS]
    for protocol, scores in scored.items():
        texts = [*plain_texts(protocol)]
        nats = [
            [score(list(context.encode()), list(ending.encode()))[0] for ending in endings]
            for context, endings, _ in texts
        ]
        np.testing.assert_allclose(scores.log_likelihoods, nats, rtol=2e-5)
        for lengths, (_, endings, cleaned) in zip(scores.lengths, texts, strict=True):
            measured = [e.encode() for e in endings] if protocol == "completion" else cleaned
            assert lengths.tolist() == [len(text) for text in measured]
        summary, chosen_norm = scores.summary(), (np.array(nats) / scores.lengths).argmax(1)
        assert summary["acc"] == np.mean(np.argmax(nats, axis=1) == labels)
        assert summary["acc_norm"] == np.mean(chosen_norm == labels)
        assert summary["num_questions"] == 6
        assert [row[protocol]["choice_norm"] for row in rows] == chosen_norm.tolist()
        written = [row[protocol]["log_likelihoods"] for row in rows]
        assert written == scores.log_likelihoods.tolist()


def test_accuracies_and_their_standard_errors():
    scores = Scores(
        log_likelihoods=np.array([[-4.0, -3.0, -3.0, -9.0], [-1.0, -2.0, -3.0, -2.0]]),
        lengths=np.array([[1, 1, 1, 9], [1, 1, 0, 8]]),  # cleaning may leave nothing of an ending
        labels=np.array([1, 3]),
        cut=np.array([False, True]),
    )
    assert scores.predictions.tolist() == [1, 0]  # the first of equals
    assert scores.predictions_norm.tolist() == [3, 3]
    assert scores.summary() == {
        "acc": 0.5,
        "acc_stderr": pytest.approx(np.std([0, 1], ddof=1) / 2**0.5),
        "acc_norm": 0.5,
        "acc_norm_stderr": pytest.approx(0.5),
        "num_questions": 2,
        "num_cut": 1,
    }


def test_long_contexts_are_cut_and_questions_with_a_long_ending_left_out(params, questions, scored):
    few = dataclasses.replace(LONG, max_seq_len=32)  # an ending of the last question has 42 bytes
    short = params | {"wpe": jax.tree.map(lambda x: x[:32], params["wpe"])}
    score = HellaSwag(few, mesh_of(), ByteTokenizer(), questions)
    assert score.questions == questions[:-1]
    by_protocol = score(short)
    assert [*by_protocol] == [*PROTOCOLS]
    for protocol, scores in by_protocol.items():
        texts = [(len(context.encode()), ends) for context, ends, _ in plain_texts(protocol)][:-1]
        lengths = [size + max(len(end.encode()) for end in ends) for size, ends in texts]
        fit = np.array(lengths) <= 33  # the last token predicts nothing
        assert 0 < fit.sum() < len(fit)
        np.testing.assert_array_equal(scores.cut, ~fit)
        same = np.isclose(
            scores.log_likelihoods, scored[protocol].log_likelihoods[:-1], rtol=1e-4, atol=0
        ).all(axis=1)
        np.testing.assert_array_equal(same, fit)
        summary = scores.summary()
        assert (summary["num_questions"], summary["num_cut"]) == (5, (~fit).sum())


def test_refusals(questions, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    few, one = dataclasses.replace(LONG, vocab_size=256), np.ones(1, bool)
    for kind, named, call in (
        (FileNotFoundError, ["none.jsonl"], lambda: load_questions(tmp_path / "none.jsonl")),
        (ValueError, ["empty.jsonl"], lambda: load_questions(tmp_path / "empty.jsonl")),
        (ValueError, ["questions, 0"], lambda: load_questions(num_questions=0)),
        (
            ValueError,
            ["byte", "257 tokens", "vocab_size=256"],
            lambda: HellaSwag(few, mesh_of(), ByteTokenizer(), questions),
        ),
        (
            ValueError,
            ["1 HellaSwag questions", "max_seq_len=16"],
            lambda: HellaSwag(MODEL, mesh_of(), ByteTokenizer(), questions[-1:]),
        ),
        (ValueError, ["1 and 0"], lambda: paired_difference(one, one[:0])),
    ):
        with refused(kind, *named):
            call()


@pytest.mark.parametrize("count", [8, pytest.param(600, marks=pytest.mark.slow)])
def test_the_peers_scores(count, reference_dir, tiktoken_cache):
    """Of a few questions on one device, of all on eight."""
    directory = reference_dir / "reference"
    arrays = np.load(directory / "hellaswag_reference.npz")
    accuracies = json.loads((directory / "hellaswag_reference.json").read_text())
    path = reference_dir / "data" / "hellaswag_val_600.jsonl"
    questions = load_questions(path, num_questions=count)
    mesh, batch_size = (mesh_of(), 16) if count == 8 else (make_mesh(MeshConfig()), None)
    model = load(directory / "hf_gpt2_tiny", mesh=mesh)
    scores = HellaSwag(model.config, mesh, model.tokenizer, questions, batch_size=batch_size)(
        model.params
    )
    completion = scores["completion"]
    nats = -completion.log_likelihoods
    for ours, name in (
        (scores["lm_eval"].log_likelihoods, "lm_eval_loglikelihood"),
        (nats, "completion_sum_loss"),
        (nats / completion.lengths, "completion_mean_loss"),
    ):
        np.testing.assert_allclose(ours, arrays[name][:count], rtol=0, atol=2e-3)
    np.testing.assert_array_equal(completion.labels, arrays["labels"][:count])
    if count == 600:
        for protocol in PROTOCOLS:
            assert accuracies[protocol].items() <= scores[protocol].summary().items(), protocol


# --- two models


def answers(both, first, second, neither):
    """Answers of two models that agree and differ on so many questions."""
    counts = (both, first, second, neither)
    return (
        np.repeat([True, True, False, False], counts),
        np.repeat([True, False, True, False], counts),
    )


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 0, 1.0),
        (6, 0, 2 / 64),
        (1, 9, 2 * 11 / 1024),  # by hand: 1 + 10 of 1024 sequences are so uneven, on each side
    ],
)
def test_mcnemar_is_exact(only_first, only_second, p):
    first, second = answers(30, only_first, only_second, 20)
    paired = paired_difference(first, second)
    assert paired.mcnemar_p == pytest.approx(p)
    assert (paired.only_first, paired.only_second) == (only_first, only_second)
    assert paired.difference == pytest.approx((only_first - only_second) / len(first))


def test_the_interval_is_that_of_resampled_questions():
    first, second = answers(300, 80, 50, 170)
    paired = paired_difference(first, second)
    difference = first.astype(float) - second
    rng = np.random.default_rng(1)
    means = [rng.choice(difference, 600).mean() for _ in range(4000)]
    np.testing.assert_allclose(paired.interval_95, np.quantile(means, [0.025, 0.975]), atol=0.004)
    assert paired.interval_95[0] > 0
    assert paired.mcnemar_p < 0.05
    assert 0 <= paired_difference(*answers(0, 6000, 4042, 0)).mcnemar_p < 1e-80
