"""Text in a bucket to tokens in a bucket; clients find the imitation of one by the environment of
their process."""

import hashlib
import json
import random

import fake_gcs
import pytest
from running import run_python

from maxmars.cli import main
from maxmars.data.corpus import TextFiles
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer

pytest.importorskip("gcsfs")


def texts():
    draw, words = random.Random(0), [f"wörd{i}" for i in range(100)]
    for i in range(2):
        lines = (json.dumps({"text": " ".join(draw.choices(words, k=30))}) for _ in range(200))
        yield f"{i}.jsonl", "".join(f"{line}\n" for line in lines)
    yield "c.txt", "".join(" ".join(draw.choices(words, k=12)) + "\n" for _ in range(700))


RUN = """
import json, sys
from maxmars.cli import main
for words in map(json.loads, sys.argv[1:]):
    main(["data", *words])
"""


def maxmars(server, *commands):
    """What `maxmars data` prints for one command after the other, in one process."""
    lines = [json.dumps([str(word) for word in words]) for words in commands]
    return run_python("-c", RUN, *lines, environment=server.environment).stdout


@pytest.fixture
def server(tmp_path):
    (tmp_path / "texts").mkdir()
    with fake_gcs.serve() as server:
        for name, text in texts():
            (tmp_path / "texts" / name).write_text(text)
            server.put(f"texts/{name}", text.encode())
        yield server


@pytest.mark.slow
def test_the_same_tokens_as_on_a_disk(tmp_path, server, capsys):
    options = {"tokenizer": ByteTokenizer(), "task_bytes": 30_000}
    corpus = TextFiles([str(tmp_path / "texts" / "*")])
    prepare(corpus, tmp_path / "tokens", source="gs://bucket/texts/*", **options)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()}
    command = ["prepare", "gs://bucket/texts/*", "gs://bucket/tokens", "--task-bytes", "30000"]
    shares = (["--tasks", "1/2", "--workers", "1"], ["--tasks", "0/2", "--workers", "0"])
    inspect = ["inspect", "gs://bucket/tokens"]
    there = maxmars(server, *([*command, *share] for share in shares), inspect)
    assert there.count("next: maxmars train quickstart:data=gs://bucket/tokens\n") == 2
    uploaded = {
        name.removeprefix("tokens/"): content
        for name, (_, content) in server.objects.items()
        if name.startswith("tokens/")
    }
    assert uploaded.keys() == whole.keys()
    ours, theirs = (json.loads(files["meta.json"]) for files in (uploaded, whole))
    for split in ours["splits"].values():
        for shard in split["shards"]:
            assert shard["crc32c"] == fake_gcs.crc32c(uploaded[shard["file"]])
    assert ours.pop("command").startswith("maxmars data prepare 'gs://bucket/texts/*'")
    assert ours == theirs
    for name in whole.keys() - {"meta.json"}:
        assert uploaded[name] == whole[name]
    written = [name for name, *_ in server.writes]
    deleted = written[written.index("tokens/meta.json") + 1 :]
    assert all(name.startswith(("tokens/tasks", "tokens/plan.json")) for name in deleted)
    main(["data", "inspect", str(tmp_path / "tokens")])
    here = capsys.readouterr().out
    assert "gs://bucket/tokens: every file matches its checksum" in there
    of_tokens = [line for line in here.splitlines() if line.startswith("SHA-256 of the tokens")]
    assert len(of_tokens) == 2
    assert set(of_tokens) < set(there.splitlines())


@pytest.mark.slow
def test_a_shard_that_is_uploaded_in_parts(tmp_path, server):
    text = random.Random(0).randbytes(1 << 20).hex() + "\n"
    (tmp_path / "large.txt").write_text(text * 16)  # 60 MB of training tokens; a part has 52
    options = ["--workers", "0", "--task-bytes", "100000000"]
    maxmars(server, ["prepare", tmp_path / "large.txt", "gs://bucket/tokens", *options])
    shard = {name: content for name, content in server.uploads if name == "tokens/train_00000.bin"}
    (content,) = shard.values()
    _, stored = server.objects["tokens/train_00000.bin"]
    assert len(stored) == len(content) > 50 << 20
    (described,) = json.loads(server.text("tokens/meta.json"))["splits"]["train"]["shards"]
    assert described["sha256"] == hashlib.sha256(stored).hexdigest()
    assert described["crc32c"] == fake_gcs.crc32c(stored)


# Prints the error of the preparation of each source.
ERRORS = """
import sys
from maxmars.cli import main
for source in sys.argv[1:]:
    try:
        main(["data", "prepare", source, "gs://bucket/tokens", "--workers", "0"])
    except SystemExit as stop:
        print(stop.code, "END", file=sys.stderr)
"""


@pytest.mark.seconds
def test_errors_are_one_line(server):
    server.put("bad/cut.jsonl.gz", b"no gzip")
    server.put("bad/a.jsonl", b'{"text": "a"}\n{"te')
    expected = {
        "gs://bucket/texts": "gs://bucket/texts is a directory",
        "gs://bucket/none/*": "'gs://bucket/none/*'",
        "gs://status-403/*": "gs://status-403 cannot be used",
        "gs://bucket/bad/cut.jsonl.gz": "gs://bucket/bad/cut.jsonl.gz: it is damaged",
        "gs://bucket/bad/a.jsonl": "gs://bucket/bad/a.jsonl, line 2",
    }
    result = run_python("-c", ERRORS, *expected, environment=server.environment)
    # Google's libraries look for credentials, which no test has, and may say so.
    theirs = ("google_auth_provider", "WARNING:google.auth")
    lines = [ln for ln in result.stderr.splitlines() if not any(word in ln for word in theirs)]
    assert lines[1::2] == ["1 END"] * len(expected)
    for line, message in zip(lines[::2], expected.values(), strict=True):
        assert message in line
