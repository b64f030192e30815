"""What to run elsewhere: a config, where its results go, and with which environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from maxmars.launch.source import Source
from maxmars.launch.tools import check_word

REDACTED = "<redacted>"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run to start."""

    name: str
    source: Source
    workdir: str
    train_arguments: tuple[str, ...] = ()
    """What follows CONFIG and --workdir on the command line of `maxmars train`."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that the run gets. Their values are secrets: they go into no command and no log."""

    def train_command(self, python: str, *, config: str | None = None) -> list[str]:
        """The command that each process runs, at the top of the unpacked source."""
        config = self.source.config if config is None else config
        arguments = [config, "--workdir", self.workdir, *self.train_arguments]
        return [python, "-m", "maxmars", "train", *arguments]

    def environment_file(self, *, redacted: bool) -> str:
        """Lines that bash can read, with the values or without."""
        shown = {name: REDACTED if redacted else v for name, v in self.environment.items()}
        return "".join(f"{name}={shlex.quote(value)}\n" for name, value in shown.items())


def take_environment(names: Sequence[str]) -> dict[str, str]:
    """Values of these variables here.

    Raises:
      ValueError: a name that cannot be one, a variable that is not set, or one of several lines.
    """
    taken = {}
    for name in names:
        check_word(
            name, "--env", r"[A-Za-z_][A-Za-z0-9_]*", "WANDB_API_KEY, the name of a variable"
        )
        value = os.environ.get(name)
        if value is None or "\n" in value:
            raise ValueError(
                f"--env {name}: that variable must be set here, to one line, for the run to get it."
            )
        taken[name] = value
    return taken


def check_shared_workdir(workdir: str) -> str:
    """A working directory that means the same on every host.

    Raises:
      ValueError: it is neither an absolute path nor in a bucket.
    """
    example = "/mnt/runs/run1, a path that every host reaches, or gs://bucket/run1"
    return check_word(workdir, "--workdir", r"(gs://[^/\s]+)?/[^\s\x00-\x1f]*", example)
