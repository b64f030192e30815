"""Models on the Hugging Face hub: `hf:OWNER/NAME[@REVISION]` fetched, and directories pushed.

All traffic goes through `huggingface_hub` (extra `hf`) and obeys its environment variables: HF_HOME
says where models are kept, HF_TOKEN who asks, HF_ENDPOINT which hub, and HF_HUB_OFFLINE=1 that
there is no network. Its errors are told in its own words. No message shows a token.
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

import maxmars
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
        """For people: OWNER/NAME and the first digits of the commit."""
        return f"{self.repository}@{self.commit[:7]}"

    @property
    def origin(self) -> str:
        """The target that will always mean this commit."""
        return f"{_PREFIX}{self.repository}@{self.commit}"


def is_on_hub(target: str | os.PathLike[str]) -> bool:
    """Whether a target is written `hf:...`, rather than as a path."""
    return os.fspath(target).startswith(_PREFIX)


def check_name(repository: str) -> None:
    """Raise ValueError where a name is not OWNER/NAME as the hub has it."""
    if repository.count("/") != 1:
        raise ValueError(f"{repository} must be OWNER/NAME of a model, such as me/gpt2-mars.")
    _library().utils.validate_repo_id(repository)


# --- fetching -------------------------------------------------------------------------------------


def fetch(target: str | os.PathLike[str]) -> Snapshot:
    """Fetch the files of a model that maxmars reads into the hub's cache; every process calls.

    Process 0 finds out which commit a branch or tag means, and all processes take that one. Where
    the hub cannot be reached, it is the commit that was fetched last, and a warning says so. A
    commit that is named and in the cache needs no hub.

    Raises:
      ValueError: the target is malformed; or the model is none that maxmars reads, which is found
        before its weights are fetched.
      OSError: there is no such model or revision, it is gated, or the hub refuses the token; or the
        hub cannot be reached, and it is not in the cache.
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
    check_name(repository)

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


# --- pushing --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The result of `push`."""

    url: str
    """Page of the commit."""
    is_new: bool
    """Whether it is a new commit; False where the hub had the same files already."""
    private: bool
    """Whether the repository is private."""
    deleted: list[str]
    """Files of another model that the repository had."""


def check_push(repository: str, *, private: bool) -> None:
    """Find what would make `push` fail, before anybody waits for an export.

    Raises:
      PermissionError: the token may only read.
      ValueError: the name is malformed; or the repository should be private, and is public.
      OSError: there is no token, the hub refuses it, or cannot be reached.
      ImportError: `huggingface_hub` (extra `hf`) is not installed.
    """
    check_name(repository)
    hub, is_public = _library(), False
    api = hub.HfApi()
    with _in_one_line(f"--push {repository}"):
        _check_token()
        token = api.whoami().get("auth", {}).get("accessToken", {})
        with contextlib.suppress(hub.errors.RepositoryNotFoundError):
            is_public = not api.model_info(repository, timeout=_ANSWER_S).private
    if token.get("role") == "read":
        raise PermissionError(
            f"the token may only read, and --push {repository} writes; log in by `hf auth login` "
            "to one that may write, or set HF_TOKEN."
        )
    if private and is_public:
        _refuse_public(repository)


def push(directory: Path, repository: str, *, private: bool) -> Pushed:
    """Upload a model's directory to the hub as one commit; the repository is made if it is missing.

    Files that belong to another model than the directory's, such as weights in another number of
    files, are deleted in the same commit. Hidden files are not uploaded.

    Args:
      directory: a Hugging Face directory.
      repository: OWNER/NAME.
      private: a new repository is private.

    Raises:
      ValueError: see `check_push`.
      OSError: uploading failed. The hub then shows nothing of it.
    """
    hub, api = _library(), _library().HfApi()
    paths = [path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file()]
    files = [path.as_posix() for path in paths if not any(p[0] == "." for p in path.parts)]
    with _in_one_line(repository):
        api.create_repo(repository, private=private or None, exist_ok=True)
        before = api.model_info(repository)
    if private and not before.private:
        _refuse_public(repository)
    theirs = [file.rfilename for file in before.siblings or ()]
    of_model = [*_SMALL, WEIGHTS, "model-*-of-*.safetensors"]
    stale = set(hub.utils.filter_repo_objects(theirs, allow_patterns=of_model)) - set(files)
    # Not `upload_folder`, which makes several commits of a large directory where Xet is there.
    with _in_one_line(repository):
        added = [hub.CommitOperationAdd(file, directory / file) for file in files]
        for addition in added:
            if addition.path_in_repo.endswith(".safetensors"):  # one by one, as in `_download`
                api.preupload_lfs_files(repository, [addition], free_memory=False)
        commit = api.create_commit(
            repository,
            [*map(hub.CommitOperationDelete, sorted(stale)), *added],
            commit_message=f"Upload by maxmars {maxmars.__version__}",
        )
    return Pushed(
        url=f"{api.endpoint}/{repository}/commit/{commit.oid}",
        is_new=commit.oid != before.sha,
        private=bool(before.private),
        deleted=sorted(stale),
    )


def _refuse_public(repository: str) -> None:
    raise ValueError(
        f"{repository} is public, and the hub ignores --private for a repository that exists; make "
        "it private in its settings, choose another name, or leave --private out."
    )


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
    """Raise as OSError, in one line, what the library raises: it is of many types, and has several
    lines."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk is full, or the cache cannot be written to
        text = f"{error} {error.__cause__}" if isinstance(error, RuntimeError) else str(error)
        raise OSError(f"{what}: {' '.join(text.split())}") from error
