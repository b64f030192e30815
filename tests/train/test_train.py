"""Whole runs of the loop in this process, on the interpreter's own sources."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from refusals import refused
from tiny import ADAMW, MODEL, first_difference, tiny_config, values_of
from token_directories import write_nanogpt, write_shards

from maxmars.checkpoint import read
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


def steps_of(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


@pytest.fixture
def copied(finished_run, tmp_path):
    """A copy of `finished_run`, and the config to go on with."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    return run, read(run / "checkpoints").config


@pytest.mark.seconds
@pytest.mark.smoke
def test_what_a_run_leaves_behind(finished_run):
    names = {path.name for path in finished_run.iterdir()}
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
    assert list(values_of(finished_run, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert list(values_of(finished_run, "eval/loss")) == [0, 3, 6]
    assert set(read_metrics(finished_run)[-3]) == {
        "step",
        "tokens",
        "train/loss",
        "train/grad_norm",
        *(f"train/{of}_norm/{part}" for of in ("grad", "param", "update") for part in COMPONENTS),
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
    waits, times = (values_of(finished_run, f"perf/{key}") for key in ("data_wait", "step_time"))
    assert all(0 <= waits[step] < times[step] for step in times)
    written = values_of(finished_run, "perf/checkpoint_blocking_time")
    assert list(written) == [2, 4, 6]
    assert all(0 < seconds < 60 for seconds in written.values())
    environment = json.loads((finished_run / "environment.json").read_text())
    assert environment["num_devices"] == 8
    rows = (finished_run / "parameters.txt").read_text().splitlines()
    assert rows[0].split() == ["parameter", "shape", "kind", "matrix", "rule", "rate", "decay"]
    assert rows[-1].startswith("wte.embedding")
    assert rows[-1].split()[-3:] == ["mars-adamw", "1.0", "0.0"]
    evaluations = values_of(finished_run, "eval/loss")
    assert evaluations[6] < evaluations[3] < evaluations[0]
    assert evaluations[0] == pytest.approx(np.log(257), abs=0.1)


@pytest.mark.smoke
def test_a_continued_run_equals_an_uninterrupted_one_bit_by_bit(copied, finished_run, capsys):
    run, config = copied
    for step in ("4", "6"):
        shutil.rmtree(run / "checkpoints" / step)
    result = train(config, run)
    printed = capsys.readouterr().out
    assert "continuing from step 2" in printed
    assert "done: 6 steps, 1.54k tokens in " in printed
    assert first_difference(run, finished_run) is None
    assert values_of(run, "eval/loss") == values_of(finished_run, "eval/loss")
    assert result == TrainResult(
        done=True,
        step=6,
        train_loss=values_of(finished_run, "train/loss")[6],
        eval_loss=values_of(finished_run, "eval/loss")[6],
        workdir=epath.Path(run),
    )


def test_the_summary_of_a_run_of_two_sessions(six_step_run):
    workdir = six_step_run / "run"
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


def test_more_steps_keep_the_schedule_and_say_so(six_step_run):
    run = six_step_run / "run"
    assert "still follows the schedule over 4 steps" in (run / "logs/host_000.log").read_text()
    rates = values_of(run, "train/learning_rate")
    assert rates[6] == pytest.approx(0.1 * rates[1])  # its end
    assert read(run / "checkpoints").config.schedule.decay_steps == 4


def test_another_run_in_the_workdir_is_refused(copied):
    run, config = copied
    before = {path: path.read_bytes() for path in run.rglob("*.json*")}
    with refused(ValueError, run, "seed", "0 there", "1 here"):
        train(dataclasses.replace(config, seed=1), run)
    assert {path: path.read_bytes() for path in run.rglob("*.json*")} == before


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
        num_microbatches=1,
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
        eval=EvalConfig(every=None),
        num_microbatches=1,
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


def test_a_last_evaluation_that_is_missing_is_made_and_nothing_else(copied, finished_run, capsys):
    workdir, config = copied
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if (json.loads(line)["step"], "eval/loss" in line) != (6, True)]
    assert len(kept) == len(lines) - 1
    (workdir / "metrics.jsonl").write_text("".join(kept))
    result = train(config, workdir)
    assert (result.done, result.step) == (True, 6)
    assert result.eval_loss == values_of(finished_run, "eval/loss")[6]
    assert len(read_metrics(workdir)) == len(lines)
    assert steps_of(workdir) == [2, 4, 6]
    before = (workdir / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train(config, workdir) == result
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
