"""The house: which rooms the package has, which may import which, and what importing them loads."""

import ast
import subprocess
from pathlib import Path

import pytest
from running import run_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maxmars"
# Each room may import what stands in the sets below its own.
FLOORS = [
    {"cli"},
    {"compare", "launch"},
    {"plan"},
    {"train"},
    {"eval"},
    {"checkpoint", "model", "data"},
    {"distributed"},
    {"config", "optim"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported_rooms(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    return {name.split(".")[1] for name in names if name.startswith("maxmars.")}


def test_rooms_import_only_rooms_below():
    for path in PACKAGE.glob("*/**/*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for other in imported_rooms(path) - {room}:
            assert FLOOR[other] > FLOOR[room], f"{path} imports {other}, which is not below {room}"
            assert room != "launch" or other == "config", f"{path} imports {other}"


def test_the_root_holds_the_rooms_and_nothing_else():
    entries = {p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"}
    assert entries == {*FLOOR, "__init__.py", "__main__.py", "py.typed", "LICENSE"}
    assert [room for room in FLOOR if not (PACKAGE / room / "README.md").exists()] == []


def test_neither_commands_nor_the_preparation_of_text_load_jax():
    modules = [f"maxmars.cli.{p.stem}" for p in (PACKAGE / "cli").glob("*.py")]
    modules += ["maxmars.config", "maxmars.data.prepare"]
    program = f"import sys, {', '.join(modules)}; print({{'jax', 'grain'}} & set(sys.modules))"
    assert run_python("-c", program, folder=ROOT).stdout.strip() == "set()"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a git checkout lists its files")
def test_the_top_level_of_the_repository_stays_small():
    # A checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    files = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    names = {line.partition("/")[0] for line in files.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= {
        "pyproject.toml",
        "maxmars",
        "configs",
        "tests",
        "tools",
        "README.md",
    }
