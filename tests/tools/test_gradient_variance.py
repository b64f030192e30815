"""Errors of gradient estimates: where they are known, and measured as a user measures them."""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmars.optim import MatrixSpec, clip_by_matrix_norm

TOOLS = Path(__file__).resolve().parents[2] / "tools"
B1, NOISE, SHAPE = 0.8, 0.3, (2, 200, 200)
SPECS = {"w": MatrixSpec(batch=(0,), rows=(1,), cols=(2,))}  # two matrices
SIZE = SHAPE[1] * SHAPE[2]


@pytest.fixture
def maths(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import gradient_error

    return gradient_error


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import gradient_variance

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gradient_variance.py", *map(str, arguments)])
        gradient_variance.main()

    return run


def walk(maths, gamma, *, exact, clip=None, steps=60, change=0.3):
    """Errors of c and of m, each [matrices], in variances of g, at the end of an even walk.

    On F(x) = ‖x‖² / 2 each step changes each number of ∇F by `change` standard deviations of the
    noise, which is as large at all parameters, and in exact MARS the same at the previous ones.
    """
    estimator = maths.make_estimator(B1, gamma, exact=exact, clip=clip)
    draw = np.random.default_rng(0)
    point = draw.normal(size=SHAPE)
    states = [estimator.init({"w": jnp.asarray(point)})] * 2
    update, found = jax.jit(estimator.update), []
    for _ in range(steps):
        before, point, found = point, point + change * NOISE, []
        for state in states:
            noise = NOISE * draw.normal(size=SHAPE)
            found.append(update({"w": point + noise}, state, {"w": before + noise}))
        states = [state for _, state in found]
    held = {"w": jnp.asarray(point)}
    signal = maths.matrix_products(held, held, SPECS)
    return maths.Estimates(
        *(
            maths.errors(maths.moments(own, twin, held, SPECS), signal)
            for own, twin in zip(*(estimates for estimates, _ in found), strict=True)
        )
    )


def in_noise(values):
    return np.asarray(values) / (NOISE**2 * SIZE)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 1 - B1])
def test_errors_of_approximate_mars_have_the_closed_form(maths, gamma):
    found, gain, lag = (
        walk(maths, gamma, exact=False),
        maths.noise_gain(B1, gamma),
        maths.lag(B1, gamma),
    )
    for errors, variance, steps in zip(found, gain, lag, strict=True):
        bias = (0.3 * steps) ** 2
        assert in_noise(errors.variance) == pytest.approx(variance, rel=0.04)
        assert in_noise(errors.bias) == pytest.approx(bias, rel=0.04, abs=0.03)
        assert in_noise(errors.total) == pytest.approx(variance + bias, rel=0.04)
        assert in_noise(errors.of_twin) == pytest.approx(variance + bias, rel=0.04)


def test_noise_that_is_the_same_at_the_previous_parameters_cancels_in_exact_mars(maths):
    found, plain, lag = (
        walk(maths, 0.1, exact=True),
        maths.noise_gain(B1, 0.0),
        maths.lag(B1, 0.1),
    )
    for errors, variance, steps in zip(found, plain, lag, strict=True):
        assert in_noise(errors.variance) == pytest.approx(variance, rel=0.04)
        assert in_noise(errors.bias) == pytest.approx((0.3 * steps) ** 2, rel=0.04, abs=0.03)


def test_a_clip_changes_the_error_but_not_the_direction(maths):
    free, clipped = (
        walk(maths, 0.1, exact=False, clip=clip, steps=3)
        for clip in (None, clip_by_matrix_norm(1.0, SPECS))
    )
    assert (clipped.gradient.total > 1.5 * free.gradient.total).all()
    np.testing.assert_allclose(clipped.gradient.direction, free.gradient.direction, rtol=1e-3)


