"""The programs that launching calls, and words that may go into their command lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_INSTALL = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then "
    "`gcloud auth login` and `gcloud config set project PROJECT`",
    "kubectl": "install it (`gcloud components install kubectl gke-gcloud-auth-plugin`), then "
    "`gcloud container clusters get-credentials CLUSTER`",
    "sbatch": "run this on a login node of a SLURM cluster",
}


@dataclass(frozen=True)
class Finished:
    """What a program that has ended said."""

    code: int
    output: str
    errors: str

    @property
    def problem(self) -> str:
        """What it says is wrong, as one line: from `ERROR` on, or the last lines, or its code."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "ERROR" in line), max(len(lines) - 3, 0))
        return " ".join(lines[first : first + 3]) or f"exit code {self.code}"


def require(program: str) -> None:
    """Check that a program is on PATH.

    Raises:
      FileNotFoundError: it is not; says how to install it.
    """
    if shutil.which(program) is None:
        raise FileNotFoundError(f"there is no `{program}` on PATH: {_INSTALL[program]}.")


def run(command: Sequence[str], *, text: str | None = None) -> Finished:
    """Run a command to its end, with `text` as its standard input."""
    done = subprocess.run(command, input=text or "", capture_output=True, text=True)
    return Finished(done.returncode, done.stdout, done.stderr)


def run_or_fail(command: Sequence[str], *, text: str | None = None) -> str:
    """What a command writes to standard output.

    Raises:
      ValueError: it failed; says what it wrote to standard error.
    """
    done = run(command, text=text)
    if done.code != 0:
        raise ValueError(f"`{' '.join(command[:4])} ...` failed: {done.problem}")
    return done.output


def check_word(value: str, what: str, pattern: str, example: str) -> str:
    """The value, if all of it matches.

    Raises:
      ValueError: it does not; names `what` and the example.
    """
    if re.fullmatch(pattern, value) is None:
        raise ValueError(f"{what}={value!r} does not look like {example}.")
    return value


def check_name(name: str, longest: int) -> str:
    """The name of a run, which becomes that of machines: lower-case letters, digits and hyphens."""
    pattern = rf"[a-z]([-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?"
    return check_word(
        name,
        "--name",
        pattern,
        f"run-1: a letter, then letters, digits and hyphens, all lower case, at most {longest}",
    )
