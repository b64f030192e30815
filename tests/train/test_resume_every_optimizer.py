"""A continued run is the same, bit by bit, under every optimizer."""

import shutil

import pytest
from tiny import first_difference, series, short_config, sophia

from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    LionConfig,
    MarsConfig,
    MomentumKernelConfig,
    MuonConfig,
    NAdamWConfig,
    OptaxConfig,
    SoapConfig,
    WeightUpdateConfig,
)
from maxmars.train import train

EIGHT = MomentumKernelConfig(preset="eight_ema", switch_step=2, end_step=5)
OPTIMIZERS = {
    "adamw": AdamWConfig(),
    "nadamw": NAdamWConfig(),
    "ademamix": AdamWConfig(momentum_kernel=MomentumKernelConfig(preset="ademamix", end_step=4)),
    "lion": LionConfig(),
    "adopt": OptaxConfig(make="optax.contrib:adopt", learning_rate=6e-4),
    "sophia": sophia(2),
    "soap": SoapConfig(),
    "muon": MuonConfig(),
    "muon of eight": MuonConfig(momentum_kernel=EIGHT),
    "soap of eight": SoapConfig(momentum_kernel=EIGHT),
    "mars of eight": MarsConfig(momentum_kernel=EIGHT),
    "moonlight": MuonConfig(ns_scale="rms", vector_learning_rate_scale=1.0),
    "normuon": MuonConfig(row_normalization=0.95),
    "adamw hyperball": AdamWConfig(weight_update=WeightUpdateConfig(hyperball=True)),
    "muon floor": MuonConfig(weight_update=WeightUpdateConfig(floor=0.35, coupled_decay=True)),
    "mars": MarsConfig(),
    "mars amsgrad": MarsConfig(amsgrad=True),
    "mars bf16 last": MarsConfig(last_grad_dtype="bfloat16"),
    "mars exact": MarsConfig(exact=True),
    "mars lion": MarsConfig(variant="lion"),
    "mars lion exact": MarsConfig(variant="lion", exact=True),
    "mars shampoo": MarsConfig(variant="shampoo"),
    "mars shampoo exact": MarsConfig(variant="shampoo", exact=True),
    "mars m": MarsConfig(variant="m"),
    "mars m exact": MarsConfig(variant="m", exact=True),
}
# Their states have the same arrays as others' (the last one as "mars m exact"); test_requests.py
# continues Sophia.
SIMILAR = ("sophia", "moonlight", "adamw hyperball", "muon floor", "mars shampoo exact")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SIMILAR else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_a_continued_run_is_the_same(tmp_path, name):
    config = short_config(
        tmp_path / "tokens",
        optimizer=OPTIMIZERS[name],
        num_steps=5,
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=3, keep_last=9),
    )
    train(config, tmp_path / "undisturbed")
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "continued")
    shutil.rmtree(tmp_path / "continued" / "checkpoints" / "5")
    train(config, tmp_path / "continued")
    assert len({step for step, _ in series(tmp_path / "continued")}) == 5
    assert first_difference(tmp_path / "undisturbed", tmp_path / "continued") is None
