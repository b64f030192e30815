"""Which options the compiler gets for the train step, and where."""

import jax
import pytest
from tiny import tiny_config

from maxmars.config import GPT2Config, ModuleConfig
from maxmars.train.compiler_options import compiler_options

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
def test_the_options_of_a_model_on_tpus(model, expected, monkeypatch):
    config = tiny_config(model=model)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert compiler_options(config, "tpu") == expected
    assert compiler_options(config, "cpu") is None is compiler_options(config, None)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1 --xla_tpu_dot_dot_fusion=true")
    assert compiler_options(config, "tpu") == WHOLE


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_the_options_on_gpus(platform, monkeypatch):
    name = "xla_gpu_experimental_gemm_fusion_v2"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    expected = {name: True} if jax.__version_info__ < (0, 12) else None  # 0.12's default
    assert compiler_options(tiny_config(), platform) == expected
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
    assert compiler_options(tiny_config(), platform) is None
