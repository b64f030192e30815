"""`maxmars launch` from an installed wheel, in a folder of the user's own without git."""

import hashlib
import os
import subprocess
import sys
import venv

import pytest
from fake_cloud import program

from maxmars.launch import wheel

CONFIG = """
import dataclasses
from maxmars.config import OptaxConfig
from maxmars.config.load import load_config

def get_config():
    optimizer = OptaxConfig(make="lib/optim.py:make", learning_rate=1e-3)
    return dataclasses.replace(load_config("quickstart"), optimizer=optimizer)
"""
SHOW = """
import hashlib, maxmars
from pathlib import Path
from maxmars.config.checkout import wheel_sha256
from maxmars.launch.wheel import make_wheel
print(Path(maxmars.__file__).parents[1])
print(wheel_sha256(Path(maxmars.__file__).parents[1]))
print(hashlib.sha256(make_wheel()).hexdigest())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with maxmars from its wheel, which takes the other packages from this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    content = wheel.make_wheel()
    (folder / wheel.NAME).write_bytes(content)
    # With its hash, as pip before 23.1 notes no other.
    url = f"{(folder / wheel.NAME).as_uri()}#sha256={hashlib.sha256(content).hexdigest()}"
    words = ["--no-deps", "--no-index", "--disable-pip-version-check", f"maxmars @ {url}"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *words]
    subprocess.run(pip, check=True, capture_output=True)
    (site,) = (folder / "venv" / "lib").glob("*/site-packages")
    (site / "pyproject.toml").write_text("[project]\nname = 'other'\n")  # of some other package
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))  # read in the order of names: after maxmars
    return python


def run(python, *words, **variables):
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    return subprocess.run([python, "-P", *words], env=variables, capture_output=True, text=True)


@pytest.mark.slow
def test_a_folder_without_git_is_launched_by_an_installed_maxmars(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program(tmp_path / "bin" / "sbatch", "#!/bin/bash\necho 42\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "lib" / "optim.py").write_text("import rates\n\ndef make(learning_rate): pass\n")
    (tmp_path / "lib" / "rates.py").touch()
    words = ["-m", "maxmars", "launch", "slurm", "config.py", "--name", "a", "--workdir", "run"]
    done = run(python, *words, PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    (copy,) = (tmp_path / "run").glob("source-*")
    own = {str(p.relative_to(copy)) for p in copy.rglob("*.py") if "package" not in p.parts}
    assert own == {"config.py", "lib/optim.py", "lib/rates.py"}
    sha256 = hashlib.sha256((copy / wheel.NAME).read_bytes()).hexdigest()
    here = hashlib.sha256(wheel.make_wheel()).hexdigest()
    site, installed, made = run(python, "-c", SHOW).stdout.split()
    assert "venv" in site
    assert installed == made == here == sha256
    # The job's Python, which has the copy on its path, and from there the same again.
    site, installed, made = run(python, "-c", SHOW, PYTHONPATH=f"{copy}/package").stdout.split()
    assert site == f"{copy}/package"
    assert installed == made == sha256
    (tmp_path / "lib" / "rates.py").unlink()
    done = run(python, *words)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "optim.py:1" in done.stderr
    assert "rates" in done.stderr
