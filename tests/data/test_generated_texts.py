"""`maxmars data prepare` of generated texts, in tasks of any size: their tokens are the texts'."""

import itertools
import json
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmars.cli import main
from maxmars.data.formats import open_split
from maxmars.data.sources import NoSuchSplitError
from maxmars.data.tokenizer import load

settings = hypothesis.settings(max_examples=8, deadline=None, database=None, derandomize=True)
MORE = st.characters(codec="utf-8", exclude_characters="\ufeff")  # a mark that no text keeps
# Characters of one to four bytes, and those between which splits cut.
some_text = st.text(st.sampled_from("ab1.'s \n\r\t\u00a0\u3000é—𝄞") | MORE)
two_texts = st.lists(some_text, min_size=2, max_size=30).filter(lambda t: t[0] and any(t[1:]))
long_text = st.lists(some_text, min_size=1, max_size=20).map("".join).filter(bool)


def documents(name, text, *options, tasks=1):
    """Tokens of each document of each split that a file with this text is prepared to, in about so
    many tasks."""
    task_bytes = max(1, len(text.encode()) // tasks)
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, name), Path(folder, "out")
        path.write_bytes(text.encode())
        words = ("--task-bytes", task_bytes, "--workers", 0, *options)
        main(["data", "prepare", str(path), str(out), *map(str, words)])
        found = {}
        for split in ("train", "val"):
            try:
                stream = open_split(out, split)
            except NoSuchSplitError:
                continue
            tokens = stream.read(0, stream.num_tokens)
            ends = np.flatnonzero(tokens == load("byte").eot)
            assert ends[-1] == len(tokens) - 1
            found[split] = [part[:-1].tolist() for part in np.split(tokens, ends[:-1] + 1)]
    return found


@pytest.mark.seconds
@settings
@given(long_text, st.integers(2, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_tasks_of_a_text_give_the_text(text, tasks, fraction):
    """Its end is held out, from the begin of a character on; a task is no document of its own."""
    options = ("--validation-fraction", fraction)
    found = documents("a.txt", text, *options, tasks=tasks)
    assert [len(split) for split in found.values()] == [1] * len(found)
    decode = load("byte").decode
    assert "".join(decode(np.array(tokens)) for (tokens,) in found.values()) == text
    assert all("\ufffd" not in decode(np.array(t)) or "\ufffd" in text for (t,) in found.values())
    assert found == documents("a.txt", text, *options)


@settings
@given(two_texts, st.integers(2, 5))
def test_the_tasks_of_lines_give_the_lines(texts, tasks):
    """Each in the split that it is in however the file is cut, in the order of the file. (The only
    line of a file would give its end to validation.)"""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    options = ("--validation-fraction", "0")
    found = documents("a.jsonl", lines, *options, tasks=tasks)
    expected = [load("byte").encode(text).tolist() for text in texts if text]
    assert found == {"train": expected}
    whole = documents("a.jsonl", lines, "--validation-fraction", "0.3")
    assert documents("a.jsonl", lines, "--validation-fraction", "0.3", tasks=tasks) == whole
    assert sorted(itertools.chain(*whole.values())) == sorted(expected)
