"""`data.map`: a function of the user's own that changes every window on its way to a batch."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from refusals import refused
from tiny import MODEL, tiny_config
from token_directories import write_shards

from maxmars.config import (
    GrainPart,
    MeshConfig,
    MixtureConfig,
    MixturePart,
    TokenShardsConfig,
)
from maxmars.config.errors import in_words
from maxmars.data.batches import TrainBatches, batch_types, open_data
from maxmars.data.packing import write_plans
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed.sharding import make_mesh

LENGTH, END = MODEL.max_seq_len, 256
MASK = """
import numpy as np

def even(window):
    return {**window, "mask": window["tokens"] % 2 == 0}
"""
WINDOWS = """
import grain
import numpy as np

def windows(*, split, length):
    return grain.MapDataset.range(40).map(lambda i: np.arange(length + 1) + i)
"""


@pytest.fixture
def tokens(tmp_path):
    """A directory of tokens, among them those that end documents."""
    stream = np.random.default_rng(0).integers(0, 257, 3000)
    write_shards(tmp_path / "tokens", stream, stream[:400], vocab_size=257)
    return str(tmp_path / "tokens")


@pytest.fixture
def even(tmp_path):
    """A map that counts even tokens as targets."""
    (tmp_path / "mask.py").write_text(MASK)
    return f"{tmp_path / 'mask.py'}:even"


def batches_of(data, *, steps=3, mesh=(1, 1, 1), **options):
    config = tiny_config(data=data)
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: np.prod(mesh)])
    batches = TrainBatches(open_data(data, "train", model=MODEL), config, mesh, **options)
    taken = [jax.tree.map(np.asarray, batch) for batch in itertools.islice(batches, steps)]
    batches.close()
    return taken


KINDS = {
    "sequential": {"order": "sequential"},
    "documents": {"packing": "split"},
    "documents at random": {"packing": "split", "order": "random_windows"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_window_is_changed_and_the_stream_stays(tokens, even, kind):
    data = TokenShardsConfig(path=tokens, **KINDS[kind])
    mapped = dataclasses.replace(data, map=even)
    changed = batches_of(mapped, mesh=(2, 2, 2))
    for plain, batch in zip(batches_of(data), changed, strict=True):
        assert batch.keys() == plain.keys() | {"mask"}
        for name, array in plain.items():
            assert np.array_equal(batch[name], array)
        assert np.array_equal(batch["mask"], plain["tokens"] % 2 == 0)
    np.testing.assert_equal(batches_of(mapped, steps=1, position=32), changed[2:])
    val = open_data(mapped, "val", model=MODEL)
    batch = val.read(np.arange(*val.sizes))
    assert np.array_equal(batch["mask"], batch["tokens"] % 2 == 0)
    # A plan knows the arrays, whether or not the tokens are there.
    assert batch_types(mapped, MODEL) == val.types
    absent = dataclasses.replace(mapped, path=f"{tokens}/none")
    assert batch_types(absent, MODEL) == val.types


@pytest.mark.seconds
def test_the_windows_of_a_whole_mixture_are_changed(tokens, even, tmp_path):
    (tmp_path / "own.py").write_text(WINDOWS)
    own = GrainPart(source=f"{tmp_path / 'own.py'}:windows", weight=0.5, num_workers=1)
    data = MixtureConfig(parts=(MixturePart(path=tokens, weight=0.5), own), map=even)
    for batch in batches_of(data):
        assert np.array_equal(batch["mask"], batch["tokens"] % 2 == 0)


def test_a_map_may_lower_the_weights_of_planned_windows(tmp_path):
    documents = [(str(i), "a" * (i % 30)) for i in range(400)]
    prepare(documents, tmp_path / "tokens", tokenizer=ByteTokenizer(), source="a test")
    write_plans(tmp_path / "tokens", LENGTH)
    (tmp_path / "own.py").write_text(
        "def f(window):\n    return {**window, 'mask': 0.5 * window['mask']}\n"
    )
    data = TokenShardsConfig(path=str(tmp_path / "tokens"), packing="best_fit")
    mapped = dataclasses.replace(data, map=f"{tmp_path / 'own.py'}:f")
    for plain, batch in zip(batches_of(data), batches_of(mapped), strict=True):
        assert np.array_equal(batch.pop("mask"), np.float32(0.5) * plain.pop("mask"))
        np.testing.assert_equal(batch, plain)


def test_the_digest_follows_the_text_of_the_map(tokens, even, tmp_path):
    def digest(**fields):
        return open_data(TokenShardsConfig(path=tokens, **fields), "train", model=MODEL).digest()

    digests = {digest(), digest(map=even), digest(map=even, packing="split")}
    assert len(digests) == 2  # as without a map, packing="split" changes no token
    (tmp_path / "mask.py").write_text(f"{MASK}# longer\n")
    assert digest(map=even) not in digests


NOT_A_MAP = {  # what a map returns, and what its refusal names
    "None": "tokens of element 0",
    "{'mask': tokens > 0}": "element 0 has mask",
    "{**window, 'labels': tokens}": "labels",
    "{'tokens': tokens}": "positions, segment_ids",
    "{**window, 'tokens': tokens[1:]}": "[16], not [17]",
    "{**window, 'tokens': tokens + 257}": "which is not in [0, 256]",
    "{**window, 'mask': np.random.rand(len(tokens))}": "seed",
    # Of a window unlike the first, when it is read:
    "{**window, 'tokens': tokens if tokens[0] == FIRST else tokens / 2}": "float64",
}


@pytest.mark.parametrize("returned", NOT_A_MAP)
def test_a_map_that_makes_something_else_is_refused(tokens, tmp_path, returned):
    data = TokenShardsConfig(path=tokens, packing="split", order="sequential")
    first = int(batches_of(data, steps=1)[0]["tokens"].flat[0])
    begin = "import numpy as np\ndef f(window):\n    tokens = window['tokens']\n"
    text = f"{begin}    return {returned}\n".replace("FIRST", str(first))
    (tmp_path / "own.py").write_text(text)
    function = f"{tmp_path / 'own.py'}:f"
    with refused(ValueError, f"data.map='{function}'", NOT_A_MAP[returned]) as raised:
        batches_of(dataclasses.replace(data, map=function))
    assert "\n" not in in_words(raised.value)
    with refused(FileNotFoundError, "data.map=", f"{tmp_path}/none.py"):
        batches_of(dataclasses.replace(data, map=f"{tmp_path}/none.py:f"))
