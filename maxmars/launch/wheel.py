"""The running maxmars as a wheel, for pip on other machines.

The files are those of a checkout as they are now, or of an installation. A wheel is a zip file with
METADATA and RECORD, so no build backend runs. Records name the code by the wheel's SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from pathlib import Path

import maxmars
from maxmars.config.checkout import COMMIT, git_commit
from maxmars.config.load import named_configs

NAME = f"maxmars-{maxmars.__version__}-py3-none-any.whl"
_INFO = f"maxmars-{maxmars.__version__}.dist-info"
_WHEEL = "Wheel-Version: 1.0\nGenerator: maxmars\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_COMMANDS = "[console_scripts]\nmaxmars = maxmars.cli:main\n"


def make_wheel() -> bytes:
    """The content of the wheel `NAME`. The same files give the same bytes: they are sorted, without
    dates, and uncompressed, as the archive around the wheel is compressed."""
    package = Path(maxmars.__file__).resolve().parent
    root = package.parent
    code = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in code}
    configs = named_configs().values()
    files |= {f"maxmars/config/files/{path.name}": path.read_bytes() for path in configs}
    texts = {"METADATA": _metadata(root), "WHEEL": _WHEEL, "entry_points.txt": _COMMANDS}
    if (commit := git_commit(root)) is not None:
        texts[COMMIT] = f"{commit}\n"
    files |= {f"{_INFO}/{name}": text.encode() for name, text in texts.items()}
    record = [f"{name},{_digest(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{_INFO}/RECORD"] = f"{''.join(sorted(record))}{_INFO}/RECORD,,\n".encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in sorted(files.items()):
            member = zipfile.ZipInfo(name)  # dated 1980-01-01
            member.external_attr = 0o644 << 16  # Unix's mode is in the upper half
            archive.writestr(member, content)
    return wheel.getvalue()


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"


def _metadata(root: Path) -> str:
    """METADATA of the wheel, with the packages that maxmars needs."""
    if (root / "maxmars/config/files").is_dir():  # an installation, see `named_configs`
        return (root / _INFO / "METADATA").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = ["Metadata-Version: 2.1", "Name: maxmars", f"Version: {maxmars.__version__}"]
    lines.append(f"Requires-Python: {project['requires-python']}")
    lines += [f"Requires-Dist: {package}" for package in project["dependencies"]]
    for extra, packages in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {package}; extra == '{extra}'" for package in packages]
    return "\n".join([*lines, ""])
