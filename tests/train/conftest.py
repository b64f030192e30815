"""A small run on its own tokens that tests of records change."""

import shutil

import pytest
from tiny import six_steps

from maxmars.train import train


@pytest.fixture(scope="session")
def six_step_run(tmp_path_factory):
    """A folder with a `run` of 6 steps in two sessions, of which the first was ended after 4, and
    its `tokens`; tests do not change it."""
    folder = tmp_path_factory.mktemp("six_steps")
    for num_steps in (4, 6):
        train(six_steps(folder, num_steps), folder / "run")
    return folder


@pytest.fixture
def six_step_copy(six_step_run, tmp_path):
    """The workdir of a copy, whose tokens lie beside it."""
    shutil.copytree(six_step_run, tmp_path / "copy")
    return tmp_path / "copy" / "run"
