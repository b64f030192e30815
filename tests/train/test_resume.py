"""How runs begin: which config they continue with, and the weights that they start from."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest
import tiny
import tokenizers
from refusals import refused
from tiny import ADAMW, MODEL, batch_of, values_of

from maxmars.checkpoint import list_steps, load, read
from maxmars.checkpoint.environment import environment
from maxmars.checkpoint.journal import changes_of_config, read_journal, session_starts
from maxmars.cli import main
from maxmars.compare.curves import read_run
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    GrainConfig,
    GrainPart,
    GuardConfig,
    LionConfig,
    MarsConfig,
    MeshConfig,
    MixtureConfig,
    MixturePart,
    MomentumKernelConfig,
    MuonConfig,
    NAdamWConfig,
    ScheduleConfig,
    TokenShardsConfig,
    WeightUpdateConfig,
)
from maxmars.data.formats import open_directory
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import Vocabulary
from maxmars.data.tokenizer import load as load_tokenizer
from maxmars.distributed import sharding
from maxmars.model import huggingface
from maxmars.model.parameters import Parameters
from maxmars.train import train
from maxmars.train.audit import audit
from maxmars.train.init_from import InitFrom, load_initial
from maxmars.train.resolve import Recorded, resolve_config
from maxmars.train.resume import continued_config, rounding_message
from maxmars.train.step import abstract_train_state, make_train_step


@pytest.fixture(scope="module")
def short_config(tmp_path_factory):
    """Makes configs of two steps."""
    return functools.partial(tiny.short_config, tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def source(tmp_path_factory, short_config):
    """A run of two steps under AdamW, which tests only read."""
    workdir = tmp_path_factory.mktemp("source") / "run"
    train(short_config(), workdir)
    return workdir


@pytest.fixture
def continuing(source, short_config):
    """The config that the run would continue with."""

    def continuing(config, *overrides, messages=None, stored=None):
        saved = read(source / "checkpoints")
        return continued_config(
            dataclasses.replace(saved, config=stored or saved.config),
            config,
            parameters=Parameters(config.model, sharding.make_mesh(config.mesh)),
            overrides=overrides,
            log=(messages if messages is not None else []).append,
        )

    return continuing


@pytest.mark.seconds
def test_the_best_checkpoint_stays_also_where_the_run_ended_first(short_config, tmp_path):
    config = short_config(
        num_steps=4,
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=10**6),
        checkpoint=CheckpointConfig(every=2, keep_last=1, keep_best=1),
    )
    train(config, tmp_path / "run")
    rate = dataclasses.replace(ADAMW, learning_rate=1.0)  # each step makes it worse
    worse = dataclasses.replace(config, num_steps=8, optimizer=rate)
    train(worse, tmp_path / "run", resume_overrides=["optimizer.learning_rate"])
    losses = values_of(tmp_path / "run", "eval/loss")
    assert min((2, 4, 6, 8), key=losses.__getitem__) == 4
    assert list_steps(tmp_path / "run" / "checkpoints") == [4, 8]
    assert audit(tmp_path / "run").verdict == "one trajectory"


@pytest.mark.seconds
def test_past_a_damaged_checkpoint_to_one_of_before_a_change(source, short_config, tmp_path):
    guard = GuardConfig(grad_norm_spike_threshold=9.0, max_consecutive_skips=3)
    config = short_config(guard=guard)
    train(config, tmp_path / "run")
    guarded, unguarded = (read(run / "checkpoints").digests for run in (tmp_path / "run", source))
    assert guarded.keys() > unguarded.keys()  # by the statistics of norms
    assert guarded | unguarded == guarded  # the guard changes no update
    changed = dataclasses.replace(
        config,
        num_steps=3,
        ema_decay=0.9,
        guard=GuardConfig(loss_spike_threshold=9.0, max_consecutive_skips=3),
    )
    overrides = ["ema_decay", "guard"]
    train(changed, tmp_path / "run", resume_overrides=overrides)
    for path in (tmp_path / "run/checkpoints/3/state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    assert train(changed, tmp_path / "run", resume_overrides=overrides).done
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert {"2", "3", "3.damaged"} <= names


@pytest.mark.seconds
def test_what_another_start_saved_meanwhile_is_not_begun_anew(short_config, tmp_path):
    workdir = tmp_path / "run"
    (tmp_path / "slow.py").write_text(
        "import grain, numpy as np\n"
        "from pathlib import Path\n"
        "from maxmars.train import train\n"
        "import tiny\n"
        "def windows(*, split, length):\n"
        f"    if not Path({str(workdir)!r}).exists():\n"
        f"        train(tiny.short_config(Path({str(tmp_path / 'tokens')!r})), {str(workdir)!r})\n"
        "    return grain.MapDataset.range(64).map(lambda i: np.arange(length + 1) % 7 + i % 5)\n"
    )
    config = short_config(data=GrainConfig(source=f"{tmp_path / 'slow.py'}:windows"))
    with refused(ValueError, workdir, "the same command"):
        train(config, workdir)
    assert list_steps(workdir / "checkpoints") == [1, 2]


@pytest.mark.seconds
def test_a_run_goes_on_with_another_rate_and_batch_size(source, short_config, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(source, workdir)
    config = short_config(
        num_steps=4,
        global_batch_size=8,
        optimizer=dataclasses.replace(ADAMW, learning_rate=1e-2),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=10**6),
        eval=EvalConfig(every=None),
    )
    names = ["optimizer.learning_rate", "global_batch_size"]
    train(config, workdir, resume_overrides=names)
    assert values_of(workdir, "train/learning_rate")[4] == pytest.approx(1e-2)
    for step, position in ((2, 2 * 16), (4, 2 * 16 + 2 * 8)):
        meta = json.loads((workdir / "checkpoints" / str(step) / "meta" / "data.json").read_text())
        assert meta["data_position"] == position
    (changes,) = changes_of_config(read_journal(workdir)).items()
    assert changes[0] == 2
    assert "num_steps 2 -> 4" in changes[1]
    assert "optimizer.learning_rate 0.0006 -> 0.01" in changes[1]
    tokens = {0: 0, 1: 256, 2: 512, 3: 512 + 128, 4: 512 + 256}
    assert values_of(workdir, "tokens") == tokens
    series = read_run(workdir, "run").runs[0].points.values()
    assert {step: tokens for points in series for step, tokens, _ in points} == tokens
    assert json.loads((workdir / "summary.json").read_text())["tokens"] == 768
    train(config, workdir)  # from here on they are the run's own
    assert list(changes_of_config(read_journal(workdir))) == [2]


def test_a_library_of_another_version_is_told(source, short_config, tmp_path, monkeypatch, capsys):
    shutil.copytree(source, tmp_path / "run")
    information = tmp_path / "site" / "optax-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(information.parent)
    train(short_config(), tmp_path / "run")
    assert re.search(r"changed since step 2: optax \S+ -> 9\.9\.9\n", capsys.readouterr().out)


def test_how_the_parts_of_a_mixture_are_read_may_change(continuing, short_config, tmp_path):
    (tmp_path / "own.py").write_text("")
    own = GrainPart(source=f"{tmp_path / 'own.py'}:source", weight=1.0)
    tokens = MixturePart(path=str(tmp_path), weight=1.0)
    before, after = (
        short_config(data=MixtureConfig(parts=(tokens, dataclasses.replace(own, num_workers=n))))
        for n in (0, 2)
    )
    assert continuing(after, stored=before) == after


def test_a_change_of_the_rounding_is_told(short_config, source):
    stored = short_config(num_microbatches=2)
    other = short_config(mesh=MeshConfig(fsdp=8))
    saved = dataclasses.replace(read(source / "checkpoints"), config=stored)
    mesh, config = sharding.make_mesh(other.mesh), short_config()
    assert rounding_message(saved, config, environment(mesh)) == (
        "since step 2: mesh data=8 fsdp=1 tensor=1 -> data=1 fsdp=8 tensor=1, num_microbatches "
        "2 -> 1; the loss goes on as before, up to rounding"
    )
    same = sharding.make_mesh(config.mesh)
    assert rounding_message(read(source / "checkpoints"), config, environment(same)) is None


def test_only_what_is_named_changes(continuing, short_config):
    messages = []
    fields = {"gradient_clip_norm": 2.0, "seed": 1, "guard": GuardConfig(history=5)}
    config = short_config(**fields)
    named = ("gradient_clip_norm", "seed", "guard")
    assert continuing(config, *named, messages=messages) == config
    assert messages[0].startswith("changed on purpose: seed from 0 to 1, gradient_clip_norm from")
    with refused(ValueError, "0 there", "--resume-overrides guard,gradient_clip_norm,seed"):
        continuing(config, "guard", "gradient_clip_norm")
    assert continuing(short_config(), *named) == short_config()  # nothing left to change


def test_a_field_that_does_not_exist(continuing, short_config):
    name = "optimizer.weight_decy"
    with refused(ValueError, f"--resume-overrides {name}:", "optimizer.weight_decay?"):
        continuing(short_config(), name)


@pytest.mark.parametrize(
    ("changes", "name", "named"),
    [
        (
            {"model": dataclasses.replace(MODEL, num_layers=2)},
            "model",
            ["model.num_layers", "params/h/", "float32[3,", "float32[2,"],
        ),
        ({"optimizer": NAdamWConfig()}, "optimizer", [ADAMW, NAdamWConfig(), "--init-from"]),
    ],
)
def test_what_does_not_fit_cannot_be_changed(
    source, continuing, short_config, changes, name, named
):
    config = short_config(**changes)
    with refused(ValueError, "--resume-overrides", *named):
        continuing(config, name)
    with refused(ValueError, source, name) as error:
        continuing(config)
    assert "--resume-overrides" not in str(error.value)  # it would not help


@pytest.mark.parametrize("optimizer", [ADAMW, NAdamWConfig(), LionConfig(), MuonConfig()])
def test_what_becomes_of_a_direction_may_change(continuing, short_config, optimizer):
    stored = short_config(optimizer=optimizer)
    hooks = WeightUpdateConfig(hyperball=True)
    config = short_config(optimizer=dataclasses.replace(optimizer, weight_update=hooks))
    assert continuing(config, "optimizer.weight_update", stored=stored) == config
    assert continuing(stored, "optimizer.weight_update", stored=config) == stored


ADEMAMIX = MomentumKernelConfig(preset="ademamix", end_step=4)
TWO = MomentumKernelConfig(decays=(0.8, 0.9), weights=(0.5, 0.5))


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        (ADAMW, ADEMAMIX, MomentumKernelConfig(decays=(0.9, 0.9999), weights=(1.0, 8.0))),
        (MuonConfig(), TWO, dataclasses.replace(TWO, weights=(0.1, 0.9))),
        (MuonConfig(), MomentumKernelConfig(), MomentumKernelConfig(decays=(0.9,), weights=(1.0,))),
    ],
)
def test_buffers_of_a_momentum_kernel_are_not_read_as_anothers(
    continuing, short_config, optimizer, before, after
):
    stored, config = (
        short_config(optimizer=dataclasses.replace(optimizer, momentum_kernel=kernel))
        for kernel in (before, after)
    )
    with refused(ValueError, "optimizer.momentum_kernel", "--new-optimizer-state"):
        continuing(config, "optimizer.momentum_kernel", stored=stored)


def test_the_steps_of_a_momentum_kernel_may_change(continuing, short_config):
    stored, config = (
        short_config(
            optimizer=dataclasses.replace(
                ADAMW, momentum_kernel=dataclasses.replace(ADEMAMIX, end_step=end)
            )
        )
        for end in (4, 8)
    )
    assert continuing(config, "optimizer.momentum_kernel", stored=stored) == config


def test_a_run_keeps_its_type_where_another_would_be_chosen(continuing, short_config):
    for dtype in ("bfloat16", "float32"):
        stored, auto = (
            short_config(model=dataclasses.replace(MODEL, compute_dtype=d)) for d in (dtype, "auto")
        )
        requested = continuing(auto, stored=stored)
        parameters = Parameters(requested.model, mesh_of(requested))
        recorded = Recorded(stored, environment(parameters.mesh))
        resolved = resolve_config(requested, parameters, recorded=recorded)
        assert resolved.config.model == stored.model


@pytest.mark.parametrize(("warmup", "given", "end"), [(1, None, 2), (2, None, None), (2, 2, 2)])
def test_a_run_that_has_not_begun_to_decay_may_still_move_the_end(
    continuing, short_config, warmup, given, end
):
    schedule = ScheduleConfig(warmup_steps=warmup)
    stored = short_config(schedule=dataclasses.replace(schedule, decay_steps=given))
    config = continuing(short_config(num_steps=4, schedule=schedule), stored=stored)
    assert config.schedule.decay_steps == end


def test_overrides_need_a_run(short_config, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    with refused(ValueError, "--resume-overrides seed", checkpoints):
        train(short_config(), tmp_path / "run", resume_overrides=["seed"])
    assert not (tmp_path / "run").exists()


# --- starting from weights ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(tmp_path_factory, short_config, source):
    """A run from its weights, and its config."""
    config = short_config(seed=1)
    workdir = tmp_path_factory.mktemp("started") / "run"
    train(config, workdir, init_from=InitFrom(path=str(source)))
    return workdir, config


def model(**changes):
    return dataclasses.replace(MODEL, **changes)


def mesh_of(config):
    return sharding.make_mesh(config.mesh)


def loaded(path, config, *, optimizer_state=False, vocabulary=None):
    source = InitFrom(path=str(path), optimizer_state=optimizer_state)
    step = make_train_step(config, Parameters(config.model, mesh_of(config)))
    return load_initial(step, source, vocabulary or open_directory(config.data.path).vocabulary)


def saved(workdir, config, step=None):
    """Parameters and optimizer state of a run's checkpoint."""
    abstract = abstract_train_state(config, Parameters(config.model, mesh_of(config)))
    parts = {"params": abstract.params, "opt_state": abstract.opt_state}
    return load(workdir / "checkpoints", parts, step).state


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), jax.device_get(other))


