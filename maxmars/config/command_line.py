"""CONFIG on the command line, `NAME[:choice=value,...]` or `path/to/file.py[:...]`, and overrides.

A config file defines `get_config(...) -> TrainConfig`. Its parameters are the choices, each
annotated with the `Literal` of its values, or with `str` where any text is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from maxmars.config.data import DataConfig, GrainSource, MixtureConfig, MixturePart
from maxmars.config.model import ModuleConfig
from maxmars.config.optimizer import OptaxConfig
from maxmars.config.train import TrainConfig
from maxmars.config.user_code import import_file

_CONFIG_ROOM = Path(__file__).parent


class UsageError(ValueError):
    """A command line or config that is wrong; the process exits with code 2."""


@dataclass(frozen=True, kw_only=True)
class ConfigArguments:
    """The arguments of a command that takes a CONFIG. Subclasses add the command's own options."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The config that CONFIG names, with the overrides of the command line."""


Arguments = TypeVar("Arguments", bound=ConfigArguments)
Options = TypeVar("Options")


def named_configs() -> dict[str, Path]:
    """The config files that a bare name means, by name.

    In a checkout they lie in `configs/` at its top; an installed wheel carries a copy.
    """
    in_wheel = _CONFIG_ROOM / "files"
    folder = in_wheel if in_wheel.is_dir() else _CONFIG_ROOM.parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(spec: str) -> tuple[Path, str]:
    """Split CONFIG into the path of its file and the text of its choices, "" if it has none.

    A word with a slash or the ending `.py` is a path; any other word is one of `named_configs`.

    Raises:
      UsageError: there is no such file or name.
    """
    match = re.fullmatch(r"([^:/]*|.*?\.py)(?::(.*))?", spec, re.DOTALL)
    name, choices = match.groups(default="") if match else (spec, "")
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            known = map(str, path.parent.glob("*.py"))
            raise UsageError(f"CONFIG={spec!r}: no file {path}{_did_you_mean(name, known)}.")
        return path, choices
    known = named_configs()
    if name not in known:
        if "/" in name:
            raise UsageError(
                f"CONFIG={spec!r} must be a Python file with or without choices, such as "
                f"my_configs/tiny.py, or one of the names {', '.join(known)}."
            )
        raise UsageError(
            f"CONFIG={spec!r}: there is no config {name!r}{_did_you_mean(name, known)}; choose one "
            f"of {', '.join(known)}, or give the path of a Python file."
        )
    return known[name], choices


def load_config(spec: str) -> TrainConfig:
    """Load the config that `NAME[:choice=value,...]` or `path/to/file.py[:...]` names.

    Raises:
      UsageError: the file, its `get_config`, a choice or a value does not exist, the choices do not
        fit together, or the file's own code raises an exception.
    """
    path, choices = find_config(spec)
    with _own_errors(path):
        get_config = getattr(import_file(path), "get_config", None)
    if not callable(get_config):
        raise UsageError(
            f"{path} has no function get_config; a config file defines "
            "`def get_config() -> TrainConfig`."
        )
    arguments = _choices(path, choices, get_config)
    with _own_errors(path):
        config = get_config(**arguments)
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"get_config of {path} returned a {type(config).__name__}; "
            "it must return a TrainConfig."
        )
    model, optimizer = config.model, config.optimizer
    if isinstance(model, ModuleConfig):
        model = dataclasses.replace(model, make=str(path.parent / model.make))
    if isinstance(optimizer, OptaxConfig):
        optimizer = dataclasses.replace(optimizer, make=str(path.parent / optimizer.make))
    data = _sources_in(config.data, path.parent)
    return dataclasses.replace(config, model=model, data=data, optimizer=optimizer)


