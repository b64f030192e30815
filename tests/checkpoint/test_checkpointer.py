"""Checkpoints: bit-exact round trips onto any mesh, and every kind of damage found out."""

import asyncio
import dataclasses
import gc
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

from maxmars.checkpoint import (
    Checkpointer,
    contents,
    list_steps,
    load_config,
    load_params,
)
from maxmars.config import (
    CheckpointConfig,
    GPT2Config,
    MeshConfig,
    ScheduleConfig,
    TrainConfig,
)
from maxmars.data_config import PythonSourcesConfig
from maxmars.optimizer_config import AdamWConfig
from maxmars.sharding import make_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """The shape of a training state: dicts, optax's containers, a None and scalars."""

    step: Any
    params: Any
    opt_state: Any
    prev_params: Any
    hyperparams: Any


LABELS = {"wte": "b", "h": {"kernel": "a", "bias": "b"}}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9)),
    "partition": optax.partition(
        {"a": optax.adamw(optax.linear_schedule(0, 1, 9)), "b": optax.sgd(0.1, momentum=0.9)},
        LABELS,
    ),
}


def config(keep_last=2, embed_dim=16, **checkpoint):
    return TrainConfig(
        name="test",
        num_steps=100,
        global_batch_size=8,
        model=GPT2Config(num_layers=2, num_heads=2, embed_dim=embed_dim),
        optimizer=AdamWConfig(),
        schedule=ScheduleConfig(warmup_steps=1),
        data=PythonSourcesConfig(),
        checkpoint=CheckpointConfig(keep_last=keep_last, **checkpoint),
    )


def mesh_of(data, fsdp, tensor):
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


MESH = mesh_of(2, 2, 2)


def make_state(optimizer="partition", width=16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        # Large enough that Orbax does not store it inside its index, which has checksums.
        "wte": jax.random.normal(keys[0], (512, width)),
        "h": {
            "kernel": jax.random.normal(keys[1], (2, width, 32)),
            "bias": jax.random.normal(keys[2], (8, 32)).astype(jnp.bfloat16),
        },
    }
    tx = OPTIMIZERS[optimizer]
    opt_state = tx.init(params)
    _, opt_state = tx.update(jax.tree.map(jnp.sin, params), opt_state, params)
    return State(jnp.int32(3), params, opt_state, None, {"learning_rate": jnp.float32(0.1)})


def abstract(state, mesh=MESH):
    def leaf(x):
        spec = P(*[None] * (x.ndim - 2), "fsdp", "tensor") if x.ndim >= 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, state)


def place(state, mesh=MESH):
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, abstract(state, mesh))


def assert_same(got, want):
    """Same containers, types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints 1 and 2, and the state of each. Not to be changed."""
    directory = tmp_path_factory.mktemp("saved")
    states = {step: place(make_state(seed=step)) for step in (1, 2)}
    with Checkpointer(directory, config(), mesh=MESH) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state, data_position=8 * step)
    return directory, states


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def restore(directory, want, mesh=MESH, **kwargs):
    with Checkpointer(directory, config(), mesh=mesh) as checkpointer:
        return checkpointer.restore(abstract(want, mesh), **kwargs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_round_trip_onto_other_meshes_is_bit_exact(tmp_path, optimizer):
    state = make_state(optimizer)
    for step, sizes in enumerate([(8, 1, 1), (1, 8, 1), (2, 2, 2)]):
        mesh = mesh_of(*sizes)
        with Checkpointer(tmp_path, config(), mesh=mesh) as checkpointer:
            if step:
                got = checkpointer.restore(abstract(state, mesh))
                assert (got.step, got.data_position, got.skipped) == (step, 80 * step, ())
                assert_same(got.state, state)
                for x, a in zip(
                    jax.tree.leaves(got.state), jax.tree.leaves(abstract(state, mesh)), strict=True
                ):
                    assert x.sharding == a.sharding
                placed = got.state
            else:
                assert checkpointer.latest_step() is None
                placed = place(state, mesh)
            checkpointer.save(step + 1, placed, data_position=80 * (step + 1))
            assert checkpointer.latest_step() == step + 1


def test_restores_onto_fewer_devices_and_without_shardings(saved):
    directory, states = saved
    one = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    assert_same(restore(directory, states[2], one).state, states[2])
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), states[2])
    with Checkpointer(directory, config(), mesh=MESH) as checkpointer:
        got = checkpointer.restore(bare).state
    assert_same(got, states[2])
    assert got.params["wte"].sharding == NamedSharding(MESH, P())


def test_keeps_the_newest(tmp_path):
    state = place(make_state())
    with Checkpointer(tmp_path, config(keep_last=2), mesh=MESH) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state, data_position=step, metrics={"eval/loss": 1.0 / step})
        checkpointer.save(5, state, data_position=5, wait=True)
        assert list_steps(tmp_path) == [4, 5]