@pytest.mark.seconds
def test_a_run_starts_where_another_ended(source, started):
    workdir, _ = started
    before, losses = values_of(source, "eval/loss"), values_of(workdir, "eval/loss")
    assert losses[0] == pytest.approx(before[2], abs=1e-5)
    assert losses[2] < losses[0]
    (began,) = session_starts(read_journal(workdir))
    assert began.init_from["weights"] == str(source / "checkpoints" / "2")
    meta = json.loads((workdir / "checkpoints" / "2" / "meta" / "data.json").read_text())
    assert (meta["step"], meta["data_position"]) == (2, 2 * 16)


def test_a_run_continues_from_its_own_checkpoints(source, started, capsys):
    """Whatever --init-from says: a launcher gives the same command, its source may be gone."""
    workdir, config = started
    request, elsewhere = InitFrom(path=str(source)), InitFrom(path="/elsewhere")
    for init_from in (request, elsewhere, None):
        train(config, workdir, init_from=init_from)
        output = capsys.readouterr().out
        assert "continuing from step 2" in output
        assert (f"--init-from {elsewhere.path}" in output) == (init_from is elsewhere)


@pytest.mark.seconds
def test_the_weights_that_a_run_starts_from_are_its_step_0(source, started, tmp_path):
    """From the first save on, a kill leaves a run that needs no source."""
    workdir, config = shutil.copytree(started[0], tmp_path / "run"), started[1]
    assert list_steps(workdir / "checkpoints") == [0, 1, 2]
    for step in ("1", "2"):
        shutil.rmtree(workdir / "checkpoints" / step)
    train(config, workdir)
    audited = audit(workdir, replay=2)
    assert (audited.problems, audited.verdict) == ([], "one trajectory")
    began = session_starts(read_journal(workdir))
    assert {line.init_from["weights"] for line in began} == {str(source / "checkpoints/2")}

    shutil.rmtree(workdir / "checkpoints")
    with refused(ValueError, workdir, source, "--init-from"):
        train(config, workdir)
    train(config, workdir, init_from=InitFrom(path=str(source)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Tokens of two vocabularies of one size."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, text in (("one", "to be or not to be " * 40), ("other", "it is the question " * 40)):
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text], 262, 2, special_tokens=["<|endoftext|>"])
        tokenizer.save(str(folder / f"{name}.json"))
        theirs = load_tokenizer(str(folder / f"{name}.json"))
        assert theirs.vocab_size == 262
        prepare([("a", text * 9)], folder / name, tokenizer=theirs, source="", workers=0)
    return folder


