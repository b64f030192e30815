"""Models on the Hugging Face hub: `hf:OWNER/NAME[@REVISION]`, fetched into the hub's cache.

All traffic goes through `huggingface_hub` (extra `hf`) and obeys its environment variables: HF_HOME
says where models are kept, HF_TOKEN who asks, HF_ENDPOINT which hub, and HF_HUB_OFFLINE=1 that
there is no network. The hub's own message is shown, and no token.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxmars.config.errors import about, needs_extra
from maxmars.distributed import processes
from maxmars.distributed.files import read_json_object
from maxmars.model import huggingface
from maxmars.model.huggingface import INDEX, WEIGHTS

_LOGGER = logging.getLogger(__name__)

_PREFIX = "hf:"
_FORM = re.compile(rf"{_PREFIX}([^@/\s]+/[^@/\s]+)(?:@(\S+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
_SMALL = [
    *("config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
]
_ANSWER_S = 10.0  # how long to wait for the hub's first answer


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A model at one commit, in the hub's cache."""

    repository: str
    """OWNER/NAME."""
    directory: Path

    @property
    def commit(self) -> str:
        """40 hex digits."""
        return self.directory.name

    @property
    def name(self) -> str:
        """Text for people: OWNER/NAME and the first digits of the commit."""
        return f"{self.repository}@{self.commit[:7]}"

    @property
    def origin(self) -> str:
        """The target that will always mean this commit."""
        return f"{_PREFIX}{self.repository}@{self.commit}"


def is_on_hub(target: str | os.PathLike[str]) -> bool:
    """Whether a target is written `hf:...`, rather than as a path."""
    return os.fspath(target).startswith(_PREFIX)


# --- fetching -------------------------------------------------------------------------------------


def fetch(target: str | os.PathLike[str]) -> Snapshot:
    """Fetch the files of a model that maxmars reads into the hub's cache; call it in every process.

    Process 0 resolves a branch or tag to a commit, and all processes take that commit. If the hub
    cannot be reached, it is the commit that was fetched last, and a warning says so. A target with
    a commit that is in the cache needs no hub.

    Raises:
      ValueError: the target is malformed; or maxmars does not read such a model, which is checked
        before its weights are fetched.
      OSError: there is no such model or revision, it is gated, or the hub refuses the token; or the
        hub cannot be reached, and the model is not in the cache.
      ImportError: `huggingface_hub` (extra `hf`) is not installed.
    """
    match = _FORM.fullmatch(os.fspath(target))
    if match is None:
        raise ValueError(
            f"{target} names no model of the Hugging Face hub; write hf:OWNER/NAME, or "
            "hf:OWNER/NAME@REVISION with a branch, a tag or a commit, such as "
            "hf:openai-community/gpt2."
        )
    repository, directory, failure = match[1], None, None
    _library().utils.validate_repo_id(repository)

    def fetch_as_primary() -> str:
        nonlocal directory
        directory = _download(repository, match[2] or "main")
        return directory.name

    commit = processes.text_from_primary(fetch_as_primary) or ""
    try:
        directory = directory or _download(repository, commit)
    except (ValueError, OSError) as error:
        failure = error
    if not processes.all_processes(failure is None) or directory is None:
        raise failure or ValueError(f"another process cannot fetch {target}; it says why.")
    return Snapshot(repository=repository, directory=directory)


def _download(repository: str, revision: str) -> Path:
    """Fetch what the cache lacks: the small files and then, if it is a GPT-2, the weights."""
    hub, name, unreachable = _library(), f"{_PREFIX}{repository}@{revision}", None
    with _in_one_line(name):
        _check_token()
        if not _COMMIT.fullmatch(revision):
            # Where the hub does not answer, `snapshot_download` takes the cached copy in silence.
            try:
                hub.HfApi().model_info(repository, revision=revision, timeout=_ANSWER_S)
            except Exception as error:  # of many kinds; what must stop us is raised again below
                unreachable = " ".join(str(error).split())
        directory = Path(
            hub.snapshot_download(repository, revision=revision, allow_patterns=_SMALL)
        )
    if unreachable is not None:
        _LOGGER.warning(
            "the hub cannot say what %s is now (%s); the cached copy is used, commit %s",
            *(name, unreachable, directory.name),
        )
    with about(name):
        config, files = huggingface.read_config(directory), [WEIGHTS]
        if (directory / INDEX).is_file():
            files = sorted(set(read_json_object(directory / INDEX)["weight_map"].values()))
    with _in_one_line(name):
        # One by one: threads of the library would make Ctrl-C wait for whole files.
        for file in files:
            hub.hf_hub_download(repository, file, revision=directory.name)
    with about(name):
        huggingface.open_weights(directory, config)
    return directory


# --- the library ----------------------------------------------------------------------------------


def _library() -> Any:
    with needs_extra("hf"):
        import huggingface_hub
        import huggingface_hub.utils
    if not sys.stderr.isatty():  # bars would fill the log of a job
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def _check_token() -> None:
    """Refuse a token that cannot be in a header before the HTTP library does, which shows it."""
    if not re.fullmatch("[!-~]*", _library().get_token() or ""):
        raise PermissionError(
            "HF_TOKEN, or what `hf auth login` stored, is no token; copy it again"
        )


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Raise the library's errors, which have many types and lines, as OSErrors of one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk is full, or the cache cannot be written to
        text = f"{error} {error.__cause__}" if isinstance(error, RuntimeError) else str(error)
        raise OSError(f"{what}: {' '.join(text.split())}") from error
