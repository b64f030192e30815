"""Run maxmars with slow file operations in one directory, so that kills come between them.

    python tools/slow_files.py DIRECTORY OPERATIONS train CONFIG --workdir DIRECTORY ...

Python tells an audit hook of each file that is opened, renamed, made or removed. This hook appends
the operation to the file OPERATIONS, and then waits 10 to 50 ms before Python goes on with it.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from typing import Any

EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime"}


def main() -> None:
    directory, operations, *arguments = sys.argv[1:]
    file = os.open(operations, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance = random.Random()

    def slow_down(event: str, about: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(about[0], str | os.PathLike):
            path = os.fspath(about[0])
            if isinstance(path, str) and path.startswith(directory):
                os.write(file, f"{event} {os.path.relpath(path, directory)}\n".encode())
                time.sleep(chance.uniform(0.01, 0.05))

    sys.addaudithook(slow_down)
    sys.argv[1:] = arguments
    runpy.run_module("maxmars", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
