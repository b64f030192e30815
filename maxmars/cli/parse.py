"""The command line of a command, parsed by tyro into a dataclass.

A command that takes a CONFIG inherits `ConfigArguments`, so that every field of the config is an
option too. tyro refuses an invalid line in a box, with exit code 2. Added here are hints: for
options of other programs (`FOREIGN_OPTIONS`), and for choices of a CONFIG that were typed as
options. Errors show no value of an unknown option, as it may be a secret.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import tyro

from maxmars.cli.help import HELP, has_option, print_help
from maxmars.cli.values import call_tyro
from maxmars.config.checks import CheckedConfig, UsageError
from maxmars.config.credentials import refuse_credentials
from maxmars.config.errors import in_words
from maxmars.config.load import choices_of, find_config, load_config, named_configs
from maxmars.config.optimizer import OptaxConfig
from maxmars.config.train import TrainConfig

FOREIGN_OPTIONS = (
    ("lr", "optimizer.learning-rate", ""),
    ("max-lr", "optimizer.learning-rate", ""),
    ("wd", "optimizer.weight-decay", ""),
    ("batch-size", "global-batch-size", ", which counts the sequences of all devices"),
    ("steps", "num-steps", ""),
    ("max-steps", "num-steps", ""),
    ("max-iters", "num-steps", ""),
    ("epochs", "num-steps", "; a step takes --global-batch-size * --model.max-seq-len tokens"),
    ("output-dir", "workdir", ""),
    ("out-dir", "workdir", ""),
    ("gpus", "gpus-per-node", ""),
    ("gpus", "mesh.fsdp", " to split the model; every GPU that JAX sees takes part"),
)
"""Options of other programs, the option of maxmars instead, and a note for the message."""
Hint = Callable[[Any, str, str | None], str | None]
"""A function (parsed options, unknown word, word after it) -> a line that says what the user may
have meant, or None."""


@dataclass(frozen=True, kw_only=True)
class ConfigArguments(CheckedConfig):
    """Arguments of a command that takes a CONFIG. Subclasses add the command's own options."""

    # A field of the config takes True or False; options of the command itself are switches.
    config: Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    """The config that CONFIG names, with the overrides of the command line."""


Arguments = TypeVar("Arguments", bound=ConfigArguments)
Options = TypeVar("Options")


def parse_arguments(
    arguments: type[Arguments],
    argv: Sequence[str],
    *,
    prog: str,
    example: str = "quickstart",
    choices: Mapping[str, str] = MappingProxyType({}),
) -> Arguments:
    """Parse the command line of a command that takes a CONFIG, options and overrides of fields.

    Args:
      arguments: the command's dataclass; every field that it adds has a default.
      argv: the command line after the command's name: CONFIG, then options.
      prog: the command's name in help and errors.
      example: the CONFIG whose fields `--help` shows where the line has none.
      choices: choices of CONFIG, besides those in the line.

    Raises:
      UsageError: there is no CONFIG; see also `load_config` and `parse_options`.
      SystemExit: 0 after `--help`, 2 after tyro's message.
    """
    spec, options = split_config(argv, prog)
    config = load_config(example if spec is None else spec, choices)
    if isinstance(config.optimizer, OptaxConfig) and (make := parse_first(_Make, argv)[0].make):
        try:  # the options are then those of this function
            config = load_config(example if spec is None else spec, choices, make)
        except ValueError as error:
            raise UsageError(f"--optimizer.make {make}: {error}") from error
    return parse_options(
        arguments,
        options,
        prog=f"{prog} {'CONFIG' if spec is None else shlex.quote(spec)}",
        default=arguments(config=config),
        about=_describe_choices(spec, example),
        hint=lambda _, word, value: None if spec is None else choice_hint(prog, spec, word, value),
    )


def split_config(argv: Sequence[str], prog: str) -> tuple[str | None, Sequence[str]]:
    """Split off CONFIG, the first word of a command line; it is None in a call for help."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    if not asks_for_help(argv):
        raise UsageError(
            f"{prog} needs a config before its options: `{prog} quickstart`, for example. See "
            f"`{prog} --help`."
        )
    return None, argv


@dataclass(frozen=True)
class _Make:
    """The option that decides which other options there are."""

    make: Annotated[str | None, tyro.conf.arg(name="optimizer.make")] = None


def parse_first(options_class: type[Options], argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Parse some options before all others; returns them and the other words."""
    # Without --help, which is to show all options.
    return tyro.cli(options_class, args=argv, return_unknown_args=True, add_help=False)


def choice_hint(prog: str, spec: str, word: str, value: str | None) -> str | None:
    """A line with the choice of CONFIG that an unknown word means; None if it means none."""
    # Users may type a choice of gpt2.py as an option, or forget its name:
    #
    #   gpt2 --optimizer mars          gpt2 --optimizer.name mars
    #   gpt2 optimizer=mars            gpt2 mars               all mean gpt2:optimizer=mars
    choices, (_, text) = choices_of(spec), find_config(spec)
    name, _, assigned = word.lstrip("-").partition("=")
    name, _, field = name.partition(".")
    if not word.startswith("-"):
        value = assigned or word
        name = name if assigned else next((n for n, words in choices.items() if word in words), "")
    if value and name in choices and (value in choices[name] or not (field or choices[name])):
        # Of gpt2:size=small,optimizer=adamw the other choices stay: gpt2:size=small,optimizer=mars.
        others = [item for item in text.split(",") if item and not item.startswith(f"{name}=")]
        config = f"{spec.removesuffix(text).rstrip(':')}:{','.join([*others, f'{name}={value}'])}"
        return f"{name} is a choice of the config: `{prog} {shlex.quote(config)}`."
    configs = [other for other in named_configs() if value in choices_of(other).get(name, ())]
    if configs and word.startswith("-"):
        commands = " or ".join(f"`{prog} {config}:{name}={value}`" for config in configs)
        return f"{name} is a choice of other configs: {commands}."
    return None


