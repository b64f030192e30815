"""Further gradients that an optimizer requests: what it gets, and two users of the request, the
example `tools/examples/sophia.py` and the look-ahead optimizer of a page."""

import dataclasses
import runpy
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from markdown_pages import blocks_of
from tiny import (
    MODEL,
    SOPHIA_FILE,
    first_difference,
    first_state,
    packed_rows,
    series,
    split_on_mesh,
    tiny_config,
    values_of,
)

from maxmars.checkpoint import read
from maxmars.cli import main
from maxmars.config import MeshConfig, OptaxConfig, ScheduleConfig
from maxmars.model.language_model import make_model, token_losses
from maxmars.optim import GradientRequest, mars, mars_over, requests_of, with_requests

make_sophia = runpy.run_path(str(SOPHIA_FILE))["sophia"]
PAGE = SOPHIA_FILE.parent / "your_own_optimizer_model_data.md"


# --- what a transformation says -------------------------------------------------------------------


def test_exact_mars_says_what_it_needs():
    previous = GradientRequest(name="prev_grads", at="prev_params")
    exact = (mars(0.1, exact=True), mars_over(optax.adam(0.1), exact=True))
    assert [requests_of(tx) for tx in exact] == [(previous,)] * 2
    assert requests_of(mars(0.1)) == requests_of(optax.adam(0.1)) == ()
    again = with_requests(optax.chain(exact[0], optax.scale(2.0)), requests_of(exact[0]))
    assert requests_of(again) == (previous,)
    params = {"w": jnp.eye(2)}
    updates, _ = again.update(params, again.init(params), params, prev_grads=params)
    expected, _ = exact[0].update(params, exact[0].init(params), params, prev_grads=params)
    np.testing.assert_array_equal(updates["w"], 2 * expected["w"])


# --- what a step gives ----------------------------------------------------------------------------

KEEPING = """
import jax, jax.numpy as jnp, optax
from maxmars.optim import GradientRequest, with_requests

def keep(learning_rate, batch_tokens):
    def init(params):
        zeros = optax.tree.zeros_like(params)
        return {"count": jnp.int32(0), "tokens": jnp.float32(0), "given": {n: zeros for n in NAMES}}

    def update(updates, state, params=None, **given):
        state = {"count": state["count"] + 1, "tokens": jnp.float32(batch_tokens), "given": given}
        return jax.tree.map(lambda g: -learning_rate * g, updates), state

    def doubled(state, params):
        return jax.tree.map(lambda p: 2 * p, params)

    def is_second(state):
        return state["count"] == 1

    requests = [
        GradientRequest(name="doubled", at=doubled),
        GradientRequest(name="previous", at="prev_params"),
        GradientRequest(name="sometimes", at="prev_params", due=is_second),
        GradientRequest(name="sampled", targets="sampled"),
        GradientRequest(name="sampled_there", at=doubled, targets="sampled"),
    ]
    tx = optax.GradientTransformationExtraArgs(init, update)
    return with_requests(tx, requests)

NAMES = ("doubled", "previous", "sometimes", "sampled", "sampled_there")
"""


@pytest.fixture(scope="module")
def keeping(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(KEEPING)
    return OptaxConfig(make=f"{file}:keep", learning_rate=0.1)


def states_of(config):
    """The first state, and that after each of three steps on packed rows."""
    step, state = first_state(config)
    states = [jax.device_get(state)]
    for _ in range(3):
        state, metrics = step(state, split_on_mesh(step, ROWS))
        assert metrics["train/skipped"] == 0
        states.append(jax.device_get(state))
    return states


ROWS = packed_rows(0)


@pytest.fixture(scope="module")
def on_one_device(keeping):
    """The config of a run, and its states."""
    config = tiny_config(
        optimizer=keeping,
        num_microbatches=1,
        gradient_multiplier=2.0,
        gradient_clip_norm=None,
        schedule=ScheduleConfig(warmup_steps=0),
    )
    return config, states_of(config)


@pytest.mark.seconds
def test_each_gradient_is_taken_where_and_when_it_is_requested(on_one_device):
    _, (first, second, state, third) = on_one_device
    rows = {name: jnp.asarray(array) for name, array in ROWS.items() if name != "mask"}

    def close(name, expected):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
            state.opt_state["given"][name],
            expected,
        )

    def loss(params):
        return token_losses(make_model(MODEL, params), **rows).mean(where=ROWS["mask"][:, 1:])

    @jax.jit
    def gradient(params):
        return jax.tree.map(lambda g: 2 * g, jax.grad(loss)(params))

    close("doubled", gradient(jax.tree.map(lambda p: 2 * p, second.params)))
    close("previous", gradient(first.params))
    close("sometimes", gradient(first.params))  # the second step is the one
    assert state.opt_state["tokens"] == 16 * 16
    norms = {n: float(optax.tree.norm(g)) for n, g in state.opt_state["given"].items()}
    assert norms["sampled"] < norms["previous"] / 2  # its labels are likelier; no multiplier
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(third.opt_state["given"]["sometimes"]))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(third.opt_state["given"]["previous"]))


