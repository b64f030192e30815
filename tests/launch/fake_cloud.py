"""Folders and programs that stand for a cloud, for the tests of `maxmars launch`."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from running import exit_code

HERE = Path(__file__).parent

# The hosts' Python: makes an environment whose Python "installs" at once, and "trains" by running
# $FAKE_CLOUD/train, a bash script, with what a training process gets.
HOST_PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then exit 0; fi
mkdir -p "$4/bin"
cat >"$4/bin/python" <<'END'
#!/bin/bash
if [[ $2 == pip ]]; then
  echo "pip $*"
  [[ ! -f $FAKE_CLOUD/pip_fails_on_$FAKE_HOST ]]
  exit
fi
. "$FAKE_CLOUD/train"
END
chmod +x "$4/bin/python"
"""


def launch(*words):
    """Exit code of `maxmars launch` with these words."""
    return exit_code("launch", *words)


def with_options(words, options):
    """The words of a command with other options, in place of their own of the same names."""
    kept, rest = [], iter(words)
    named = options[: options.index("--")] if "--" in options else options
    for word in rest:
        if word in named and word.startswith("--"):
            next(rest)
        else:
            kept.append(word)
    return [*kept, *options]


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def put_on_path(folder, programs, monkeypatch):
    """Write these programs, which find the folder as $FAKE_CLOUD, and put them first on PATH."""
    for name, text in programs.items():
        program(folder / "on_path" / name, text)
    monkeypatch.setenv("FAKE_CLOUD", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'on_path'}{os.pathsep}{os.environ['PATH']}")


class FakeCloud:
    """A TPU of two hosts, at first not there, and `gcloud` on PATH."""

    def __init__(self, folder, monkeypatch, hosts=2):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.write("hosts", hosts)
        self.train('echo "trained on $FAKE_HOST"')
        gcloud = f'#!/bin/sh\nexec {sys.executable} -S -E {HERE}/fake_gcloud.py "$@"\n'
        put_on_path(folder, {"gcloud": gcloud}, monkeypatch)
        program(folder / "bin" / "hostname", '#!/bin/sh\necho "tpu-w-$FAKE_HOST"\n')
        program(folder / "bin" / f"python3.{sys.version_info.minor}", HOST_PYTHON)

    def train(self, script):
        """What each host's process does."""
        (self.folder / "train").write_text(script)

    def write(self, name, value):
        (self.folder / name).write_text(json.dumps(value))

    def read(self, name):
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def calls(self):
        """Command lines of gcloud so far, as text."""
        lines = (self.folder / "calls").read_text().splitlines()
        words = [[word for word in json.loads(line) if word != "alpha"] for line in lines]
        return [" ".join(call[2:]) for call in words]

    def count(self, *words):
        """Number of calls with all these words."""
        return sum(all(word in call for word in words) for call in self.calls())

    def host(self, number):
        return self.folder / f"host{number}"

    def switch_off(self):
        """End what still runs on the hosts."""
        for pid in sorted(self.folder.glob("host*/maxmars-*/*.pid")):  # run before train
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)
