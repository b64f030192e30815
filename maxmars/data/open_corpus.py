"""What SOURCE means: a TFDS dataset, a Hugging Face dataset, a preset, local files or Python.

`open_corpus` reads the syntax of SOURCE and makes the corpus. The corpora of files stand in
`corpus.py`; those of TFDS and of the hub stand here. Both libraries raise exceptions of many kinds,
which become one error with the way out. TFDS is read from its files alone, without TensorFlow.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from maxmars.config.errors import about, needs_extra
from maxmars.data.corpus import Corpus, CorpusFile, Document, FileRange, PythonSources, TextFiles
from maxmars.data.rows import OnBad, Row, no_field, text_in, texts_of

# NAME[:1.0.0][:split]; only the split may have colons of its own, as in train[:10%].
_TFDS_SOURCE = re.compile(r"([^:]+(?::(?:\d+|\*)(?:\.(?:\d+|\*)){2})?)(?::(.+))?")


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A dataset of the Hugging Face hub, or a local directory of one."""

    repository: str
    config: str | None = None
    split: str = "train"
    text_field: str = "text"
    revision: str | None = None
    data_files: str | None = None
    """Pattern of the split's files, if the repository declares no config for them."""
    first_row: str | None = None
    """Pattern of the row that starts a document, if a document has several rows."""
    validation_fraction: float = 0.0005
    """Share of the documents to hold out by default."""


PRESETS: Mapping[str, HubDataset] = {
    # `datasets` no longer runs the loading script; the hub's own conversion to Parquet needs none.
    "openwebtext": HubDataset(
        repository="Skylion007/openwebtext",
        revision="refs/convert/parquet",
        data_files="plain_text/*train/*.parquet",
    ),
    "fineweb-edu": HubDataset(repository="HuggingFaceFW/fineweb-edu", config="sample-100BT"),
    "c4": HubDataset(repository="allenai/c4", config="en"),
    # A row is a line; an article starts with " = Title = ", its sections with more signs.
    "wikitext-103": HubDataset(
        repository="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        first_row=r" = [^=].* = \s*$",
        validation_fraction=0.01,
    ),
}


def open_corpus(
    source: str,
    *,
    text_field: str | None = None,
    data_dir: str | None = None,
    separator: str | None = None,
) -> Corpus:
    """The corpus that `maxmars data prepare SOURCE` means.

    Args:
      source: `tfds:NAME[:split]`, `hf:REPO[:config][:split]`, `NAME[:split]` of `PRESETS`,
        `python`, or a path or glob of files, also of `gs://`.
      text_field: the field with the text; by default `text`, or the preset's.
      data_dir: the directory of TFDS's datasets.
      separator: text between the documents of a `.txt`; with None a file is one document.

    Raises:
      ValueError: the source is no dataset that can be read, lacks the field, or has no separator.
      FileNotFoundError: there are no such files, or no such dataset.
      ImportError: a library of the extra `hf` is missing.
    """
    kind, _, rest = source.partition(":")
    if separator is not None and (
        not separator or source == "python" or kind in ("hf", "tfds", *PRESETS)
    ):
        raise ValueError(
            f"the document separator {separator!r} must be what stands between the documents of "
            f".txt files, but the source is {source}."
        )
    if source == "python":
        return PythonSources()
    if kind == "tfds" and rest:
        match = _TFDS_SOURCE.fullmatch(rest)
        if match is None:
            raise ValueError(f"{source!r} is no TFDS dataset; write tfds:NAME[:split].")
        name, split = match.groups("train")
        return TfdsCorpus(name, split, text_field=text_field or "text", data_dir=data_dir)
    if kind in PRESETS:
        preset = PRESETS[kind]
        preset = replace(preset, split=rest or preset.split)
        return HubCorpus(preset, text_field=text_field or preset.text_field)
    if kind == "hf" and rest:
        dataset = _hub_dataset(rest)
        return HubCorpus(dataset, text_field=text_field or dataset.text_field)
    try:
        return TextFiles([source], text_field=text_field or "text", separator=separator)
    except FileNotFoundError as error:
        meant = difflib.get_close_matches(source, [*PRESETS, "python"], 1, cutoff=0.75)
        if not meant and re.fullmatch(r"[\w-]+/[\w.-]+", source):
            meant = [f"hf:{source}, a dataset of the Hugging Face hub"]
        if not meant:
            raise
        raise FileNotFoundError(f"{error} Did you mean the source {meant[0]}?") from error


