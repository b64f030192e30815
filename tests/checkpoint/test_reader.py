"""Reading checkpoints: on any mesh, in parts, every kind of damage, and of other versions."""

import gc
import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from damage import flip, halve
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused
from states import (
    ADAMW,
    MESH,
    abstract,
    assert_same,
    change_meta,
    config,
    data_files,
    make_state,
    mesh_of,
    place,
    restore,
)

from maxmars.checkpoint import (
    Checkpointer,
    find,
    first_sound,
    list_steps,
    load,
    load_arrays,
    read,
)
from maxmars.checkpoint.digest import digest

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_tests_left_is_not_collected():
    """Reading collects garbage where it meets damage, which takes long among many objects."""
    gc.freeze()


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


def test_what_a_checkpoint_says(saved):
    checkpoint = read(saved[0])
    assert checkpoint.config == config()
    assert (checkpoint.step, checkpoint.data_position) == (2, 16)
    assert checkpoint.types["params/h/bias"] == "bfloat16[8,32]"
    assert checkpoint.digests == digest(saved[1][2])
    assert checkpoint.environment["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert checkpoint.environment["jax"] == jax.__version__
    assert read(saved[0], 1).step == 1
    meta = json.loads((saved[0] / "2/meta/data.json").read_text())
    assert (meta["rng"]["seed"], meta["rng"]["step"]) == (config().seed, 2)
    stored = json.loads((saved[0] / "2/state/_METADATA").read_text())["tree_metadata"]
    kinds = {key["key_type"] for leaf in stored.values() for key in leaf["key_metadata"]}
    assert kinds == {2}  # dict keys only
    assert any("'params', 'h', 'kernel'" in name for name in stored)


def test_parts_and_single_arrays(saved, copy):
    params = saved[1][2]["params"]
    got = load(copy, {"params": abstract(params)})
    assert_same(got.state["params"], params)
    assert (got.checkpoint.step, got.skipped) == (2, ())
    bare = {"params": {"wte": jax.ShapeDtypeStruct((512, 16), jnp.float32)}}
    wte = load(copy, bare, 1).state["params"]["wte"]
    assert_same(wte, saved[1][1]["params"]["wte"])
    assert wte.devices() == {jax.devices()[0]}


def test_one_array_after_the_other_from_the_newest_sound_checkpoint(saved, copy):
    for file in data_files(copy / "2"):  # the order of arrays within them is by chance
        file.write_bytes(file.read_bytes()[:100])
    wanted = abstract(saved[1][1]["params"])

    def use(checkpoint, skipped):
        arrays = {}
        for name, leaf in wanted.items():
            arrays |= load_arrays(checkpoint, {"params": {name: leaf}})["params"]
        return arrays, checkpoint.step, skipped

    arrays, step, ((skipped, why),) = first_sound(copy, use)
    assert (step, skipped) == (1, 2)
    assert "state" in why
    assert_same(arrays, saved[1][1]["params"])


def swap_layers(path):
    """Write a state with two layers exchanged under the meta of the right one."""
    state = place(make_state(seed=2))
    state["params"]["h"]["kernel"] = state["params"]["h"]["kernel"][::-1]
    with Checkpointer(path.parent / "other", config(), mesh=MESH) as checkpointer:
        checkpointer.save(2, state, data_position=16)
    shutil.rmtree(path / "state")
    (path.parent / "other" / "2" / "state").rename(path / "state")
    shutil.rmtree(path.parent / "other")


def change_data_position(path):
    file = path / "meta" / "data.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_position": 17}))


