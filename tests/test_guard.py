"""The guard: which steps are skipped."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxmars.config import GuardConfig
from maxmars.guard import check_step, new_guard


def spikes(threshold, history=100):
    return GuardConfig(loss_spike_threshold=threshold, history=history, max_skipped_in_a_row=10)


def run(config, losses, norms=None):
    """Whether each step is applied, and the last guard."""
    guard, applied = new_guard(), []
    for i, loss in enumerate(losses):
        norm = 1.0 if norms is None else norms[i]
        ok, guard = check_step(config, guard, jnp.float32(loss), [jnp.float32(norm)])
        applied.append(bool(ok))
    return applied, guard


def noisy(n, seed=0):
    return 3 + 0.1 * np.random.default_rng(seed).standard_normal(n)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_skipped_and_not_remembered(bad):
    config = spikes(5.0, history=10)
    losses = noisy(20)
    applied, clean = run(config, losses)
    assert all(applied)
    applied, guard = run(config, np.insert(losses, 12, bad))
    assert applied == [i != 12 for i in range(21)]
    assert guard.num_skipped == 1
    assert guard.skipped_in_a_row == 0
    assert guard.loss_mean == clean.loss_mean
    assert guard.loss_variance == clean.loss_variance
    applied, guard = run(config, losses, [1.0] * 18 + [bad] * 2)
    assert applied[-3:] == [True, False, False]
    assert guard.skipped_in_a_row == 2


def test_a_spike_is_skipped_once_there_is_a_history():
    config = spikes(6.0, history=50)
    losses = noisy(200)
    losses[[10, 120]] = 5.0  # 20 deviations
    applied, guard = run(config, losses)
    assert [i for i, ok in enumerate(applied) if not ok] == [120]
    assert guard.num_skipped == 1
    applied, _ = run(GuardConfig(history=50), losses)
    assert all(applied)


def test_running_mean_and_deviation():
    losses = noisy(2000, seed=1)
    _, guard = run(spikes(8.0, history=500), losses)
    assert guard.loss_mean == pytest.approx(3.0, abs=0.02)
    assert np.sqrt(guard.loss_variance) == pytest.approx(0.1, rel=0.1)
    _, early = run(GuardConfig(history=500), losses[:100])
    assert early.loss_mean == pytest.approx(losses[:100].mean(), rel=1e-5)
    assert early.loss_variance == pytest.approx(losses[:100].var(), rel=1e-3)


def test_a_loss_that_stays_high_passes_in_the_end():
    losses = np.concatenate([noisy(100), noisy(100) + 2])
    applied, _ = run(spikes(6.0, history=20), losses)
    assert not applied[100]
    assert all(applied[150:])
    assert sum(not ok for ok in applied) < 30


def test_bad_values():
    with pytest.raises(ValueError, match=r"GuardConfig\.loss_spike_threshold=0\.0 must be greater"):
        GuardConfig(loss_spike_threshold=0.0)
    with pytest.raises(ValueError, match=r"max_skipped_in_a_row=-1 must not be negative"):
        GuardConfig(max_skipped_in_a_row=-1)
    with pytest.raises(ValueError, match=r"max_skipped_in_a_row=0 stops the run at the first"):
        GuardConfig(loss_spike_threshold=5.0)