@contextlib.contextmanager
def _own_errors(path: Path) -> Generator[None]:
    """Tell an exception of the code in a config file in one line, with its line there."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == str(path)]
        is_ours = isinstance(error, ValueError) and _raised_by_config_module(error)
        if is_ours and not lines:  # no Python: the message names the line
            raise UsageError(str(error)) from error
        kind = "" if is_ours else f"{type(error).__name__}: "
        raise UsageError(f"{path}{''.join(lines[-1:])}: {kind}{error}") from error


def _sources_in(data: DataConfig | MixturePart | GrainSource, folder: Path) -> Any:
    """The data of a config file in `folder`, to which the sources of its own are relative."""
    if isinstance(data, MixtureConfig):
        parts = tuple(_sources_in(part, folder) for part in data.parts)
        return dataclasses.replace(data, parts=parts)
    if isinstance(data, GrainSource):
        return dataclasses.replace(data, source=str(folder / data.source))
    return data


def parse_config(spec: str, overrides: Sequence[str], prog: str) -> TrainConfig:
    """Load the config that `spec` names and apply overrides such as `--model.num-layers 3`.

    Raises:
      UsageError: an override is wrong; see also `load_config`.
      SystemExit: 0 after `--help`.
    """
    return parse_arguments(ConfigArguments, [spec, *overrides], prog=prog).config


def parse_arguments(
    arguments: type[Arguments], argv: Sequence[str], *, prog: str, usage: str = ""
) -> Arguments:
    """Parse the command line of a command that takes a CONFIG, options and overrides of fields.

    Args:
      arguments: the command's dataclass; every field that it adds has a default.
      argv: the command line after the command's name. CONFIG is its first word that is neither an
        option nor the value of an option.
      prog: the command's name in help and errors.
      usage: printed for `--help` without a CONFIG, when the fields of the config are unknown.

    Raises:
      UsageError: there is no CONFIG, or an option is wrong; see also `load_config`.
      SystemExit: 0 after `--help`.
    """
    words, options = split_positionals(argv)
    if not words:
        if {"-h", "--help"} & set(argv):
            print(usage)
            sys.exit(0)
        raise UsageError(
            f"{prog} needs a config: `{prog} quickstart`, for example. See `{prog} --help`."
        )
    spec, *rest = words
    return parse_options(
        arguments,
        [*options, *rest],
        prog=f"{prog} {shlex.quote(spec)}",
        default=arguments(config=load_config(spec)),
        markers=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def parse_options(
    arguments: type[Options],
    argv: Sequence[str],
    *,
    prog: str,
    default: Options | None = None,
    markers: Sequence[Any] = (tyro.conf.AvoidSubcommands,),
) -> Options:
    """Parse options by tyro into a dataclass, with errors of one line instead of tyro's frames.

    Args:
      arguments: the dataclass.
      argv: the options, and positional arguments if the dataclass has some.
      prog: the command's name in help and errors.
      default: the values of options that are not given; None takes the dataclass's own.
      markers: of `tyro.conf`, such as `FlagConversionOff`, with which booleans take a value.

    Raises:
      UsageError: there is no such option, one that is needed is missing, or a value is missing, is
        of another type than the field's, or is refused by the config.
      SystemExit: 0 after `--help`; 2 after tyro's own words for any other error.
    """
    known = _annotations(default or arguments)
    frames = io.StringIO()
    try:
        with contextlib.redirect_stderr(frames):
            parsed, unknown = tyro.cli(
                arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                args=argv,
                prog=prog,
                config=markers,
                return_unknown_args=True,
            )
    except (ValueError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        if tyro.conf.FlagConversionOff not in markers:
            known = {flag: hint for flag, hint in known.items() if hint is not bool}
        problem = _refusal(error) or _wrong_value(argv, known)
        if problem is not None:
            raise UsageError(problem) from error
        missing = [] if default is not None else _missing(arguments, argv, known)
        if missing:
            names = ", ".join(missing)
            raise UsageError(f"`{prog}` needs {names}. See `{prog} --help`.") from error
        sys.stderr.write(frames.getvalue())
        raise
    if unknown:
        flag = unknown[0].partition("=")[0]
        hint = _did_you_mean(flag.replace("_", "-"), known)
        raise UsageError(f"`{prog}` has no option {flag}{hint}; see `{prog} --help`.")
    return parsed


def _annotations(arguments: Any, prefix: str = "--") -> dict[str, Any]:
    """The annotation of each option of a dataclass, or of an instance with nested ones, by flag."""
    found: dict[str, Any] = {}
    kind = arguments if isinstance(arguments, type) else type(arguments)
    for name, hint in typing.get_type_hints(kind).items():
        flag, value = prefix + name.replace("_", "-"), getattr(arguments, name, None)
        if value is None and dataclasses.is_dataclass(hint):
            value = hint
        if isinstance(value, TrainConfig):
            found |= _annotations(value)
        elif dataclasses.is_dataclass(value):
            found |= _annotations(value, f"{flag}.")
        elif value and isinstance(value, tuple) and all(map(dataclasses.is_dataclass, value)):
            for i, part in enumerate(value):
                found |= _annotations(part, f"{flag}.{i}.")
        elif isinstance(value, dict):
            found |= {f"{flag}.{key}": type(item) for key, item in value.items()}
        else:
            found[flag] = hint
    return found


def _refusal(error: BaseException | None) -> str | None:
    """The error of a config class among the causes of an error."""
    while error is not None:
        if isinstance(error, ValueError) and _raised_by_config_module(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _wrong_value(argv: Sequence[str], known: Mapping[str, Any]) -> str | None:
    """The first option whose value is missing or of another type than its field's."""
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        hint = known.get(flag.replace("_", "-"))
        if hint is None:
            continue
        if not equals:
            value = argv[i + 1] if i + 1 < len(argv) else "--"
        if not equals and value.startswith("--"):
            return f"{flag} needs a value: {_expected(hint)}."
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                tyro.cli(hint, args=[value], config=(tyro.conf.FlagConversionOff,))
        except SystemExit:
            return f"{flag} {value} must be {_expected(hint)}."
    return None