def test_keeps_the_best_and_some_for_good_over_restarts(tmp_path):
    state, losses = place(make_state()), {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 6.0, 6: None, 7: 9.0}
    keep = config(keep_last=1, keep_best=2, keep_every=4)
    for step, loss in losses.items():
        with Checkpointer(tmp_path, keep, mesh=MESH) as checkpointer:
            metrics = None if loss is None else {"eval/loss": loss}
            checkpointer.save(step, state, data_position=step, metrics=metrics)
    assert list_steps(tmp_path) == [2, 3, 4, 7]
    meta = json.loads((tmp_path / "7/meta/data.json").read_text())
    assert meta["metrics"] == {"eval/loss": 9.0}


def test_the_metric_to_choose_by_must_be_there(tmp_path):
    keep, state = config(keep_best=1, best_metric="eval/los"), place(make_state())
    with (
        Checkpointer(tmp_path, keep, mesh=MESH) as checkpointer,
        pytest.raises(ValueError, match=r"best_metric='eval/los' is not .*; eval/loss is\."),
    ):
        checkpointer.save(1, state, data_position=8, metrics={"eval/loss": 1.0})


def test_meta_says_where_it_comes_from(saved):
    meta = json.loads((saved[0] / "2/meta/data.json").read_text())
    assert meta["rng"]["seed"] == config().seed
    assert meta["rng"]["step"] == meta["step"] == 2
    assert meta["environment"]["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert meta["environment"]["num_devices"] == 8
    assert meta["environment"]["jax"] == jax.__version__


def test_blocking_time_is_not_that_of_the_save(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        write = v1.handlers.JsonHandler._background_save

        async def slowly(*args, **kwargs):
            await asyncio.sleep(1)
            return await write(*args, **kwargs)

        state = place(make_state())
        checkpointer.save(1, state, data_position=8, wait=True)  # compiles the digest
        monkeypatch.setattr(v1.handlers.JsonHandler, "_background_save", slowly)
        started = time.perf_counter()
        blocked_s = checkpointer.save(2, state, data_position=16, wait=True)
        assert 0 < blocked_s < time.perf_counter() - started - 0.9
        checkpointer.save(3, state, data_position=24)
        assert checkpointer.save(4, state, data_position=32) > 0.5  # waits for the one before


def test_a_second_writer_is_refused_and_readers_are_not(saved, copy):
    with Checkpointer(copy, config(), mesh=MESH):
        (copy / "3.orbax-checkpoint-tmp").mkdir()
        with pytest.raises(
            ValueError, match=rf"{copy} is being written by process {os.getpid()} on"
        ):
            Checkpointer(copy, config(), mesh=MESH)
        assert (copy / "3.orbax-checkpoint-tmp").exists()  # of the first writer, for all we know
        assert load_config(copy) == config()
    Checkpointer(copy, config(), mesh=MESH).close()


def test_save_is_safe_from_donation(tmp_path):
    state, want = place(make_state()), make_state()
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, state, data_position=8)
        for _ in range(5):
            state = update(state)
        assert_same(checkpointer.restore(abstract(want)).state, want)


def test_saving_a_step_again(tmp_path):
    first, second = place(make_state(seed=1)), place(make_state(seed=2))
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, first, data_position=8, wait=True)
        inode = (tmp_path / "1").stat().st_ino
        assert checkpointer.save(1, first, data_position=8, wait=True) is None
        assert (tmp_path / "1").stat().st_ino == inode  # the same state: not written again
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        restored = checkpointer.restore(abstract(first)).state
        assert checkpointer.save(1, restored, data_position=8, wait=True) is None
        assert (tmp_path / "1").stat().st_ino == inode  # neither after a restart
        checkpointer.save(1, second, data_position=8)
        assert_same(checkpointer.restore(abstract(second)).state, second)


def test_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = place(make_state())
    with Checkpointer("runs/a/checkpoints", config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, state, data_position=8)
    assert list_steps("runs/a/checkpoints") == [1]
    assert_same(restore("runs/a/checkpoints", state).state, state)
    assert_same(load_params("runs/a/checkpoints", abstract(state.params)), state.params)


