"""A run to start elsewhere, for all three platforms.

First `RunOptions`, `Job` and `pack`: the checkout goes along as it is here, with its configs. Then
checks of words that go into other programs' command lines, and calls of the user's own `gcloud`,
`kubectl` or `sbatch`.
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
from modulefinder import ModuleFinder
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated

from tyro.conf import Positional, arg

import maxmars
from maxmars.config.checkout import COMMIT, git_commit
from maxmars.config.checks import CheckedConfig, NotNegative, Positive, UsageError
from maxmars.config.errors import about
from maxmars.config.load import find_config
from maxmars.config.own_modules import files_of
from maxmars.config.user_code import Source

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
# Not needed by a run; without them a ConfigMap has room for more. pip reads the topmost README.
_NOT_NEEDED = {"tests", "tools", ".github", ".ci"}
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
    """Files of the checkout, relative to its top, that go along though git does not track them."""
    max_restarts: NotNegative[int] = 10_000
    """How often the run may be started again, mostly after preemptions. Ten starts in a row that
    save fewer than ten steps each end it earlier."""
    price: Annotated[Positive[float] | None, arg(metavar="MONEY")] = None
    """Price of one chip or GPU for an hour, in any currency: what the machines cost an hour is then
    said before they are asked for."""
    dry_run: bool = False
    """Print the script or the JobSet alone, without the checkout, and run nothing."""

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
class PackedCheckout:
    """A packed checkout."""

    contents: Mapping[str, bytes] = field(repr=False)
    """Of the files, by their paths relative to the top, none of which leads out of it."""
    config: str
    """CONFIG of `maxmars train`, relative to the top."""

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
    def size(self) -> str:
        """Number of files and size, for the user."""
        return f"{len(self.contents)} files of the checkout, {len(self.archive) / 1000:.0f} kB"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run to start."""

    name: str
    checkout: PackedCheckout
    workdir: str
    train_arguments: tuple[str, ...]
    """The words after CONFIG and --workdir on the command line of `maxmars train`."""
    environment: Mapping[str, str] = field(repr=False)
    """Variables that the run gets. Their values are secrets: they go into no command and no log."""

    def python_arguments(self, directory: Path | None = None) -> list[str]:
        """The words after `python` on each process's command line.

        Args:
          directory: where the archive is unpacked; None if the process starts there.
        """
        config = (
            self.checkout.config if directory is None else f"{directory}/{self.checkout.config}"
        )
        return ["-m", "maxmars", "train", config, "--workdir", self.workdir, *self.train_arguments]


