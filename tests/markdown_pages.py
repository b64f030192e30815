"""Markdown pages: their code blocks, links and headings, and a reader who types what they say."""

import contextlib
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from xla_flags import xla_flags

ROOT = Path(__file__).resolve().parents[1]
# What a block may need, and the module by which one sees that it is there.
NEEDS = {
    "a TPU": None,
    "a GPU": None,
    "a cloud account": None,
    "the internet": None,
    "hours": None,
    "extra tpu": "libtpu",
    "extra cuda": "jax_cuda13_plugin",
    "extra hf": "tokenizers",
    "extra report": "matplotlib",
    "extra eval": "lm_eval",
}


@dataclass(frozen=True)
class Block:
    """A code block.

    Its first line may be a comment that says something of it: `# needs: the internet`, and it is
    run only where that is at hand; `# file: my_config.py`, and it is saved instead of run.
    """

    language: str
    code: str
    line: int  # of its fence in the page, from 1 on

    def said(self, key: str) -> str | None:
        found = re.match(rf"# {key}: (.+)\n", self.code)
        return found[1] if found else None


def is_run(block: Block) -> bool:
    needs = block.said("needs")
    module = NEEDS[needs] if needs else "sys"
    return block.language in ("sh", "python") and bool(module and importlib.util.find_spec(module))


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    fences = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(f[1], f[2], 1 + text.count("\n", 0, f.start())) for f in fences]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links_of(text: str) -> list[str]:
    """What a page links to or shows."""
    prose = re.sub(r"`[^`]*`", "", without_blocks(text))
    return re.findall(r"\]\(([^)]+)\)", prose) + re.findall(r'src="([^"]+)"', prose)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def mark(number: int) -> str:
    return f"@@@ block {number}"


def run_blocks(blocks: list[Block], folder: Path, timeout_s: float = 600) -> dict[Block, str]:
    """Run blocks in order, in one shell in `folder`; what each printed, without times of day.

    Blocks of `sh` are typed into the shell, which stops at the first command that fails; blocks of
    `python` between two of them go to one Python. Raises AssertionError with the line of the block
    that fails.
    """
    tools, work = folder / ".tools", folder / "work"
    work.mkdir(parents=True)
    tools.mkdir()
    (tools / "maxmars").write_text(f'#!/bin/sh\nexec {sys.executable} -m maxmars "$@"\n')
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("maxmars", "python"):
        (tools / name).chmod(0o755)

    script, python = ["set -eo pipefail"], None
    for number, block in enumerate(blocks):
        if name := block.said("file"):
            (tools / str(number)).write_text(block.code)
            script += [f"mkdir -p $(dirname {name})", f"cp {tools / str(number)} {name}"]
        elif block.language == "python":
            if python is None:
                python = tools / f"{number}.py"
                script.append(f"python {python}")
            with python.open("a") as file:
                file.write(f"print({mark(number)!r}, flush=True)\n{block.code}")
            continue
        else:
            script += [f"echo '{mark(number)}'", block.code]
        python = None
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(1),
        "COLUMNS": "120",
    }
    with (tools / "output").open("w+") as output:
        shell = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"none after {timeout_s} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left in the background
                os.killpg(shell.pid, signal.SIGKILL)
        output.seek(0)
        parts = re.split(r"^@@@ block (\d+)\n", output.read(), flags=re.MULTILINE)
    printed = {blocks[int(n)]: text for n, text in zip(parts[1::2], parts[2::2], strict=True)}
    if code != 0:
        block, text = list(printed.items())[-1] if printed else (blocks[0], parts[0])
        raise AssertionError(f"line {block.line}: exit code {code}\n{block.code}\n{text[-3000:]}")
    return {b: re.sub(r"(?m)^\d\d:\d\d:\d\d ", "", text) for b, text in printed.items()}


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def missing_line(expected: str, printed: str) -> str | None:
    """The first line of `expected` that does not stand, in this order, in what was printed.

    `...` stands for anything, a decimal number for those within 5 %.
    """
    lines = iter(printed.splitlines())
    for wanted in expected.splitlines():
        if wanted.strip() not in ("", "...") and not any(is_like(wanted, line) for line in lines):
            return wanted
    return None


def is_like(wanted: str, line: str) -> bool:
    """Whether words and whole numbers are equal, and decimal numbers within 5 %."""
    wanted, line = " ".join(wanted.split()), " ".join(line.split())
    words = [re.escape(word).replace(r"\.\.\.", ".*") for word in NUMBER.split(wanted)]
    found = re.fullmatch(f"({NUMBER.pattern})".join(words), line)
    if found is None:
        return False
    return all(
        a == b or ("." in a and math.isclose(number(a), number(b), rel_tol=0.05))
        for a, b in zip(NUMBER.findall(wanted), found.groups(), strict=True)
    )


def number(text: str) -> float:
    return float(text.replace(",", ""))
