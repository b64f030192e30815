"""A TFDS dataset of tokens in ArrayRecord files, written without TensorFlow.

`tfds_stream` reads it.

The directory is that of a TFDS dataset (`dataset_info.json`, `features.json`,
`tokens-train.array_record-00000-of-00002`, ...), so that `tfds.builder_from_directory` opens it,
and `tfds.data_source(NAME, data_dir=DIR)` where it is called DIR/NAME/1.0.0. Each record has one
feature, `tokens`: `record_tokens` consecutive tokens of the split's stream, and what is left in the
last. So the records of a split in order are its stream. `meta.json` beside them says what
`maxmars.data.sources.Metadata` says, with ArrayRecord files for shards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from maxmars.data.sources import Metadata, Shard, Split, read_metadata
from maxmars.data.token_files import TokenShards
from maxmars.distributed.files import replacing, sha256_of
from maxmars.distributed.progress import Progress

DATASET = "tokens"
FEATURE = "tokens"
_VERSION = "1.0.0"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def to_tfds(source: Path, target: Path, record_tokens: int) -> Metadata:
    """Write a TFDS dataset of the same stream as a directory of token shards.

    Args:
      source: the token shards.
      target: where to write; files of the same names are replaced.
      record_tokens: tokens a record, but for the last of a split.

    Returns:
      What describes the dataset.

    Raises:
      OSError: a file cannot be written.
    """
    import tensorflow_datasets as tfds

    metadata = read_metadata(source)
    feature = tfds.features.Tensor(shape=(None,), dtype=np.dtype(metadata.dtype))
    features = tfds.features.FeaturesDict({FEATURE: feature})
    splits, infos = {}, []
    for name, split in metadata.splits.items():
        shards = TokenShards(source, name)
        template = tfds.core.ShardedFileTemplate(
            data_dir=target, dataset_name=DATASET, split=name, filetype_suffix="array_record"
        )
        splits[name], info = _write_split(shards, split, features, template, record_tokens)
        infos.append(info)
        if split.documents is not None:
            shutil.copyfile(source / split.documents.file, target / split.documents.file)
    tfds.folder_dataset.write_metadata(
        data_dir=target, features=features, split_infos=infos, version=_VERSION, check_data=False
    )
    return replace(metadata, splits=splits, record_tokens=record_tokens)


def _write_split(
    shards: TokenShards, split: Split, features: Any, template: Any, record_tokens: int
) -> tuple[Split, Any]:
    """Write as many ArrayRecord files as the split has token shards; what describes them."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    serializer = ExampleSerializer(features.get_serialized_info())
    num_records = -(-split.num_tokens // record_tokens)
    count = min(len(split.shards), num_records)
    written, lengths, num_bytes = [], [], 0
    with Progress(stderr=True) as status:
        for i in range(count):
            first, last = i * num_records // count, (i + 1) * num_records // count
            path = Path(template.sharded_filepath(shard_index=i, num_shards=count))
            with replacing(path) as temporary:
                with _array_record_writer(temporary, path) as writer:
                    for record in range(first, last):
                        start = record * record_tokens
                        status.update(
                            f"writing TFDS {shards.split}: {start / split.num_tokens:.0%}"
                        )
                        tokens = shards.read(start, min(record_tokens, split.num_tokens - start))
                        encoded = features.encode_example(
                            {FEATURE: tokens.astype(shards.metadata.dtype)}
                        )
                        data = serializer.serialize_example(encoded)
                        num_bytes += len(data)
                        writer.write(data)
                sha256 = sha256_of(temporary)
            tokens_in_file = min(last * record_tokens, split.num_tokens) - first * record_tokens
            written.append(Shard(file=path.name, num_tokens=tokens_in_file, sha256=sha256))
            lengths.append(last - first)
    info = tfds.core.SplitInfo(
        name=shards.split, shard_lengths=lengths, num_bytes=num_bytes, filename_template=template
    )
    return replace(split, shards=tuple(written)), info


@contextlib.contextmanager
def _array_record_writer(temporary: Path, path: Path) -> Generator[Any, None, None]:
    """A writer of ArrayRecord to `temporary`; errors name `path`.

    Raises:
      OSError: the file cannot be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    try:
        # Groups of one: each record can be read by itself.
        with contextlib.closing(ArrayRecordWriter(str(temporary), "group_size:1")) as writer:
            yield writer
    except RuntimeError as error:  # the library has no other; only its text tells the cause
        text = str(error)
        code = next((c for c in _FULL if os.strerror(c) in text), errno.EIO)
        reason = os.strerror(code) if code in _FULL else text.partition("\n")[0]
        raise OSError(code, reason, str(path)) from error
