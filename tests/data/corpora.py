"""Files with documents that tests write, and the documents that a corpus reads from them."""

import gzip
import hashlib
import io
import json

import pytest

from maxmars.data.corpus import FileRange


def documents_of(corpus, count=1, on_bad=None):
    """Name and text of each document of a corpus whose files are read in so many ranges each."""
    files = range(len(corpus.files))
    parts = [FileRange(file, i / count, (i + 1) / count) for file in files for i in range(count)]
    return [(d.name, "".join(d.blocks)) for part in parts for d in corpus.read(part, on_bad)]


def texts_of(*arguments, **options):
    return [text for _, text in documents_of(*arguments, **options)]


def is_held_out(name, fraction):
    """Whether a document of this name, which is no file of its own, is for validation."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < fraction * 2**64


def write_rows(path, texts):
    """Texts in a file of rows of any kind."""
    kind = path.suffixes[0]
    if kind == ".parquet":
        path.write_bytes(parquet(texts, row_group_size=50))
        return
    rows = [json.dumps({"text": text}) for text in texts]
    content = {
        ".jsonl": "".join(f"{row}\n" for row in rows),
        ".json": f"[{', '.join(rows)}]",
        ".csv": "text,n\n" + "".join(f'"{text}",1\n' for text in texts),
        ".txt": "<|endoftext|>".join(texts),
    }[kind].encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def parquet(texts, field="text", **options):
    """The bytes of a Parquet file with the texts in a field and, nested, in `a.b`."""
    pyarrow, tables = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    nested, numbers = [{"b": text, "c": 1} for text in texts], list(range(len(texts)))
    out = io.BytesIO()
    tables.write_table(pyarrow.table({"a": nested, field: texts, "n": numbers}), out, **options)
    return out.getvalue()
