"""Generated texts, prepared in tasks of any size: their tokens are the texts'."""

import itertools
import json
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmars.data.corpus import TextFiles
from maxmars.data.formats import open_directory
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer

settings = hypothesis.settings(max_examples=8, deadline=None, database=None, derandomize=True)
MORE = st.characters(codec="utf-8", exclude_characters="\ufeff")  # a mark that no text keeps
# Characters of one to four bytes, and those between which splits cut.
some_text = st.text(st.sampled_from("ab1.'s \n\r\t\u00a0\u3000é—𝄞") | MORE)
two_texts = st.lists(some_text, min_size=2, max_size=15).filter(lambda t: t[0] and any(t[1:]))
long_text = st.lists(some_text, min_size=1, max_size=10).map("".join).filter(bool)


def documents(name, text, fraction, tasks=1):
    """Tokens of each document of each split that a file with this text is prepared to, in about so
    many tasks."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, name), Path(folder, "out")
        path.write_bytes(text.encode())
        metadata = prepare(
            TextFiles([str(path)]),
            out,
            tokenizer=ByteTokenizer(),
            source="a test",
            validation_fraction=fraction,
            task_bytes=max(1, len(text.encode()) // tasks),
        )
        of_splits = {}
        for split in metadata.splits:
            stream = open_directory(out).stream(split)
            tokens = stream.read(0, stream.num_tokens)
            ends = np.flatnonzero(tokens == ByteTokenizer.eot)
            assert ends[-1] == len(tokens) - 1
            of_splits[split] = [some[:-1].tolist() for some in np.split(tokens, ends[:-1] + 1)]
    return of_splits


@pytest.mark.seconds
@settings
@given(long_text, st.integers(2, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_tasks_of_a_text_give_the_text(text, tasks, fraction):
    """Its end is held out, from the begin of a character on; a task is no document of its own."""
    splits = documents("a.txt", text, fraction, tasks)
    assert [len(split) for split in splits.values()] == [1] * len(splits)
    texts = [ByteTokenizer().decode(np.array(tokens)) for (tokens,) in splits.values()]
    assert "".join(texts) == text
    assert all("\ufffd" not in part for part in texts) or "\ufffd" in text
    assert splits == documents("a.txt", text, fraction)


@pytest.mark.seconds
@settings
@given(two_texts, st.integers(2, 5))
def test_the_tasks_of_lines_give_the_lines(texts, tasks):
    """Each in the split that it is in however the file is cut, in the order of the file. (The only
    line of a file would give its end to validation.)"""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    expected = [ByteTokenizer().encode(text).tolist() for text in texts if text]
    assert documents("a.jsonl", lines, 0.0, tasks) == {"train": expected}
    try:
        whole = documents("a.jsonl", lines, 0.3)
    except ValueError:  # the texts of one split are all empty
        return
    assert documents("a.jsonl", lines, 0.3, tasks) == whole
    assert sorted(itertools.chain(*whole.values())) == sorted(expected)