def test_sweeps_what_a_killed_run_left(copy):
    (copy / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    Checkpointer(copy, config(), mesh=MESH).close()
    assert sorted(p.name for p in copy.iterdir()) == [".lock", "1", "2"]


# Orbax leaves an unhandled exception in a thread, a coroutine that it did not await and, depending
# on when the garbage is collected, a task on a closed loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_failed_save_is_raised(tmp_path, monkeypatch):
    async def fail(*args, **kwargs):
        raise OSError("No space left on device")

    state = place(make_state())
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, state, data_position=8)
    monkeypatch.setattr(v1.handlers.JsonHandler, "_background_save", fail)
    checkpointer = Checkpointer(tmp_path, config(), mesh=MESH)
    checkpointer.save(2, state, data_position=16)
    for _ in range(2):
        with pytest.raises(OSError, match=r"could not be written .*No space left.* start again"):
            checkpointer.save(3, state, data_position=24)
    checkpointer.close()
    with pytest.raises(OSError, match="could not be written"):  # noqa: SIM117
        with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
            checkpointer.save(3, state, data_position=24)
    gc.collect()
    assert restore(tmp_path, state).step == 1


def data_files(path):
    """The files of a checkpoint with arrays or Orbax's index of them, largest first."""
    files = [p for p in (path / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    return sorted(files, key=lambda p: -p.stat().st_size)


def flip(path, offset, mask=0x10):
    content = bytearray(path.read_bytes())
    content[offset] ^= mask
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_data_position(path):
    file = path / "meta" / "data.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_position": 17}))


def swap_layers(path):
    """Write a state with two layers exchanged under the meta of the right one."""
    state = place(make_state(seed=2))
    state.params["h"]["kernel"] = state.params["h"]["kernel"][::-1]
    with Checkpointer(path.parent / "other", config(), mesh=MESH) as checkpointer:
        checkpointer.save(2, state, data_position=16)
    shutil.rmtree(path / "state")
    (path.parent / "other" / "2" / "state").rename(path / "state")
    shutil.rmtree(path.parent / "other")


