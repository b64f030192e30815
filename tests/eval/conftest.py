"""A run and a model with random weights, which the tests of this room read."""

from pathlib import Path

import pytest
from hf_models import BYTES, make_run, random_params
from tiny import trained_model
from trees import mesh_of

from maxmars.data.tokenizer import ByteTokenizer
from maxmars.eval import TrainedModel


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The directory of the run `own`, with `random_params(BYTES, step)` at the steps 2 and 4."""
    params = {step: random_params(BYTES, step) for step in (2, 4)}
    return make_run(tmp_path_factory.mktemp("runs") / "own", BYTES, params, ByteTokenizer())


@pytest.fixture(scope="session")
def model() -> TrainedModel:
    return trained_model(mesh_of())