def _describe_choices(spec: str | None, example: str) -> str:
    """The text of `--help` on the choices of a CONFIG, or of all that have a name."""
    choices = [
        f"  {name.partition(':')[0]}:{choice}={', '.join(words) or 'TEXT'}"
        for name in (named_configs() if spec is None else [spec])
        for choice, words in choices_of(name).items()
    ]
    about = f"The defaults shown are those of {spec or example}{', with the choices' * bool(spec)}"
    if spec is None:
        about = (
            "CONFIG is the path of a Python file, or one of these names, with choices after a "
            f"colon, as in gpt2:size=small,optimizer=mars. {about}"
        )
    return "\n".join([f"{about}{':' if choices else '.'}", *choices])


def parse_options(
    arguments: type[Options],
    argv: Sequence[str],
    *,
    prog: str,
    default: Options | None = None,
    about: str = "",
    hint: Hint = lambda parsed, word, value: None,
    recorded: bool = True,
) -> Options:
    """Parse options, and positional arguments if the dataclass has some.

    Args:
      arguments: the dataclass.
      argv: the command line after the command's name.
      prog: the command's name in help and errors.
      default: values of the options that argv lacks; None takes the dataclass's defaults.
      about: text of `--help` above the options.
      hint: see `Hint`.
      recorded: whether values go to records and files, so that credentials are refused.

    Raises:
      UsageError: a value is a credential, or a word is an option of another program.
      SystemExit: 0 after `--help`; 2 after tyro's message: an option is unknown, or a required one
        is missing, or a value is missing, of another type, or refused by the dataclass.
    """
    command = arguments if default is None else default
    if asks_for_help(argv):
        print_help(command, argv, prog=prog, about=about)
        sys.exit(0)
    if recorded:
        _refuse_credentials(argv, prog)
    for word in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if not has_option(command, word[2:]) and (foreign := translate_option(command, word)):
            ours, note = foreign
            raise UsageError(f"`{prog}` does not take {word}: it is --{ours} here{note}.")
    values = tyro.MISSING_NONPROP if default is None else default
    call = functools.partial(call_tyro, arguments, prog=prog, default=values)
    # Where an argument is missing, tyro prints the values of unknown options, too. So its message
    # is discarded, and printed again for a line without these values.
    hidden = _words_of_unknown_options(command, argv) if default is None else []
    try:
        with contextlib.redirect_stderr(io.StringIO()) if hidden else contextlib.nullcontext():
            parsed, unknown = call(args=argv, return_unknown_args=True)
    except ValueError as error:  # of the config itself; tyro draws those of its groups
        raise UsageError(in_words(error)) from error
    except SystemExit:
        if hidden:
            call(args=_without_values(argv, hidden))
        raise
    if not unknown:
        return parsed
    word, value = _first_option(unknown)
    line = hint(parsed, word, value)
    if line is not None:
        raise UsageError(f"`{prog}` does not take {word}: {line}")
    return call(args=_without_values(argv, unknown))  # tyro refuses the line


def _words_of_unknown_options(arguments: Any, argv: Sequence[str]) -> list[str]:
    """Options that a command does not have, each with the words up to the next option."""
    words: list[str] = []
    is_unknown = False
    for word in argv:
        if re.match(r"--?[^\W\d]", word):  # an option, and not a negative number
            name = word.lstrip("-").partition("=")[0]
            is_unknown = not any(has_option(arguments, n) for n in (name, name.removeprefix("no-")))
        if is_unknown:
            words.append(word)
    return words


def _first_option(unknown: Sequence[str]) -> tuple[str, str | None]:
    """The first option in a list of unknown words, with its value, else the first word."""
    for index, word in enumerate(unknown):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            return flag, value if equals else next(iter(unknown[index + 1 :]), None)
    return unknown[0], None


def _without_values(argv: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """A command line without the values of its unknown options, which may be secrets."""
    words: list[str] = []
    is_unknown = False
    for word in argv:
        if word.startswith("-"):
            is_unknown = word in unknown
            words.append(word.partition("=")[0] if is_unknown else word)
        elif not (is_unknown and word in unknown):
            words.append(word)
    return words


def translate_option(arguments: Any, word: str) -> tuple[str, str] | None:
    """The option of a command that means an option of another program, with a note for the message;
    None if there is none."""
    name = re.sub("[-_]", "", word)  # --batchsize and --batch_size are --batch-size
    for theirs, ours, note in FOREIGN_OPTIONS:
        if theirs.replace("-", "") == name and has_option(arguments, ours):
            return ours, note
    return None


def _refuse_credentials(argv: Sequence[str], prog: str) -> None:
    """Refuse credentials in a command line, before another error prints its words."""
    argument = name = f"an argument of `{prog}`"
    for word in argv:
        value = word
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if not equals:
                continue
        refuse_credentials(None if value == "None" else value, name)
        name = argument


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help rather than for work."""
    return any(word in HELP for word in argv)
