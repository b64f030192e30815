"""The `maxmars` command: picks a subcommand, runs it, and turns user errors into one line.

A command is a module of this package with `run(argv: list[str]) -> int` and one row in `COMMANDS`.
Its module is imported only when it runs, so `maxmars --help` loads neither JAX nor tyro.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

import maxmars
from maxmars.cpu_settings import restart_with_huge_pages

_PACKAGE = Path(maxmars.__file__).resolve().parent
_USER_ERRORS = (ValueError, OSError, ImportError)


class Command(NamedTuple):
    """One row of the command table."""

    module: str
    """Module with `run(argv) -> int`."""
    help: str
    """What it does, in one line."""


COMMANDS = {
    "train": Command("maxmars.cli.train", "train a model as a config file says, or continue"),
    "eval": Command("maxmars.cli.eval", "score a trained model, or compare two"),
    "generate": Command("maxmars.cli.generate", "continue a prompt with a trained model"),
    "export": Command("maxmars.cli.export", "write a model as a Hugging Face directory"),
    "import": Command("maxmars.cli.import_", "make a Hugging Face model a checkpoint"),
    "verify-resume": Command(
        "maxmars.cli.verify_resume", "prove that a killed run continues bit by bit"
    ),
    "compare": Command("maxmars.cli.compare", "tune optimizers and compare them, fairly"),
    "report": Command("maxmars.cli.report", "draw the curves of runs and comparisons"),
    "plan": Command("maxmars.cli.plan", "memory, traffic and time of a run, before you pay"),
    "launch": Command("maxmars.cli.launch", "train on TPU VMs, a GKE cluster or SLURM"),
    "data": Command("maxmars.cli.data", "prepare text for training"),
}


def main(argv: list[str] | None = None) -> None:
    """Run `maxmars` with these arguments (default: those of the process).

    Raises:
      SystemExit: 0 or no exit after success, 1 after an error of the run, 2 after wrong usage, 75
        where `train` was asked to stop and has saved, hangs or lost a process of the run, 130 after
        Ctrl-C elsewhere. Errors that are not the user's pass through with their traceback.
    """
    if argv is None:
        argv = sys.argv[1:]
        if argv[:1] in (["train"], ["compare"]):
            restart_with_huge_pages()
    try:
        try:
            code = _dispatch(argv)
        finally:
            sys.stdout.flush()  # while a closed pipe can still be noticed
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # `maxmars ... | head` closed our output; keep the interpreter's last flush quiet as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except _USER_ERRORS as error:
        if os.environ.get("MAXMARS_TRACEBACK") == "1" or not _is_users(error):
            raise
        _print_error(_message(error))
        code = _exit_code(error)
    if code:
        sys.exit(code)


def _dispatch(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name].module).run(rest)
    if name in ("-h", "--help", "help"):
        print(_help_text())
        return 0
    if name == "--version":
        print(f"maxmars {maxmars.__version__}")
        return 0
    if name:
        _print_error(_unknown_command(name))
    else:
        print(_help_text(), file=sys.stderr)
    return 2


def _is_users(error: BaseException) -> bool:
    """Whether an error is one that maxmars reports on purpose, rather than a bug of ours."""
    if isinstance(error, OSError) and error.errno is not None:
        return True  # what the machine refuses is nobody's bug, whichever library ran into it
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "maxmars":
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and _PACKAGE in Path(frame.tb_frame.f_code.co_filename).parents


def _exit_code(error: BaseException) -> int:
    from maxmars.cli.config_file import UsageError

    return 2 if isinstance(error, UsageError) else 1


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__


def _print_error(message: str) -> None:
    print(f"maxmars: error: {message}", file=sys.stderr)


def _unknown_command(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return f"there is no command `{name}`.{hint} The commands are {', '.join(COMMANDS)}."


def _help_text() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"""\
usage: maxmars COMMAND ...

Pretrain GPT-2 with variance-reduced optimizers (MARS), on one CPU or a pod.

commands:
{rows}

For example, in a checkout of the repository:
  maxmars train configs/quickstart.py
  maxmars generate runs/quickstart --prompt "def "

`maxmars COMMAND --help` explains a command, `maxmars --version` tells the version.
With MAXMARS_TRACEBACK=1 in the environment, errors show where they were raised."""
