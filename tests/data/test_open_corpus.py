import gzip
import json
import pickle
import shlex
import sys
import tempfile

import numpy as np
import pytest
from corpora import parquet, texts_of
from fake_hub import FakeHub, serving
from refusals import refused
from running import run_python
from token_directories import write_tfds

from maxmars.cli import main
from maxmars.data import documents
from maxmars.data.metadata import read_metadata
from maxmars.data.open_corpus import PRESETS, open_corpus
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer

TEXTS = [f"text {i} ä\n" for i in range(250)]


def write_prose(data_dir, file_format, **more):
    """A set of TFDS, built without TensorFlow."""
    import tensorflow_datasets as tfds

    splits = {"train": TEXTS, "test": ["a", "b", "c"]} | more
    examples = {s: [{"text": t, "id": i} for i, t in enumerate(ts)] for s, ts in splits.items()}
    features = {"text": tfds.features.Text(), "id": np.int64}
    write_tfds(data_dir, examples, features, num_shards=3, file_format=file_format)
    return str(data_dir)


@pytest.fixture(scope="module", params=["array_record", "tfrecord"])
def tfds_dir(request, tmp_path_factory):
    return write_prose(tmp_path_factory.mktemp("tfds"), request.param)


def test_tfds(tfds_dir, tmp_path):
    for source, expected in (
        ("tfds:made_up", TEXTS),
        ("tfds:made_up:test", ["a", "b", "c"]),
        ("tfds:made_up:1.0.0:test", ["a", "b", "c"]),
        ("tfds:made_up:1.0.0", TEXTS),
        ("tfds:made_up:train[:10%]", TEXTS[:25]),
        ("tfds:made_up:train[30%:50%]", TEXTS[75:125]),  # from within a shard into another
    ):
        assert texts_of(open_corpus(source, data_dir=tfds_dir)) == expected
    corpus = open_corpus("tfds:made_up", data_dir=tfds_dir)
    assert len(corpus.files) == 3
    if corpus.files[0].is_divisible:
        assert texts_of(corpus, count=7) == TEXTS
    assert texts_of(pickle.loads(pickle.dumps(corpus))) == TEXTS  # as workers get it
    options = {"source": "tfds:made_up", "tokenizer": ByteTokenizer(), "task_bytes": 1000}
    metadata = prepare(corpus, tmp_path / "out", **options)
    # The same documents of either kind of file.
    assert metadata.splits["train"].num_documents == 225
    assert metadata.splits["val"].num_documents == 25


@pytest.mark.parametrize(
    ("name", "field", "error"),
    [
        ("made_up", "body", ValueError),
        ("made_up:nowhere", None, FileNotFoundError),
        ("made_up:2.0.0", None, FileNotFoundError),
        ("lm1b", None, FileNotFoundError),
    ],
)
def test_tfds_errors(tfds_dir, tmp_path, monkeypatch, name, field, error):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with refused(error, f"tfds:{name}", field or f"tfds build {name.partition(':')[0]}"):
        open_corpus(f"tfds:{name}", data_dir=tfds_dir, text_field=field)
    assert not list(tmp_path.iterdir())


def test_a_damaged_shard_of_tfrecord(tmp_path):
    corpus = open_corpus("tfds:made_up", data_dir=write_prose(tmp_path, "tfrecord"))
    shard = tmp_path / "made_up" / "1.0.0" / "made_up-train.tfrecord-00001-of-00003"
    data = shard.read_bytes()
    first_record = int.from_bytes(data[:8], "little") + 16
    for damaged in (data[:-3], data[:first_record], data[:12] + b"\xff" * 9 + data[21:]):
        shard.write_bytes(damaged)
        with refused(ValueError, shard):
            texts_of(corpus)
    shard.unlink()
    with refused(FileNotFoundError, shard):
        texts_of(corpus)


READ = """
import sys
from maxmars.data.corpus import FileRange
from maxmars.data.open_corpus import open_corpus
for folder in sys.argv[1:]:
    assert len(list(open_corpus("tfds:made_up", data_dir=folder).read(FileRange(0))))
assert "tensorflow" not in sys.modules
"""


@pytest.mark.seconds
def test_tfds_loads_no_tensorflow(tmp_path):
    formats = ("array_record", "tfrecord")
    run_python("-c", READ, *(write_prose(tmp_path / name, name) for name in formats))


@pytest.mark.parametrize(
    ("splits", "words", "command", "val"),
    [
        (("val", "validation"), [], "--validation tfds:made_up:validation", ["validation"]),
        (("val",), [], "--validation tfds:made_up:val", ["val"]),
        ((), [], "--validation-fraction 0.1", TEXTS),
        (("val",), ["--validation-fraction", "0.2"], "--validation-fraction 0.2", TEXTS),
        (("val",), ["--validation", "tfds:made_up:test"], "--validation tfds:made_up:test", "abc"),
    ],
)
def test_the_own_validation_split_of_a_set(tmp_path, capsys, splits, words, command, val):
    directory = write_prose(tmp_path, "tfrecord", **{split: [split] * 3 for split in splits})
    out = ["tfds:made_up", str(tmp_path / "out"), "--data-dir", directory, "--workers", "0"]
    main(["data", "prepare", *out, *words])
    metadata = read_metadata(tmp_path / "out")
    assert command in metadata.command
    held_out = documents(tmp_path / "out", "val")
    assert {held_out.tokenizer.decode(tokens[:-1]) for tokens in held_out} <= set(val)
    said = f"{command.split()[-1]}, the data set's own" in capsys.readouterr().err
    assert said == (not words and bool(splits))
    again = shlex.split(metadata.command.replace(f"{tmp_path}/out", f"{tmp_path}/again"))
    main([*again[1:], "--workers", "0"])
    assert read_metadata(tmp_path / "again").splits == metadata.splits


