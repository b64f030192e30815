"""Text to a directory of tokens: in independent tasks, to the same bytes every time.

`Preparation` serves all ways of running the tasks: processes of this machine, jobs of a scheduler
(`--tasks i/n`), or Apache Beam (`tools/prepare_on_beam.py`). The directory holds

* `plan.json`: the arguments, so that nobody mixes two preparations;
* shards, which get their final names when they are complete;
* `tasks/00003.json`, the record of task 3, written when its shards have their names;
* `meta.json`, written when all tasks are done; then `plan.json` and `tasks` are removed.

Buckets and network file systems have no locks, and none is needed: two processes that do the same
task write the same files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from maxmars.config.checks import from_json
from maxmars.config.errors import EXTERNAL_ERRORS
from maxmars.config.numbers import short
from maxmars.data.corpus import Corpus, PythonSources, TextFiles, Texts
from maxmars.data.formats import open_directory
from maxmars.data.metadata import (
    METADATA,
    PLAN,
    VERSION,
    DocumentStarts,
    Metadata,
    Shard,
    Split,
    read_metadata,
    write_metadata,
)
from maxmars.data.rows import Skipped
from maxmars.data.tasks import SPLITS, Fill, Recipe, write_task
from maxmars.data.tokenizer import ByteTokenizer, Tokenizer, save
from maxmars.data.workers import work_through
from maxmars.distributed.files import (
    cache_directory,
    is_remote,
    make_directory,
    parse_json,
    read_text,
    reporting,
    require_access,
    resolve,
    write_bytes,
    write_text,
)
from maxmars.distributed.progress import Progress

_PLAN_VERSION = 6  # of the rules by which text becomes tasks and splits
_TASKS = "tasks"
_SHARD = re.compile(rf"({'|'.join(SPLITS)})_\d+(_\d+)?\.bin")
_OURS = re.compile(rf"{_SHARD.pattern}|({'|'.join(SPLITS)})_documents\.bin")
_RECORD = re.compile(r"\d+\.json")
_TEMPORARY = re.compile(r"\..+\.tmp")
_BYTES_A_TOKEN = 4  # of English text under a vocabulary of tens of thousands; for estimates only
_REQUESTS_AT_ONCE = 16

Records = dict[int, dict[str, Any]]
"""From the number of a task to the content of `tasks/NUMBER.json`."""


def prepare(
    documents: Corpus | Iterable[tuple[str, str]],
    out: str | os.PathLike[str],
    *,
    workers: int = 0,
    **options: Any,
) -> Metadata:
    """Tokenise documents into a directory of token shards, or continue an unfinished one.

    Args:
      documents: a corpus, or pairs (name, text); names need not be unique.
      out: the directory to make, on a disk or in a bucket.
      workers: processes that tokenise, started by `spawn`; 0 tokenises in this process.
      **options: the other fields of `Recipe`.

    Returns:
      The metadata of the directory.

    Raises:
      See `Recipe`, `Preparation.run` and `Preparation.finish`.
    """
    corpus = documents if isinstance(documents, Corpus) else Texts(documents)
    preparation = Preparation(Recipe(corpus=corpus, **options), resolve(out))
    preparation.run(workers)
    metadata = preparation.finish()
    assert metadata is not None
    return metadata


@dataclass(frozen=True)
class Preparation:
    """A directory of tokens in the making, which any number of processes may work on.

    Every document is followed by the end-of-text token; empty documents are left out.
    """

    recipe: Recipe
    out: epath.Path

    @functools.cached_property
    def _plan(self) -> str:
        recipe = self.recipe
        fields = {
            "version": _PLAN_VERSION,
            "source": recipe.source,
            "corpus": recipe.corpus.fingerprint,
            "validation": recipe.validation and recipe.validation.fingerprint,
            "tokenizer": recipe.tokenizer.name,
            "tokenizer_digest": recipe.tokenizer.digest,
            "validation_fraction": recipe.validation_fraction,
            "shard_tokens": recipe.shard_tokens,
            "task_bytes": recipe.task_bytes,
            "num_tasks": len(recipe.tasks),
        }
        return json.dumps(fields, indent=2) + "\n"

    def is_finished(self) -> bool:
        """Whether the directory is complete."""
        return METADATA in _names(self.out)

    def begin(self) -> None:
        """Make the directory, or check that an earlier call with the same arguments began it.

        Raises:
          FileExistsError: the directory is complete, or holds something else.
          ValueError: it was begun with other arguments, `meta.json` is not ours, the disk is too
            small, or the tokenizer loses too much of the text.
          OSError: it cannot be made, or a bucket does not answer.
        """
        names = _names(self.out)  # one listing: in a bucket each costs a request
        self._refuse_if_finished(names)
        begun = read_text(self.out / PLAN) if PLAN in names else None  # the plan of that call
        if not _is_plan(begun) and not all(map(_TEMPORARY.fullmatch, names)):
            raise FileExistsError(
                f"{self.out} exists and is no unfinished preparation; delete it or choose another "
                "name."
            )
        num_done = len(self._done())
        self._check_disk(num_done)
        self.recipe.check_loss()
        if begun is not None and begun != self._plan:
            # Another plan that has finished no task may be replaced.
            if any(filter(_RECORD.fullmatch, _names(self.out / _TASKS))):
                raise ValueError(self._other_arguments(begun))
            for name in filter(_SHARD.fullmatch, names):  # of tasks that were cut short
                _delete(self.out / name)
            _delete_all(self.out / _TASKS)
            _delete(self.out / PLAN)
        make_directory(self.out)
        if begun != self._plan:
            write_text(self.out / PLAN, self._plan)
        make_directory(self.out / _TASKS)  # after the plan, which says that it is ours
        with self._unless_finished():
            self._check_plan()
        self._refuse_if_finished(_names(self.out))  # others may have been faster
        if num_done:
            print(
                f"continuing {self.out}: {num_done:,} of {len(self.recipe.tasks):,} tasks are done",
                file=sys.stderr,
            )

    def _refuse_if_finished(self, names: set[str]) -> None:
        if METADATA in names:
            read_metadata(self.out)  # raises if this `meta.json` is another program's
            self._clean(names)
            raise FileExistsError(
                f"{self.out} is complete: train on it, or delete it to prepare it anew, or choose "
                "another name."
            )

    def run(self, workers: int = 0, share: tuple[int, int] = (0, 1)) -> None:
        """Begin, and do the tasks that are not done.

        Args:
          workers: processes to start; 0 works in this process.
          share: (i, n) does only the tasks whose number is i modulo n.

        Raises:
          ValueError: a file of the corpus is damaged, or an argument lies outside its range; and
            see `begin`.
          ChildProcessError: a worker has died.
          OSError: the disk is full, or a bucket does not answer.
        """
        if workers < 0:
            raise ValueError(f"workers={workers} must not be negative.")
        index, count = share
        if not 0 <= index < count:
            raise ValueError(f"tasks={index}/{count} must be i/n with 0 <= i < n, from 0.")
        self.begin()
        numbers = range(index, len(self.recipe.tasks), count)
        done = self._read_records(sorted(self._done().intersection(numbers)))
        todo = [number for number in numbers if number not in done]
        before = sum(self.recipe.tasks[number].num_bytes or 0 for number in done)
        with Progress(stderr=True) as status:

            def progress(num_tasks: int, num_bytes: int) -> None:
                tasks_done = len(numbers) - len(todo) + num_tasks
                rate = num_bytes / 1e6 / max(status.elapsed_s, 1e-9)
                text = (
                    f"tokenised {(before + num_bytes) / 1e6:,.0f} MB, {tasks_done:,} of "
                    f"{len(numbers):,} tasks, {rate:.1f} MB/s"
                )
                status.update(text, tasks_done, len(numbers))

            try:
                work_through(todo, self.run_task, workers=workers, progress=progress)
            except EXTERNAL_ERRORS:
                if share == (0, 1) and not self._done():  # nothing to continue: leave nothing
                    self._discard()
                raise

    def run_task(self, number: int, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Do one task, if it is not done.

        Args:
          number: number of the task.
          report: called now and then with the bytes of text tokenised since its last call.

        Raises:
          See `run`.
        """
        require_access(self.out)
        if self._read_record(number) is not None:
            return
        with self._unless_finished():
            self._do(number, report)

    def _do(
        self, number: int, report: Callable[[int], None], fill: Fill | None = None
    ) -> dict[str, Any]:
        """Write the shards and the record of a task; returns the record."""
        record = write_task(
            self.recipe, number, self.out, check=self._check_plan, report=report, fill=fill
        )
        for split, described in record["splits"].items():
            starts = described.pop("starts")
            described["num_starts"] = len(starts)
            if len(starts):
                write_bytes(self._starts(number, split), starts.tobytes())
        record["plan"] = self._plan_digest
        write_text(self._record(number), json.dumps(record) + "\n")  # last: marks the task as done
        return record

    def finish(self) -> Metadata | None:
        """Write `meta.json`, if all tasks are done; any process may call.

        Returns:
          The metadata of the directory; None if tasks are missing.

        Raises:
          ValueError: a split has no text, or the corpus has more bad rows than may be skipped.
          OSError: a file cannot be written.
        """
        with self._unless_finished():
            if METADATA not in _names(self.out) and not self._describe():
                return None
        metadata = read_metadata(self.out)
        self._clean(_names(self.out))
        return metadata

    def _describe(self) -> bool:
        """Write `meta.json`, if all tasks are done; returns whether it is there."""
        recipe = self.recipe
        records = self._read_records(range(len(recipe.tasks)))
        if len(records) < len(recipe.tasks):
            return METADATA in _names(self.out)
        skipped = sum(
            (from_json(Skipped, record["skipped"]) for record in records.values()), Skipped()
        )
        skipped.check_limit(recipe.skip_bad)
        if 0 < recipe.validation_fraction < 1:
            self._fill(records)
        splits = {split: self._join(split, records) for split in SPLITS}
        splits = {name: split for name, split in splits.items() if split.num_tokens}
        self._check_splits(splits)
        save(recipe.tokenizer, self.out)  # before `meta.json`, which says that all is there
        metadata = Metadata(
            tokenizer=recipe.tokenizer.name,
            tokenizer_digest=recipe.tokenizer.digest,
            vocab_size=recipe.tokenizer.vocab_size,
            dtype=recipe.dtype,
            splits=splits,
            source=recipe.source,
            command=recipe.command,
            loss=recipe.check_loss(),
            skipped=skipped if skipped.count else None,
            repeated=self._repeated(records) or None,
        )
        write_metadata(self.out, metadata)
        return True

    def _fill(self, records: Records) -> None:
        """Give the last document to the other split if all documents are of one split.

        Repeats the last task that has documents.
        """
        counts = {
            split: sum(record["splits"][split]["num_documents"] for record in records.values())
            for split in SPLITS
        }
        empty = [split for split in SPLITS if not counts[split]]
        if len(empty) != 1:
            return
        (split,) = set(SPLITS) - set(empty)
        number = max(n for n, r in records.items() if r["splits"][split]["num_documents"])
        last = records[number]["splits"][split]["num_documents"] - 1
        fill = Fill(split=empty[0], number=last, is_only=counts[split] == 1)
        before = _shards(records[number])
        records[number] = self._do(number, lambda num_bytes: None, fill)
        for name in before - _shards(records[number]):  # the task may have fewer shards now
            _delete(self.out / name)

    # --- the state of a preparation --------------------------------------------------------------

    @functools.cached_property
    def _plan_digest(self) -> str:
        return hashlib.sha256(self._plan.encode()).hexdigest()

    def _record(self, number: int) -> epath.Path:
        return self.out / _TASKS / f"{number:05d}.json"

    def _starts(self, number: int, split: str) -> epath.Path:
        return self.out / _TASKS / f"{number:05d}_{split}.starts"

    def _done(self) -> set[int]:
        """Numbers of the tasks that have a record."""
        names = _names(self.out / _TASKS)
        return {n for n in range(len(self.recipe.tasks)) if self._record(n).name in names}

    def _read_record(self, number: int) -> dict[str, Any] | None:
        """The record of a task; None if the task is not done, or was done with other arguments."""
        try:
            record = parse_json(read_text(self._record(number)) or "null")
        except ValueError:
            return None  # damaged: the task is done again
        is_ours = isinstance(record, dict) and record.get("plan") == self._plan_digest
        return record if is_ours else None

    def _read_records(self, numbers: Sequence[int]) -> Records:
        """The records of these tasks, by number; tasks that are not done are left out."""
        # In threads: there may be thousands of records, each of which costs a request.
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            records = zip(numbers, pool.map(self._read_record, numbers), strict=True)
            return {number: record for number, record in records if record is not None}

    def _check_plan(self) -> None:
        """Check that the directory still has the plan of this preparation.

        Raises:
          FileNotFoundError: the directory is complete, or gone.
          ValueError: it has the plan of another preparation.
        """
        plan = read_text(self.out / PLAN)
        if plan is None:
            raise FileNotFoundError(f"{self.out / PLAN} is gone; run the same command again.")
        if plan != self._plan:
            raise ValueError(self._other_arguments(plan))

    @contextlib.contextmanager
    def _unless_finished(self) -> Generator[None]:
        """Suppress FileNotFoundError if other processes have finished the directory meanwhile."""
        try:
            yield
        except FileNotFoundError:
            if METADATA not in _names(self.out):
                raise

    def _other_arguments(self, begun: str) -> str:
        try:
            earlier = parse_json(begun)
        except ValueError:
            earlier = {}
        now = parse_json(self._plan)
        if earlier.get("version") != _PLAN_VERSION:
            return (
                f"{self.out} holds an unfinished preparation of another version of maxmars, with "
                f"plan.json of version {earlier.get('version')} and not {_PLAN_VERSION}; finish it "
                "with that one, or delete that directory to start anew."
            )
        of_text = ("corpus", "validation", "num_tasks")  # hashes, which say nothing to a user
        differences = ", ".join(
            f"{name} was {_shortened(earlier.get(name))}, now {_shortened(now[name])}"
            for name in now
            if name not in of_text and earlier.get(name) != now[name]
        )
        if not differences:
            return (
                f"{self.out} holds an unfinished preparation of another text: since then, files of "
                f"{self.recipe.source} were changed, added or removed, or --text-field or "
                "--document-separator is another. Delete that directory to start anew, or restore "
                "the text to finish it."
            )
        return (
            f"{self.out} holds an unfinished preparation with other arguments: {differences}. Run "
            "the earlier command to finish it, or delete that directory to start anew."
        )

    def _check_disk(self, num_done: int) -> None:
        sizes, tokenizer = [task.num_bytes for task in self.recipe.tasks], self.recipe.tokenizer
        if is_remote(self.out) or None in sizes:
            return
        text = sum(size or 0 for size in sizes) * (1 - num_done / max(len(sizes), 1))
        tokens = text / (1 if isinstance(tokenizer, ByteTokenizer) else _BYTES_A_TOKEN)
        needed, path = tokens * np.dtype(self.recipe.dtype).itemsize, Path(self.out).absolute()
        free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
        if needed > free:
            raise ValueError(
                f"{self.out}: the tokens of {short(text)}B of text need about {short(needed)}B, "
                f"but the disk has {short(free)}B free; make room or choose another disk."
            )

    # --- the last step ---------------------------------------------------------------------------

    def _join(self, split: str, records: Records) -> Split:
        """One split from the shards of all tasks; writes the file of its documents' starts."""
        of_tasks = [records[number]["splits"][split] for number in range(len(self.recipe.tasks))]
        shards = [Shard(**shard) for of_task in of_tasks for shard in of_task["shards"]]
        num_tokens = np.cumsum([0, *(of_task["num_tokens"] for of_task in of_tasks)]).astype("<u8")

        # A task counts its tokens from 0; `num_tokens` are the tokens of the tasks before.
        pairs = zip(self._read_starts(split, records), num_tokens, strict=False)
        starts = np.concatenate([of_task[:, 0] + first for of_task, first in pairs])
        documents, file = None, f"{split}_documents.bin"
        if len(starts):
            data = starts.astype("<u8").tobytes()
            write_bytes(self.out / file, data)
            sha256 = hashlib.sha256(data).hexdigest()
            documents = DocumentStarts(file=file, count=len(starts), sha256=sha256)
        return Split(
            num_tokens=int(num_tokens[-1]),
            num_documents=sum(of_task["num_documents"] for of_task in of_tasks),
            shards=tuple(shards),
            documents=documents,
        )

    def _read_starts(self, split: str, records: Records) -> Iterator[np.ndarray]:
        """The `starts` of each task, in order; see `write_task`."""

        def read(number: int) -> np.ndarray:
            if not records[number]["splits"][split]["num_starts"]:
                return np.empty((0, 2), "<u8")
            with reporting(self.out):
                content = self._starts(number, split).read_bytes()
            return np.frombuffer(content, "<u8").reshape(-1, 2)

        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            yield from pool.map(read, range(len(self.recipe.tasks)))

    def _repeated(self, records: Records) -> int:
        """Number of documents of `val` that are in `train` too, by their hashes."""
        held_out = np.concatenate([starts[:, 1] for starts in self._read_starts("val", records)])
        hashes, counts = np.unique(held_out[held_out > 0], return_counts=True)
        is_repeated = np.zeros(len(hashes), bool)
        for starts in self._read_starts("train", records) if len(hashes) else ():
            # The index of each hash of `train` in the sorted ones of `val`, if it is there.
            indices = np.searchsorted(hashes, starts[:, 1]) % len(hashes)
            is_repeated[indices[hashes[indices] == starts[:, 1]]] = True
        return int(counts[is_repeated].sum())

    def _check_splits(self, splits: Mapping[str, Split]) -> None:
        fraction = self.recipe.validation_fraction
        wanted = {0.0: SPLITS[:1], 1.0: SPLITS[1:]}.get(fraction, SPLITS)
        for split in SPLITS if self.recipe.validation is not None else wanted:
            if split not in splits:
                self._discard()
                raise ValueError(
                    f"no text of {self.recipe.source} has come into split {split!r} with "
                    f"validation_fraction={fraction}; give more documents or another fraction."
                )

    def _discard(self) -> None:
        """Remove all files of the preparation, and the directory if it is empty then."""
        for name in filter(_OURS.fullmatch, _names(self.out)):
            _delete(self.out / name)
        self._clean(_names(self.out))
        with contextlib.suppress(OSError):  # not empty: files of others stay
            os.rmdir(self.out)

    def _clean(self, names: set[str]) -> None:
        """Remove the files that only an unfinished preparation needs."""
        if not names & {_TASKS, PLAN}:
            return
        # Temporary files of killed processes; in a bucket there are none.
        for name in () if is_remote(self.out) else filter(_TEMPORARY.fullmatch, names):
            _delete(self.out / name)
        _delete_all(self.out / _TASKS)
        _delete(self.out / PLAN)


