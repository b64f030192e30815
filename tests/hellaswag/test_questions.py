import hashlib
import io
import json
import urllib.error
import urllib.request

import pytest
from hellaswag_questions import BRACKETS, SHORT, fields_of, write_questions_file

from maxmars.hellaswag import load_questions, questions

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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .*q.jsonl is not JSON"),
        ("[]", "'ctx' is missing"),
        (ROW | {"ctx_b": None}, "'ctx_b' is missing or no text"),
        (ROW | {"endings": "abcd"}, "'endings' is missing or no list"),
        (ROW | {"endings": ["a", "b", "c"]}, "endings must be 4 strings"),
        (ROW | {"endings": ["a", "b", "c", 4]}, "endings must be 4 strings"),
        (ROW | {"label": 4}, r"label=4 must be an integer in \[0, 4\)"),
        (ROW | {"label": ""}, "label='' must .* test set has no labels"),
        (ROW | {"ind": None}, "ind=None must be an integer"),
    ],
)
def test_a_malformed_line(tmp_path, line, message):
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "q.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{text}\n")
    with pytest.raises(ValueError, match=message):
        load_questions(path)


def test_no_questions(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*none\.jsonl"):
        load_questions(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no questions"):
        load_questions(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="0, must be at least 1"):
        load_questions(tmp_path / "empty.jsonl", num_questions=0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def network(monkeypatch):
    """What the network answers: bytes, or an error."""
    answer, asked = {}, []

    def urlopen(url, timeout):
        asked.append(url)
        if isinstance(answer["now"], Exception):
            raise answer["now"]
        return io.BytesIO(answer["now"])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return answer, asked


def test_the_validation_set_is_downloaded_once(cache, network, monkeypatch):
    content = (json.dumps(ROW) + "\n").encode() * 3000
    monkeypatch.setattr(questions, "_SHA256", hashlib.sha256(content).hexdigest())
    answer, asked = network
    answer["now"] = content
    seen = []
    assert len(load_questions(progress=lambda *counts: seen.append(counts))) == 3000
    assert seen[-1][0] == len(content) > seen[0][0]
    assert len(load_questions(num_questions=5)) == 5
    assert len(asked) == 1
    assert [path.name for path in cache.iterdir()] == ["hellaswag_val.jsonl"]


def test_a_download_of_something_else_leaves_nothing(cache, network):
    network[0]["now"] = b"<html>please log in</html>"
    with pytest.raises(ValueError, match="is not HellaSwag's validation set: 26 bytes"):
        load_questions()
    assert list(cache.iterdir()) == []


def test_without_network_the_message_says_what_to_do(cache, network):
    network[0]["now"] = urllib.error.URLError("no route")
    with pytest.raises(FileNotFoundError) as error:
        load_questions()
    for part in (str(cache / "hellaswag_val.jsonl"), "no route", "https://", "--hellaswag.path"):
        assert part in str(error.value)
