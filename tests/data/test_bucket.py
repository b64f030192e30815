"""Tokens in a bucket, through the real libraries.

They read where the server is at their first use: hence a process of its own.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import fake_gcs
import numpy as np
import pytest
from running import run_python

from maxmars.data.formats import open_directory
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
)

LENGTH, WINDOWS = 17, 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Tokens in several shards."""
    path = tmp_path_factory.mktemp("bucket") / "tokens"
    documents = [(str(i), chr(97 + i % 26) * (i % 30)) for i in range(4000)]
    options = {"tokenizer": ByteTokenizer(), "source": "a test", "shard_tokens": 20_000}
    prepare(documents, path, **options)
    return path


def in_process(server, code, *arguments):
    """What a process prints, line by line, and what it writes to standard error."""
    done = run_python("-c", code, *arguments, environment=server.environment)
    assert "Traceback" not in done.stderr
    assert "Unclosed" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


# Reads windows of each directory, and prints a digest of them or the error; at last a file that
# always fails.
READ = """
import hashlib, json, sys
import numpy as np
from maxmars.data.bucket import read_ranges
from maxmars.data.formats import open_directory
from maxmars.distributed.files import resolve

for place in sys.argv[3:]:
    try:
        stream = open_directory(place).stream("train")
        starts = np.random.default_rng(0).permutation(stream.num_tokens - int(sys.argv[1]))
        windows = stream.read_windows(starts[:int(sys.argv[2])], int(sys.argv[1]))
        print(json.dumps(hashlib.sha256(windows.tobytes()).hexdigest()))
    except (ValueError, OSError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
try:
    read_ranges([(resolve("gs://bucket/lost"), 0, 4)], timeout_s=0)
except OSError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.seconds
def test_ranges_are_read_and_objects_are_compared_with_what_was_prepared(directory):
    """Also from a store that fails now and then."""
    stream = open_directory(directory).stream("train")
    starts = np.random.default_rng(0).permutation(stream.num_tokens - LENGTH)[:WINDOWS]
    expected = hashlib.sha256(stream.read_windows(starts, LENGTH).tobytes()).hexdigest()
    flipped = bytearray((directory / "train_00000_1.bin").read_bytes())
    flipped[5] ^= 1
    places = ("whole", "old", "flipped", "cut", "missing", "none")
    with fake_gcs.serve() as server:
        for name in places[:-1]:
            server.put_directory(directory, name)
        server.put("lost", b"1234")

        fields = json.loads((directory / "meta.json").read_text())
        for shard in fields["splits"]["train"]["shards"]:
            content = (directory / shard["file"]).read_bytes()
            assert shard.pop("crc32c") == fake_gcs.crc32c(content)
        server.put("old/meta.json", json.dumps(fields).encode())
        server.put("flipped/train_00000_1.bin", bytes(flipped))
        server.put("cut/train_00000_1.bin", bytes(flipped[:-2]))
        del server.objects["missing/train_00000_1.bin"]
        failed = []

        def failing(number, name):
            if name == "lost":
                return "ABORTED: made up"
            if name.startswith("whole/train_0") and len(failed) < 3:
                failed.append(name)
                return True
            return False

        server.failing = failing
        arguments = [f"gs://bucket/{name}" for name in places]
        printed, warned = in_process(server, READ, LENGTH, WINDOWS, *arguments, "gs://status-403/a")
        read = sum(n for name, n in server.reads if name.startswith("whole/train_0"))
    whole, old, flipped, cut, missing, none, forbidden, lost = printed
    assert whole == old == expected
    assert read == len(np.unique(starts[:, None] + np.arange(LENGTH))) * 2
    assert len(failed) == 3
    assert warned.count("by size alone") == 1  # of `old`
    for error, start in (
        (flipped, "ValueError: the token shard gs://bucket/flipped/train_00000_1.bin"),
        (cut, "ValueError: the token shard gs://bucket/cut/train_00000_1.bin"),
        (missing, "FileNotFoundError: the token shard gs://bucket/missing/train_00000_1.bin"),
        (none, "FileNotFoundError: gs://bucket/none"),
        (forbidden, "OSError: gs://status-403"),
        (lost, "gs://bucket/lost"),
    ):
        assert error.startswith(start)
        assert "\n" not in error
    assert "its crc32c is" in flipped
    assert "its size is" in cut


# Prints digests of windows and documents of each directory that a function of the user's own maps.
OWN = """
import hashlib, itertools, json, sys
import numpy as np
from maxmars.config import GPT2Config, GrainConfig
from maxmars.data.batches import open_data

model = GPT2Config(num_layers=1, num_heads=1, embed_dim=8, max_seq_len=16, vocab_size=257)
for place, function in itertools.product(sys.argv[2:], ("windows", "packed")):
    data = GrainConfig(source=f"{sys.argv[1]}:{function}", options={"path": place})
    opened = open_data(data, "train", model=model)
    assert opened.in_bucket == place.startswith("gs://")
    batch = opened.read(np.arange(40, 60))
    text = b"".join(batch[name].tobytes() for name in sorted(batch))
    print(json.dumps(hashlib.sha256(text).hexdigest()))
"""
OWN_FILE = """
import sys
sys.path.insert(0, {examples!r})
from best_fit import windows as packed
from maxmars.data import dataset

def windows(*, split, length, path):
    return dataset(path, split, length).map(lambda window: window)
"""


@pytest.mark.slow
def test_own_windows_are_read_by_ranges(directory, tmp_path):
    examples = Path(__file__).parents[2] / "tools" / "examples"
    (tmp_path / "own.py").write_text(OWN_FILE.format(examples=str(examples)))
    with fake_gcs.serve() as server:
        server.put_directory(directory, "tokens")
        places = ("gs://bucket/tokens", directory)
        printed, _ = in_process(server, OWN, tmp_path / "own.py", *places)
        read = sum(size for name, size in server.reads if name.startswith("tokens/train_0"))
    assert printed[:2] == printed[2:]
    whole = sum(len(data) for name, (_, data) in server.objects.items() if "train_0" in name)
    assert 0 < read < whole / 5
