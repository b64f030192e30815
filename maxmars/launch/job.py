"""A run to start on other machines: what all three platforms share.

First `RunOptions`, `Job` and `pack`: this maxmars goes along as a wheel, with the files that the
run names. Then checks of words that go into the command lines of other programs, and calls of the
user's own `gcloud`, `kubectl` or `sbatch`. Values of `--env` are secrets: they go into files that
only the user reads, and into no command line and no log.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated

from tyro.conf import Positional, arg

from maxmars.config.checks import CheckedConfig, NotNegative, Positive, UsageError
from maxmars.config.errors import about
from maxmars.config.load import find_config, named_configs
from maxmars.config.own_modules import Files, files_of, imported_paths
from maxmars.config.user_code import Source
from maxmars.launch import wheel

CONSTRAINTS = "launch-constraints.txt"
"""File in the archive: versions of the packages that are installed here, for pip."""
STARTS_AGAIN = """\
# Whether a run that ended with this code is started again: at 75 it saved and can continue; from
# 128 on a signal ended it. Other errors would come back, such as 78, of one of several processes.
starts_again() {
  if (($1 == 134)); then
    echo "maxmars: exit code 134: JAX aborted, as a process was missing or no longer answered"
  fi
  (($1 == 75 || $1 >= 128))
}
"""
"""The rule of restarts, in bash. `train` itself ends a run whose restarts make no progress."""

SETUP = "launch-setup.sh"
"""File in the archive: the user's script that runs on each host before the run."""
PROLOG = "launch-prolog.sh"
"""File in the archive: the user's script that SLURM's batch script sources."""

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_CHOSEN_FILES = re.compile(r"(?<==)[^,:]+\.py(?=:)")  # of NAME=FILE.py:FUNCTION among the choices
_MAX_BYTES = 50_000_000