def _shards(record: dict[str, Any]) -> set[str]:
    """Names of the shards in a task's record."""
    return {shard["file"] for split in record["splits"].values() for shard in split["shards"]}


def _is_plan(text: str | None) -> bool:
    """Whether the text of a `plan.json` is ours; other programs write files of this name too."""
    try:
        fields = parse_json(text or "null")
    except ValueError:
        return False
    return isinstance(fields, dict) and {"version", "corpus", "num_tasks"} <= fields.keys()


def _names(directory: epath.Path) -> set[str]:
    """Names in a directory; an empty set if there is no such directory."""
    with reporting(directory):
        try:
            return {path.name for path in directory.iterdir()}
        except FileNotFoundError:
            return set()


def _delete(path: epath.Path) -> None:
    with reporting(path):
        path.unlink(missing_ok=True)


def _delete_all(directory: epath.Path) -> None:
    """Delete a directory; other processes may be deleting it at the same time."""
    with contextlib.suppress(OSError), reporting(directory):
        directory.rmtree()


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def prepare_python_sources() -> Path:
    """Directory with the standard library's text as bytes; see `_in_cache`."""
    corpus, python = PythonSources(), platform.python_version()
    name, source = f"python-{python}-byte", f"standard library of Python {python}"
    return _in_cache(name, corpus, corpus.fingerprint[:8], tokenizer=ByteTokenizer(), source=source)


def prepare_validation_text(file: epath.Path, tokenizer: Tokenizer) -> Path:
    """Directory with all of a file of text as the split `val`; see `_in_cache`.

    Raises:
      ValueError, ImportError, OSError: see `TextFiles` and `prepare`.
    """
    corpus = TextFiles([str(file)])
    parts = f"{file} {corpus.fingerprint} {tokenizer.digest}"
    digest = hashlib.sha256(parts.encode()).hexdigest()[:16]
    options = {"tokenizer": tokenizer, "source": file.name, "validation_fraction": 1.0}
    return _in_cache(f"text-{file.stem}", corpus, digest, **options)


def _in_cache(name: str, corpus: Corpus, digest: str, **options: Any) -> Path:
    """Directory of tokens; made in the cache, by `prepare`, if it is not there.

    The cache is the directory MAXMARS_CACHE, by default ~/.cache/maxmars. Several processes may
    call this at once. `digest` is that of the text and of its tokenizer.

    Raises:
      ValueError: what is in the cache is damaged.
    """
    path = cache_directory() / f"{name}-v{VERSION}-{digest}"
    if not (path / METADATA).exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            prepare(corpus, path, **options)
    open_directory(path)
    return path