@pytest.mark.seconds
def test_weights_of_another_tokenizer_are_refused(pairs, short_config, tmp_path):
    def config(name, **changes):
        tokens = TokenShardsConfig(path=str(pairs / name))
        fields = {"data": tokens, "model": model(vocab_size=262), "num_steps": 1}
        return short_config(**fields | changes)

    run, hf, new = tmp_path / "run", tmp_path / "hf", tmp_path / "new"
    train(config("one"), run)
    main(["export", str(run), str(hf)])
    for start in (run, hf, run / "checkpoints" / "1"):
        for other in (config("other"), short_config(model=MODEL)):
            with refused(ValueError, start, "--tokenizer", "token"):
                loaded(start, other)
        loaded(start, config("one", seed=2))
    with refused(ValueError, run, f"--tokenizer {run / 'tokenizer'}"):
        train(config("other"), new, init_from=InitFrom(path=str(run)))
    assert not new.exists()


@pytest.mark.seconds
def test_weights_alone_begin_everything_anew(source, short_config):
    config = short_config(optimizer=MarsConfig(), seed=3)
    state = loaded(source / "checkpoints" / "1", config).state
    assert_equal(state.params, saved(source, short_config(), 1)["params"])
    new = jax.device_get((state.step, state.opt_state, state.guard))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(new))
    rate = np.float32(config.optimizer.learning_rate)
    assert np.asarray(state.hyperparams["learning_rate"]) == rate
    abstract = abstract_train_state(config, Parameters(config.model, mesh_of(config)))
    assert jax.tree.all(jax.tree.map(lambda x, a: x.sharding == a.sharding, state, abstract))


