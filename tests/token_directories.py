"""Directories of tokens in every format that can be read, written without maxmars's own writers."""

import hashlib
import struct
import tempfile

import numpy as np
import pytest
from etils import epath

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
    write_metadata(epath.Path(directory), metadata)
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


def write_tfds(data_dir, splits, features, *, num_shards=2, file_format="array_record"):
    """The set `made_up` by a builder of TFDS; `splits` maps names to examples. Its directory.

    TFDS writes TFRecord by TensorFlow alone: its array_record is written anew as such.
    """
    import tensorflow_datasets as tfds

    class MadeUp(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples(examples) for name, examples in splits.items()}

        def _generate_examples(self, examples):
            yield from enumerate(examples)

    tfds.disable_progress_bar()
    # Where a builder leaves a temporary directory.
    (data_dir / "temporary").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(data_dir / "temporary"))
        builder = MadeUp(data_dir=data_dir, file_format="array_record")
    options = tfds.download.DownloadConfig(num_shards=num_shards)
    builder.download_and_prepare(download_config=options)
    directory = data_dir / "made_up" / "1.0.0"
    if file_format == "tfrecord":
        for path in list(directory.iterdir()):
            _array_record_to_tfrecord(path)
    return directory


def _array_record_to_tfrecord(path):
    """A file of a set, a shard or a description, in the place of itself."""
    from array_record.python.array_record_module import ArrayRecordReader

    if path.suffix == ".json":
        path.write_text(path.read_text().replace("array_record", "tfrecord"))
        return
    with path.with_name(path.name.replace("array_record", "tfrecord")).open("wb") as file:
        for record in ArrayRecordReader(str(path)).read_all():
            length = struct.pack("<Q", len(record))
            for data in (length, record):
                file.write(data + struct.pack("<I", _masked_crc32c(data)))
    path.unlink()


def _masked_crc32c(data):
    crc = pytest.importorskip("google_crc32c").value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