DAMAGE = {
    "empty directory": (lambda p: [shutil.rmtree(p), p.mkdir()], "meta"),
    "truncated data": (lambda p: halve(data_files(p)[0]), "state"),
    "missing manifest": (lambda p: (p / "state/manifest.ocdbt").unlink(), "state"),
    "changed meta": (change_data_position, "meta"),
    "swapped layers": (swap_layers, "params/h/kernel"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_skipped_with_its_reason(saved, copy, caplog, capfd, kind):
    damage, named = DAMAGE[kind]
    damage(copy / "2")
    before = sorted(p.name for p in copy.iterdir())
    with caplog.at_level(logging.WARNING):
        got = load(copy, abstract(saved[1][1]))
    assert (got.checkpoint.step, got.checkpoint.data_position) == (1, 8)
    assert_same(got.state, saved[1][1])
    ((step, why),) = got.skipped
    assert step == 2
    assert named in why
    assert f"{copy / '2'} skipped: {why}" in caplog.text
    assert sorted(p.name for p in copy.iterdir()) == before  # readers rename nothing
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err  # Orbax's unfinished reads


@pytest.mark.slow
def test_flipped_bits_are_caught_or_harmless(saved, copy):
    """Four bits of each file with arrays, and one of each other."""
    arrays, caught = data_files(copy / "2"), 0
    for file in (path for path in (copy / "2").rglob("*") if path.is_file()):
        size = file.stat().st_size
        for offset in range(0, size, -(-size // 4) if file in arrays else size):
            flip(file, offset, 0x10)
            got = load(copy, abstract(saved[1][2]))
            assert_same(got.state, saved[1][got.checkpoint.step])
            caught += got.checkpoint.step == 1 and file in arrays
            flip(file, offset, 0x10)
    assert load(copy, abstract(saved[1][2])).skipped == ()
    assert caught >= 5


def test_a_reader_beside_a_run_takes_what_was_saved_meanwhile(saved, copy, caplog):
    wanted = abstract(saved[1][2])

    def use(checkpoint, skipped):
        if checkpoint.step == 2:  # the run saves step 3, and keeps that alone
            shutil.copytree(copy / "2", copy / "3")
            change_meta(copy / "3", lambda meta: meta.update(step=3))
            for step in "12":
                shutil.rmtree(copy / step)
        return load_arrays(checkpoint, wanted), checkpoint.step, skipped

    state, *used = first_sound(copy, use)
    assert used == [3, ()]
    assert_same(state, saved[1][2])
    assert caplog.text == ""


def test_errors(saved, copy, tmp_path):
    state = saved[1][1]
    by_eight = NamedSharding(mesh_of(1, 8, 1), P("fsdp"))
    odd = jax.ShapeDtypeStruct((2, 16, 32), jnp.float32, sharding=by_eight)
    with refused(FileNotFoundError, tmp_path / "x"):
        read(tmp_path / "x")
    with refused(FileNotFoundError, "step 7", "1, 2"):
        read(copy, 7)
    with refused(ValueError, copy / "2", "mu/h/kernel", "float32[2,16,32]", "float32[2,32,32]"):
        load(copy, abstract(make_state(width=32)))
    with refused(ValueError, "opt_state/1/0/count", "int32"):
        load(copy, abstract(make_state(ADAMW)))
    with refused(ValueError, copy / "2", "absent here"):
        restore(copy, {"step": state["step"]})
    with refused(ValueError, "dimension size is 2"):  # JAX's own words: it is no damage
        load(copy, {"params": {"h": {"kernel": odd}}})
    for step in (1, 2):
        halve(data_files(copy / str(step))[0])
    with refused(ValueError, "step 2: ", "step 1: "):
        restore(copy, state)
    with refused(ValueError, "step 2: "):
        load(copy, abstract(state), 2)
    assert list_steps(copy) == [1, 2]  # without a sound one, nothing is set aside


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("Connection timeout to host"),
        ValueError("UNAVAILABLE: Error reading the key: HTTP response code: 503"),
    ],
)
def test_a_network_that_fails_is_no_damage(saved, copy, monkeypatch, error):
    path_type, names = type(epath.Path("/")), sorted(path.name for path in copy.iterdir())
    read_text = path_type.read_text

    def read_text_of_older_ones(path, *args, **kwargs):
        if path.parent.parent.name == "2":
            raise error
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(path_type, "read_text", read_text_of_older_ones)
    with refused(OSError, copy / "2/meta", "start again") as caught:
        restore(copy, saved[1][1])
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert sorted(path.name for path in copy.iterdir()) == names
    assert read(copy).step == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format_version": 2}, "format 2"),
        ({"journal": ...}, "journal"),
        ({"config": {"model": {"depth": 7}}}, "depth"),
        ({"config": {"optimizer": {"type": "SophiaConfig"}}}, "tools/examples/sophia.py:sophia"),
    ],
)
def test_another_version_is_refused_and_names_the_code_that_wrote_it(copy, change, named):
    change_meta(copy / "2", lambda meta: meta["environment"].update(git_commit=f"{'2' * 40}-dirty"))
    change_meta(copy / "2", lambda meta: apply(meta, change))
    with refused(ValueError, copy / "2", named, f"git checkout {'2' * 40}`", "maxmars export"):
        read(copy)


def test_fields_that_are_no_more_are_left_out_where_they_were_not_in_use(copy):
    before = read(copy).config
    change_meta(copy / "2", lambda meta: apply(meta, {"config": {"model": {"depth": None}}}))
    change_meta(copy / "2", lambda meta: apply(meta, {"config": {"is_deep": False}}))
    assert read(copy).config == before


def apply(fields, change):
    """Change some fields; `...` takes one away."""
    for name, value in change.items():
        if value is ...:
            del fields[name]
        elif isinstance(value, dict):
            apply(fields[name], value)
        else:
            fields[name] = value


def test_steps_of_a_directory_and_what_a_path_means(copy, tmp_path, monkeypatch):
    for name in ("4.damaged", "5.orbax-checkpoint-tmp", ".lock.d", "x"):
        (copy / name).mkdir()
    (copy / "6").touch()
    assert list_steps(copy) == [1, 2]
    assert list_steps(copy / "missing") == []
    assert find(tmp_path) == find(copy) == (copy, None)
    assert find(copy / "1") == (copy, 1)
    assert find(copy / "x") is None
    monkeypatch.chdir(tmp_path)
    assert list_steps("checkpoints") == [1, 2]
    shutil.copytree(copy / "1", tmp_path / "best")
    with refused(ValueError, tmp_path / "best"):
        find(tmp_path / "best")
