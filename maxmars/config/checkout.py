"""Origin of the running code, for records: its commit, and the wheel that it was installed from.

A checkout asks git. An installation has the file `COMMIT`, if `maxmars launch` made its wheel, and
the `direct_url.json` that pip writes for an address or a file (PEP 610).
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

COMMIT = "launch-commit.txt"
"""File in the .dist-info of a wheel that `maxmars launch` made: the commit of the code."""


def git_commit(root: Path) -> str | None:
    """Commit of the code in `root`, the top of a checkout or a `site-packages`, with `-dirty` if
    tracked files have changed; None if unknown."""
    if not (root / ".git").exists():  # a folder, or in a worktree a file
        commit, origin = _installed(root)
        return commit or origin.get("vcs_info", {}).get("commit_id")
    # Without --exclude, git would name the commit by the nearest tag.
    describe = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(
            ["git", "-c", "safe.directory=*", *describe],  # also another user's, in a container
            cwd=root,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def wheel_sha256(root: Path) -> str | None:
    """SHA-256, in hex, of the wheel that pip installed into `root` from a file or an address; None
    for any other installation, and where pip before 23.1 did not record it."""
    _, origin = _installed(root)
    kind, _, digest = origin.get("archive_info", {}).get("hash", "").partition("=")
    return digest if kind == "sha256" else None


def _installed(root: Path) -> tuple[str | None, dict[str, Any]]:
    """Content of `COMMIT` and of `direct_url.json` of the maxmars installed in `root`; (None, {})
    where there is none."""
    # Of `root` alone, as Python's path may have another maxmars too.
    for package in importlib.metadata.distributions(name="maxmars", path=[str(root)]):
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        return (package.read_text(COMMIT) or "").strip() or None, origin
    return None, {}