@pytest.mark.seconds
def test_the_first_step_of_exact_mars_reads_no_earlier_parameters(source, short_config):
    config = short_config(optimizer=MarsConfig(exact=True))
    step = make_train_step(config, Parameters(config.model, mesh_of(config)))
    shape = step.abstract_batch["tokens"].shape
    batch = batch_of(step, np.random.default_rng(0).integers(0, 257, shape, np.int32))
    state = loaded(source, config).state
    assert_equal(state.prev_params, state.params)
    copies = [jax.tree.map(lambda x: x.copy(), state.params) for _ in range(2)]
    # `step` donates the state: both of these have arrays of their own.
    other = dataclasses.replace(
        loaded(source, config).state, params=copies[0], prev_params=copies[1]
    )
    (one, _), (two, _) = (step(state, batch) for state in (state, other))
    assert_equal(one, two)
    assert_equal(one.prev_params, saved(source, short_config())["params"])


@pytest.mark.seconds
def test_the_optimizer_state_can_go_on(source, short_config):
    config = short_config(optimizer=dataclasses.replace(ADAMW, learning_rate=1e-5))
    state = loaded(source, config, optimizer_state=True).state
    expected = saved(source, short_config())
    assert_equal(state.params, expected["params"])
    assert_equal(state.opt_state, expected["opt_state"])
    assert any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(state.opt_state)))
    assert int(state.step) == 0
    assert np.asarray(state.hyperparams["learning_rate"]) == np.float32(1e-5)


