"""Memory and compiler of programs that compute on CPUs."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxmars import cpu_settings
from maxmars.cli.config_file import load_config
from maxmars.cpu_settings import fuse_outputs, keep_freed_memory, prepare

# What of 128 MiB, filled and freed by a second thread, is still resident. One thread at a time, no
# JAX: how much the heap of a real step grows, and when, is decided by how its threads interleave.
PROGRAM = """
import os, sys, threading
from maxmars.cpu_settings import give_back_freed_memory, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def fill_and_free():
    block = b"x" * 2**27
    assert resident() > before + 2**26
    del block

if sys.argv[1] != "leave":
    keep_freed_memory()
if sys.argv[1] == "give back":
    import jax  # which it loads

before = resident()
thread = threading.Thread(target=fill_and_free)
thread.start()
thread.join()
if sys.argv[1] == "give back":
    give_back_freed_memory(None)
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
    assert kept_bytes("give back") < 2**26
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


@pytest.mark.parametrize(
    ("gigabytes", "limit", "kept"),
    [(8, None, 2), (64, None, 3), (64, "max", 3), (64, str(2 * 10**9), 2), (0.1, "max", 0)],
)
def test_runs_keep_what_they_free_where_memory_is_ample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gigabytes: float, limit: str | None, kept: int
) -> None:
    calls: list[str] = []
    pages = {"SC_PHYS_PAGES": int(gigabytes * 10**9) // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    monkeypatch.setattr(cpu_settings, "_CGROUP_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(cpu_settings, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(cpu_settings, "fuse_outputs", lambda: None)
    configs = Path(__file__).parents[1] / "configs"
    small = load_config(f"{configs}/gpt2.py:size=small")
    small = dataclasses.replace(small, global_batch_size=4, num_microbatches=4)
    for config in (
        small,
        load_config(f"{configs}/quickstart.py"),
        load_config(f"{configs}/compare_tiny.py"),
    ):
        prepare(config)
    assert len(calls) == kept


@pytest.mark.parametrize(
    ("platforms", "given", "expected"),
    [
        ("cpu", None, ["--xla_backend_extra_options=xla_cpu_use_multi_output_fusion=true"]),
        (
            "cpu",
            "--xla_a=1",
            ["--xla_a=1", "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion=true"],
        ),
        ("cpu", "--xla_backend_extra_options=b", ["--xla_backend_extra_options=b"]),
        ("tpu,cpu", "--xla_a=1", ["--xla_a=1"]),
    ],
)
def test_outputs_are_fused_unless_others_say_so(
    monkeypatch: pytest.MonkeyPatch, platforms: str, given: str | None, expected: list[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("XLA_FLAGS", given or "")
    fuse_outputs()
    fuse_outputs()
    assert os.environ["XLA_FLAGS"].split() == expected


RESTARTED = """
import os, sys
from pathlib import Path
from maxmars import cpu_settings
cpu_settings._HUGE_PAGES = Path(sys.argv[1])
cpu_settings.platform.libc_ver = lambda: ("glibc", sys.argv[2])
cpu_settings.restart_with_huge_pages()
print(os.getpid(), sys.stdin.readline(), os.environ.get("GLIBC_TUNABLES"), sys.argv[3:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages of Linux")
@pytest.mark.parametrize(
    ("pages", "version", "environment", "tunables"),
    [
        ("always [madvise] never", "2.35", {}, "glibc.malloc.hugetlb=1"),
        ("[always] madvise never", "2.35", {}, None),
        (None, "2.35", {}, None),
        ("always [madvise] never", "2.31", {}, None),
        ("always [madvise] never", "2.35", {"JAX_PLATFORMS": "cuda"}, None),
        ("always [madvise] never", "2.35", {"GLIBC_TUNABLES": "x.y=1"}, "x.y=1"),
    ],
)
def test_a_process_starts_anew_for_huge_pages(
    tmp_path: Path,
    pages: str | None,
    version: str,
    environment: dict[str, str],
    tunables: str | None,
) -> None:
    path = tmp_path / "enabled"
    if pages is not None:
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
