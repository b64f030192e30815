"""Which commit the code is that runs here, also where `maxmars launch` has packed and sent it."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMIT = "launch-commit.txt"
"""At the top of a packed checkout, which has no .git: the commit of the checkout."""


def git_commit(root: Path) -> str | None:
    """Commit of the checkout `root`, `-dirty` if tracked files have changed; None if it is none."""
    if not (root / ".git").exists():
        try:
            return (root / COMMIT).read_text().strip() or None
        except (OSError, ValueError):
            return None
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