def pack(
    config: str,
    *,
    sources: Sequence[Source] = (),
    scripts: Mapping[str, Path] = MappingProxyType({}),
    include: Sequence[str] = (),
    root: Path | None = None,
) -> PackedCheckout:
    """Pack a checkout: the files that git tracks, as they are now, and its commit.

    Args:
      config: CONFIG of `maxmars train`; a file outside the checkout is packed as well.
      sources: the functions of the user's own that the config names; their files
        keep their places beside the config file.
      scripts: bash scripts, by their names in the archive.
      include: files, relative to `root`, to pack in any case.
      root: the checkout; by default that of the maxmars which is running.

    Raises:
      UsageError: the run imports a file that does not go along.
      ValueError: maxmars does not run from a checkout, or it is too large; or the file of a
        function has no place in the archive.
      FileNotFoundError: there is no such file.
    """
    root = Path(maxmars.__file__).resolve().parents[1] if root is None else root.resolve()
    if not (root / "pyproject.toml").is_file():
        raise ValueError(
            f"{root} is no checkout of maxmars (there is no pyproject.toml), and only a checkout "
            "can be packed for other machines: install maxmars by `pip install -e CHECKOUT`."
        )
    require("git")
    with about("only a checkout that git knows can be packed for other machines"):
        files = _tracked(root)
    include = [os.path.normpath(file) for file in include]
    for file in include:
        if not (root / file).is_file() or file.startswith(("..", "/")):
            raise FileNotFoundError(f"--include {file}: there is no such file in {root}.")
    contents = {name: (root / name).read_bytes() for name in [*files, *include]}
    config_file, choices = find_config(config)
    path = config_file.resolve()
    inside = path.is_relative_to(root)
    name = str(path.relative_to(root)) if inside else f"launch-config/{path.name}"
    own: set[Path] = set()

    def add(file: Path, files: Mapping[str, bytes], place: Path) -> None:
        own.update((file.parent / relative).resolve() for relative in files)
        contents.update({str(place / relative): text for relative, text in files.items()})

    add(path, files_of(path), Path(name).parent)
    for source in sources:
        folder = Path(name).parent
        packed = os.path.normpath(folder / os.path.relpath(source.file, config_file.parent))
        if packed.startswith("..") or not (inside or Path(packed).is_relative_to(folder)):
            raise ValueError(
                f"source={source!r} lies outside of what goes along to other machines; move it "
                f"into the folder of {config_file}."
            )
        with about(f"source={source!r}"):
            add(Path(source.file), source.files(), Path(packed).parent)
    scripts_of_run = [path, *(Path(source.file).resolve() for source in sources)]
    packed_files = {*own, *((root / name).resolve() for name in contents)}
    _check_imports(root, scripts_of_run, packed_files)
    if (commit := git_commit(root)) is not None:
        contents[COMMIT] = f"{commit}\n".encode()
    # Packages elsewhere get the versions that are installed, and so were tried, here.
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    lines = [f"{package}=={v}\n" for package, v in versions.items() if "+" not in v]
    contents[CONSTRAINTS] = "".join(lines).encode()
    contents |= {name: script.read_bytes() for name, script in scripts.items()}
    if sum(map(len, contents.values())) > _MAX_BYTES:
        largest = max(contents, key=lambda name: len(contents[name]))
        raise ValueError(
            f"the checkout {root} has over {_MAX_BYTES // 1_000_000} MB of files that git "
            f"tracks, the largest {largest}; `git rm --cached` what the run does not need."
        )
    return PackedCheckout(
        contents=contents,
        config=f"{name}:{choices}" if choices else name,
    )


def _is_needed(path: Path) -> bool:
    nested_readme = path.name == "README.md" and len(path.parts) > 1
    return path.parts[0] not in _NOT_NEEDED and not nested_readme


def _tracked(root: Path) -> list[str]:
    """Relative paths of the files that git tracks and the run may need."""
    command = ["git", "-C", str(root), "-c", "safe.directory=*", "ls-files", "-z"]
    names = filter(None, run_or_fail(command).split("\0"))
    return [name for name in names if (root / name).is_file() and _is_needed(Path(name))]


def _check_imports(root: Path, scripts: Sequence[Path], packed: set[Path]) -> None:
    """Check that the modules of `root`, and of the scripts' folders, that a run imports go along.

    Args:
      root: the checkout.
      scripts: the config file and the files of its functions.
      packed: the files that go along.

    Raises:
      UsageError: names the files that do not.
      ValueError: a script is no Python.
    """
    folders = dict.fromkeys([root, *(script.parent for script in scripts)])
    finder = ModuleFinder(path=list(map(str, folders)))
    package = root / "maxmars"
    if not packed.issuperset(package.rglob("*.py")):  # to follow its imports takes half a second
        scripts = [package / "cli" / "train.py", *scripts]
    for script in scripts:
        try:
            finder.run_script(str(script))
        except SyntaxError as error:
            raise ValueError(f"{script}:{error.lineno}: {error.msg}") from error
    files = [vars(module)["__file__"] for module in finder.modules.values()]
    found = {Path(file).resolve() for file in files if file}
    missing = [
        str(file.relative_to(root) if file.is_relative_to(root) else file)
        for file in sorted(found - packed)
    ]
    if missing:
        raise UsageError(
            f"the run imports {', '.join(missing)}, which git does not track in {root}, and hosts "
            "would lack: have it there, and `git add` it or name it by --include FILE."
        )


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
    "git": "install git, which says which files of a checkout a run needs",
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