@pytest.mark.slow
def test_a_mesh_and_microbatches_change_nothing_but_rounding(on_one_device, capfd):
    """The labels that are drawn are the same too."""
    config, (_, _, one, _) = on_one_device
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    _, _, many, _ = states_of(dataclasses.replace(config, mesh=mesh, num_microbatches=2))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5),
        many.opt_state,
        one.opt_state,
    )
    assert "rematerialization" not in capfd.readouterr().err  # XLA's warning of a bad resharding


# --- the example ----------------------------------------------------------------------------------


def plain_sophia(p, grads, sampled, rates, *, tokens, b1, b2, rho, decay, every):
    """The official order and parametrisation: h is kept without the number of tokens, is updated
    after the steps k - 1, 2k - 1, ..., and parameters decay first."""
    m, h = np.zeros_like(p), np.zeros_like(p)
    clipped = []
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True)):
        p = p * (1 - rate * decay)
        m = b1 * m + (1 - b1) * g
        ratio = np.minimum(np.abs(m) / (rho * tokens * h + 1e-15), 1)
        clipped.append(np.mean(ratio == 1))
        p = p - rate * np.sign(m) * ratio
        if t % every == every - 1 and t + 1 < len(sampled):
            h = b2 * h + (1 - b2) * sampled[t + 1] ** 2
    return p, clipped


@pytest.mark.smoke
@pytest.mark.parametrize("every", [1, 3])
def test_equations_of_sophia(x64, every):
    rng = np.random.default_rng(0)
    grads, sampled = rng.standard_normal((2, 25, 6, 4))
    p, rates = rng.standard_normal((6, 4)), 0.01 / np.arange(1, 26)
    given = {"b1": 0.9, "b2": 0.8, "rho": 0.01}
    # Elsewhere than where they are needed sampled gradients are ignored, even if not finite.
    masked = [s if t and t % every == 0 else np.full_like(s, np.nan) for t, s in enumerate(sampled)]
    tx = make_sophia(
        lambda count: jnp.asarray(rates)[count],
        batch_tokens=20,
        update_hessian_every=every,
        weight_decay=0.3,
        **given,
    )
    expected, clipped = plain_sophia(
        p, grads, sampled, rates, tokens=20.0, decay=0.3, every=every, **given
    )
    assert 0 < np.mean(clipped[10:]) < 1  # both branches count
    (request,) = requests_of(tx)
    ours, state, due = jnp.asarray(p), tx.init(p), []
    update = jax.jit(tx.update)
    for t, (g, s) in enumerate(zip(grads, masked, strict=True)):
        due += [t] * bool(request.due(state))
        updates, state = update(g, state, ours, sampled_grads=s)
        ours = ours + updates
    assert due == list(range(every, 25, every))
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


SIZE = """--num-steps 4 --global-batch-size 8 --num-microbatches 1
    --schedule.warmup-steps 1 --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16
    --model.max-seq-len 16 --model.scan-unroll 1 --eval.every None
    --log.every 1 --checkpoint.every 2"""


@pytest.mark.seconds
def test_sophia_by_the_command_line(byte_tokens, tmp_path, capsys):
    """Trained, continued and audited; its tokens a step are the run's."""
    train = ["train", f"quickstart:data={byte_tokens},optimizer={SOPHIA_FILE}:sophia"]
    train += [*SIZE.split(), "--num-processes", "1"]
    train += ["--optimizer.options.update-hessian-every", "2", "--workdir"]
    main([*train, str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "4")
    main([*train, str(tmp_path / "killed")])
    assert "continuing from step 2" in capsys.readouterr().out
    assert first_difference(tmp_path / "whole", tmp_path / "killed") is None
    assert len({step for step, _ in series(tmp_path / "whole")}) == 4
    main(["audit", str(tmp_path / "killed"), "--replay", "4"])
    assert "computed again: the same digest" in capsys.readouterr().out
    types = read(tmp_path / "whole" / "checkpoints").types
    assert {name.split("/")[2] for name in types if name.startswith("opt_state/0")} == {
        "count",
        "hessian",
        "mu",
    }


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_the_look_ahead_optimizer_of_the_page(byte_tokens, tmp_path):
    (code,) = (b.code for b in blocks_of(PAGE.read_text()) if b.said("file") == "my_lookahead.py")
    file = tmp_path / "my_lookahead.py"
    file.write_text(code)
    tx = runpy.run_path(str(file))["make"](0.1)
    (request,) = requests_of(tx)
    np.testing.assert_allclose(request.at({"w": 2.0}, {"w": 1.0})["w"], 1 + 0.9 * 2)
    updates, velocity = tx.update({"w": 5.0}, {"w": 2.0}, {"w": 1.0}, ahead_grads={"w": 3.0})
    assert updates["w"] == velocity["w"] == pytest.approx(0.9 * 2 - 0.1 * 3)

    train = ["train", f"quickstart:data={byte_tokens},optimizer={file}:make", *SIZE.split()]
    train += ["--optimizer.learning-rate", "0.3", "--num-processes", "1", "--workdir"]
    main([*train, str(tmp_path / "run")])
    losses = list(values_of(tmp_path / "run", "train/loss").values())
    assert losses[3] < losses[0] - 0.1
