"""Models on the Hugging Face hub: `hf:OWNER/NAME[@REVISION]` fetched, and directories pushed.

All traffic goes through `huggingface_hub` (extra `hf`) and obeys its environment variables: HF_HOME
says where models are kept, HF_TOKEN who asks, HF_ENDPOINT which hub, and HF_HUB_OFFLINE=1 that
there is no network. No message shows a token.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import maxmars
from maxmars.distributed import processes
from maxmars.distributed.files import read_json
from maxmars.distributed.progress import Progress
from maxmars.model import huggingface

_LOGGER = logging.getLogger(__name__)

_PREFIX = "hf:"
_REPOSITORY = r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+"
_FORM = re.compile(rf"{_PREFIX}({_REPOSITORY})(?:@([^\s@]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_INDEX, _SHARDS = "model.safetensors.index.json", "model-*-of-*.safetensors"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
_ANSWER_S = 10.0  # how long to wait for the hub's first answer
_LOG_IN = "log in by `hf auth login`, or set HF_TOKEN"


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
    def source(self) -> str:
        """The target that will always mean this commit."""
        return f"{_PREFIX}{self.repository}@{self.commit}"


def is_on_hub(target: str | os.PathLike[str]) -> bool:
    """Whether a target is written `hf:...`, rather than as a path."""
    return os.fspath(target).startswith(_PREFIX)


def check_name(repository: str) -> None:
    """Raise ValueError where a name is not OWNER/NAME as the hub has it."""
    if not re.fullmatch(_REPOSITORY, repository):
        raise ValueError(
            f"{repository} must be OWNER/NAME of a model on the Hugging Face hub, such as "
            "me/gpt2-mars."
        )
    try:
        _library().utils.validate_repo_id(repository)
    except ValueError as error:
        raise ValueError(f"{repository} cannot be a model of the hub: {error}") from error


# --- fetching -------------------------------------------------------------------------------------


def fetch(target: str | os.PathLike[str]) -> Snapshot:
    """Fetch the files of a model that maxmars reads into the hub's cache; every process calls.

    Process 0 finds out which commit a branch or tag means, and all processes take that one. Where
    the hub cannot be reached, it is the commit that was fetched last, and a warning says so. A
    commit that is named and in the cache needs no hub.

    Raises:
      ValueError: the target is malformed; or the model is none that maxmars reads, which is found
        before its weights are fetched.
      FileNotFoundError: there is no such model or revision; or the hub cannot be reached, and it is
        not in the cache.
      PermissionError: it is gated, or the hub refuses the token.
      OSError: fetching it failed.
      ImportError: `huggingface_hub` (extra `hf`) is not installed.
    """
    match = _FORM.fullmatch(os.fspath(target))
    if match is None:
        raise ValueError(
            f"{target} names no model of the Hugging Face hub; write hf:OWNER/NAME, or "
            "hf:OWNER/NAME@REVISION with a branch, a tag or a commit, such as "
            "hf:openai-community/gpt2."
        )
    repository, revision = match[1], match[2] or "main"
    check_name(repository)
    found: list[Snapshot] = []

    def fetch_as_primary() -> str:
        found.append(_fetch_revision(repository, revision))
        return found[0].commit

    commit = processes.text_from_primary(fetch_as_primary) or ""
    failure = None
    if not found:
        try:
            found.append(_cached(repository, commit) or _download(repository, commit))
        except (ValueError, OSError) as error:
            failure = error
    if not processes.all_processes(failure is None):
        raise failure or ValueError(f"another process cannot fetch {target}; it says why.")
    return found[0]


def _fetch_revision(repository: str, revision: str) -> Snapshot:
    """Fetch what a revision means now or, where the hub cannot be reached, meant the last time."""
    if _COMMIT.fullmatch(revision) and (found := _cached(repository, revision)) is not None:
        return found
    hub, name = _library(), f"{_PREFIX}{repository}"
    _token()
    try:
        files = hub.HfApi().model_info(repository, revision=revision, timeout=_ANSWER_S).siblings
    except Exception as error:  # `huggingface_hub` and its HTTP library raise many kinds
        if not _is_unreachable(error):
            _refuse(error, repository, revision)
        if (found := _cached(repository, revision)) is None:
            raise FileNotFoundError(
                f"{_endpoint()} cannot be reached ({_reason(error)}), and {name}, revision "
                f"{revision}, is not in the cache {hub.constants.HF_HUB_CACHE}; run the command "
                "once with a network."
            ) from error
        _LOGGER.warning(
            "%s cannot be reached (%s): the cached copy of %s, commit %s, is used",
            _endpoint(),
            _reason(error),
            name,
            found.commit,
        )
        return found
    names = sorted(file.rfilename for file in files or ())
    if _WEIGHTS not in names and _INDEX not in names:
        pickles = [file for file in names if file.endswith(".bin")]
        raise ValueError(
            f"{name}, revision {revision}, has no {_WEIGHTS}"
            + (f", only {pickles[0]}: a pickle, which can run any program" if pickles else "")
            + ". Name a revision with safetensors, or convert the model by transformers "
            "(`save_pretrained`) and give the directory."
        )
    return _download(repository, revision)


def _cached(repository: str, revision: str) -> Snapshot | None:
    """A revision in the cache; None where it is not complete there."""
    with contextlib.suppress(OSError), _quiet():
        directory = Path(
            _library().snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=[_CONFIG]
            )
        )
        if _is_complete(directory):
            return Snapshot(repository=repository, directory=directory)
    return None


def _is_complete(directory: Path) -> bool:
    """Whether the files of a model are there. Its weights are fetched last, so they tell."""
    if not (directory / _CONFIG).is_file():
        return False
    if (directory / _WEIGHTS).is_file():
        return True
    files = _files_of_index(directory)
    return bool(files) and all((directory / file).is_file() for file in files)


def _files_of_index(directory: Path) -> list[str]:
    """The files of weights that the index names; none where there is no sound index."""
    index = read_json(directory / _INDEX)
    files = index.get("weight_map") if isinstance(index, dict) else None
    return sorted(set(map(str, files.values()))) if isinstance(files, dict) else []


def _download(repository: str, revision: str) -> Snapshot:
    """Fetch what the cache lacks: the small files and then, if it is a GPT-2, the weights."""
    hub, name = _library(), f"{_PREFIX}{repository}"
    with Progress(stderr=True) as status:

        def again() -> None:
            status.update(f"fetching {name}: the hub does not answer well; trying again")

        def get_weights(file: str, text: str) -> None:
            def show(done: int, total: int) -> None:
                sizes = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                status.update(f"fetching {text}: {sizes}", done, total)

            # Not in the library's threads, which would make Ctrl-C wait for whole files.
            bar = _bar_class(show)
            hub.hf_hub_download(repository, file, revision=found.commit, tqdm_class=bar)

        with _refusing(repository, revision), _quiet(again):
            # By the branch's name, so that the cache knows its commit when there is no network.
            small = hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[_CONFIG, _INDEX, *_TOKENIZER],
                tqdm_class=_bar_class(lambda done, total: None),
            )
        found = Snapshot(repository=repository, directory=Path(small))
        try:
            huggingface.read_config(found.directory)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{found.source} is no model for maxmars: {error}") from error
        with _refusing(repository, revision), _quiet(again):
            try:
                get_weights(_WEIGHTS, name)
            except hub.errors.RemoteEntryNotFoundError:
                files = _files_of_index(found.directory)
                for number, file in enumerate(files, 1):
                    get_weights(file, f"{name}, file {number} of {len(files)}")
    return found


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
      PermissionError: there is no token, the hub refuses it, or it may only read.
      ValueError: the name is malformed; or the repository should be private, and is public.
      OSError: the hub cannot be reached.
      ImportError: `huggingface_hub` (extra `hf`) is not installed.
    """
    check_name(repository)
    if _token() is None:
        raise PermissionError(f"--push {repository} needs a token that may write: {_LOG_IN}.")
    hub, info = _library(), None
    api = hub.HfApi()
    with _refusing_push(repository, "when the cause is gone, run the same command again"), _quiet():
        with contextlib.suppress(hub.errors.RepositoryNotFoundError):
            info = api.model_info(repository, timeout=_ANSWER_S)
        token = api.whoami().get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise PermissionError(
            f"the token may only read, and --push {repository} writes; {_LOG_IN} to one that may "
            "write."
        )
    if private and info is not None:
        _check_private(info.private, repository)


