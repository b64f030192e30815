"""A run to start elsewhere, for all three platforms.

First `RunOptions`, `Job` and `pack`: this maxmars goes along as a wheel, with the files that the
run names. Then checks of words that go into the command lines of other programs, and calls of the
user's own `gcloud`, `kubectl` or `sbatch`.
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
"""File in the archive with the versions of the packages that are installed here."""
STARTS_AGAIN = """\
# Whether a run that ended with this code is started again: 75 is saved, to go on; from 128 on, it
# was ended by a signal. Any other error would come back, such as 78, of one process among several.
starts_again() {
  if (($1 == 134)); then
    echo "maxmars: exit code 134: JAX aborted, as a process was missing or no longer answered"
  fi
  (($1 == 75 || $1 >= 128))
}
"""
"""The rule of restarts, in bash. A run that gets no further ends them itself, see `train`."""

SETUP = "launch-setup.sh"
"""File in the archive, of the user's script that runs on each host before the run."""
PROLOG = "launch-prolog.sh"
"""Another, which SLURM's batch script sources."""

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_CHOSEN_FILES = re.compile(r"(?<==)[^,:]+\.py(?=:)")  # of NAME=FILE.py:FUNCTION among the choices
_MAX_BYTES = 50_000_000


@dataclass(frozen=True, kw_only=True)
class RunOptions(CheckedConfig):
    """Options of `maxmars launch PLATFORM CONFIG` on every platform."""

    config: Annotated[str, Positional, arg(metavar="CONFIG")]
    """A config file with its choices, as for `maxmars train`."""
    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, and of the machines and files that are created for it."""
    workdir: Annotated[str, arg(metavar="DIR")]
    """Directory of the run's metrics and checkpoints, which every host must reach by this path. It
    is in a bucket (gs://), or on a shared file system, mounted by --setup or --claim for example.
    """
    env: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Variables of your environment that the run gets, such as WANDB_API_KEY. Their values appear
    in no command and no log."""
    setup: Annotated[Path | None, arg(metavar="FILE.sh")] = None
    """A bash script to run on each host before, for example to mount a bucket with the data."""
    include: Annotated[tuple[str, ...], arg(metavar="FILE ...")] = ()
    """Files and folders of the current folder that go along, besides CONFIG, the files of your own
    that it names, and what these import from their folders."""
    max_restarts: NotNegative[int] = 10_000
    """How often the run may be started again, mostly after preemptions. Ten starts in a row that
    save fewer than ten steps each end it earlier."""
    price: Annotated[Positive[float] | None, arg(metavar="MONEY")] = None
    """Price of one chip or GPU for an hour, in any currency: what the machines cost an hour is then
    said before they are asked for."""
    dry_run: bool = False
    """Print the script or the JobSet alone, without what goes along, and run nothing."""

    def shared_workdir(self) -> str:
        """The working directory, which means the same on every host.

        Raises:
          UsageError: it is neither an absolute path nor in a bucket.
        """
        example = "/mnt/runs/run1, a path that every host reaches, or gs://bucket/run1"
        return check_word(self.workdir, "--workdir", r"(gs://[^/\s]+)?/[^\s\x00-\x1f]*", example)

    @property
    def scripts(self) -> dict[str, Path]:
        """The user's scripts that go along, by their names in the archive."""
        return {} if self.setup is None else {SETUP: self.setup}


@dataclass(frozen=True)
class PackedCode:
    """What travels: maxmars as a wheel, and files of the folder in which the user is."""

    contents: Mapping[str, bytes] = field(repr=False)
    """Of the files, by their paths relative to the folder, none of which leads out of it; with the
    wheel, `wheel.NAME`."""
    config: str
    """The name of a config of maxmars, or the path of the user's relative to the folder."""
    choices: str
    """Those of CONFIG, with the user's files relative to the folder; "" if it has none."""

    def config_in(self, directory: Path) -> str:
        """CONFIG with the user's files in the directory where they were unpacked."""
        config = str(directory / self.config) if self.config.endswith(".py") else self.config
        choices = _CHOSEN_FILES.sub(lambda match: str(directory / match[0]), self.choices)
        return f"{config}:{choices}" if choices else config

    def has(self, path: str) -> bool:
        """Whether a relative path, from the top, is that of a file or a folder in the archive."""
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
        """Write the files into a new folder, as they are in the archive."""
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(_mode(name))

    @property
    def digest(self) -> str:
        """Tells this archive from others."""
        return hashlib.sha256(self.archive).hexdigest()[:16]

    @property
    def wheel_sha256(self) -> str:
        """SHA-256 of the wheel, in hex."""
        return hashlib.sha256(self.contents[wheel.NAME]).hexdigest()

    @property
    def size(self) -> str:
        """What it is, and its size, for the user."""
        maxmars_is = f"{wheel.NAME} (SHA-256 {self.wheel_sha256[:16]})"
        others = len(self.contents) - 1
        return f"{maxmars_is} and {others} other files, {len(self.archive) / 1000:.0f} kB"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run to start."""

    name: str
    code: PackedCode
    workdir: str
    train_arguments: tuple[str, ...]
    """The words after CONFIG and --workdir on the command line of `maxmars train`."""
    environment: Mapping[str, str] = field(repr=False)
    """Variables that the run gets. Their values are secrets: they go into no command and no log."""

    def python_arguments(self, directory: Path = Path()) -> list[str]:
        """The words after `python` on each process's command line.

        Args:
          directory: where the archive is unpacked, relative to where the process starts.
        """
        config = self.code.config_in(directory)
        # -P: a file in the folder where the process starts hides no module.
        train = ["-P", "-m", "maxmars", "train", config, "--workdir", self.workdir]
        return [*train, *self.train_arguments]


def pack(
    config: str,
    *,
    sources: Sequence[Source] = (),
    scripts: Mapping[str, Path] = MappingProxyType({}),
    include: Sequence[str] = (),
) -> PackedCode:
    """Pack this maxmars as a wheel, and files of the current folder, where a run starts elsewhere.

    Args:
      config: CONFIG of `maxmars train`; its file, unless maxmars has it, goes along with what it
        imports from its folder.
      sources: the functions of the user's own that the config names, whose files do as well.
      scripts: bash scripts, by their names in the archive.
      include: further files, and folders with all in them that is not hidden.

    Raises:
      UsageError: a file lies outside of the folder, or imports another one that does not go along.
      ValueError: it is too much.
      FileNotFoundError: there is no such file.
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
    # Packages elsewhere get the versions that are installed, and so were tried, here.
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    lines = [f"{package}=={v}\n" for package, v in versions.items() if "+" not in v]
    contents[CONSTRAINTS] = "".join(lines).encode()
    contents |= {name: script.read_bytes() for name, script in scripts.items()}
    choices = _CHOSEN_FILES.sub(lambda match: _in_folder(Path(match[0])), choices)
    return PackedCode(contents=contents, config=name, choices=choices)


def _in_folder(path: Path) -> str:
    """A path relative to the current folder.

    Raises:
      UsageError: it lies elsewhere.
    """
    relative = os.path.relpath(path)
    if relative.startswith(".."):  # or a link leads to the folder
        relative = os.path.relpath(path.parent.resolve() / path.name)
    if relative.startswith(".."):
        raise UsageError(
            f"{path} lies outside of {Path.cwd()}, whose files go along to other machines: copy it "
            "there, or give the command in a folder that has all files of the run."
        )
    return relative


def _files_in(path: Path) -> list[Path]:
    """The file, or all in a folder that is not hidden."""
    if not path.is_dir():
        return [path]
    hidden = re.compile(r"(^|/)(\.|__pycache__)")
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [file for file in files if not hidden.search(str(file.relative_to(path)))]


def _with_imports(name: str, files: Files, others: Files) -> dict[str, bytes]:
    """A file and what it imports (`files_of`), by their paths relative to the current folder.

    Raises:
      UsageError: one imports a module of the current folder that is neither its own nor one of
        `others`, which `python -m maxmars` finds here, and hosts would not.
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
    """The value, if all of it matches the pattern.

    Raises:
      UsageError: it does not; names `what` and the example.
    """
    if re.fullmatch(pattern, value) is None:
        raise UsageError(f"{what}={value!r} does not look like {example}.")
    return value


def check_name(name: str) -> None:
    """The name of a run, which becomes that of machines: lower-case letters, digits and hyphens."""
    example = "run-1: a letter, then letters, digits and hyphens, all lower case, at most 40"
    check_word(name, "--name", r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", example)


def take_environment(names: Sequence[str]) -> dict[str, str]:
    """Values of these variables here.

    Raises:
      UsageError: a name that cannot be one, a variable that is not set, or one of several lines.
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


def require(program: str) -> None:
    """Check that a program is on PATH.

    Raises:
      FileNotFoundError: it is not; says how to install it.
    """
    if shutil.which(program) is None:
        raise FileNotFoundError(f"there is no `{program}` on PATH: {_INSTALL[program]}.")


def run_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without standard input."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def problem(done: subprocess.CompletedProcess[str]) -> str:
    """Why a program failed, in one line: its error from `ERROR` on, the last lines, or its code."""
    if "attribute [project]" in done.stderr:
        return "gcloud knows no project: give --project ID, or run `gcloud config set project ID`"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "ERROR" in line), max(len(lines) - 3, 0))
    return " ".join(lines[first : first + 3]) or f"exit code {done.returncode}"


def run_or_fail(command: Sequence[str]) -> str:
    """The standard output of a command.

    Raises:
      ValueError: the command failed; says what it wrote to standard error.
    """
    done = run_program(command)
    if done.returncode != 0:
        raise ValueError(f"`{' '.join(command[:4])} ...` failed: {problem(done)}")
    return done.stdout


def log(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def remark(text: str) -> None:
    """Print a line that is no part of what a dry run prints, which is YAML or bash."""
    print(text, file=sys.stderr, flush=True)


def say_size(name: str, hosts: int, chips: int, kind: str, price: float | None) -> None:
    """Say what a run is about to ask for, and with a price of a chip and hour what it costs."""
    cost = "" if price is None else f", {price * chips:,.2f} an hour"
    plural = "s" if hosts > 1 else ""
    remark(f"{name}: {hosts} host{plural}, {chips} x {kind}{cost}")