DAMAGE = {
    "empty directory": (lambda p: [shutil.rmtree(p), p.mkdir()], "there is no meta in it"),
    "truncated data": (lambda p: truncate(data_files(p)[0]), "state cannot be read"),
    "missing data": (lambda p: data_files(p)[0].unlink(), "state cannot be read"),
    "missing _METADATA": (lambda p: (p / "state/_METADATA").unlink(), "state cannot be read"),
    "missing state": (lambda p: shutil.rmtree(p / "state"), "state cannot be read"),
    "missing manifest": (lambda p: (p / "state/manifest.ocdbt").unlink(), "state cannot be read"),
    "garbled meta": (lambda p: flip(p / "meta/data.json", 0), "meta cannot be read"),
    "changed meta": (change_data_position, "meta does not agree with its checksum"),
    "swapped layers": (
        swap_layers,
        "1 of .* arrays differ from their digest, first params/h/kernel",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_skipped_with_its_reason(saved, copy, caplog, capfd, kind):
    damage, reason = DAMAGE[kind]
    damage(copy / "2")
    with caplog.at_level(logging.WARNING):
        got = restore(copy, saved[1][1])
    assert (got.step, got.data_position) == (1, 8)
    assert_same(got.state, saved[1][1])
    ((step, why),) = got.skipped
    assert step == 2
    assert re.search(reason, why)
    assert f"{copy / '2'} skipped: {why}" in caplog.text
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err  # Orbax's unfinished reads
    assert f"damaged checkpoint 2 is now {copy / '2.damaged'}" in caplog.text
    assert list_steps(copy) == [1]
    assert restore(copy, saved[1][1]).skipped == ()
    assert (copy / "2.damaged").is_dir()


def test_what_is_set_aside_stays(saved, copy):
    state = saved[1][2]
    for name in ("2.damaged", "2.damaged-2", "2.damaged-3"):
        truncate(data_files(copy / "2")[0])
        with Checkpointer(copy, config(keep_last=2), mesh=MESH) as checkpointer:
            assert checkpointer.restore(abstract(state)).step == 1
            assert (copy / name).is_dir()
            checkpointer.save(2, state, data_position=16, wait=True)
            assert list_steps(copy) == [1, 2]
    assert len(list(copy.glob("2.damaged*/state"))) == 3


def test_nothing_is_set_aside_without_a_sound_one(saved, copy):
    for step in (1, 2):
        truncate(data_files(copy / str(step))[0])
    with pytest.raises(ValueError, match=r"no checkpoint in .* could be used \(step 2: "):
        restore(copy, saved[1][1])
    with pytest.raises(ValueError, match=r"could be used \(step 2: state .*; name another step"):
        restore(copy, saved[1][1], step=2)
    assert list_steps(copy) == [1, 2]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ValueError("RESOURCE_EXHAUSTED: out of memory"),
        OSError(24, "Too many open files"),
    ],
)
def test_a_reader_in_trouble_is_no_damage(saved, copy, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(v1, "load", fail)
    with pytest.raises(type(error)):
        restore(copy, saved[1][1])
    assert list_steps(copy) == [1, 2]


def test_readers_rename_nothing(saved, copy):
    truncate(copy / "2/meta/data.json")
    assert load_config(copy) == config()
    assert_same(load_params(copy, abstract(saved[1][1].params)), saved[1][1].params)
    assert sorted(p.name for p in copy.iterdir()) == sorted(p.name for p in saved[0].iterdir())


def test_flipped_bits_are_caught_or_harmless(saved, copy):
    caught = 0
    with Checkpointer(copy, config(), mesh=MESH) as checkpointer:
        for file in data_files(copy / "2"):
            size = file.stat().st_size
            for offset in range(0, size, -(-size // 10)):
                flip(file, offset)
                got = checkpointer.restore(abstract(saved[1][2]))
                assert_same(got.state, saved[1][got.step])
                caught += got.step == 1
                if got.step == 1:
                    (copy / "2.damaged").rename(copy / "2")
                flip(file, offset)
        assert checkpointer.restore(abstract(saved[1][2])).skipped == ()
    assert caught >= 5


def test_none_sound(saved, copy):
    truncate(data_files(copy / "1")[0])
    (copy / "2/meta/data.json").unlink()
    with pytest.raises(
        ValueError, match=r"step 2: meta cannot be read.*; step 1: state cannot be read"
    ):
        restore(copy, saved[1][1])


def test_a_sharding_that_does_not_divide_is_no_damage(saved):
    mesh = mesh_of(1, 8, 1)
    odd = jax.tree.map(lambda x: x, saved[1][1])
    odd.params["h"]["bias"] = jnp.zeros((3, 32), jnp.bfloat16)
    with pytest.raises(ValueError, match="dimension size is 3"):
        restore(saved[0], odd, mesh)


def test_no_checkpoint(saved, copy, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint; name a directory with one"):
        restore(tmp_path / "empty", saved[1][1])
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7, but of 1, 2\."):
        restore(copy, saved[1][1], step=7)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load_config(tmp_path / "nowhere")
    assert restore(copy, saved[1][1], step=1).step == 1


def test_new_checkpoints_outlive_newer_ones_that_were_passed_over(saved, copy):
    state = saved[1][1]
    shutil.copytree(copy / "2", copy / "9")
    with Checkpointer(copy, config(keep_last=1), mesh=MESH) as checkpointer:
        assert checkpointer.restore(abstract(state), step=1).step == 1
        checkpointer.save(2, state, data_position=16)
        checkpointer.save(3, state, data_position=24, wait=True)
        assert list_steps(copy) == [3, 9]
        checkpointer.save(10, state, data_position=80, wait=True)
        assert list_steps(copy) == [10]


def test_another_model_is_refused_and_not_skipped(saved):
    directory, _ = saved
    other = make_state(width=32)
    with Checkpointer(directory, config(embed_dim=32), mesh=MESH) as checkpointer:
        with pytest.raises(
            ValueError,
            match=r"2 does not fit .* arrays differ, first .*float32\[.*16.* there and float32\[.*"
            r"32.* here.*model.embed_dim is 16 there and 32 here",
        ):
            checkpointer.restore(abstract(other))
        with pytest.raises(
            ValueError, match="first opt_state/0/count, which is absent there and int32"
        ):
            checkpointer.restore(abstract(make_state("adamw")))
    with pytest.raises(ValueError, match="2 does not fit"):
        load_params(directory, abstract(other.params))


def test_load_params_only(saved, copy):
    params = saved[1][2].params
    assert_same(load_params(copy, abstract(params)), params)
    assert_same(load_params(copy, abstract(saved[1][1].params), step=1), saved[1][1].params)
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    got = load_params(copy, bare)
    assert got["wte"].devices() == {jax.devices()[0]}
    (copy / "3.orbax-checkpoint-tmp").mkdir()
    swap_layers(copy / "2")
    assert_same(load_params(copy, abstract(params)), saved[1][1].params)
    assert (copy / "3.orbax-checkpoint-tmp").exists()  # a reader may not sweep a running save


def test_load_config(saved, copy):
    assert load_config(saved[0]) == config()
    assert load_config(saved[0], step=1) == config()
    (copy / "7").mkdir()
    assert load_config(copy) == config()


def test_newer_format_is_refused(saved, copy):
    file = copy / "2/meta/data.json"
    meta = json.loads(file.read_text()) | {"format_version": 99}
    file.write_text(json.dumps(meta | {"checksum": contents.checksum(meta)}))
    with pytest.raises(
        ValueError, match=r"has format 99 and maxmars .* reads up to 2; use the version"
    ):
        restore(copy, saved[1][1])


def test_stored_keys_are_plain(saved):
    stored = json.loads((saved[0] / "2/state/_METADATA").read_text())["tree_metadata"]
    kinds = {key["key_type"] for leaf in stored.values() for key in leaf["key_metadata"]}
    assert kinds == {2}  # dict keys only
    assert any("'params', 'h', 'kernel'" in name for name in stored)