def push(directory: Path, repository: str, *, private: bool) -> Pushed:
    """Upload a model's directory to the hub as one commit; the repository is made if it is missing.

    Files that belong to another model than the directory's, such as weights in another number of
    files, are deleted in the same commit. Hidden files are not uploaded.

    Args:
      directory: a Hugging Face directory.
      repository: OWNER/NAME.
      private: a new repository is private.

    Raises:
      PermissionError: the token may not write there.
      ValueError: see `check_push`.
      OSError: uploading failed. The hub then shows nothing of it.
    """
    hub, api = _library(), _library().HfApi()
    files = [
        file.relative_to(directory).as_posix()
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(directory).parts)
    ]
    num_bytes = sum((directory / file).stat().st_size for file in files)
    with Progress(stderr=True) as status:

        def again() -> None:
            status.message("the hub does not answer well; trying again")

        with _refusing_push(repository), _quiet(again):
            api.create_repo(repository, private=private or None, exist_ok=True)
            before = api.model_info(repository)
        if private:
            _check_private(before.private, repository)
        theirs = [file.rfilename for file in before.siblings or ()]
        stale = [file for file in theirs if _is_of_model(file) and file not in files]
        status.message(f"uploading {num_bytes / 1e6:,.1f} MB to {_endpoint()}/{repository}")
        with _refusing_push(repository), _quiet(again), _bars(shown=sys.stderr.isatty()):
            added = [hub.CommitOperationAdd(file, directory / file) for file in files]
            for addition in added:
                # One after the other, as in `_download`.
                if addition.path_in_repo.endswith(".safetensors"):
                    api.preupload_lfs_files(repository, [addition], free_memory=False)
            commit = api.create_commit(
                repository,
                [*(hub.CommitOperationDelete(file) for file in stale), *added],
                commit_message=f"Upload by maxmars {maxmars.__version__}",
            )
    return Pushed(
        url=f"{_endpoint()}/{repository}/commit/{commit.oid}",
        is_new=commit.oid != before.sha,
        private=bool(before.private),
        deleted=stale,
    )


