"""What `--help` prints: what the command does, the options to know first, and the rest by groups.

A command's dataclass says it all: its docstring (lines that are indented stay as they are),
`EXAMPLES`, `FIRST` with the options that a newcomer needs, `GROUP` for its own fields, and the
fields' own texts.
"""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Sequence

from maxmars.config.checks import UsageError
from maxmars.config.options import HELP, Option, did_you_mean, first_sentence

_MOST_FIRST = 10
_WORD_WIDTH = 34


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help rather than for work."""
    return any(word in HELP for word in argv)


def show_help(
    arguments: type,
    options: Sequence[Option],
    argv: Sequence[str],
    *,
    prog: str,
    config: str | None = None,
    about: str = "",
    rows: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the help that a command line asks for: `--help`, `--help GROUP` or `--help-all`.

    Args:
      arguments: the command's dataclass.
      options: its options.
      argv: the command line; any word that names a group of options asks for that group.
      prog: the command's name, with its CONFIG if it takes one.
      config: this CONFIG, which may follow `--help` too.
      about: told below the docstring, with these rows of a word and its text.

    Raises:
      UsageError: the word after `--help` is neither a group nor an argument.
    """
    places = [option for option in options if option.is_positional]
    usage = " ".join(["usage:", prog, *(place.words for place in places), "[OPTIONS]"])
    groups: dict[str, list[Option]] = {}
    for option in options:
        if not option.is_positional:
            groups.setdefault(option.group.title, []).append(option)
    asked = next((word for word in argv if word in groups), None)
    if asked is not None:
        print("\n".join([usage, *_explained(groups[asked])]))
        return
    after = next((word for help_, word in itertools.pairwise(argv) if help_ in HELP), config)
    if after != config and not str(after).startswith("-"):
        hint = did_you_mean(str(after), groups)
        if hint or not places:  # else it may be an argument
            known = ", ".join(groups)
            raise UsageError(f"`{prog}` has no group {after}{hint}; its groups are {known}.")
    what, _, details = inspect.cleandoc(arguments.__doc__ or "").partition("\n\n")
    examples = "\n".join(f"  {example}" for example in getattr(arguments, "EXAMPLES", ()))
    lines = [usage]
    for text in filter(None, (what, examples, details, about)):
        lines += ["", *_wrap(text)]
    if places:
        rows = [(place.words, _text(place)) for place in places]
    lines += ["", *_rows(rows)] if rows else []
    if "--help-all" in argv:
        lines += [line for group in groups.values() for line in _explained(group)]
    else:
        lines += _first_and_rest(arguments, groups, prog)
    print("\n".join(lines))


def _first_and_rest(arguments: type, groups: dict[str, list[Option]], prog: str) -> list[str]:
    options = [option for group in groups.values() for option in group]
    names = [f"--{name}" for name in getattr(arguments, "FIRST", ())]
    if len(options) <= _MOST_FIRST:
        names = [option.flag for option in options]
    by_flag = {option.flag: option for option in options}
    first = [by_flag[name] for name in names if name in by_flag]
    if not first:
        return []
    whole = len(first) == len(options)
    lines = ["", "Options:" if whole else "The options to know first:"]
    lines += _rows([(option.words, _in_short(option)) for option in first])
    if whole:
        return lines
    one = f" `{prog} --help GROUP` explains a group, and" if len(groups) > 1 else ""
    everything = f"`{prog} --help-all` explains all {len(options)}."
    lines += ["", *_wrap(f"More options.{one} {everything}")]
    rows = []
    for title, group in groups.items():
        left = [option for option in group if option not in first]
        names = [option.words.split()[0].removeprefix(f"--{title}.") for option in left]
        rows += [(title, ", ".join(names))] if left else []
    return lines + _rows(rows)


def _in_short(option: Option) -> str:
    text = first_sentence(option.doc)
    if option.is_required:
        return f"{text} (required)"
    if option.is_switch:
        return f"Do not {text[0].lower()}{text[1:]}" if option.default else text
    if option.default is not None or option.default_text != "default: None":
        return f"{text} ({option.default_text})" if option.default_text else text
    what = re.search(r"(?:^|[.;]\s)None (.+?)(?:[.;]\s|\.?$)", option.doc, re.DOTALL)
    return f"{text} (default: None, which {' '.join(what[1].split())})" if what else text


def _explained(group: Sequence[Option]) -> list[str]:
    """A group with the whole text of each of its options."""
    title, about = group[0].group.title, group[0].group.about
    lines = ["", *_wrap(f"{title.upper()}{': ' if about else ''}{about}")]
    for option in group:
        lines += [f"  {option.words}", *_wrap(_text(option), indent=6)]
    return lines


def _text(option: Option) -> str:
    if option.is_positional:
        return option.doc
    note = "required" if option.is_required else option.default_text
    return f"{option.doc} ({note})" if note else option.doc


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Words with their texts in a column beside them, or below a word that is too long."""
    width = max([len(word) for word, _ in rows if len(word) <= _WORD_WIDTH], default=0)
    lines: list[str] = []
    for word, text in rows:
        beside = _wrap(text, indent=width + 4)
        if len(word) > width or not beside:
            lines += [f"  {word}", *beside]
        else:
            lines += [f"  {word:<{width}}  {beside[0].strip()}", *beside[1:]]
    return lines


def _wrap(text: str, indent: int = 0) -> list[str]:
    """Wrap paragraphs at words to the terminal's width; lines that are indented stay."""
    width = max(min(shutil.get_terminal_size().columns, 100), 60)
    lines: list[str] = []
    paragraph: list[str] = []

    def end() -> None:
        if paragraph:
            margin = " " * indent
            lines.extend(
                textwrap.wrap(
                    " ".join(paragraph),
                    width,
                    initial_indent=margin,
                    subsequent_indent=margin,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
            paragraph.clear()

    for line in text.splitlines():
        if line.startswith(" ") or not line:
            end()
            lines.append(" " * indent * bool(line) + line)
        else:
            paragraph.append(line)
    end()
    return lines
