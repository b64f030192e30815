"""Questions, both protocols against a plain scorer and the peers, and two models compared."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import json
import threading
import urllib.request

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

from maxmars.config import MeshConfig
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed.sharding import make_mesh
from maxmars.eval import load
from maxmars.eval.hellaswag import (
    PROTOCOLS,
    HellaSwag,
    Scores,
    download,
    fitting,
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


KINDS = {
    "validation-00000-of-00001.parquet": lambda rows, path: pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), path
    ),
    "q.jsonl.gz": lambda rows, path: path.write_bytes(gzip.compress(as_lines(rows))),
    "q.jsonl.zst": lambda rows, path: path.write_bytes(
        pyarrow.compress(as_lines(rows), "zstd", asbytes=True)
    ),
    "q.jsonl": lambda rows, path: path.write_bytes(as_lines(rows)),
}


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("name", KINDS)
def test_copies_of_the_data_in_other_formats(tmp_path, name):
    rows = [fields_of(number, *question) for number, question in enumerate(SHORT)]
    expected = load_questions(write_questions_file(tmp_path / "own.jsonl", rows))
    for change in (lambda label: label, str, float, lambda label: f"{label}.0"):
        copies = [row | {"label": change(row["label"])} for row in rows]
        without = [{k: v for k, v in row.items() if k != "ind"} for row in copies]
        for found in (copies, without, [row | {"ind": None} for row in copies]):
            KINDS[name](found, tmp_path / name)
            assert load_questions(tmp_path / name) == expected
    assert load_questions(tmp_path / name, num_questions=2) == expected[:2]
    KINDS[name]([row | {"label": ""} for row in rows], tmp_path / name)
    with refused(ValueError, tmp_path / name, "validation set"):
        load_questions(tmp_path / name)
    if name != "q.jsonl":
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-20])
        with refused((ValueError, OSError), name):
            load_questions(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2"),
        ("[]", "[]"),
        ({name: ROW[name] for name in ROW if name != "ctx"}, "'ctx'"),
        (ROW | {"ctx_b": None}, "context_b: null"),
        (ROW | {"endings": "abcd"}, '"abcd"'),
        (ROW | {"endings": ["a", "b", "c"]}, "('a', 'b', 'c')"),
        (ROW | {"endings": ["a", "b", "c", 4]}, "4"),
        (ROW | {"label": 4}, "label=4"),
        (ROW | {"label": ""}, "validation set"),
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


def test_no_questions(tmp_path):
    with refused(FileNotFoundError, "none.jsonl"):
        load_questions(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with refused(ValueError, tmp_path / "empty.jsonl"):
        load_questions(tmp_path / "empty.jsonl")
    with refused(ValueError, "questions, 0"):
        load_questions(write_questions_file(tmp_path / "q.jsonl"), num_questions=0)


@pytest.fixture
def server(tmp_path):
    """Serves the files of `tmp_path / "served"`; its address."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_download_appears_whole_or_not_at_all(tmp_path, server):
    content = (json.dumps(ROW) + "\n").encode() * 3000
    (tmp_path / "served" / "q.jsonl").write_bytes(content)
    path, seen = tmp_path / "cache" / "q.jsonl", []
    wanted = {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}
    with refused(ValueError, f"{server}/q.jsonl", len(content), wanted["sha256"], "0" * 64):
        download(f"{server}/q.jsonl", path, sha256="0" * 64, num_bytes=5)
    with pytest.raises(OSError, match="404"):
        download(f"{server}/other.jsonl", path, **wanted)
    assert list(path.parent.iterdir()) == []
    download(f"{server}/q.jsonl", path, **wanted, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (len(content), len(content))
    assert seen[0][0] < len(content)
    assert len(load_questions(path)) == 3000


def test_the_cache_and_a_message_without_network(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "hellaswag_val.jsonl"
    monkeypatch.setenv("MAXMARS_CACHE", str(cache.parent))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "")
    urllib.request.install_opener(None)  # the one in use knows the proxies of before
    with pytest.raises(FileNotFoundError) as error:
        load_questions()
    for part in (str(cache), "refused", "https://", "--hellaswag.path"):
        assert part in str(error.value), str(error.value)
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
    score = plain_scorer(LONG, params)
    found = [
        score(list(context.encode()), list(ending.encode()))[0]
        for context, endings, _ in plain_texts(protocol)
        for ending in endings
    ]
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
        cut=np.array([False, True]),
    )
    assert scores.choices.tolist() == [1, 0]  # the first of equals
    assert scores.choices_norm.tolist() == [3, 3]
    assert scores.summary() == {
        "acc": 0.5,
        "acc_stderr": pytest.approx(np.std([0, 1], ddof=1) / 2**0.5),
        "acc_norm": 0.5,
        "acc_norm_stderr": pytest.approx(0.5),
        "num_questions": 2,
        "num_cut": 1,
    }