def _is_of_model(file: str) -> bool:
    return file in (_CONFIG, _WEIGHTS, _INDEX, *_TOKENIZER) or Path(file).match(_SHARDS)


def _check_private(is_private: bool | None, repository: str) -> None:
    if not is_private:
        raise ValueError(
            f"{repository} is public, and the hub ignores --private for a repository that exists; "
            f"make it private at {_endpoint()}/{repository}/settings, choose another name, or "
            "leave --private out."
        )


# --- the library ----------------------------------------------------------------------------------


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise ImportError(
            "models of the Hugging Face hub need the library huggingface_hub; install it with "
            "`pip install 'maxmars[hf]'`."
        ) from error
    return huggingface_hub


def _endpoint() -> str:
    """Address of the hub, without a password that HF_ENDPOINT may hold."""
    return re.sub("//[^/]*@", "//", _library().HfApi().endpoint)


def _token() -> str | None:
    """The user's token; None if there is none."""
    try:
        token = _library().get_token()
    except Exception as error:  # the library may ask a service for one
        if isinstance(error, OSError) and error.errno is not None:
            raise  # HF_HOME cannot be read
        raise PermissionError(f"no token for the hub ({type(error).__name__}); {_LOG_IN}.") from (
            error
        )
    # The HTTP library would show one that cannot be in a header.
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise PermissionError(
            "the token for the hub has characters that no token has (HF_TOKEN, or what `hf auth "
            "login` stored); copy it again."
        )
    return token


