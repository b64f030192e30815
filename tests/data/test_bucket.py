"""Tokens in a bucket, through the real libraries.

They read where the server is at their first use: hence a process of its own.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys

import fake_gcs
import numpy as np
import pytest
from token_directories import write_shards

from maxmars.data.formats import open_split
from maxmars.data.packing import write_plans
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
)

STREAM = np.random.default_rng(0).integers(0, 2000, 40_000)
LENGTH, WINDOWS = 17, 60

# Reads windows of each directory, and prints a digest of them or the error.
READ = """
import hashlib, json, sys
import numpy as np
from maxmars.data.formats import open_split

for place in sys.argv[3:]:
    try:
        stream = open_split(place, "train")
        starts = np.random.default_rng(0).permutation(stream.num_tokens - int(sys.argv[1]))
        windows = stream.read_windows(starts[:int(sys.argv[2])], int(sys.argv[1]))
        print(json.dumps(hashlib.sha256(windows.tobytes()).hexdigest()))
    except (ValueError, OSError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def read(server, *places):
    """What the process printed of each directory, and what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(LENGTH), str(WINDOWS), *map(str, places)],
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("bucket") / "tokens"
    write_shards(path, STREAM, STREAM[:400])
    return path


def described(directory, change):
    """The text of `meta.json` with `change(shard, content)` applied to every training shard."""
    fields = json.loads((directory / "meta.json").read_text())
    for shard in fields["splits"]["train"]["shards"]:
        change(shard, (directory / shard["file"]).read_bytes())
    return json.dumps(fields).encode()


def with_crc32c(shard, content):
    shard["crc32c"] = fake_gcs.crc32c(content)


@pytest.mark.seconds
def test_windows_are_read_by_ranges_also_from_a_store_that_fails_now_and_then(directory):
    stream = open_split(directory, "train")
    starts = np.random.default_rng(0).permutation(stream.num_tokens - LENGTH)[:WINDOWS]
    expected = hashlib.sha256(stream.read_windows(starts, LENGTH).tobytes()).hexdigest()
    with fake_gcs.serve() as server:
        server.put_directory(directory, "tokens")
        server.failing = lambda number, name: number in (3, 10, 17) and name.endswith(".bin")
        (found,), error = read(server, "gs://bucket/tokens")
    assert found == expected
    assert "by size alone" in error
    assert "Traceback" not in error
    assert "Unclosed" not in error
    assert sum(count == 0 for _, count in server.reads) == 3  # failed
    needed = len(np.unique(starts[:, None] + np.arange(LENGTH))) * 2
    assert sum(count for name, count in server.reads if name.endswith(".bin")) == needed
    assert len(server.lists) <= 2


def test_objects_that_are_not_those_that_were_prepared_are_named(directory):
    flipped = bytearray((directory / "train_00001.bin").read_bytes())
    flipped[5] ^= 1
    places = ("whole", "flipped", "replaced", "cut", "missing", "old", "none")
    with fake_gcs.serve() as server:
        for name in places[:-1]:
            server.put_directory(directory, name)
            server.put(f"{name}/meta.json", described(directory, with_crc32c))

        def with_generation(shard, content):
            shard["generation"] = str(server.objects[f"replaced/{shard['file']}"][0])

        server.put("replaced/meta.json", described(directory, with_generation))
        for name in ("flipped", "replaced"):
            server.put(f"{name}/train_00001.bin", bytes(flipped))
        server.put("cut/train_00001.bin", bytes(flipped[:-2]))
        del server.objects["missing/train_00001.bin"]
        server.put("old/meta.json", (directory / "meta.json").read_bytes())  # without checksums
        found, _ = read(server, *(f"gs://bucket/{name}" for name in places), "gs://status-403/a")
    whole, flipped, replaced, cut, missing, old, none, refused = found
    assert whole == old
    shard = "the token shard gs://bucket/{}/train_00001.bin is"
    prepared = f"ValueError: {shard} not the one that was prepared: its {{}} is"
    assert flipped.startswith(prepared.format("flipped", "crc32c"))
    assert replaced.startswith(prepared.format("replaced", "generation"))
    assert cut.startswith(prepared.format("cut", "size"))
    assert missing == f"FileNotFoundError: {shard.format('missing')} missing; upload it again."
    assert none.startswith("FileNotFoundError: gs://bucket/none has no meta.json")
    assert refused.startswith("OSError: gs://status-403 cannot be used (")
    assert all("\n" not in text for text in found)


@pytest.mark.slow
def test_a_directory_prepared_on_a_disk_and_uploaded_is_compared_by_its_checksums(tmp_path):
    documents = [(str(i), f"text {i} " * 20) for i in range(200)]
    prepare(documents, tmp_path / "tokens", tokenizer=ByteTokenizer(), source="a test")
    damaged = bytearray((tmp_path / "tokens" / "train_00000.bin").read_bytes())
    damaged[5] ^= 1
    with fake_gcs.serve() as server:
        for name in ("whole", "damaged"):
            server.put_directory(tmp_path / "tokens", name)
        server.put("damaged/train_00000.bin", bytes(damaged))
        (_, damaged), errors = read(server, "gs://bucket/whole", "gs://bucket/damaged")
    assert "by size alone" not in errors
    shard = "the token shard gs://bucket/damaged/train_00000.bin"
    assert damaged.startswith(f"ValueError: {shard} is ")
    assert "crc32c" in damaged


# Prints of each directory a digest of the windows that best fit planned.
PACKED = """
import hashlib, sys
import numpy as np
from maxmars.config import GPT2Config, TokenShardsConfig
from maxmars.data.batches import open_data

model = GPT2Config(num_layers=1, num_heads=1, embed_dim=8, max_seq_len=16, vocab_size=257)
for place in sys.argv[1:]:
    data = TokenShardsConfig(path=place, packing="best_fit")
    found = open_data(data, "train", model=model).read(np.arange(40, 60))
    print(hashlib.sha256(b"".join(array.tobytes() for array in found.values())).hexdigest())
"""


@pytest.mark.slow
def test_windows_of_a_plan_are_read_by_ranges(tmp_path):
    documents = [(str(i), "a" * (i % 30)) for i in range(4000)]
    prepare(documents, tmp_path / "tokens", tokenizer=ByteTokenizer(), source="a test")
    write_plans(tmp_path / "tokens", 16)
    with fake_gcs.serve() as server:
        server.put_directory(tmp_path / "tokens", "tokens")
        places = [str(tmp_path / "tokens"), "gs://bucket/tokens"]
        command = [sys.executable, "-c", PACKED, *places]
        found = subprocess.check_output(command, env=server.environment, text=True).split()
    assert len(found) == 2
    assert found[0] == found[1]
    read = sum(size for name, size in server.reads if name == "tokens/train_best_fit_16.bin")
    assert 0 < read < len(server.objects["tokens/train_best_fit_16.bin"][1]) / 50


GIVE_UP = """
from maxmars.data.bucket import read_ranges
from maxmars.distributed.files import resolve

try:
    read_ranges([(resolve("gs://bucket/file"), 0, 4)], patience_s=0)
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_store_that_keeps_failing_ends_in_one_line():
    with fake_gcs.serve() as server:
        server.put("file", b"1234")
        server.failing = lambda number, name: name == "file"
        done = subprocess.run(
            [sys.executable, "-c", GIVE_UP],
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.stdout.startswith("gs://bucket/file cannot be used (HttpError: status 503")
    assert done.stdout.endswith("; check the network.\n")
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