@pytest.mark.seconds
def test_rows_that_pad_the_vocabulary_go(source, short_config):
    """`test_a_hugging_face_model` adds some."""
    before = jax.device_get(saved(source, short_config())["params"]["wte"]["embedding"])
    config = short_config(model=model(vocab_pad_multiple=1), mesh=MeshConfig(fsdp=8))
    table = jax.device_get(loaded(source, config).state.params["wte"]["embedding"])
    np.testing.assert_array_equal(table, before[:257])


@pytest.mark.parametrize(
    ("changes", "optimizer_state", "named"),
    [
        (
            {"model": model(num_layers=2, max_seq_len=8)},
            False,
            [
                *("model.num_layers", "3 there", "2 here", "--model.num-layers 3"),
                *("model.max_seq_len", "16 there", "8 here", "--model.max-seq-len 16"),
            ],
        ),
        (
            {"model": model(scale_attn_by_inverse_layer_idx=True)},
            False,
            ["model.scale_attn_by_inverse_layer_idx", "False there", "True here"],
        ),
        # NAdamW's state has the same arrays as AdamW's.
        (
            {"optimizer": NAdamWConfig()},
            True,
            ["--init-optimizer-state", "AdamWConfig", "NAdamWConfig"],
        ),
        (
            {"model": model(vocab_pad_multiple=1)},
            True,
            [
                *("--init-optimizer-state", "params/wte/embedding"),
                *("model.vocab_pad_multiple", "8 there", "1 here"),
            ],
        ),
    ],
)
def test_what_does_not_fit_is_named(source, short_config, changes, optimizer_state, named):
    with refused(ValueError, source / "checkpoints" / "2", *named):
        loaded(source, short_config(**changes), optimizer_state=optimizer_state)