def _hub_dataset(rest: str) -> HubDataset:
    repository, *names = rest.split(":")
    if len(names) > 2:
        raise ValueError(f"hf:{rest} has too many names; write hf:REPO[:config][:split].")
    config, split = (*names, "", "")[:2]
    return HubDataset(repository=repository, config=config or None, split=split or "train")


class TfdsCorpus(Corpus):
    """A data set of TensorFlow Datasets on the disk; loads no TensorFlow.

    The files of the corpus are the shards of the split. Shards of TFRecord are read from the first
    record on, those of array_record also in ranges. Documents have the same names in both formats.

    Raises:
      FileNotFoundError: the data set has not been prepared, or has no such split.
      ValueError: there is no such field.
    """

    def __init__(self, name: str, split: str, *, text_field: str, data_dir: str | None) -> None:
        """Open the split."""
        self._name, self._split = name, split
        self._text_field = text_field
        self._data_dir = None if data_dir is None else os.path.expanduser(data_dir)
        builder, part, records = self._opened
        features = list(builder.info.features or {})
        if text_field.partition(".")[0] not in features and text_field not in features:
            raise ValueError(f"tfds:{name}: it {no_field(text_field, features)}")
        is_slice = "[" in split
        # A slice such as train[:10%] has no shards of its own, and becomes one file.
        lengths = [int(part.num_examples)] if is_slice else list(part.shard_lengths)
        total = None if is_slice else int(part.num_bytes) or None  # 0 where TFDS does not know
        self._starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.files = [
            CorpusFile(
                name=f"{builder.info.full_name}/{split}/{i}",
                num_bytes=None if total is None else total * length // max(sum(lengths), 1),
                is_divisible=records is not None,
            )
            for i, length in enumerate(lengths)
        ]
        self.fingerprint = f"{self.files[0].name} {self._starts} {text_field}"
        for own in _OWN_VALIDATION:  # the data set's own validation split, unless SOURCE has it
            is_part = own in split or re.match(r"all\b", split)
            if own in builder.info.splits and not is_part:
                self.validation_source = f"tfds:{name}:{own}"
                break

    @cached_property
    def _opened(self) -> tuple[Any, Any, Any]:
        """The builder, its description of the split, and the records by number; None for records
        in TFRecord, which has no random access."""
        import tensorflow_datasets as tfds

        try:
            # From the files: the code of a data set knows only the newest version, and makes a
            # temporary directory that nobody removes.
            builder = tfds.core.read_only_builder.builder_from_files(
                self._name, data_dir=self._data_dir
            )
            part = builder.info.splits[self._split]
            is_tfrecord = {form.value for form in builder.info.available_file_formats()} == {
                "tfrecord"
            }
            return builder, part, None if is_tfrecord else builder.as_data_source(split=self._split)
        except Exception as error:  # TFDS raises many kinds
            raise FileNotFoundError(
                f"tfds:{self._name}:{self._split} cannot be opened ({type(error).__name__}: "
                f"{str(error).strip().partition(chr(10))[0]}). It must have been prepared as "
                f"TFRecord or array_record: run `tfds build {self._name}` where TensorFlow is, and "
                "name its directory by --data-dir."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but open files, for pickle."""
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def read(self, part: FileRange, on_bad: OnBad | None = None) -> Iterator[Document]:
        """The documents of a shard, or of a range of a divisible shard."""
        name = self.files[part.file].name
        start, end = self._starts[part.file], self._starts[part.file + 1]
        first, last = part.of(end - start)
        if self.files[part.file].is_divisible:
            records = self._read_range(start + first, start + last)
        else:
            records = self._read_shards(start, end)
        for number, text in texts_of(_rows(records, self._text_field, first), name, on_bad):
            yield Document(f"{name}:{number}", (text,))

    def _read_range(self, first: int, last: int) -> Iterator[Any]:
        for begin in range(first, last, _TFDS_ROWS):  # bounds the memory
            yield from self._opened[2].__getitems__(range(begin, min(begin + _TFDS_ROWS, last)))

    def _read_shards(self, first: int, last: int) -> Iterator[Any]:
        """The records of the TFRecord shards whose first record is one of [first, last)."""
        import grain

        builder, part, _ = self._opened
        start = 0
        for shard in part.file_instructions:
            if first <= start < last:
                records = grain.experimental.TFRecordIterDataset(shard.filename)
                records = itertools.islice(records, shard.skip, shard.skip + shard.take)
                yield from _examples(records, builder.info.features, shard)
            start += shard.take


def _examples(records: Iterable[bytes], features: Any, shard: Any) -> Iterator[Any]:
    """The examples in the records of a shard; raises if the shard ends early."""
    count = 0
    with about(shard.filename):
        try:
            for record in records:
                yield features.deserialize_example_np(record)
                count += 1
        except OSError:
            raise
        except Exception as error:  # Grain's, protobuf's or TFDS's
            raise ValueError(f"{_DAMAGED} ({error}).") from error
        if count < shard.take:
            raise ValueError(f"{_DAMAGED} (only {shard.skip + count:,} records).")


_TFDS_ROWS = 256
_OWN_VALIDATION = ("validation", "val")
_DAMAGED = "it is damaged or cut short; copy or build it again"


class HubCorpus(Corpus):
    """A dataset of the Hugging Face hub, streamed by `datasets` (extra `hf`).

    The files of the corpus are the shards of the split.

    Raises:
      ImportError: `datasets` is not installed.
      FileNotFoundError: there is no such dataset, config or split, or no network.
    """

    def __init__(self, dataset: HubDataset, *, text_field: str) -> None:
        """Look up the files; read none."""
        self._dataset, self._text_field = dataset, text_field
        self._stream, identity = _open_stream(dataset)
        self.files = [
            CorpusFile(name=f"{dataset.repository}/{dataset.split}/{i}", num_bytes=None)
            for i in range(self._stream.num_shards)
        ]
        self.fingerprint = f"{dataset} {text_field} {identity}"

    def read(self, part: FileRange, on_bad: OnBad | None = None) -> Iterator[Document]:
        """The documents of a file."""
        name = self.files[part.file].name
        rows = _read_rows(self._stream.shard(num_shards=len(self.files), index=part.file), name)
        # A bad row is left out before rows are joined, so that its document keeps the others.
        texts = texts_of(_rows(rows, self._text_field), name, on_bad)
        for number, text in enumerate(self._joined(text for _, text in texts)):
            yield Document(f"{name}:{number}", (text,))

    def _joined(self, rows: Iterable[str]) -> Iterator[str]:
        """The texts of the documents; rows of one document are joined."""
        first_row = self._dataset.first_row
        if first_row is None:
            yield from rows
            return
        texts: list[str] = []
        for text in rows:
            if texts and re.match(first_row, text):
                yield "".join(texts)
                texts = []
            texts.append(text)
        if texts:
            yield "".join(texts)


def _rows(rows: Iterable[Mapping[str, Any]], field: str, first: int = 0) -> Iterator[Row]:
    """Rows from the examples that a library has read, numbered from `first`."""
    for number, row in enumerate(rows, first):
        yield Row(number, partial("row {:,}".format, number), partial(text_in, row, field))


@contextlib.contextmanager
def _reporting_hub_errors(what: str) -> Iterator[None]:
    """Raise ConnectionError for any error of `datasets`, `huggingface_hub` and `httpx`."""
    try:
        yield
    except Exception as error:
        raise ConnectionError(
            f"{what} failed ({type(error).__name__}: {str(error).strip()}); check the names and "
            "the network and give the same command again, which continues. Without a network, "
            "prepare from local files or from a local directory: hf:DIRECTORY."
        ) from error


def _read_rows(rows: Iterable[Any], name: str) -> Iterator[Any]:
    with _reporting_hub_errors(f"reading {name}"):
        yield from rows


def _open_stream(dataset: HubDataset) -> tuple[Any, str]:
    """The stream of a split, and the identity of its files; see `_identity`."""
    with needs_extra("hf"):
        import datasets
    repository = str(Path(dataset.repository).expanduser())
    files = {dataset.split: dataset.data_files} if dataset.data_files else None
    what = f"opening split {dataset.split!r}, config {dataset.config!r} of {repository}"
    with _reporting_hub_errors(what):
        builder = datasets.load_dataset_builder(
            repository, name=dataset.config, revision=dataset.revision, data_files=files
        )
        stream = builder.as_streaming_dataset(split=dataset.split)
    data_files = sorted(map(str, (builder.config.data_files or {}).get(dataset.split, ())))
    if any("/partial-" in file for file in data_files):  # the hub converts at most 5 GB
        print(
            f"warning: the hub's Parquet files hold only a part of {dataset.repository}, as their "
            "names say",
            file=sys.stderr,
        )
    return stream, "\n".join(map(_identity, data_files))


def _identity(file: str) -> str:
    """A text that changes with a file: a name on the hub has the commit in it."""
    if not os.path.isfile(file):
        return file
    status = os.stat(file)
    return f"{file} {status.st_size} {status.st_mtime}"