def test_the_noise_of_a_held_batch_falls_with_its_size(maths):
    """The loss ‖w − row‖² / 2, with rows around zero: ∇F = w, and a part of 4 rows has NOISE²/4."""
    params = {"w": jnp.full(SHAPE, 0.2)}

    def held(num_parts):
        rows = NOISE * jax.random.normal(jax.random.key(0), (num_parts, 4, *SHAPE))
        gradient = lambda params, part: {"w": params["w"] - part.mean(axis=0)}  # noqa: E731
        return jax.jit(lambda params, rows: maths.held_gradient(gradient, params, rows, SPECS))(
            params, rows
        )

    for num_parts in (4, 16):
        found = held(num_parts)
        off = jax.tree.map(jnp.subtract, found.gradient, params)
        assert in_noise(found.noise) == pytest.approx(1 / 4, rel=0.03)
        assert in_noise(found.floor) == pytest.approx(1 / 4 / num_parts, rel=0.03)
        assert in_noise(maths.matrix_products(off, off, SPECS)) == pytest.approx(
            1 / 4 / num_parts, rel=0.03
        )
        assert np.asarray(found.signal) == pytest.approx(0.2**2 * SIZE, rel=0.02)


TINY = """--num-steps 8 --points 2 --window 3 --held 16 --global-batch-size 8 --num-microbatches 1
    --schedule.warmup-steps 2 --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16
    --model.max-seq-len 16 --model.scan-unroll 1 --model.compute-dtype float32"""


@pytest.mark.slow
def test_a_measurement_leaves_numbers_tables_and_a_figure(tool, byte_tokens, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = [f"quickstart:data={byte_tokens}", *TINY.split(), "--output", tmp_path / "found"]
    tool(*command)
    found = json.loads((tmp_path / "found" / "gradient_variance.json").read_text())
    (seed,) = found["seeds"]
    assert found["gammas"] == [0.0, 0.025, 0.05, 0.1]
    assert seed["windows"] == [[3, 5], [6, 8]]
    products = np.array(seed["moments"])
    assert products.shape == (2, 4, 2, 4, 5, len(seed["matrices"]))
    np.testing.assert_array_equal(products[:, 0, :, 0], products[:, 2, :, 0])
    assert (products[:, 0, 0, 3, 0] != products[:, 0, 0, 0, 0]).all()
    table = (tmp_path / "found" / "gradient_variance.md").read_text()
    assert table in capsys.readouterr().out
    assert re.findall(r"\| (?:approximate|exact), γ = 0 \| 1? ?\| 1 \| 1 \|", table)
    assert (tmp_path / "found" / "gradient_variance.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="2"):  # minutes of work are not overwritten
        tool(*command)
    assert "has 1 already; raise it" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        tool(*command, "--seeds", "2", "--spacing", "linear")
    assert "is another measurement" in capsys.readouterr().err
    tool(*command, "--seeds", "2")  # goes on after the first
    both = json.loads((tmp_path / "found" / "gradient_variance.json").read_text())
    assert both["seeds"][0] == seed
    assert [found["config"]["seed"] for found in both["seeds"]] == [
        seed["config"]["seed"],
        seed["config"]["seed"] + 1,
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--points", "4"], "--points 4 windows of --window 3 steps do not fit into num_steps=8"),
        (["--held", "12"], "--held 12 must be a multiple of 8"),
        (["--held", "8"], "at least 16"),
        (["--held", "80000"], "lower --held"),
        (["--draw", "True"], "there is no"),
        (["--gammas", "0.1,-1"], "--gammas 0.1,-1 must be numbers above 0"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tool, byte_tokens, tmp_path, capsys, arguments, words):
    pytest.importorskip("matplotlib")
    given = dict(zip(TINY.split()[::2], TINY.split()[1::2], strict=True))
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    options = [word for pair in given.items() for word in pair]
    with pytest.raises(SystemExit, match="2"):
        tool(f"quickstart:data={byte_tokens}", *options, "--output", tmp_path / "found")
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "found").exists()
