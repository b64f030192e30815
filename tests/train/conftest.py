"""A small run on its own tokens that tests of records change."""

import shutil

import pytest
from tiny import six_steps

from maxmars.train import train


@pytest.fixture(scope="session")
def six_step_run(tmp_path_factory):
    """A folder with a `run` of 6 steps in two sessions, of which the first was ended after 4, what
    it was `after_4`, and its `tokens`; tests do not change it."""
    folder = tmp_path_factory.mktemp("six_steps")
    train(six_steps(folder, 4), folder / "run")
    shutil.copytree(folder / "run", folder / "after_4")
    train(six_steps(folder, 6), folder / "run")
    return folder


@pytest.fixture
def six_step_copy(six_step_run, tmp_path):
    """The workdir of a copy, whose tokens lie beside it."""
    shutil.copytree(six_step_run, tmp_path / "copy")
    return tmp_path / "copy" / "run"
