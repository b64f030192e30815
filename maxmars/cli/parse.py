"""The command lines of commands: tyro parses them, and what it refuses is told in one line.

A command is a dataclass; those that take a CONFIG inherit `ConfigArguments`, so that every field of
the config is an option too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import tyro

from maxmars.cli.help import evened, groups_of, print_help, rows_of
from maxmars.cli.values import VALUES
from maxmars.config.checks import CheckedConfig, RuleError, UsageError
from maxmars.config.credentials import refuse_credentials
from maxmars.config.load import choices_of, find_config, load_config, named_configs
from maxmars.config.train import TrainConfig
from maxmars.config.user_code import Source

HELP = ("-h", "--help", "--help-all")
_OPTION = re.compile(r"--\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class ConfigArguments(CheckedConfig):
    """The arguments of a command that takes a CONFIG. Subclasses add the command's own options."""

    # True or False follows a field of the config; options of the command itself are switches.
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
      argv: the command line after the command's name. CONFIG is its first word that is neither an
        option nor the value of an option.
      prog: the command's name in help and errors.
      example: the CONFIG whose fields `--help` shows where none is given.
      choices: of CONFIG, beside those that it names.

    Raises:
      UsageError: there is no CONFIG, or an option is wrong; see also `load_config`.
      SystemExit: 0 after `--help`.
    """
    indices = _indices_of_words(argv, _switches_of(arguments))
    about = ""
    if asks_for_help(argv):  # also for that of a group, whose name is no CONFIG
        groups = {field.name for field in dataclasses.fields(TrainConfig)}
        indices = [index for index in indices if argv[index] not in groups]
        about = _about_config(argv[indices[0]] if indices else None, example)
    elif not indices:
        raise UsageError(
            f"{prog} needs a config: `{prog} quickstart`, for example. See `{prog} --help`."
        )
    spec = argv[indices[0]] if indices else example
    return parse_options(
        arguments,
        # The words after CONFIG stay where they are, as values of the option before them.
        [word for index, word in enumerate(argv) if index not in indices[:1]],
        prog=f"{prog} {shlex.quote(spec) if indices else 'CONFIG'}",
        default=arguments(config=load_config(spec, choices, _value_in(argv, "--optimizer.make"))),
        about=about,
        meant=functools.partial(choice_meant, prog, spec),
    )


def _value_in(argv: Sequence[str], flag: str) -> str | None:
    """The value that a command line gives an option whose value decides which options there are;
    None if it gives none, or none that parsing accepts."""
    value = None
    for word, following in itertools.pairwise([*argv, ""]):
        name, equals, given = word.partition("=")
        if name == flag:
            value = given if equals else following
    with contextlib.suppress(ValueError):
        return value and Source.parse(value).written
    return None


def choice_meant(prog: str, spec: str, word: str, value: str | None) -> str:
    """A hint at the choice of a CONFIG that an unknown option and its value mean, or a word alone;
    "" if they mean none."""
    # What users write who take a choice of gpt2.py for an option, or forget the name:
    #
    #   gpt2 --optimizer mars          gpt2 --optimizer.name mars
    #   gpt2 optimizer=mars            gpt2 mars               all mean gpt2:optimizer=mars
    choices, (_, text) = choices_of(spec), find_config(spec)
    name, rest = word.lstrip("-").replace("-", "_"), ""
    if word.startswith("-"):
        name, _, rest = name.partition(".")
    elif "=" in word:
        name, _, value = word.partition("=")
    else:
        name, value = next((n for n, words in choices.items() if word in words), ""), word
    if name in choices and (not rest or value in choices[name]):
        words = choices[name]
        shown = value if value and (value in words or not words) else "|".join(words) or "TEXT"
        # Of gpt2:size=small,optimizer=adamw the other choices stay: gpt2:size=small,optimizer=mars.
        kept = [item for item in text.split(",") if item and not item.startswith(f"{name}=")]
        base = spec.removesuffix(f":{text}").rstrip(":")
        meant = f"{base}:{','.join([*kept, f'{name}={shown}'])}"
        return f" (a choice of the config: `{prog} {meant}`)"
    groups = {field.name for field in dataclasses.fields(TrainConfig)}
    if word.startswith("-") and name in groups and not rest:
        known = [n for n in named_configs() if value in choices_of(n).get(name, ())]
        others = " or ".join(f"`{other}:{name}={value}`" for other in known)
        meant = f"; {value} is a choice of {others}" if known else ""
        return f" (its options are --{name}.*: `{prog} {spec} --help {name}`{meant})"
    return ""


def _about_config(spec: str | None, example: str) -> str:
    """What `--help` says of a CONFIG, or of all that have a name."""
    specs = list(named_configs()) if spec is None else [spec]
    choices = {
        f"{spec.partition(':')[0]}:{name}=": ", ".join(words) or "TEXT"
        for spec in specs
        for name, words in choices_of(spec).items()
    }
    if spec is None:
        about = (
            "CONFIG is the path of a Python file, or one of these names, with choices after a "
            f"colon: gpt2:size=small,optimizer=mars. The defaults shown are those of {example}."
        )
    else:
        about = f"The defaults shown are those of {spec}{', with the choices:' if choices else '.'}"
    return "\n".join([about, "", *rows_of(choices)]).rstrip()


def parse_options(
    arguments: type[Options],
    argv: Sequence[str],
    *,
    prog: str,
    default: Options | None = None,
    about: str = "",
    meant: Callable[[str, str | None], str] = lambda word, value: "",
    recorded: bool = True,
) -> Options:
    """Parse options, and positional arguments if the dataclass has some.

    Args:
      arguments: the dataclass.
      argv: the command line after the command's name.
      prog: the command's name in help and errors.
      default: the values of options that are not given; None takes the dataclass's own.
      about: told by `--help` below the dataclass's docstring.
      meant: a hint at what an unknown word and the value after it mean, "" for that of the option
        with the most similar name.
      recorded: whether values are kept in records and files, which take no credentials.

    Raises:
      UsageError: there is no such option, one that is needed is missing, or a value is missing, is
        of another type than the field's, is a credential, or is refused by the dataclass.
      SystemExit: 0 after `--help`.
    """
    if asks_for_help(argv):
        whole = arguments if default is None else default
        groups = groups_of(whole)
        asked = next((word for word in argv if word in groups), None)
        if asked is not None:
            field = (asked, type(groups[asked]), dataclasses.field(default=groups[asked]))
            alone = dataclasses.make_dataclass("Group", [field])
            _, _, options = _all_options(alone, None, prog).partition("\n\n")
            print(f"usage: {prog} [OPTIONS]\n\n{evened(options)}")
        else:
            in_full = "--help-all" in argv
            options = _all_options(arguments, default, prog)
            print_help(whole, options, prog=prog, about=about, in_full=in_full)
        sys.exit(0)
    if recorded:
        _refuse_credentials(argv, prog)
    box = io.StringIO()  # which tyro draws with plain dashes where standard output is a text too
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(box):
            parsed, unknown = _call_tyro(argv, arguments, default, prog)
    except (SystemExit, ValueError) as error:
        raise UsageError(_why(error, box.getvalue(), prog)) from error
    if unknown:
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:  # which tyro splits from a switch: --json=True
            word = next((w for w in argv if w.partition("=")[2] == unknown[0]), unknown[0])
            hint = meant(word, None)
            raise UsageError(f"`{prog}` takes no argument {word!r}{hint}; see `{prog} --help`.")
        name, equals, value = flag.partition("=")  # a value may be a secret
        after = argv[argv.index(flag) + 1 :] if flag in argv else []
        value = value if equals else next((word for word in after[:1] if word[:1] != "-"), None)
        hint = meant(name, value) or _option_meant(name, _all_options(arguments, default, ""))
        raise UsageError(f"`{prog}` has no option {name}{hint}; see `{prog} --help`.")
    return parsed


def _refuse_credentials(argv: Sequence[str], prog: str) -> None:
    """Refuse them before anything reads, and in an error prints, the words of a command line."""
    argument = name = f"an argument of `{prog}`"
    for word in argv:
        value = word
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if not equals:
                continue
        refuse_credentials(None if value == "None" else value, name)
        name = argument


def options_of(arguments: type[Any], default: Any = None) -> list[str]:
    """The options that a command takes, such as `--data.path`."""
    return _OPTION.findall(_all_options(arguments, default, ""))


def _all_options(arguments: type[Any], default: Any, prog: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        _call_tyro(["--help"], arguments, default, prog)
    return printed.getvalue()


def _call_tyro(words: Sequence[str], arguments: type[Any], default: Any, prog: str) -> Any:
    return tyro.cli(
        arguments,
        args=words,
        prog=prog,
        description="",
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.AvoidSubcommands,),  # the config file decides which optimizer, not a word
        registry=VALUES,
        return_unknown_args=True,
    )


def _option_meant(name: str, options: str) -> str:
    """A hint at the option whose last word is most like that of an unknown one, "" if none is."""
    positive = re.sub(r"(--|\.)no-", r"\1", name, count=1)
    if f"{positive} True|False" in options:
        return f" (did you mean `{positive} False`?)"
    group, _, leaf = name.rpartition(".")
    flags = _OPTION.findall(options)
    leaves = [flag.rpartition(".")[2].lstrip("-") for flag in flags]
    for near in difflib.get_close_matches(leaf.lstrip("-"), leaves, n=1):
        alike = [flag for flag in flags if re.search(rf"[.-]{near}$", flag)]
        best = min(alike, key=lambda flag: (flag.rpartition(".")[0] != group, flag))
        return f" (did you mean `{best}`?)"
    return ""


def _why(error: BaseException, box: str, prog: str) -> str:
    """Why tyro or a dataclass has refused a command line, in one line.

    tyro's box names the option or the group of options, the exception before it says what is wrong.
    """
    _, message, *_ = [*re.split(r"\n *-{3,} *\n", box), ""]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ValueError):
        cause = cause.__context__
    if cause is None:
        needed = re.findall(r"^ {6}(\S.*?) *$", message, re.MULTILINE)
        if needed:
            return f"`{prog}` needs {', '.join(needed)}; see `{prog} --help`."
        return " ".join(message.split())
    match = re.search(r"Error parsing (\S+):", message)
    named = match[1] if match else ""
    if isinstance(cause, RuleError):
        group = re.sub(r"^config\.?|^[A-Z]\w*$", "", named)  # the class or its config is no group
        flag = ".".join(filter(None, (group, cause.field))).replace("_", "-")
        return f"--{flag} {cause.value} {cause.words}."
    is_option = named.startswith("-") or named.isupper()  # else a group, by its dataclass
    return f"{named} {cause}" if is_option else str(cause)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help rather than for work."""
    return any(word in HELP for word in argv)


def split_positionals(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line, in which every option takes a value, into its words and its options."""
    indices = _indices_of_words(argv)
    options = [word for index, word in enumerate(argv) if index not in indices]
    return [argv[index] for index in indices], options


def _switches_of(arguments: type[Any]) -> list[str]:
    """The options of a command that have no value."""
    fields = [f for f in dataclasses.fields(arguments) if isinstance(f.default, bool)]
    return [f"--{no}{f.name.replace('_', '-')}" for f in fields for no in ("", "no-")]


def _indices_of_words(argv: Sequence[str], switches: Collection[str] = ()) -> list[int]:
    """The indices of the words that are neither an option nor the first value of one."""
    indices: list[int] = []
    is_value = False
    for index, word in enumerate(argv):
        is_option = word.startswith("-")
        if not is_value and not is_option:
            indices.append(index)
        has_value = "=" not in word and word not in (*HELP, *switches)
        is_value = not is_value and is_option and has_value
    return indices
