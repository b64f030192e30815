"""`maxmars data`: prepare text for training, and look at the result.

`prepare` makes a `Recipe` of its options, with the command line for the record; a directory is
continued only by the same recipe. `inspect` reads directories of tokens, also of other programs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import tyro
from etils import epath
from rich.console import Console
from rich.table import Table

from maxmars.cli.help import HELP
from maxmars.cli.parse import parse_options
from maxmars.config.checks import CheckedConfig, Fraction, NotNegative, Positive, UsageError
from maxmars.data.formats import open_directory
from maxmars.data.metadata import FORMAT, DocumentStarts, Metadata, Shard
from maxmars.data.token_files import TokenDirectory, TokenStream
from maxmars.data.tokenizer import GPT2Tokenizer, load, tokenizer_of_tokens
from maxmars.distributed.files import resolve, sha256_of
from maxmars.distributed.progress import Progress

if TYPE_CHECKING:
    from maxmars.data.prepare import Preparation

_SAMPLE_TOKENS = 1 << 14  # of each split, for the bytes of a token
_SAMPLE_CHARACTERS = 300
_BLOCK_TOKENS = 1 << 22  # 16 MiB as uint32
_TOKENS_OF_SMALL = 124_000_000  # one for each parameter of GPT-2 small
_RECORDED_ALWAYS = {"tokenizer", "validation_fraction"}  # also at their defaults
_NOT_RECORDED = {"source", "out", "workers", "tasks"}  # words of the command, or without effect


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(CheckedConfig):
    """Turn text into tokens for training; the same command again continues the work.

    SOURCE is one of

      'books/*.txt'             files: .txt (each one document), .jsonl, .json,
                                .csv, .tsv, .parquet, .arrow (each line, element
                                or row one document), also with .gz, .bz2, .xz or
                                .zst, and in gs://BUCKET; quote a pattern
      openwebtext, fineweb-edu, c4, wikitext-103 (each with :split)
                                these datasets of the Hugging Face hub (tested
                                only with a local imitation of the hub)
      hf:REPO[:config][:split]  a dataset of the Hugging Face hub, streamed, or a
                                local directory of one
      tfds:NAME[:split]         a dataset of TensorFlow Datasets on the disk
                                (TFRecord, array_record); needs no TensorFlow
      python                    source code of Python's standard library
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars data prepare 'books/*.txt' data/books",
        "maxmars data prepare openwebtext data/openwebtext --tokenizer gpt2",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "text-field",
        "document-separator",
        "skip-bad",
        "validation-fraction",
        "validation",
        "workers",
        "tasks",
    )

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Text to read, one of the above."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to write, on a disk or gs://BUCKET/PATH."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="byte|gpt2|FILE.json")] = "byte"
    """`byte`, `gpt2` (BPE of 50257 tokens), or the path of a Hugging Face tokenizer.json."""
    validation_fraction: Fraction | None = None
    """Fraction of the text to hold out for validation; None is 0.1, or less for the large datasets
    above, unless there is a validation split. Of each .txt the end is held out; of other files and
    datasets the documents that a hash of their names selects."""
    validation: Annotated[str | None, tyro.conf.arg(metavar="SOURCE")] = None
    """Source of the validation split, while the first SOURCE is all for training: a split of the
    dataset (`c4:validation`, hf:REPO:CONFIG:test), or other files. None takes the split
    `validation` or `val` of tfds:NAME, if there is one."""
    text_field: str | None = None
    """Field of a line or row that has the text, also a nested one such as `document.text`; None is
    `text`, or the field of the dataset above."""
    document_separator: str | None = None
    r"""Text between the documents of a .txt, such as '<|endoftext|>', or '\n' where each line is a
    document; None takes the whole file as one document. Line breaks beside a separator are not
    part of a document."""
    skip_bad: NotNegative[int] = 0
    """Largest number of lines and rows to leave out, in all the text, because they are cut off or
    lack the field; the first of them are named."""
    data_dir: str | None = None
    """Directory of TFDS datasets, for tfds:NAME."""
    eot_token: str | None = None
    """Token of a tokenizer.json that ends a document; None takes the one that the files beside the
    tokenizer.json name, else <|endoftext|>."""
    allow_lossy: bool = False
    """Go on although the tokenizer cannot represent more than 1 % of the characters in a sample of
    the text; `inspect` shows how many."""
    workers: NotNegative[int] | None = None
    """Number of processes that tokenise; None takes one for each core, 0 starts none."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="I/N")] = None
    """Do a part of the work: this is job I, from 0, of N jobs that write to one directory or
    bucket. The work is divided into tasks by the text alone; job I does the tasks I, I + N, I + 2N,
    ... Whichever job does the last task completes OUT; the result does not depend on N."""
    task_bytes: Positive[int] | None = None
    """Approximate bytes of text in a task; None takes 8 to 256 MB, by the size of the text."""
    shard_tokens: Positive[int] = 100_000_000
    """Largest number of tokens in a file."""


@dataclass(frozen=True, kw_only=True)
class InspectArguments(CheckedConfig):
    """Show the contents of a directory of tokens, and compare every file with its checksum.

    The SHA-256 of a split is that of its tokens, whatever the number and the format of the files:
    directories with equal ones hold equal streams of tokens.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars data inspect data/books",
        "maxmars data inspect data/books --no-verify",
    )
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory that `prepare` made, on a disk or gs://BUCKET/PATH, or tokens of nanoGPT,
    build-nanogpt or llm.c, as `maxmars train` reads them."""
    verify: bool = True
    """Compare the files with their checksums, and hash the tokens: two reads of all."""


def open_preparation(arguments: PrepareArguments) -> Preparation:
    """Open the text and the tokenizer that a command line names; nothing is written yet."""
    from maxmars.data.open_corpus import PRESETS, open_corpus
    from maxmars.data.prepare import Preparation
    from maxmars.data.tasks import Recipe

    source, separator = arguments.source, arguments.document_separator
    fraction, validation_source = arguments.validation_fraction, arguments.validation
    if fraction is not None and validation_source is not None:
        raise UsageError(
            f"--validation {validation_source} is the validation split; leave out "
            "--validation-fraction."
        )
    # In quotes, a shell passes \n as these two characters.
    for escape, character in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        separator = separator and separator.replace(escape, character)
    open_source = functools.partial(
        open_corpus,
        text_field=arguments.text_field,
        data_dir=arguments.data_dir,
        separator=separator,
    )
    corpus = open_source(source)
    if fraction is None:
        validation_source = validation_source or corpus.validation_source
        preset = PRESETS.get(source.partition(":")[0])
        fraction = 0.1 if preset is None else preset.validation_fraction
    # The record names the split that is taken, also where no option does.
    if validation_source is not None:
        arguments, fraction = replace(arguments, validation=validation_source), 0.0
    else:
        arguments = replace(arguments, validation_fraction=fraction)
    recipe = Recipe(
        corpus=corpus,
        validation=None if validation_source is None else open_source(validation_source),
        tokenizer=load(arguments.tokenizer, eot_token=arguments.eot_token),
        source=source if validation_source is None else f"{source}, validation {validation_source}",
        validation_fraction=fraction,
        shard_tokens=arguments.shard_tokens,
        task_bytes=arguments.task_bytes,
        allow_lossy=arguments.allow_lossy,
        skip_bad=arguments.skip_bad,
        command=_command(arguments),
    )
    return Preparation(recipe, resolve(arguments.out))


def _prepare(arguments: PrepareArguments) -> int:
    job = None if arguments.tasks is None else _parse_tasks(arguments.tasks)
    preparation = open_preparation(arguments)
    recipe, out = preparation.recipe, preparation.out
    workers = arguments.workers
    if workers is None:
        workers = len(os.sched_getaffinity(0))  # taskset and SLURM may allow fewer than there are
    # A job may begin when the others have done all. Without --tasks, `run` refuses a complete OUT.
    was_complete = job is not None and preparation.is_finished()
    if not was_complete:
        with Progress(stderr=True) as status:
            status.update("looking at the text")
            corpora = filter(None, (recipe.corpus, recipe.validation))
            hints = list(filter(None, (corpus.hint() for corpus in corpora)))
        if recipe.validation and not arguments.validation:
            hints.append(
                f"validation is {recipe.corpus.validation_source}, the data set's own; "
                "--validation-fraction holds out a part of the source instead, --validation names "
                "another."
            )
        for hint in hints:
            print(f"note: {hint}", file=sys.stderr)
        preparation.run(workers, job or (0, 1))
    metadata = preparation.finish()
    if metadata is None:
        done = f"the tasks {arguments.tasks} of {out} are done"
        print(f"{done}; the last of the other jobs completes it")
        return 0
    # With --tasks, a job of another command may have completed the directory.
    if (metadata.source, metadata.tokenizer) != (recipe.source, recipe.tokenizer.name):
        raise ValueError(
            f"{out} holds {metadata.source} as tokens of {metadata.tokenizer}; choose another "
            "directory, or give its own source and --tokenizer."
        )
    counts = ", ".join(f"{s.num_tokens:,} tokens ({n})" for n, s in metadata.splits.items())
    print(f"{out} was complete: {counts}" if was_complete else f"wrote {counts} to {out}")
    if metadata.loss is not None:
        print(f"of a sample of the text, {metadata.loss}")
    if metadata.skipped is not None:
        print(f"left out {metadata.skipped}")
    if metadata.repeated is not None:
        print(f"warning: {_repeated_documents(metadata)}", file=sys.stderr)
    tokens = {name: split.num_tokens for name, split in metadata.splits.items()}
    print(training_command(arguments.out, tokens, metadata.tokenizer))
    return 0


def _repeated_documents(metadata: Metadata) -> str:
    count = metadata.splits["val"].num_documents
    return (
        f"{metadata.repeated:,} of {count:,} documents of val are in train too, token for token, "
        "which makes the validation loss too low"
    )


def training_command(path: str, tokens: Mapping[str, int], tokenizer: str) -> str:
    """A line with the `maxmars train` command for a model that suits the number of tokens.

    Args:
      path: the directory of tokens.
      tokens: number of tokens of each split.
      tokenizer: name of the tokenizer.
    """
    config, length, batch_size = [f"quickstart:data={path}"], 128, 8
    train, val = tokens.get("train", 0), tokens.get("val")
    if tokenizer == GPT2Tokenizer.name and train >= _TOKENS_OF_SMALL:
        config = ["gpt2:size=small,optimizer=mars", "--data.path", path]
        length, batch_size = 1024, 480
    if val is None:
        config += ["--eval.every", "None"]
    # A batch needs a window of length + 1 tokens for each sequence, and validation one window.
    longest = min(length, (train - 1) // batch_size, length if val is None else val - 1)
    if longest < 2:
        return f"{path} has too few tokens to train on; prepare more text."
    if longest < length:
        config += ["--model.max-seq-len", str(1 << longest.bit_length() - 1)]  # a power of two
    return f"next: {shlex.join(['maxmars', 'train', *config])}"


def _command(arguments: PrepareArguments) -> str:
    """The command line for the record, without options that do not change the tokens: it is the
    same whichever job completes the directory."""
    words = ["maxmars", "data", "prepare", arguments.source, arguments.out]
    for field in fields(arguments):
        value, option = getattr(arguments, field.name), f"--{field.name.replace('_', '-')}"
        if (field.name in _RECORDED_ALWAYS and value is not None) or (
            field.name not in _NOT_RECORDED and value != field.default
        ):
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _parse_tasks(tasks: str) -> tuple[int, int]:
    index, slash, count = tasks.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"--tasks {tasks} must be I/N with 0 <= I < N, such as 0/4.")
    return int(index), int(count)


def _inspect(arguments: InspectArguments) -> int:
    opened = open_directory(arguments.path)
    if arguments.verify and opened.metadata is None:
        print(f"{opened.path}: files of another program, without checksums to compare")
    elif arguments.verify and opened.metadata is not None:
        _verify(opened.path, opened.metadata)
        print(f"{opened.path}: every file matches its checksum")
    splits = {name: opened.stream(name) for name in opened.splits}
    _print_summary(opened, splits)
    if arguments.verify:
        for name, stream in splits.items():
            print(f"SHA-256 of the tokens of {name}: {sha256_of_tokens(stream)}")
    tokens = {name: stream.num_tokens for name, stream in splits.items()}
    print(training_command(arguments.path, tokens, opened.vocabulary.tokenizer))
    return 0


def sha256_of_tokens(stream: TokenStream) -> str:
    """SHA-256, in hex, of a split's tokens as little-endian uint32, one after the other; it does
    not depend on the number and the format of the files."""
    sha = hashlib.sha256()
    with Progress(stderr=True) as status:
        for start in range(0, stream.num_tokens, _BLOCK_TOKENS):
            status.update(f"hashing the tokens of {stream.split}", start, stream.num_tokens)
            count = min(_BLOCK_TOKENS, stream.num_tokens - start)
            sha.update(stream.read(start, count).astype("<u4").tobytes())
    return sha.hexdigest()


def _verify(directory: epath.Path, metadata: Metadata) -> None:
    """Compare every file with its checksum.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file differs; the message names it.
    """
    files: list[Shard | DocumentStarts] = []
    for split in metadata.splits.values():
        files += [*split.shards, *filter(None, [split.documents])]
    missing = [file.file for file in files if not (directory / file.file).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}; prepare it again.")
    with Progress(stderr=True) as status:
        for number, file in enumerate(files):
            status.update(f"verifying {file.file}", number, len(files))
            sha256 = sha256_of(directory / file.file)
            if sha256 != file.sha256:
                raise ValueError(
                    f"{directory / file.file} does not match its checksum: its SHA-256 is "
                    f"{sha256}, but meta.json says {file.sha256}; delete the directory "
                    "and prepare it again."
                )


def _print_summary(directory: TokenDirectory, splits: Mapping[str, TokenStream]) -> None:
    """Print the origin of the tokens, their counts, and a sample of each split."""
    # A long command stays one line, to be copied; and a text may have brackets, rich's markup.
    console = Console(highlight=False, soft_wrap=True)
    metadata, vocabulary = directory.metadata, directory.vocabulary
    file_format = "files of another program, without source and counts of documents"
    if metadata is not None:
        file_format = f"token shards ({FORMAT}, {metadata.dtype})"
    facts = {
        "format": file_format,
        "source": metadata and metadata.source,
        "command": metadata and metadata.command,
        "tokenizer": f"{vocabulary.tokenizer}, vocabulary of {vocabulary.size:,}",
        "digest": vocabulary.digest,
        "left out": metadata and metadata.skipped,
        "repeated": metadata and metadata.repeated and _repeated_documents(metadata),
        "lost": metadata and metadata.loss and f"of a sample of the text, {metadata.loss}",
    }
    console.print(str(directory.path), style="bold", markup=False)
    for name, value in facts.items():
        if value is not None:
            console.print(f"  {name:<10}", str(value), markup=False)
    try:
        tokenizer = tokenizer_of_tokens(vocabulary)
    except (ImportError, OSError, ValueError) as error:
        console.print(f"no sample: {error}", markup=False)
        tokenizer = None
    table = Table("split")
    for column in ("tokens", "documents", "files", "tokens/document", "bytes/token"):
        table.add_column(column, justify="right")
    samples = []
    for name, stream in splits.items():
        ratio = length = documents = ""
        if tokenizer is not None:
            tokens = stream.read(0, min(stream.num_tokens, _SAMPLE_TOKENS))
            text = tokens[tokens != tokenizer.eot]  # which no byte of the text stands for
            ratio = f"{len(tokenizer.decode(text).encode()) / max(len(text), 1):.2f}"
            end = int(np.argmax(np.append(tokens, tokenizer.eot) == tokenizer.eot))  # 1st document
            sample = tokenizer.decode(tokens[:end])
            cut = sample[:_SAMPLE_CHARACTERS]
            samples.append(f"{name}: {cut!r}{'...' if cut != sample else ''}")
        num_files = sum(file.split == name for file in directory.files)
        if metadata is not None:
            split = metadata.splits[name]
            documents = f"{split.num_documents:,}"
            if split.num_documents:
                length = f"{split.num_tokens / split.num_documents:,.1f}"
        counts = f"{stream.num_tokens:,}", documents, f"{num_files:,}"
        table.add_row(name, *counts, length, ratio)
    console.print(table)
    for sample in samples:
        console.print(sample, markup=False)


_USAGE = """\
usage: maxmars data prepare SOURCE OUT [OPTIONS]
       maxmars data inspect DIR [OPTIONS]

Turn text into tokens for training, and look at the result.

  maxmars data prepare 'books/*.txt' data/books --tokenizer gpt2
  maxmars data inspect data/books

`maxmars data prepare --help` lists the sources and the options."""


def _advise_quotes(arguments: PrepareArguments, word: str, value: str | None) -> str | None:
    """Hint where the shell has expanded a pattern to several files."""
    return "quote a pattern of files: 'books/*.txt'." if Path(word).is_file() else None


def run(argv: list[str]) -> int:
    """Run `maxmars data`."""
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in HELP:
        print(_USAGE)
        return 0
    if name == "prepare":
        prog = "maxmars data prepare"
        return _prepare(parse_options(PrepareArguments, rest, prog=prog, hint=_advise_quotes))
    if name == "inspect":
        return _inspect(parse_options(InspectArguments, rest, prog="maxmars data inspect"))
    raise UsageError(
        f"maxmars data needs one of prepare, inspect, not {name!r}. See `maxmars data --help`."
    )