def test_the_validation_split_of_a_set_as_its_text(tmp_path):
    """It is not for validation as well."""
    directory = write_prose(tmp_path, "array_record", validation=TEXTS[:40])
    for split in ("validation", "train+validation", "all"):
        corpus = open_corpus(f"tfds:made_up:{split}", data_dir=directory)
        assert corpus.validation_source is None
    both = open_corpus("tfds:made_up:train+validation", data_dir=directory)
    assert {file.num_bytes for file in both.files} == {None}  # TFDS does not know the size


def card(config, pattern):
    """The part of a data set's README that names the files of a config."""
    files = f"configs:\n- config_name: {config}\n  data_files:\n  - split: train\n"
    return f"---\n{files}    path: {pattern}\n---\n".encode()


def hub_of_presets():
    """What the presets name, as the repositories on the hub are laid out."""
    hub, script = FakeHub(), {"openwebtext.py": b"raise SystemExit('must not run')"}
    hub.add("Skylion007/openwebtext", script)
    train = "plain_text/train"
    files = {f"{train}/0000.parquet": parquet(["owt a", "owt b"])}
    files |= {f"{train}/0001.parquet": parquet(["owt c"])}
    hub.add("Skylion007/openwebtext", files, "refs/convert/parquet")
    files = {
        "README.md": card("sample-100BT", "sample/100BT/*"),
        "sample/100BT/000_00000.parquet": parquet(["edu a", "edu b"]),
        "sample/10BT/000_00000.parquet": parquet(["another sample"]),
    }
    hub.add("HuggingFaceFW/fineweb-edu", files)
    rows = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in ("c4 a", "c4 b"))
    files = {
        "README.md": card("en", "en/c4-train.*.json.gz"),
        "en/c4-train.00000-of-01024.json.gz": gzip.compress(rows.encode()),
    }
    hub.add("allenai/c4", files)
    titles = [" = First = \n", " = = Part = = \n", " = Second = \n"]
    rows = ["", titles[0], "", " Words = x . \n", *titles[1:], " E \n"]
    files = {
        "README.md": card("wikitext-103-raw-v1", "wikitext-103-raw-v1/train-*"),
        "wikitext-103-raw-v1/train-00000-of-00001.parquet": parquet(rows),
    }
    hub.add("Salesforce/wikitext", files)
    return hub


@pytest.mark.seconds
def test_presets_against_an_imitation_of_the_hub():
    pytest.importorskip("datasets")
    articles = [" = First = \n Words = x . \n = = Part = = \n", " = Second = \n E \n"]
    expected = {
        "openwebtext": ["owt a", "owt b", "owt c"],
        "fineweb-edu": ["edu a", "edu b"],
        "c4": ["c4 a", "c4 b"],
        "wikitext-103": articles,
    }
    assert expected.keys() == PRESETS.keys()
    with serving(hub_of_presets()):
        for source, texts in expected.items():
            corpus = open_corpus(source)
            assert [text for text in texts_of(corpus) if text] == texts
            assert corpus.fingerprint == open_corpus(source).fingerprint
        with refused(ConnectionError, "no/such"):
            open_corpus("hf:no/such")


@pytest.mark.seconds
def test_a_local_directory_of_a_dataset(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train-00000.parquet").write_bytes(parquet(TEXTS[:5], "content"))
    (folder / "train-00001.parquet").write_bytes(parquet(TEXTS[5:9], "content"))
    corpus = open_corpus(f"hf:{folder}::train", text_field="content")
    assert texts_of(pickle.loads(pickle.dumps(corpus))) == TEXTS[:9]  # as workers get it
    (folder / "train-00001.parquet").write_bytes(parquet(TEXTS[5:8], "content"))
    assert open_corpus(f"hf:{folder}::train").fingerprint != corpus.fingerprint
    with refused(ValueError, "'text'", "content, n"):
        texts_of(open_corpus(f"hf:{folder}"))


def test_sources_that_cannot_be_opened(monkeypatch, tmp_path):
    with refused(ValueError, "hf:a/b:c:d:e"):
        open_corpus("hf:a/b:c:d:e")
    (tmp_path / "a.parquet").write_bytes(b"")
    for library in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, library, None)  # as where it is not installed
    for source in ("openwebtext", "hf:a/b", str(tmp_path / "a.parquet")):
        with refused(ImportError, "[hf]'"):
            open_corpus(source)
