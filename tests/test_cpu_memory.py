"""Memory of programs that compute on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxmars.cli.config_file import load_config
from maxmars.cpu_memory import (
    keep_freed_memory,
    keep_freed_memory_if_small,
    restart_with_huge_pages,
)

# What of 128 MiB, filled and freed by a second thread, is still resident. One thread at a time, no
# JAX: how much the heap of a real step grows, and when, is decided by how its threads interleave.
PROGRAM = """
import os, sys, threading
from maxmars.cpu_memory import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def fill_and_free():
    block = b"x" * 2**27
    assert resident() > before + 2**26
    del block

if sys.argv[1] == "keep":
    keep_freed_memory()
before = resident()
thread = threading.Thread(target=fill_and_free)
thread.start()
thread.join()
print(resident() - before)
"""


def kept_bytes(word: str, **environment: str) -> int:
    """What the program keeps of what it has freed."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word],
        env=others | {"JAX_PLATFORMS": "cpu"} | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_is_freed_is_kept() -> None:
    assert kept_bytes("leave") < 2**25
    assert kept_bytes("keep") > 2**26
    # What the environment says about malloc counts.
    assert kept_bytes("keep", MALLOC_MMAP_THRESHOLD_="65536") < 2**25


@pytest.mark.parametrize("variable", [("JAX_PLATFORMS", "tpu,cpu"), ("MALLOC_ARENA_MAX", "2")])
def test_others_habits_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    def load(name: object) -> None:
        raise AssertionError(f"the C library {name} was loaded")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(AssertionError):
        keep_freed_memory()
    monkeypatch.setenv(*variable)
    keep_freed_memory()


def test_only_small_runs_keep_what_they_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr("maxmars.cpu_memory.keep_freed_memory", lambda: kept.append("kept"))
    configs = Path(__file__).parents[1] / "configs"
    keep_freed_memory_if_small(load_config(f"{configs}/gpt2.py:size=small"))
    assert not kept
    keep_freed_memory_if_small(load_config(f"{configs}/quickstart.py"))
    keep_freed_memory_if_small(load_config(f"{configs}/compare_tiny.py"))
    assert len(kept) == 2


RESTARTED = """
import os, sys
from pathlib import Path
from maxmars import cpu_memory
cpu_memory._HUGE_PAGES = Path(sys.argv[1])
cpu_memory.platform.libc_ver = lambda: ("glibc", sys.argv[2])
cpu_memory.restart_with_huge_pages()
print(os.getpid(), sys.stdin.readline(), os.environ.get("GLIBC_TUNABLES"), sys.argv[3:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages of Linux")
@pytest.mark.parametrize(
    ("pages", "version", "environment", "tunables"),
    [
        ("always [madvise] never", "2.35", {}, "glibc.malloc.hugetlb=1"),
        ("[always] madvise never", "2.35", {}, None),
        ("always [madvise] never", "2.31", {}, None),
        ("always [madvise] never", "2.35", {"JAX_PLATFORMS": "cuda"}, None),
        ("always [madvise] never", "2.35", {"GLIBC_TUNABLES": "x.y=1"}, "x.y=1"),
    ],
)
def test_a_process_starts_anew_for_huge_pages(
    tmp_path: Path, pages: str, version: str, environment: dict[str, str], tunables: str | None
) -> None:
    path = tmp_path / "enabled"
    path.write_text(pages)
    others = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    with subprocess.Popen(
        [sys.executable, "-c", RESTARTED, str(path), version, "an argument"],
        env=others | {"JAX_PLATFORMS": "cpu"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate("input")
    assert out == f"{process.pid} input {tunables} ['an argument']\n"


def test_huge_pages_are_left_to_those_who_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("started anew"))
    monkeypatch.setattr("maxmars.cpu_memory._HUGE_PAGES", Path("/absent"))
    monkeypatch.setattr("maxmars.cpu_memory.platform.libc_ver", lambda: ("glibc", "2.40"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    restart_with_huge_pages()