def test_each_question_is_written(params, questions, tmp_path):
    scores = HellaSwag(LONG, one_device(), ByteTokenizer(), questions)(params)
    write_scores(tmp_path / "out" / "q.jsonl", questions, scores)
    rows = [json.loads(line) for line in (tmp_path / "out" / "q.jsonl").read_text().splitlines()]
    assert [row["ind"] for row in rows] == [question.index for question in questions]
    for protocol, found in scores.items():
        summary = found.summary()
        right = [row[protocol]["choice_norm"] == row["label"] for row in rows]
        assert np.mean(right) == summary["acc_norm"]
        assert [row[protocol]["log_likelihoods"] for row in rows] == found.log_likelihoods.tolist()


def test_what_does_not_fit_the_model(questions):
    few = dataclasses.replace(LONG, vocab_size=256)
    with refused(ValueError, "byte", "257 tokens", "vocab_size=256"):
        HellaSwag(few, one_device(), ByteTokenizer(), questions)
    with refused(ValueError, "question 4", "42 tokens", "max_seq_len=16"):
        HellaSwag(MODEL, one_device(), ByteTokenizer(), questions[-1:], protocols=["completion"])


def test_questions_that_are_too_long_are_told_or_left_out(params, questions):
    few = dataclasses.replace(LONG, max_seq_len=44)  # enough for some
    whole = HellaSwag(LONG, one_device(), ByteTokenizer(), questions)(params)
    fit = {}
    for protocol in PROTOCOLS:
        texts = [(len(context.encode()), ends) for context, ends, _ in plain_texts(protocol)]
        lengths = [size + max(len(end.encode()) for end in ends) for size, ends in texts]
        fit[protocol] = np.array(lengths) <= 45  # the last token predicts nothing
    kept = fitting(questions, ByteTokenizer(), 44)
    assert [q in kept for q in questions] == (fit["lm_eval"] & fit["completion"]).tolist()
    assert 0 < len(kept) < len(questions)
    short = params | {"wpe": jax.tree.map(lambda x: x[:44], params["wpe"])}
    found = HellaSwag(few, one_device(), ByteTokenizer(), questions)(short)
    for protocol, scores in found.items():
        np.testing.assert_array_equal(scores.cut, ~fit[protocol])
        same = np.isclose(
            scores.log_likelihoods, whole[protocol].log_likelihoods, rtol=1e-4, atol=0
        ).all(axis=1)
        np.testing.assert_array_equal(same, fit[protocol])
        assert scores.summary()["num_cut"] == (~fit[protocol]).sum()
    with refused(ValueError, "6 HellaSwag questions", "max_seq_len=8"):
        fitting(questions, ByteTokenizer(), 8)


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
    model = load(reference_dir / "reference" / "hf_gpt2_tiny", mesh=mesh)
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
        (5, 5, 1.0),
        (6, 0, 2 / 64),
        (1, 9, 2 * 11 / 1024),  # by hand: 1 + 10 of 1024 sequences are so uneven, on each side
        (4, 6, 2 * 386 / 1024),
    ],
)
def test_mcnemar_is_exact(only_first, only_second, p):
    first, second = answers(30, only_first, only_second, 20)
    found = paired_difference(first, second)
    assert found.mcnemar_p == pytest.approx(p)
    assert (found.only_first, found.only_second) == (only_first, only_second)
    assert found.difference == pytest.approx((only_first - only_second) / len(first))


def test_the_interval_is_that_of_resampled_questions():
    first, second = answers(300, 80, 50, 170)
    found = paired_difference(first, second)
    difference = first.astype(float) - second
    rng = np.random.default_rng(1)
    means = [rng.choice(difference, 600).mean() for _ in range(4000)]
    np.testing.assert_allclose(found.interval_95, np.quantile(means, [0.025, 0.975]), atol=0.004)
    assert found.interval_95[0] > 0
    assert found.mcnemar_p < 0.05


def test_a_large_difference_underflows_to_no_error():
    assert 0 <= paired_difference(*answers(0, 6000, 4042, 0)).mcnemar_p < 1e-80


def test_questions_must_be_the_same():
    with refused(ValueError, "3 and 2"):
        paired_difference(np.ones(3, bool), np.ones(2, bool))
