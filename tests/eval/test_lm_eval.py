import importlib.util
import json

import numpy as np
import pytest
from plain_scores import plain_scorer
from refusals import refused
from tiny import MODEL
from trees import mesh_of

from maxmars.data.tokenizer import ByteTokenizer
from maxmars.eval import load
from maxmars.eval.generate import GREEDY, generate_tokens
from maxmars.eval.hellaswag import load_questions
from maxmars.eval.lm_eval import PRESETS, Answers, rolling_windows, run_lm_eval

RNG = np.random.default_rng(0)
TEXT = "A man was sleeping. He woke up and walked to the door, and there he stood."


@pytest.fixture(scope="module")
def answers(model):
    return Answers(model, batch_size=None, seed=0)


@pytest.fixture(scope="module")
def plain_score(model):
    return plain_scorer(MODEL, model.params)


def assert_scores_equal(ours, expected):
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    np.testing.assert_allclose([n for n, _ in ours], [n for n, _ in expected], rtol=1e-5)


def test_scores_of_token_pairs_equal_those_of_separate_rows(model, answers, plain_score):
    def tokens(count):
        return RNG.integers(0, 257, count)

    context = tokens(5)
    (greedy,) = generate_tokens(model, [context], max_new_tokens=4, sampling=GREEDY)
    wrong_end = np.append(greedy[:-1], greedy[-1] ^ 1)
    pairs = [(context, end) for end in (tokens(3), greedy, tokens(1), wrong_end, greedy[:1])]
    # Too long together: the context is cut; the last leaves one token of it.
    pairs += [(tokens(9), tokens(8)), (tokens(40), tokens(10)), (tokens(3), tokens(16))]
    expected = [plain_score(*pair) for pair in pairs]
    assert [is_greedy for _, is_greedy in expected[:5]] == [False, True, False, False, True]
    assert_scores_equal(answers.score(pairs), expected)


def test_texts_are_split_as_the_harness_does(answers):
    def tokens(text):
        return np.frombuffer(text.encode(), np.uint8)

    end_of_text = np.array([256])
    ours = answers.log_likelihoods(
        [("a man", " sat"), ("a man  ", "sat"), ("", "sat"), (" ", "sat")]
    )
    pairs = [("a man", " sat"), ("a man", "  sat")]
    split = [(tokens(context), tokens(end)) for context, end in pairs]
    split += [(end_of_text, tokens("sat")), (end_of_text, tokens(" sat"))]
    assert ours == answers.score(split)


def test_rolling_windows_score_each_token_once_with_the_most_context():
    tokens = np.arange(10)
    windows = [(c.tolist(), t.tolist()) for c, t in rolling_windows(tokens, 99, 4)]
    assert windows == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(rolling_windows(tokens[:0], 99, 4)) == []


def test_rolling_log_likelihoods_of_texts(answers, plain_score):
    texts = [TEXT, "", "short"]
    ours = answers.rolling_log_likelihoods(texts)
    windows = [rolling_windows(np.frombuffer(t.encode(), np.uint8), 256, 16) for t in texts]
    expected = [sum(plain_score(*pair)[0] for pair in pairs) for pairs in windows]
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_generated_text_ends_before_a_stopping_text(model, answers):
    (whole,) = answers.generate([(TEXT, {"max_gen_toks": 12, "until": []})])
    context = np.frombuffer(TEXT.encode(), np.uint8)[-8:]  # half of the model's context of 16
    (tokens,) = generate_tokens(model, [context], max_new_tokens=12, sampling=GREEDY, stop=256)
    assert whole == ByteTokenizer().decode(tokens)
    stop = whole[5:7]
    # Arguments that change nothing are no reason to refuse.
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0.0, "early_stopping": False}
    neutral |= {"use_cache": True}
    sampled = {"max_gen_toks": 12, "until": [], "temperature": 5.0, "do_sample": True}
    requests = [
        (TEXT, {"max_gen_toks": 12, "until": [stop, "\n\n"], "do_sample": False}),
        (TEXT, {"max_new_tokens": 12, "until": whole[3]} | neutral),
        (TEXT, sampled),
        (TEXT, sampled | {"top_k": 0}),
    ]
    first, second, *others = answers.generate(requests)
    assert first == whole[: whole.index(stop)]
    assert second == whole[: whole.index(whole[3])]
    assert len({whole, *others}) == 3


