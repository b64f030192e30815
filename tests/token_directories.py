"""Directories of tokens in every format that can be read, written without maxmars's own writers."""

import hashlib
import tempfile

import numpy as np
import pytest

from maxmars.data.metadata import Metadata, Shard, Split, write_metadata
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer

DIGESTS = {tokenizer.name: tokenizer.digest for tokenizer in (ByteTokenizer, GPT2Tokenizer)}


def write_shards(
    directory,
    train,
    val=None,
    *,
    sizes=None,
    dtype="uint16",
    tokenizer="byte",
    vocab_size=2000,
    digest=None,
):
    """Our own format; `sizes` are those of the training shards, by default four odd ones."""
    directory.mkdir()
    splits = {}
    for name, stream in (("train", train), ("val", val)):
        if stream is not None:
            odd = np.array([30, 31, 76]) * len(stream) // 100
            cuts = odd if sizes is None else np.cumsum(sizes)[:-1]
            splits[name] = write_split(directory, name, np.split(stream, cuts), dtype)
    metadata = Metadata(
        tokenizer=tokenizer,
        tokenizer_digest=digest or DIGESTS[tokenizer],
        vocab_size=vocab_size,
        dtype=dtype,
        splits=splits,
        source="a test",
    )
    write_metadata(directory, metadata)
    return metadata


def write_split(directory, name, parts, dtype):
    shards = []
    for i, part in enumerate(parts):
        data = part.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        file = f"{name}_{i:05d}.bin"
        (directory / file).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        shards.append(Shard(file=file, num_tokens=len(part), sha256=sha256))
    num_tokens = sum(map(len, parts))
    return Split(num_tokens=num_tokens, num_documents=1, shards=tuple(shards))


def write_nanogpt(directory, train, val):
    directory.mkdir()
    for name, stream in (("train", train), ("val", val)):
        (directory / f"{name}.bin").write_bytes(stream.astype("<u2").tobytes())


def write_llm_c(path, stream, magic=20240520, version=1, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(stream)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header.tobytes() + stream.astype(dtype).tobytes())


def write_tfds(data_dir, splits, *, shape, num_shards=2):
    """A dataset by a real builder; `splits` maps names to lists of records. Its directory."""
    import tensorflow_datasets as tfds

    feature = tfds.features.Tensor(shape=shape, dtype=np.uint16)

    class Tokens(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"tokens": feature})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples(records) for name, records in splits.items()}

        def _generate_examples(self, records):
            for i, record in enumerate(records):
                yield i, {"tokens": record.astype(np.uint16)}

    builder = make_builder(Tokens, data_dir)
    tfds.disable_progress_bar()
    options = tfds.download.DownloadConfig(num_shards=num_shards)
    builder.download_and_prepare(download_config=options)
    return data_dir / "tokens" / "1.0.0"


def make_builder(cls, data_dir):
    """A TFDS builder of array_record; the temporary directory that it leaves lies in `data_dir`."""
    (data_dir / "temporary").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(data_dir / "temporary"))
        return cls(data_dir=data_dir, file_format="array_record")
