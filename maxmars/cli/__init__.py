"""The `maxmars` command: finds a subcommand, runs it, and turns user errors into one line.

A command is a function of a module here, from the arguments to the exit code, and one row in
`COMMANDS`. Its module is imported only when the command runs, so that `maxmars --help` loads
neither JAX nor tyro. Errors of input, files and network, whoever raised them, are printed here and
nowhere else; all others are bugs and keep their traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import maxmars
from maxmars.cli.memory import keep_freed_memory
from maxmars.cli.output import standard_streams
from maxmars.distributed.exits import OWN_ERROR, is_one_of_several

_PACKAGE = Path(maxmars.__file__).resolve().parent


class Command(NamedTuple):
    """A subcommand: its module here, the function in it, and its line in `maxmars --help`."""

    module: str
    function: str
    help: str


COMMANDS = {
    "train": Command("train", "run", "train a model as a config file says, or continue"),
    "rewind": Command("rewind", "run", "take a run back to a checkpoint, or skip examples"),
    "eval": Command("eval", "run", "score a trained model, or compare two"),
    "generate": Command("generate", "run", "continue a prompt with a trained model"),
    "export": Command("export", "run", "write a model as a Hugging Face directory"),
    "audit": Command("audit", "run", "check states and data of a run against its journal"),
    "compare": Command("compare", "run", "tune optimizers and compare them, fairly"),
    "report": Command("compare", "run_report", "draw the curves of runs and comparisons"),
    "plan": Command("plan", "run", "estimate memory, traffic and time, before you pay"),
    "launch": Command("launch", "run", "train on TPU VMs, a GKE cluster or SLURM"),
    "data": Command("data", "run", "prepare text for training, and look at the result"),
}


def main(argv: list[str] | None = None) -> None:
    """Run `maxmars` with these arguments (default: those of the process).

    Raises:
      SystemExit: the exit code, unless it is 0: 1 after an error, 2 after wrong usage, 75 where
        `train` or `compare` saved and stopped on request, hung, or lost a process of the run, 78
        after an error of one process among several, 130 after Ctrl-C elsewhere, 141 after a closed
        pipe. Errors of maxmars itself keep their traceback.
    """
    if argv is None:
        argv = sys.argv[1:]
    # Once, as a process may call this function many times.
    if getattr(sys.unraisablehook, "func", None) is not _show_unraisable:
        sys.unraisablehook = functools.partial(_show_unraisable, sys.unraisablehook)
    # A run must not end because nobody reads its output; the metrics are in files.
    with standard_streams(keep_going=argv[:1] == ["train"]):
        code = _run(argv)
    if code:
        sys.exit(code)


def _show_unraisable(show: Callable[..., None], unraisable: sys.UnraisableHookArgs) -> None:
    """Show an error of a thread or a destructor, except those that only follow another error.

    Where an array of a checkpoint cannot be read or written, that error is raised, and TensorStore
    (0.1.86) adds one in its threads for each other array in transfer.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        show(unraisable)