@pytest.mark.parametrize(
    ("call", "kind", "named"),
    [
        (
            lambda answers: answers.generate([(TEXT, {"until": [], "num_beams": 4})]),
            ValueError,
            "num_beams=4",
        ),
        (lambda answers: answers.log_likelihoods([("a", "")]), ValueError, "''"),
        (lambda a: run_lm_eval(a.model, ["arc_easy"], limit=0), ValueError, "limit=0"),
        (lambda a: run_lm_eval(a.model, ["arc_easy"], num_fewshot=-1), ValueError, "num_fewshot"),
        (lambda a: run_lm_eval(a.model, ["arc_easy"], batch_size=0), ValueError, "batch_size=0"),
        pytest.param(
            lambda answers: run_lm_eval(answers.model, ["arc_easy"]),
            ImportError,
            "[eval]'",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("lm_eval") is not None, reason="it is installed"
            ),
        ),
    ],
)
def test_refusals(answers, call, kind, named):
    with refused(kind, named):
        call(answers)


# --- the harness itself, and its class for Hugging Face models ------------------------------------

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
validation_split: validation
"""
HELLASWAG = """
output_type: multiple_choice
process_docs: !function hellaswag_texts.process_docs
doc_to_text: "{{query}}"
doc_to_target: "{{label}}"
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
GENERATION = """
output_type: generate_until
doc_to_text: "{{ctx}}"
doc_to_target: "{{endings[0]}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 20
metric_list:
  - metric: exact_match
"""
SMALL = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: choices
"""
OWN_FUNCTION = "validation_split: validation\nprocess_docs: !function "
WRONG_TASKS = {
    "split": (("validation_split: validation", "validation_split: test"), "test"),
    "variable": (("{question}", "{query}"), "'query'"),
    "yaml": (("output_type: ", "output_type: [[ "), "small.yaml", "line"),
    "function": (("validation_split: validation", f"{OWN_FUNCTION}own.none"), "'none'"),
    "own error": (("validation_split: validation", f"{OWN_FUNCTION}own.texts"), "boom"),
}


@pytest.mark.peers
@pytest.mark.parametrize("kind", WRONG_TASKS)
def test_a_task_that_the_harness_cannot_run_is_told_in_its_words(model, tmp_path, kind):
    pytest.importorskip("lm_eval")
    (change, *named), path = WRONG_TASKS[kind], tmp_path / "small.yaml"
    rows = [{"question": f"{i}?", "choices": ["a", "b"], "label": i % 2} for i in range(3)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text("def texts(data):\n    raise RuntimeError('boom')\n")
    text = TASK.format(name="small", path=data) + SMALL
    path.write_text(text.replace(*change))
    assert text != path.read_text()
    # By its name, the harness does not find a file that it cannot read.
    task, include_path = ("small", tmp_path) if kind == "yaml" else (str(path), None)
    with refused((ValueError, KeyError), "small", *named):
        run_lm_eval(model, [task], include_path=include_path)


@pytest.fixture(scope="module")
def task_directory(reference_dir, tmp_path_factory):
    """Two tasks over a local file."""
    directory = tmp_path_factory.mktemp("tasks")
    path = reference_dir / "data" / "hellaswag_val_600.jsonl"
    for name, rest in (("hellaswag", HELLASWAG), ("generation", GENERATION)):
        text = TASK.format(name=f"local_{name}", path=path) + rest
        (directory / f"{name}.yaml").write_text(text)
    # The harness's own preparation of the texts.
    module = "from lm_eval.tasks.hellaswag.utils import process_docs\n"
    (directory / "hellaswag_texts.py").write_text(module)
    return directory


@pytest.fixture(scope="module")
def hf_directory(reference_dir):
    return reference_dir / "reference" / "hf_gpt2_tiny"


@pytest.fixture(scope="module")
def hf_answers(reference_dir, hf_directory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
        return Answers(load(hf_directory, mesh=mesh_of()), batch_size=None, seed=0)


@pytest.fixture(scope="module")
def hflm(reference_dir, hf_directory, tmp_path_factory):
    """The harness's own model over the same weights, tokens by transformers."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    transformers = pytest.importorskip("transformers")
    # tiktoken names the files by the SHA-1 of their addresses.
    cache, own = reference_dir / "data" / "tiktoken", tmp_path_factory.mktemp("tokenizer")
    names = {
        "vocab.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "merges.txt": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    }
    for name, source in names.items():
        (own / name).write_bytes((cache / source).read_bytes())
    return huggingface.HFLM(
        pretrained=transformers.GPT2LMHeadModel.from_pretrained(hf_directory),
        tokenizer=transformers.GPT2TokenizerFast.from_pretrained(own),
        batch_size=16,
        device="cpu",
    )


def instances(requests):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    return [instance("loglikelihood", {}, request, i) for i, request in enumerate(requests)]


@pytest.mark.peers
def test_a_local_task_scores_as_the_harness_does(reference_dir, hf_answers, hflm, task_directory):
    report = run_lm_eval(hf_answers.model, ["local_hellaswag"], include_path=task_directory)
    reference = json.loads((reference_dir / "reference" / "hellaswag_reference.json").read_text())
    scores = report["results"]["local_hellaswag"]
    assert {name: scores[name] for name in ("acc", "acc_norm")} == reference["lm_eval"]
    assert report["num_questions"] == {"local_hellaswag": 600}

    questions = load_questions(reference_dir / "data" / "hellaswag_val_600.jsonl", num_questions=50)
    pairs = [(question.context, f" {end}") for question in questions for end in question.endings]
    ours = hf_answers.log_likelihoods(pairs)
    theirs = hflm.loglikelihood(instances(pairs), disable_tqdm=True)
    np.testing.assert_allclose([n for n, _ in ours], [n for n, _ in theirs], atol=2e-3, rtol=0)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


@pytest.mark.peers
def test_long_texts_score_as_the_harness_does(reference_dir, hf_answers, hflm):
    text = (reference_dir / "data" / "wikitext2_a.txt").read_text()
    texts = [text[:9000], text[20_000:21_000], ""]
    theirs = hflm.loglikelihood_rolling(instances([(text,) for text in texts]), disable_tqdm=True)
    np.testing.assert_allclose(hf_answers.rolling_log_likelihoods(texts), theirs, rtol=1e-5)
    pairs = [(text[:6000], text[6000:6100]), ("", " the"), ("The man ", "sat")]
    ours = hf_answers.log_likelihoods(pairs)
    theirs = hflm.loglikelihood(instances(pairs), disable_tqdm=True)
    np.testing.assert_allclose([n for n, _ in ours], [n for n, _ in theirs], atol=2e-3, rtol=0)


@pytest.mark.peers
def test_generated_texts_are_those_of_the_harness(hf_answers, hflm, task_directory):
    contexts = ["A man is sitting on a roof. He", "The", "Pole vault is a sport where you run"]
    arguments = {"until": ["\n", "."], "max_gen_toks": 20}
    requests = [(context, arguments) for context in contexts]
    assert hf_answers.generate(requests) == hflm.generate_until(instances(requests))
    report = run_lm_eval(hf_answers.model, [str(task_directory / "generation.yaml")], limit=3)
    assert report["results"]["local_generation"]["exact_match"] == 0.0
    assert report["num_questions"] == {"local_generation": 3}


@pytest.mark.peers
def test_the_preset_and_unknown_tasks(hf_answers):
    manager = pytest.importorskip("lm_eval.tasks").TaskManager()
    assert set(PRESETS["mars_paper"]) <= set(manager.all_tasks)
    with refused(ValueError, "'arc_eazy'", "arc_easy"):
        run_lm_eval(hf_answers.model, ["arc_eazy"])