def test_a_model_that_is_computed_in_another_way_is_the_same(source, short_config):
    loaded(source, short_config(model=model(remat="full", scan_unroll=2)))


@pytest.mark.seconds
def test_an_optimizer_state_of_another_momentum_kernel_is_named(tmp_path, short_config):
    before, after = (
        short_config(num_steps=1, optimizer=MuonConfig(momentum_kernel=kernel))
        for kernel in (TWO, dataclasses.replace(TWO, weights=(0.1, 0.9)))
    )
    train(before, tmp_path / "run")
    with refused(ValueError, "--init-optimizer-state", "optimizer.momentum_kernel.weights"):
        loaded(tmp_path / "run", after, optimizer_state=True)


def test_no_weights(tmp_path, short_config):
    with refused(FileNotFoundError, tmp_path / "nowhere"):
        loaded(tmp_path / "nowhere", short_config())
    with refused(ValueError, tmp_path, "checkpoints", "model.safetensors", "config.json"):
        loaded(tmp_path, short_config())


def test_a_hugging_face_model(reference_dir, short_config):
    directory = reference_dir / "reference" / "hf_gpt2_tiny"
    shape = GPT2Config(
        num_layers=2, num_heads=2, embed_dim=32, vocab_size=50257, vocab_pad_multiple=64
    )
    config = short_config(model=shape, mesh=MeshConfig(fsdp=4, tensor=2))
    vocabulary = Vocabulary(tokenizer="gpt2", size=50257)
    initial = loaded(directory, config, vocabulary=vocabulary)
    assert initial.origin["weights"] == str(directory)
    table = jax.device_get(initial.state.params["wte"]["embedding"])
    stored = huggingface.load_params(
        directory,
        huggingface.read_config(directory),
        Parameters(huggingface.read_config(directory)).abstract,
    )
    np.testing.assert_array_equal(table[:50257], stored["wte"]["embedding"])
    assert table.shape == (50304, 32)
    assert_equal(initial.state.params["h"], stored["h"])
    shorter = short_config(model=dataclasses.replace(shape, max_seq_len=512))
    with refused(ValueError, directory, "model.max_seq_len", "1024 there", "512 here"):
        loaded(directory, shorter, vocabulary=vocabulary)
    with refused(ValueError, directory, "--init-optimizer-state"):
        loaded(directory, config, optimizer_state=True, vocabulary=vocabulary)