def _run(argv: list[str]) -> int:
    """Run a subcommand; returns the exit code."""
    try:
        try:
            with _printing_warnings():
                return _dispatch(argv)
        finally:
            sys.stdout.flush()  # while a closed pipe can still be noticed
    except KeyboardInterrupt:
        again = "this command does not continue: run again, it starts from the beginning"
        if _continues(argv):
            again = "run the same command again to continue"
        print(f"\ninterrupted; {again}", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:
        from maxmars.config.errors import EXTERNAL_ERRORS, line_in_user_file

        if isinstance(error, SystemExit):
            if line_in_user_file(error) is None:
                raise
            error.add_note("sys.exit ends the command; raise an exception there")
        is_external = isinstance(error, (*EXTERNAL_ERRORS, SystemExit)) or _is_out_of_memory(error)
        if is_external and os.environ.get("MAXMARS_TRACEBACK") != "1":
            code = _report(error)
        elif is_one_of_several():
            traceback.print_exc()
            code = OWN_ERROR
        else:
            raise
        if is_one_of_several():  # Python's exit would wait for the others, and JAX would abort
            os._exit(OWN_ERROR)
        return code


def _continues(argv: list[str]) -> bool:
    """Whether the same command continues after an interruption."""
    if argv[:2] == ["compare", "verify"]:
        return any(word.startswith("--workdir") for word in argv)
    return argv[:1] in (["train"], ["compare"]) or argv[:2] == ["data", "prepare"]


def _dispatch(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in COMMANDS:
        if name != "launch":  # gcloud, kubectl and sbatch would pass JAX_PLATFORMS on to the run
            _stay_on_the_cpu_without_chips()
            keep_freed_memory()
        command = COMMANDS[name]
        try:
            module = importlib.import_module(f"{__name__}.{command.module}")
        except ModuleNotFoundError as error:  # packages of extras are imported later
            _print_error(
                f"there is no package {error.name}, which `maxmars {name}` needs: this maxmars was "
                "installed for maxmars.optim alone. Install it again without --no-deps."
            )
            return 1
        return getattr(module, command.function)(rest)
    if name in ("-h", "--help", "--help-all", "help"):
        print(_help_text())
        return 0
    if name == "--version":
        print(f"maxmars {maxmars.__version__}")
        return 0
    if name:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        known = ", ".join(COMMANDS)
        _print_error(f"there is no command `{name}`.{hint} The commands are {known}.")
    else:
        print(_help_text(), file=sys.stderr)
    return 2


@contextlib.contextmanager
def _printing_warnings() -> Iterator[None]:
    """Print warnings that maxmars logs as `maxmars: warning: ...`, whatever style libraries set."""
    logger, handler = logging.getLogger("maxmars"), logging.StreamHandler()
    orbax = logging.getLogger("absl")
    orbax_level = orbax.level
    orbax.setLevel(logging.CRITICAL)  # Orbax also raises the errors that it logs
    handler.setFormatter(logging.Formatter("maxmars: warning: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        orbax.setLevel(orbax_level)


def _stay_on_the_cpu_without_chips() -> None:
    """Set JAX_PLATFORMS=cpu on a machine with neither a TPU nor a GPU, but with a compiler for one
    (extra `tpu` or `cuda`), as `maxmars plan` needs.

    JAX loads each compiler to look for chips; without chips libtpu (0.0.42) and the CUDA plugin
    (0.10.2) log pages of errors. Where SLURM has allotted GPUs, the user needs these pages.
    """
    if os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        return
    parent = importlib.util.find_spec("jax_plugins")  # find_spec of a child raises without it
    has_cuda = parent is not None and importlib.util.find_spec("jax_plugins.xla_cuda13")
    if has_cuda or importlib.util.find_spec("libtpu"):
        # Vendors of PCI devices: Google and NVIDIA. Containers and WSL may hide the bus, but not
        # the devices in /dev.
        vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
        has_chip = not {"0x1ae0", "0x10de"}.isdisjoint(v.read_text().strip() for v in vendors)
        nodes = ("accel*", "vfio/[0-9]*", "nvidia*", "dxg")
        if not has_chip and not any(node for name in nodes for node in Path("/dev").glob(name)):
            os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _report(error: BaseException) -> int:
    """Print an error as one line; returns the exit code."""
    from maxmars.config.checks import UsageError
    from maxmars.config.errors import in_words, line_in_user_file

    message = in_words(error)
    if _is_out_of_memory(error):
        way_out = "take smaller batches, a smaller model, or more devices"
        # JAX adds a note of several lines about its shortened traceback.
        notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
        message = (
            f"out of memory ({message.splitlines()[0]}): {', '.join(notes or [way_out])}; "
            "`maxmars plan` says what fits."
        )
    elif not (line_in_user_file(error) or _is_raised_here(error)):
        message = f"{message} (MAXMARS_TRACEBACK=1 shows where this was raised)"
    _print_error(message)
    return 2 if isinstance(error, UsageError) else 1


def _is_raised_here(error: BaseException) -> bool:
    """Whether maxmars itself raised an error, or the operating system did, with the file's name."""
    if isinstance(error, OSError) and error.filename:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _PACKAGE in Path(frames[-1].filename).parents


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that this host or, by XLA's message, a device is out of memory."""
    is_xlas = isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")
    return is_xlas or isinstance(error, MemoryError)


def _print_error(message: str) -> None:
    print("maxmars: error: " + "\\n".join(message.splitlines()), file=sys.stderr)


def _help_text() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"""\
usage: maxmars COMMAND ...

Pretrain GPT-2 with variance-reduced optimizers (MARS), on one CPU or a pod.

commands:
{rows}

For example:
  maxmars train quickstart
  maxmars generate runs/quickstart --prompt "def "

`maxmars COMMAND --help` explains a command and the options to know first,
`maxmars COMMAND --help-all` every option; `maxmars --version` prints the version.
With MAXMARS_TRACEBACK=1 in the environment, errors show where they were raised."""