def _missing(arguments: type, argv: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """The fields without a default that a command line does not give, as `--help` calls them."""
    given, num_words, rest = set(), 0, iter(argv)
    for word in rest:
        flag, equals, _ = word.replace("_", "-").partition("=")
        given.add(flag)
        if not word.startswith("-"):
            num_words += 1
        elif not equals and known.get(flag, bool) is not bool:
            next(rest, None)  # the option's value
    missing = []
    hints = typing.get_type_hints(arguments, include_extras=True)
    for field in dataclasses.fields(arguments):
        if field.default is not field.default_factory:  # both are MISSING where there is none
            continue
        extras = typing.get_args(hints[field.name])[1:]
        metavars = [extra.metavar for extra in extras if getattr(extra, "metavar", None)]
        if tyro.conf.Positional not in extras:
            flag = f"--{field.name.replace('_', '-')}"
            missing += [] if flag in given else [" ".join([flag, *metavars])]
        elif num_words:
            num_words -= 1
        else:
            missing += metavars or [field.name.upper()]
    return missing


def _expected(annotation: Any) -> str:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return " or ".join(map(str, parts))
    if parts:
        return " or ".join(_expected(part) for part in parts if part is not Ellipsis)
    words = {bool: "True or False", int: "an integer", float: "a number", str: "text"}
    return words.get(annotation, "None" if annotation is types.NoneType else str(annotation))


def split_positionals(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line, in which every option takes a value, into its words and its options."""
    words: list[str] = []
    options: list[str] = []
    rest = iter(argv)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        options.append(word)
        if "=" not in word and word not in ("-h", "--help"):
            options += itertools.islice(rest, 1)
    return words, options


_SECRET_OPTION = re.compile(r"--(.*[._-])?(api_?key|key|secret|token|password|credentials?)", re.I)


def without_secrets(words: Sequence[str]) -> str:
    """A command line to record: `HIDDEN` stands for the value of an option whose name ends with
    key, token, secret, password or credentials, and for a password in a URL."""
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if _SECRET_OPTION.fullmatch(name):
            kept.append(f"{name}=HIDDEN" if equals else name)
        elif kept and _SECRET_OPTION.fullmatch(kept[-1]):
            kept.append("HIDDEN")
        else:
            kept.append(re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:HIDDEN@", word))
    return shlex.join(kept)


def _choices(path: Path, text: str, get_config: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `get_config` in the text of the choices, by its annotations."""
    parameters = inspect.signature(get_config).parameters
    annotations = typing.get_type_hints(get_config)
    values: dict[str, dict[str, Any]] = {}  # none for a choice that takes any text
    for name in parameters:
        annotation = annotations.get(name)
        if annotation is not str and typing.get_origin(annotation) is not Literal:
            raise UsageError(
                f"{path}: annotate get_config's parameter `{name}` with its values, as in "
                f"`{name}: Literal['a', 'b'] = 'a'`, or with `str` to allow any text."
            )
        values[name] = {str(value): value for value in typing.get_args(annotation)}
    chosen: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, word = item.partition("=")
        last = next(reversed(chosen), None)
        if last is not None and name not in values and not values[last]:
            chosen[last] += f",{item}"  # any text may hold commas, as paths do
            continue
        if not equals or not word or name in chosen:
            raise UsageError(
                f"CONFIG {path}:{text}: {item!r} is not a choice; write each as name=value, once."
            )
        if name not in values:
            raise UsageError(
                f"{path} has no choice `{name}`{_did_you_mean(name, values)}; its choices: "
                f"{', '.join(values) or 'none'}."
            )
        if values[name] and word not in values[name]:
            raise UsageError(
                f"{path}: {name}={word} is not a choice{_did_you_mean(word, values[name])}; "
                f"{name} is one of {', '.join(values[name])}."
            )
        chosen[name] = values[name][word] if values[name] else word
    for name, parameter in parameters.items():
        if name not in chosen and parameter.default is inspect.Parameter.empty:
            words = "|".join(values[name]) or "TEXT"
            raise UsageError(f"{path} needs the choice {name}={words}: {path}:{name}=....")
    return chosen


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _raised_by_config_module(error: ValueError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).parent == _CONFIG_ROOM