@contextlib.contextmanager
def _quiet(again: Callable[[], None] = lambda: None) -> Generator[None]:
    """Without the library's own warnings; `again` is called where it warns that it tries again."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search("retry|resume", record.getMessage(), re.I):
                again()

    logger = logging.getLogger("huggingface_hub")
    handlers, propagates = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [Handler(logging.WARNING)], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagates


@contextlib.contextmanager
def _bars(*, shown: bool) -> Generator[None]:
    """With the library's own bars, which alone know how far an upload is, or without."""
    utils = _library().utils
    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _bar_class(show: Callable[[int, int], None]) -> type:
    """A class for the library's bars that gives the bytes so far, and all, to `show`."""
    from tqdm import tqdm  # comes with huggingface_hub

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options = {key: options[key] for key in ("desc", "total", "initial") if key in options}
            super().__init__(*arguments, **options, file=io.StringIO(), leave=False)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.total:
                show(int(self.n), int(self.total))

    return Bar


def _is_unreachable(error: Exception) -> bool:
    """Whether there is no hub to talk to, rather than one that refuses."""
    errors = _library().errors
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    # The base of httpx's errors of the network, and of those of its successor.
    return isinstance(error, errors.OfflineModeIsEnabled) or any(
        kind.__name__ == "TransportError" for kind in type(error).__mro__
    )


def _reason(error: BaseException) -> str:
    """An error of the library in a few words, without the user's token."""
    errors = _library().errors
    while isinstance(error, errors.LocalEntryNotFoundError | RuntimeError) and error.__cause__:
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, errors.HfHubHTTPError):
        text = f"it answers {error.response.status_code} {error.server_message or ''}"
    else:
        text = f"{type(error).__name__}: {error}"
    line = " ".join(text.split())[:200]
    token = _token()
    return line if token is None else line.replace(token, "***")


@contextlib.contextmanager
def _refusing(repository: str, revision: str) -> Generator[None]:
    """Turn the errors of the library in the block into those of `_refuse`."""
    try:
        yield
    except Exception as error:  # as in `_fetch_revision`
        _refuse(error, repository, revision)


def _refuse(error: Exception, repository: str, revision: str) -> NoReturn:
    """Raise what keeps a model from being fetched, in one line."""
    errors, name = _library().errors, f"{_PREFIX}{repository}"
    page = f"{_endpoint()}/{repository}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        raise PermissionError(
            f"{name} is gated: accept its terms at {page}, and {_LOG_IN} to a token of the account "
            "that did."
        ) from error
    if isinstance(error, errors.RepositoryNotFoundError):
        hidden = "it is private" if _token() is None else "your token may not read it"
        raise FileNotFoundError(
            f"there is no model {repository} on the hub, or {hidden}; check the name, or {_LOG_IN} "
            "to a token that may read it."
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise FileNotFoundError(
            f"{name} has no branch, tag or commit {revision}; {page}/commits/main lists commits."
        ) from error
    if status in (401, 403):
        raise PermissionError(
            f"the hub refuses to give {name} ({_reason(error)}); {_LOG_IN} to a token that may "
            "read it."
        ) from error
    if status is None and isinstance(error, OSError) and error.errno is not None:
        raise error  # the disk is full, or the cache cannot be written to
    raise OSError(
        f"{name} could not be fetched ({_reason(error)}); when the cause is gone, run the same "
        "command again."
    ) from error


@contextlib.contextmanager
def _refusing_push(repository: str, way_out: str = "") -> Generator[None]:
    """Raise what keeps a model from being pushed, in one line."""
    try:
        yield
    except Exception as error:  # as in `_fetch_revision`
        if isinstance(error, _library().errors.HfHubHTTPError) and (
            error.response.status_code in (401, 403, 404)
        ):
            raise PermissionError(
                f"the hub refuses to push to {repository} ({_reason(error)}); {_LOG_IN} to a token "
                "that may write there."
            ) from error
        end = f"; {way_out}." if way_out else "."
        raise OSError(f"the push to {repository} failed ({_reason(error)}){end}") from error
