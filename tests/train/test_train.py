"""Whole runs of the loop in this process, on the interpreter's own sources."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from refusals import refused
from tiny import ADAMW, MODEL, audited, tiny_config, values_of
from token_directories import write_nanogpt, write_shards

from maxmars.checkpoint import load, read
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    GrainPart,
    GuardConfig,
    LogConfig,
    MeshConfig,
    MixtureConfig,
    MixturePart,
    OptaxConfig,
    ScheduleConfig,
    TokenShardsConfig,
)
from maxmars.data import examples
from maxmars.data.batches import TrainBatches, open_data
from maxmars.distributed.sharding import make_mesh
from maxmars.model.parameters import Parameters
from maxmars.train import TrainResult, train
from maxmars.train.metrics import read_metrics
from maxmars.train.optimizer import COMPONENTS

QUICK = {"optimizer": ADAMW, "num_microbatches": 1}
"""For runs whose step matters less than how fast it compiles."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One text cache for the module, away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAXMARS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def params_of(workdir, config, step=None):
    abstract = Parameters(config.model).abstract
    return jax.device_get(load(workdir / "checkpoints", {"params": abstract}, step).state["params"])


def steps_of(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """A run of 6 steps from start to end."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    assert train(tiny_config(), workdir).done
    return workdir


@pytest.mark.seconds
@pytest.mark.smoke
def test_what_a_run_leaves_behind(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "checkpoints",
        "config.json",
        "data.json",
        "environment.json",
        "journal.jsonl",
        "logs",
        "metrics.jsonl",
        "parameters.txt",
        "summary.json",
        "tokenizer",
        "verified",
    }
    assert list(values_of(finished, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert list(values_of(finished, "eval/loss")) == [0, 3, 6]
    assert set(read_metrics(finished)[-3]) == {
        "step",
        "tokens",
        "train/loss",
        "train/grad_norm",
        *(
            f"train/{name}_norm/{part}"
            for name in ("grad", "param", "update")
            for part in COMPONENTS
        ),
        "train/param_norm",
        "train/update_norm",
        "train/learning_rate",
        "train/learning_rate/vector",
        "train/grad_clip_fraction",
        "train/clip_fraction",
        "train/first_example",
        "train/num_examples",
        "train/skipped",
        "train/update_rms/linear",
        "train/update_rms/embedding",
        "train/update_rms/vector",
        "perf/tokens_per_sec",
        "perf/step_time",
        "perf/data_wait",
        "perf/goodput",
    }
    written = values_of(finished, "perf/checkpoint_blocking_time")
    assert list(written) == [2, 4, 6]
    assert all(0 < seconds < 60 for seconds in written.values())
    assert steps_of(finished) == [4, 6]  # the newest two of 2, 4 and 6
    assert read(finished / "checkpoints").config == tiny_config()
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["num_devices"] == 8
    rows = (finished / "parameters.txt").read_text().splitlines()
    assert rows[0].split() == ["parameter", "shape", "kind", "matrix", "rule", "rate", "decay"]
    assert rows[-1].startswith("wte.embedding")
    assert rows[-1].split()[-3:] == ["mars-adamw", "1.0", "0.0"]
    evaluations = values_of(finished, "eval/loss")
    assert evaluations[6] < evaluations[3] < evaluations[0]
    assert evaluations[0] == pytest.approx(np.log(257), abs=0.1)


@pytest.mark.smoke
def test_a_continued_run_equals_an_uninterrupted_one_bit_by_bit(finished, tmp_path, capsys):
    # decay_steps is the horizon of the whole run, so that a shorter one follows the same schedule.
    schedule = ScheduleConfig(warmup_steps=2, decay_steps=6)
    train(tiny_config(num_steps=4, schedule=schedule), tmp_path)
    result = train(tiny_config(schedule=schedule), tmp_path)
    printed = capsys.readouterr().out
    assert "continuing from step 4" in printed
    assert "done: 6 steps, 1.54k tokens in " in printed
    assert values_of(tmp_path, "train/loss") == values_of(finished, "train/loss")
    assert values_of(tmp_path, "eval/loss")[6] == values_of(finished, "eval/loss")[6]
    assert result == TrainResult(
        done=True,
        step=6,
        train_loss=values_of(finished, "train/loss")[6],
        eval_loss=values_of(finished, "eval/loss")[6],
        workdir=epath.Path(tmp_path),
    )
    config = tiny_config()
    jax.tree.map(
        np.testing.assert_array_equal, params_of(tmp_path, config), params_of(finished, config)
    )
    check_summary(tmp_path)


def check_summary(workdir):
    """What `summary.json` says of a run of 6 steps that was done after 4, and then continued."""
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["done"], summary["step"], summary["sessions"]) == (True, 6, 2)
    assert summary["tokens"] == 6 * 16 * 16
    losses, evaluations = values_of(workdir, "train/loss"), values_of(workdir, "eval/loss")
    assert (summary["train/loss"], summary["eval/loss"]) == (losses[6], evaluations[6])
    best = min(evaluations, key=evaluations.get)
    assert summary["best"] == {"eval/loss": evaluations[best], "step": best}
    rates = list(values_of(workdir, "perf/tokens_per_sec").values())
    assert summary["perf/tokens_per_sec"] == pytest.approx(np.median(rates))
    seconds = summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(summary["wall_time_s"])
    for name in ("steps", "compile", "start", "evaluation", "checkpoint"):
        assert seconds[name] > 0
    assert seconds["restart"] == seconds["repeated"] == 0


@pytest.mark.slow
def test_a_run_continues_on_another_mesh(finished, tmp_path, capsys):
    schedule = ScheduleConfig(warmup_steps=2, decay_steps=6)
    train(tiny_config(num_steps=4, schedule=schedule, mesh=MeshConfig(fsdp=4, tensor=2)), tmp_path)
    other = tiny_config(schedule=schedule, mesh=MeshConfig(fsdp=8), num_microbatches=None)
    train(other, tmp_path)
    assert "fsdp=8 tensor=1, num_microbatches 2 -> 1; the loss" in capsys.readouterr().out
    found = audited(tmp_path)
    assert found.verdict == "one trajectory up to rounding"
    (change,) = found.changes
    assert change.startswith("at step 4: mesh {'data': 1, ")
    assert change.endswith("num_microbatches 2 -> 1")
    ours, expected = values_of(tmp_path, "train/loss"), values_of(finished, "train/loss")
    for step in expected:
        assert ours[step] == pytest.approx(expected[step], abs=1e-5)


@pytest.mark.seconds
def test_more_steps_keep_the_schedule_and_say_so(tmp_path, capsys):
    schedule = ScheduleConfig(warmup_steps=1)
    config = tiny_config(num_steps=2, schedule=schedule, eval=EvalConfig(every=None), **QUICK)
    train(config, tmp_path)
    train(dataclasses.replace(config, num_steps=3), tmp_path)
    assert "still follows the schedule over 2 steps" in capsys.readouterr().out
    assert values_of(tmp_path, "train/learning_rate")[3] == pytest.approx(
        6e-5
    )  # its end: 0.1 x peak
    assert read(tmp_path / "checkpoints").config.schedule.decay_steps == 2
    assert not values_of(tmp_path, "eval/loss")


def test_another_run_in_the_workdir_is_refused(finished):
    before = {path: path.read_bytes() for path in finished.rglob("*.json*")}
    with refused(ValueError, finished, "seed", "0 there", "1 here"):
        train(tiny_config(seed=1), finished)
    assert {path: path.read_bytes() for path in finished.rglob("*.json*")} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mesh": MeshConfig(data=3, fsdp=2)}, ["data=3", "fsdp=2", "6 devices", "1, 2, 4, 8"]),
        ({"mesh": MeshConfig(tensor=8)}, ["mesh.tensor=8", "model.num_heads=4"]),
        (
            {"global_batch_size": 12, "num_microbatches": 1},
            ["12 sequences", "global_batch_size=12", "8 devices"],
        ),
        (
            {
                "mesh": MeshConfig(tensor=4),
                "model": dataclasses.replace(MODEL, vocab_pad_multiple=1),
            },
            ["mesh.tensor=4", "257", "model.vocab_pad_multiple"],
        ),
        ({"model": dataclasses.replace(MODEL, vocab_size=100)}, ["model.vocab_size=100"]),
        ({"data": TokenShardsConfig(path="tokens")}, ["tokens", "60000", "257"]),
    ],
)
def test_nothing_is_written_when_the_config_does_not_fit(tmp_path, monkeypatch, changes, named):
    monkeypatch.chdir(tmp_path)
    write_nanogpt(tmp_path / "tokens", np.full(1000, 60_000), np.arange(1000))
    with refused(ValueError, *named):
        train(tiny_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_on_a_mixture_waits_less_for_data_than_for_steps(tmp_path):
    for i in range(2):
        stream = np.random.default_rng(i).integers(0, 257, 3000)
        write_shards(tmp_path / str(i), stream, stream[:600], vocab_size=257)
    parts = tuple(MixturePart(path=str(tmp_path / str(i)), weight=0.5) for i in range(2))
    changes = {"num_steps": 4, "eval": EvalConfig(every=100, num_windows=8), **QUICK}
    changes |= {"checkpoint": CheckpointConfig(every=None)}
    config = tiny_config(data=MixtureConfig(parts=parts), **changes)
    train(config, tmp_path / "run")
    waits, times = (
        values_of(tmp_path / "run", key) for key in ("perf/data_wait", "perf/step_time")
    )
    assert 0 <= waits[4] < times[4]
    assert read(tmp_path / "run" / "checkpoints").config == config


BREAKS = """
import jax
import jax.numpy as jnp
import optax

def make(learning_rate, *, matrix_specs, mesh):
    # The third update makes every parameter infinite.
    def update(updates, count, params=None):
        factor = jnp.where(count == 2, jnp.inf, -learning_rate)
        return jax.tree.map(lambda g: factor * jnp.ones_like(g), updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)
"""


@pytest.mark.seconds
def test_the_last_finite_checkpoint_stays_while_steps_are_skipped(tmp_path):
    (tmp_path / "own.py").write_text(BREAKS)
    config = tiny_config(
        num_steps=6,
        optimizer=OptaxConfig(make=f"{tmp_path / 'own.py'}:make", learning_rate=1e-3),
        checkpoint=CheckpointConfig(every=2, keep_last=1),
        eval=EvalConfig(every=None),
        guard=GuardConfig(max_consecutive_skips=10),
    )
    with refused(ValueError, "params/", "step 6"):
        train(config, tmp_path / "run")
    assert steps_of(tmp_path / "run") == [2]
    assert read_metrics(tmp_path / "run")[-1]["train/skipped"] == 3


@pytest.mark.seconds
def test_a_run_that_diverges_stops_and_names_the_step(tmp_path, capsys):
    config = tiny_config(
        optimizer=dataclasses.replace(ADAMW, learning_rate=1e30),
        checkpoint=CheckpointConfig(every=1),
        log=LogConfig(every=4),
        schedule=ScheduleConfig(warmup_steps=0),
        guard=GuardConfig(max_consecutive_skips=1),
    )
    with refused(ValueError, "not finite", "2 in a row", "guard.max_consecutive_skips") as error:
        train(config, tmp_path)
    assert "1 skipped in all" in " ".join(capsys.readouterr().out.split())
    last = read_metrics(tmp_path)[-1]
    assert last["train/skipped"] == 2

    step, newest = last["step"], steps_of(tmp_path)[-1]
    assert (last["train/first_example"], last["train/num_examples"]) == ((step - 1) * 16, 16)
    for named in (f"step {step} ", f"step {newest}.", f"from {(step - 1) * 16} on"):
        assert named in str(error.value)


MAPS = """
from maxmars.data import dataset

def windows(*, split, length, path):
    return dataset(path, split, length).map(lambda window: {"tokens": window["tokens"][::-1]})
"""


@pytest.mark.seconds
def test_examples_are_what_every_step_read(tmp_path, monkeypatch):
    """Also those of a run on data of its own, whose file is gone."""
    monkeypatch.chdir(tmp_path)
    stream = np.random.default_rng(0).integers(0, 257, 3000)
    write_shards(tmp_path / "tokens", stream, stream[:600], vocab_size=257)
    (tmp_path / "own.py").write_text(MAPS)
    own = GrainPart(source="own.py:windows", options={"path": "tokens"}, weight=0.3)
    mixture = MixtureConfig(parts=(MixturePart(path="tokens", weight=0.7), own))
    for name, data in (("mixture", mixture), ("shuffled", TokenShardsConfig(path="tokens"))):
        config = tiny_config(data=data, num_steps=3, **QUICK)
        config = dataclasses.replace(config, eval=EvalConfig(every=None))
        batches = TrainBatches(
            open_data(data, "train", model=config.model), config, make_mesh(config.mesh)
        )
        read = [np.concatenate(next(batches)["tokens"]) for _ in range(3)]
        batches.close()
        train(config, tmp_path / name)
        firsts = values_of(tmp_path / name, "train/first_example")
        (tmp_path / "own.py").write_text("")
        found = examples(tmp_path / name)
        for step, rows in enumerate(read, 1):
            window = found[firsts[step] : firsts[step] + 16]
            assert np.array_equal([row["tokens"] for row in window], rows)
        assert found.tokenizer.name == "byte"
    write_shards(tmp_path / "others", stream[::-1], stream[:600], vocab_size=257)
    (tmp_path / "tokens").rename(tmp_path / "gone")
    with refused(FileNotFoundError, tmp_path / "tokens"):
        examples(tmp_path / "shuffled")
    (tmp_path / "others").rename(tmp_path / "tokens")
    with refused(ValueError, tmp_path / "shuffled"):
        examples(tmp_path / "shuffled")
    with refused(FileNotFoundError, "config.json"):
        examples(tmp_path / "none")


@pytest.mark.seconds
def test_checkpoints_by_the_clock(tmp_path):
    config = tiny_config(
        num_steps=4,
        schedule=ScheduleConfig(warmup_steps=2, decay_steps=6),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=None, every_minutes=1e-6, keep_last=9),
        **QUICK,
    )
    train(config, tmp_path)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert len(read_metrics(tmp_path)) == 4 + 4 + 1  # and what the saves and the first step took


def test_a_last_evaluation_that_is_missing_is_made_and_nothing_else(finished, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if (json.loads(line)["step"], "eval/loss" in line) != (6, True)]
    assert len(kept) == len(lines) - 1
    (workdir / "metrics.jsonl").write_text("".join(kept))
    result = train(tiny_config(), workdir)
    assert (result.done, result.step) == (True, 6)
    assert result.eval_loss == values_of(finished, "eval/loss")[6]
    assert len(read_metrics(workdir)) == len(lines)
    assert steps_of(workdir) == [4, 6]
    before = (workdir / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train(tiny_config(), workdir) == result
    assert "all 6 steps are done" in capsys.readouterr().out
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.seconds
def test_nothing_compiles_after_the_first_of_each(tmp_path):
    metrics, steps_reported = tmp_path / "run" / "metrics.jsonl", []

    def count(event, *_, **__):
        if "backend_compile" in event:
            text = metrics.read_text() if metrics.exists() else ""
            steps_reported.append(text.count("train/loss"))

    jax.monitoring.register_event_duration_secs_listener(count)
    # Evaluations after steps 0, 3, 6 and 7, checkpoints after 4 and 7.
    config = tiny_config(num_steps=7, checkpoint=CheckpointConfig(every=4), **QUICK)
    train(config, tmp_path / "run")
    # The first checkpoint, after step 4, is the last that has something to compile.
    assert 0 in steps_reported
    assert max(steps_reported) <= 4