@dataclass(frozen=True, kw_only=True)
class RunOptions(CheckedConfig):
    """Options of `maxmars launch PLATFORM CONFIG` on every platform."""

    config: Annotated[str, Positional, arg(metavar="CONFIG")]
    """Config file with its choices, as for `maxmars train`."""
    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, and of the machines and files that are created for it."""
    workdir: Annotated[str, arg(metavar="DIR")]
    """Working directory of the run, for metrics and checkpoints. Every host must reach it by this
    path: in a bucket (gs://), or on a shared file system, which --setup or --claim may mount."""
    env: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Variables of your environment that the run gets, such as WANDB_API_KEY. Their values appear
    in no command and no log."""
    setup: Annotated[Path | None, arg(metavar="FILE.sh")] = None
    """Bash script that each host runs before the run, such as to mount a bucket of data."""
    include: Annotated[tuple[str, ...], arg(metavar="FILE ...")] = ()
    """Further files and folders of the current folder that go along. CONFIG, your own files that it
    names, and what these import from their folders go along without it."""
    max_restarts: NotNegative[int] = 10_000
    """Largest number of restarts, most of them after preemptions. Ten starts in a row that save
    fewer than ten steps each end the run earlier."""
    price: Annotated[Positive[float] | None, arg(metavar="MONEY")] = None
    """Price of one chip or GPU for an hour, in any currency. The cost of all machines for an hour
    is then printed before they are requested."""
    dry_run: bool = False
    """Print only the script or the JobSet, without the files that go along, and run nothing."""

    def shared_workdir(self) -> str:
        """The working directory as a path that is valid on every host.

        Raises:
          UsageError: the path is neither absolute nor in a bucket.
        """
        example = "/mnt/runs/run1, a path that every host reaches, or gs://bucket/run1"
        return check_word(self.workdir, "--workdir", r"(gs://[^/\s]+)?/[^\s\x00-\x1f]*", example)

    @property
    def scripts(self) -> dict[str, Path]:
        """Scripts of the user that go along, by their names in the archive."""
        return {} if self.setup is None else {SETUP: self.setup}


@dataclass(frozen=True)
class PackedCode:
    """The files that go along: maxmars as a wheel, and files of the current folder."""

    contents: Mapping[str, bytes] = field(repr=False)
    """Contents by path, relative to the current folder and within it; the wheel is `wheel.NAME`."""
    config: str
    """Name of a config of maxmars, or path of the user's config relative to the folder."""
    choices: str
    """Choices of CONFIG, with the user's files relative to the folder; "" if there are none."""

    def config_in(self, directory: Path) -> str:
        """CONFIG with paths below the directory where the files are unpacked."""
        config = str(directory / self.config) if self.config.endswith(".py") else self.config
        choices = _CHOSEN_FILES.sub(lambda match: str(directory / match[0]), self.choices)
        return f"{config}:{choices}" if choices else config

    def has(self, path: str) -> bool:
        """Whether a path relative to the current folder is a file or a folder in the archive."""
        return any(PurePosixPath(name).is_relative_to(path) for name in self.contents)

    @functools.cached_property
    def archive(self) -> bytes:
        """The files as a .tar.gz; the same files give the same bytes."""
        file = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as tar,
        ):
            for name, content in sorted(self.contents.items()):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), _mode(name)
                tar.addfile(member, io.BytesIO(content))
        return file.getvalue()

    def write(self, folder: Path) -> None:
        """Write the files of the archive into a new folder."""
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(_mode(name))

    @property
    def digest(self) -> str:
        """First 16 hex digits of the archive's SHA-256."""
        return hashlib.sha256(self.archive).hexdigest()[:16]

    @property
    def wheel_sha256(self) -> str:
        """SHA-256 of the wheel, in hex."""
        return hashlib.sha256(self.contents[wheel.NAME]).hexdigest()

    @property
    def size(self) -> str:
        """The wheel, the number of files and their size as text for the user."""
        maxmars_wheel = f"{wheel.NAME} (SHA-256 {self.wheel_sha256[:16]})"
        others = len(self.contents) - 1
        return f"{maxmars_wheel} and {others} other files, {len(self.archive) / 1000:.0f} kB"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run to start."""

    name: str
    code: PackedCode
    workdir: str
    train_arguments: tuple[str, ...]
    """Words after CONFIG and --workdir on the command line of `maxmars train`."""
    environment: Mapping[str, str] = field(repr=False)
    """Environment variables of the run, whose values are secrets."""

    def python_arguments(self, directory: Path = Path()) -> list[str]:
        """Words after `python` on the command line of each process.

        Args:
          directory: folder of the unpacked archive, relative to where the process starts.
        """
        config = self.code.config_in(directory)
        # -P: no file in the folder where the process starts hides a module.
        train = ["-P", "-m", "maxmars", "train", config, "--workdir", self.workdir]
        return [*train, *self.train_arguments]


def pack(
    config: str,
    *,
    sources: Sequence[Source] = (),
    scripts: Mapping[str, Path] = MappingProxyType({}),
    include: Sequence[str] = (),
) -> PackedCode:
    """Pack this maxmars as a wheel, with the files of the current folder that a run needs.

    Args:
      config: CONFIG of `maxmars train`; a config file of the user's is packed with what it imports
        from its folder.
      sources: functions of the user's own that the config names; their files are packed likewise.
      scripts: bash scripts, by their names in the archive.
      include: further files, and folders, without hidden files.

    Raises:
      UsageError: a file lies outside of the current folder, or imports one that is not packed.
      ValueError: the files are larger than 50 MB.
      FileNotFoundError: a file does not exist.
    """
    config_file, choices = find_config(config)
    contents = {wheel.NAME: wheel.make_wheel()}
    name = config_file.stem
    if config_file not in named_configs().values():
        name = _in_folder(config_file)
        contents |= _with_imports(name, files_of(config_file), contents)
    for source in sources:
        contents |= _with_imports(_in_folder(Path(source.file)), source.files(), contents)
    with about("--include"):
        included = {_in_folder(path): path for name in include for path in _files_in(Path(name))}
        sizes = {name: path.stat().st_size for name, path in included.items()}
    sizes = {name: len(content) for name, content in contents.items()} | sizes
    if sum(sizes.values()) > _MAX_BYTES:  # before all is read
        raise ValueError(
            f"over {_MAX_BYTES // 1_000_000} MB would go along, the largest file "
            f"{max(sizes, key=sizes.__getitem__)}: leave it out of --include, and have the run "
            "read it from a bucket or a shared disk."
        )
    contents |= {name: path.read_bytes() for name, path in included.items()}
    # The hosts get the versions that are installed, and so were tried, here. One with a "+" is a
    # local build, which no index has.
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    lines = [f"{package}=={v}\n" for package, v in versions.items() if "+" not in v]
    contents[CONSTRAINTS] = "".join(lines).encode()
    contents |= {name: script.read_bytes() for name, script in scripts.items()}
    choices = _CHOSEN_FILES.sub(lambda match: _in_folder(Path(match[0])), choices)
    return PackedCode(contents=contents, config=name, choices=choices)


def _in_folder(path: Path) -> str:
    """A path relative to the current folder.

    Raises:
      UsageError: the path lies outside of the folder.
    """
    relative = os.path.relpath(path)
    if relative.startswith(".."):  # perhaps a link leads into the folder
        relative = os.path.relpath(path.parent.resolve() / path.name)
    if relative.startswith(".."):
        raise UsageError(
            f"{path} lies outside of {Path.cwd()}, whose files go along to other machines: copy it "
            "there, or give the command in a folder that has all files of the run."
        )
    return relative


def _files_in(path: Path) -> list[Path]:
    """The file itself, or all files of a folder that are not hidden."""
    if not path.is_dir():
        return [path]
    hidden = re.compile(r"(^|/)(\.|__pycache__)")
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [file for file in files if not hidden.search(str(file.relative_to(path)))]


def _with_imports(name: str, files: Files, others: Files) -> dict[str, bytes]:
    """A file and what it imports (`files_of`), by paths relative to the current folder.

    Raises:
      UsageError: a file imports a module of the current folder that is neither in its own folder
        nor in `others`: `python -m maxmars` finds the module here, but would not on the hosts.
    """
    folder = Path(name).parent
    for file, text in files.items():
        for path in imported_paths(file, text):
            if path not in {*files, *others} and Path(path).is_file():
                raise UsageError(
                    f"{folder / file} imports {path} from another folder, which hosts would not "
                    f"find: move it into {folder} or below."
                )
    return {str(folder / file): text for file, text in files.items()}


def _mode(name: str) -> int:
    return 0o755 if name.endswith(".sh") else 0o644


# Words that may go into the command lines of other programs.


def check_word(value: str, what: str, pattern: str, example: str) -> str:
    """Return a value that fully matches a pattern.

    Raises:
      UsageError: the value does not match; the message has `what` and the example.
    """
    if re.fullmatch(pattern, value) is None:
        raise UsageError(f"{what}={value!r} does not look like {example}.")
    return value


def check_name(name: str) -> None:
    """Check that the name of a run can be that of machines."""
    example = "run-1: a letter, then letters, digits and hyphens, all lower case, at most 40"
    check_word(name, "--name", r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", example)


def capture_environment(names: Sequence[str]) -> dict[str, str]:
    """Values of environment variables of this process, by name.

    Raises:
      UsageError: a name is invalid, or a variable is not set, or has several lines.
    """
    taken = {}
    for name in names:
        example = "WANDB_API_KEY, the name of a variable"
        check_word(name, "--env", r"[A-Za-z_][A-Za-z0-9_]*", example)
        value = os.environ.get(name)
        if value is None or "\n" in value:
            raise UsageError(
                f"--env {name}: that variable must be set here, to one line, for the run to get it."
            )
        taken[name] = value
    return taken


# The user's own programs, and what the user sees.

_INSTALL = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then "
    "`gcloud auth login` and `gcloud config set project PROJECT`",
    "kubectl": "install it (`gcloud components install kubectl gke-gcloud-auth-plugin`), then "
    "`gcloud container clusters get-credentials CLUSTER`",
    "sbatch": "run this on a login node of a SLURM cluster",
}


def require_program(program: str) -> None:
    """Check that a program is on PATH.

    Raises:
      FileNotFoundError: the program is not; the message says how to install it.
    """
    if shutil.which(program) is None:
        raise FileNotFoundError(f"there is no `{program}` on PATH: {_INSTALL[program]}.")


def run_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without standard input."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def failure_message(done: subprocess.CompletedProcess[str]) -> str:
    """One line: a program's standard error from `ERROR` on, its last lines, or the exit code."""
    if "attribute [project]" in done.stderr:
        return "gcloud knows no project: give --project ID, or run `gcloud config set project ID`"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "ERROR" in line), max(len(lines) - 3, 0))
    return " ".join(lines[first : first + 3]) or f"exit code {done.returncode}"


def run_or_fail(command: Sequence[str]) -> str:
    """Run a command and return its standard output.

    Raises:
      ValueError: the command failed; the message has its standard error.
    """
    done = run_program(command)
    if done.returncode != 0:
        raise ValueError(f"`{' '.join(command[:4])} ...` failed: {failure_message(done)}")
    return done.stdout


def log(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def print_stderr(text: str) -> None:
    """Print a line to standard error, as the standard output of a dry run is YAML or bash."""
    print(text, file=sys.stderr, flush=True)


def print_size(name: str, hosts: int, chips: int, kind: str, price: float | None) -> None:
    """Print the number of hosts and chips of a run, and with a price the cost an hour."""
    cost = "" if price is None else f", {price * chips:,.2f} an hour"
    plural = "s" if hosts > 1 else ""
    print_stderr(f"{name}: {hosts} host{plural}, {chips} x {kind}{cost}")
