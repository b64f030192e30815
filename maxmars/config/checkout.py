"""Where the code that runs here comes from: its commit, and the wheel that it was installed from,
such as the one that `maxmars launch` makes and sends."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

COMMIT = "launch-commit.txt"
"""In the .dist-info of a wheel that `maxmars launch` made: the commit of its code."""


def git_commit(root: Path) -> str | None:
    """Commit of the code in `root`, `-dirty` if tracked files of a checkout have changed; None if
    neither git nor what was installed there tells it."""
    if not (root / ".git").exists():
        commit, origin = _installed(root)
        return commit or origin.get("vcs_info", {}).get("commit_id")
    describe = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(
            ["git", "-c", "safe.directory=*", *describe],
            cwd=root,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def wheel_sha256(root: Path) -> str | None:
    """SHA-256, in hex, of the wheel that was installed into `root` from a file; None if none was,
    or not by pip, which notes it (before 23.1 only if the URL said it)."""
    _, origin = _installed(root)
    kind, _, digest = origin.get("archive_info", {}).get("hash", "").partition("=")
    return digest if kind == "sha256" else None


def _installed(root: Path) -> tuple[str | None, dict[str, Any]]:
    """`COMMIT`, and where the maxmars that is installed in `root` came from (PEP 610)."""
    for package in importlib.metadata.distributions(name="maxmars", path=[str(root)]):
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        return (package.read_text(COMMIT) or "").strip() or None, origin
    return None, {}
