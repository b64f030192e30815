"""The train step on batches with a loss mask, segment ids and positions."""

import jax
import numpy as np
import pytest
from tiny import ADAMW, first_state, packed_rows, sophia, split_on_mesh, tiny_config

from maxmars.config import CheckpointConfig, EvalConfig, GrainConfig, MarsConfig, MeshConfig
from maxmars.model import make_model, token_losses
from maxmars.train import train
from maxmars.train.reporter import DivergedError
from maxmars.train.step import SKIP_REASONS


def run(microbatches, mesh, optimizer):
    config = tiny_config(num_microbatches=microbatches, mesh=mesh, optimizer=optimizer)
    (step, state), history = first_state(config), []
    for seed in range(3):
        state, metrics = step(state, split_on_mesh(step, packed_rows(seed)))
        history.append(jax.device_get(metrics))
    return jax.device_get(state.params), history


@pytest.mark.seconds
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(MarsConfig(), id="mars"),
        # In test_requests.py the gradients of both are taken of such batches.
        pytest.param(MarsConfig(exact=True), id="exact", marks=pytest.mark.long),
        pytest.param(sophia(2), id="sophia", marks=pytest.mark.long),
    ],
)
def test_microbatches_and_devices_change_nothing_but_rounding(optimizer, capfd):
    params, history = run(1, MeshConfig(), optimizer)
    _, other = run(4, MeshConfig(data=2, fsdp=2, tensor=2), optimizer)
    for ours, theirs in zip(history, other, strict=True):
        assert float(ours["train/loss"]) == pytest.approx(float(theirs["train/loss"]), abs=1e-5)
        norms = [float(metrics["train/grad_norm"]) for metrics in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert "rematerialization" not in capfd.readouterr().err  # XLA's warning of a bad resharding
    assert all(metrics["train/skipped"] == 0 for metrics in history)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.seconds
def test_the_loss_is_the_mean_over_the_targets_that_count():
    config = tiny_config(num_microbatches=1, optimizer=ADAMW)
    step, state = first_state(config)
    batch = packed_rows(0)
    rows = {name: array for name, array in batch.items() if name != "mask"}
    losses = jax.jit(lambda p, rows: token_losses(make_model(config.model, p), **rows))(
        state.params, rows
    )
    expected = np.mean(np.asarray(losses)[batch["mask"][:, 1:]])
    nothing = {**batch, "mask": np.zeros_like(batch["mask"])}
    for given, loss, skipped in ((batch, expected, 0), (nothing, np.nan, 1)):
        state, metrics = step(state, split_on_mesh(step, given))
        np.testing.assert_allclose(metrics["train/loss"], loss, atol=1e-5)
        assert metrics["train/skipped"] == skipped
        assert ("mask" in SKIP_REASONS[metrics["train/skip_reason"]]) == bool(skipped)


NO_TARGETS_IN_SOME = """
import grain, numpy as np

def windows(split, length, first):
    def window(number):
        masked = number >= first and split == "train"
        tokens = np.arange(length + 1, dtype=np.int32) + number
        return {"tokens": tokens, "mask": np.full(length + 1, not masked)}

    return grain.MapDataset.source(range(64)).map(window)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(("first", "every"), [(0, None), (32, 1)])
def test_a_batch_without_targets_is_told_as_one(first, every, tmp_path):
    (tmp_path / "own.py").write_text(NO_TARGETS_IN_SOME)
    data = GrainConfig(
        source=f"{tmp_path}/own.py:windows", options={"first": first}, order="sequential"
    )
    config = tiny_config(
        data=data,
        num_microbatches=1,
        optimizer=ADAMW,
        checkpoint=CheckpointConfig(every=every),
        eval=EvalConfig(every=None),
    )
    with pytest.raises(DivergedError, match="mask") as told:
        train(config, tmp_path / "run")
    assert "learning_rate" not in str(told.value)
    assert "not finite" not in str(told.value)
