"""The user's checkout in one file: what runs elsewhere is what lies here, configs included."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import maxmars

CONSTRAINTS = "launch-constraints.txt"
"""File in the archive with the versions of the packages that are installed here."""

_SETUP = "launch-setup.sh"
_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_LEFT_OUT = {"runs", "data", "__pycache__", "node_modules"}  # where git does not say
_MAX_BYTES = 50_000_000


@dataclass(frozen=True)
class Source:
    """A packed checkout."""

    archive: bytes
    """A .tar.gz; the same files give the same bytes."""
    config: str
    """CONFIG of `maxmars train`, relative to the top of the archive."""
    setup: str | None
    """The user's script to run before, relative to the top."""
    num_files: int

    @property
    def digest(self) -> str:
        """What tells this archive from others."""
        return hashlib.sha256(self.archive).hexdigest()[:16]


def pack(config: str, *, setup: Path | None = None, root: Path | None = None) -> Source:
    """Pack a checkout: the files that git tracks or would, at their present state.

    Args:
      config: CONFIG, `path/to/file.py[:choices]`; a file outside the checkout is packed as well.
      setup: a bash script to pack.
      root: the checkout; by default that of the maxmars which is running.

    Raises:
      ValueError: maxmars does not run from a checkout, or it is too large.
    """
    root = Path(maxmars.__file__).resolve().parents[1] if root is None else root.resolve()
    if not (root / "pyproject.toml").is_file():
        raise ValueError(
            f"{root} is no checkout of maxmars (there is no pyproject.toml), and only a checkout "
            "can be packed for other machines: install maxmars by `pip install -e CHECKOUT`."
        )
    contents = {str(path): (root / path).read_bytes() for path in _files(root)}
    path_part, colon, choices = config.partition(".py")
    path = Path(f"{path_part}{colon}").resolve()
    inside = path.is_relative_to(root) and str(path.relative_to(root)) in contents
    name = str(path.relative_to(root)) if inside else f"launch-config/{path.name}"
    contents[name] = path.read_bytes()
    contents[CONSTRAINTS] = _constraints().encode()
    if setup is not None:
        contents[_SETUP] = setup.read_bytes()
    largest = max(contents, key=lambda name: len(contents[name]))
    if sum(map(len, contents.values())) > _MAX_BYTES:
        raise ValueError(
            f"the checkout {root} has over {_MAX_BYTES // 1_000_000} MB of files that git does not "
            f"ignore, the largest {largest}; list what the run does not need in .gitignore."
        )
    return Source(
        archive=_archive(contents),
        config=f"{name}{choices}",
        setup=None if setup is None else _SETUP,
        num_files=len(contents),
    )


def _files(root: Path) -> list[Path]:
    """Relative paths of the files to pack."""
    command = ["git", "-C", str(root), "-c", "safe.directory=*", "ls-files", "-z"]
    if (root / ".git").exists():
        listed = subprocess.run(
            [*command, "--cached", "--others", "--exclude-standard"], capture_output=True, text=True
        )
        if listed.returncode == 0:
            paths = map(Path, filter(None, listed.stdout.split("\0")))
            return sorted(path for path in paths if (root / path).is_file())
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path for path in found if not _is_left_out(path))


def _is_left_out(path: Path) -> bool:
    return any(part.startswith(".") or part in _LEFT_OUT for part in path.parts)


def _constraints() -> str:
    """Packages elsewhere get the versions that are installed, and so were tried, here."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return "".join(f"{name}=={v}\n" for name, v in versions.items() if "+" not in v)


def _archive(contents: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(contents[name]), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(contents[name]))
    return file.getvalue()
