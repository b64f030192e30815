"""The pages of tools/examples: each block runs as a reader would run it, or says what it needs."""

import itertools
from pathlib import Path

import pytest
from markdown_pages import NEEDS, Block, blocks_of, is_run, missing_line, run_blocks
from refusals import refused

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "examples"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"}
PAGES = {name: blocks_of(path.read_text()) for name, path in FILES.items()}
# `text` is no code: a formula, or output that differs from machine to machine.
LANGUAGES = ("sh", "python", "output", "text")


def check(blocks: list[Block], folder: Path) -> None:
    printed = run_blocks([block for block in blocks if is_run(block)], folder)
    for before, block in itertools.pairwise(blocks):
        if block.language == "output" and before in printed:
            line = missing_line(block.code, printed[before])
            assert line is None, f"line {block.line}: {line!r} is not in\n{printed[before]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page, tmp_path):
    check(PAGES[page], tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_says_what_it_needs(page):
    for before, block in zip([None, *PAGES[page]], PAGES[page], strict=False):
        assert block.language in LANGUAGES, f"line {block.line}"
        assert block.said("needs") in (None, *NEEDS), f"line {block.line}"
        if block.language == "output":
            assert before is not None, f"line {block.line}"
            assert before.language in ("sh", "python"), f"line {block.line}"


def test_the_list_of_pages_names_them_all():
    listed = (FOLDER / "README.md").read_text()
    assert [p.name for p in FOLDER.iterdir() if p.suffix and f"]({p.name})" not in listed] == [
        "README.md"
    ]


BROKEN = {
    "a command": (1, "```sh\nfalse\necho later\n```"),
    "code": (4, "```python\nx = 1\n```\n```python\nassert x == 2\n```"),
    "a file": (5, "```python\n# file: a/b.py\nraise ValueError\n```\n```sh\npython a/b.py\n```"),
    "output": (4, "```sh\necho loss 3.21\n```\n```output\nloss 3.51\n```"),
    "a count": (4, "```sh\necho 21 steps\n```\n```output\n20 steps\n```"),
    "order": (5, "```sh\necho a\necho b\n```\n```output\nb\na\n```"),
}


@pytest.mark.parametrize(("line", "text"), BROKEN.values(), ids=BROKEN)
def test_a_page_that_is_wrong_is_found(line, text, tmp_path):
    with refused(AssertionError, f"line {line}: "):
        check(blocks_of(text), tmp_path)


def test_a_page_that_is_right(tmp_path):
    text = """
```sh
export NAME=x
sleep 60 &
```
```python
# file: a/b.py
import os
print(os.environ["NAME"], "loss 3.21,", "1,024 tokens in 7 s")
```
```sh
python a/b.py
```
```output
x loss 3.20, 1,024 tokens in ...
```
```sh
# needs: a TPU
false
```
"""
    check(blocks_of(text), tmp_path)
