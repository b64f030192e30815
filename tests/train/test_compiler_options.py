"""Which options the compiler gets for the train step, and where."""

import dataclasses

import pytest
from tiny import MODEL, tiny_config

from maxmars.config import GPT2Config, ModuleConfig
from maxmars.distributed.sharding import make_mesh
from maxmars.model.parameters import Parameters
from maxmars.train.compiler_options import compiler_options
from maxmars.train.resume import rounding_changes, rounding_of
from maxmars.train.step import make_train_step

WHOLE = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
APART = {"xla_tpu_dot_dot_fusion": False}
OWN = ModuleConfig(make="model.py:make", vocab_size=257, max_seq_len=16)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPT2Config.small(), WHOLE),
        (GPT2Config.medium(), WHOLE),
        (GPT2Config.large(), WHOLE | APART),
        (GPT2Config.xl(), WHOLE | APART),
        (OWN, WHOLE),
    ],
)
def test_the_options_of_a_model_on_tpus(model, expected):
    config = tiny_config(model=model)
    assert compiler_options(config, "tpu") == expected
    given = dataclasses.replace(config, tpu_compiler_options={"xla_a": "1"})
    assert compiler_options(given, "tpu") == {"xla_a": "1"}
    none = dataclasses.replace(config, tpu_compiler_options=None)
    assert compiler_options(none, "tpu") is None
    for platform in ("cpu", "gpu", None):
        assert compiler_options(config, platform) is None
        assert compiler_options(given, platform) is None


def test_a_cpu_compiles_without_options_that_only_tpus_know():
    config = tiny_config(
        model=dataclasses.replace(MODEL, num_layers=1),
        tpu_compiler_options=APART,
        num_microbatches=1,
    )
    make_train_step(config, Parameters(config.model, make_mesh(config.mesh))).lower().compile()


def test_a_change_of_the_options_is_one_of_the_rounding_on_tpus():
    auto, none = tiny_config(), tiny_config(tpu_compiler_options=None)
    (change,) = rounding_changes(rounding_of(auto, "tpu"), rounding_of(none, "tpu"))
    assert "tpu_compiler_options" in change
    assert rounding_changes(rounding_of(auto, "cpu"), rounding_of(none, "cpu")) == []
