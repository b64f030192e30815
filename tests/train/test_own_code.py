"""One run of a model, data, an optimizer and an evaluation of the user's own, in files that import
others: kept, continued, refused when changed, and run only from the copies in the run."""

import json
import shutil
import timeit

import optax
import pytest
from refusals import refused, stopped
from tiny import first_difference, values_of

from maxmars.checkpoint.reader import checksum
from maxmars.cli import main
from maxmars.config import OptaxConfig, from_dict, to_dict

# Options have names that resemble those of credentials.
FILES = {
    "config.py": """
from maxmars.config import *

def get_config() -> TrainConfig:
    return TrainConfig(
        name="mine", num_steps=4, global_batch_size=8,
        model=ModuleConfig(make="code/mine_model.py:make", vocab_size=257, max_seq_len=16),
        data=GrainConfig(
            source="code/mine_data.py:windows", tokenizer="byte",
            options={"text_key": "", "answer_token": "<answer>"},
        ),
        optimizer=OptaxConfig(
            make="code/mine_tx.py:make", learning_rate=1e-3,
            options={"rng_key": "7", "signature": ["a", "b"]},
        ),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=4),
        eval=EvalConfig(every=2, num_windows=8, batch_size=8, own=("code/mine_eval.py:count",)),
        checkpoint=CheckpointConfig(every=1, keep_last=9), log=LogConfig(every=1),
    )
""",
    "code/mine_model.py": """
from mine_layers.table import Table

def make(*, rngs, vocab_size, max_seq_len):
    return Table(rngs, vocab_size)
""",
    "code/mine_layers/table.py": """
from flax import nnx
from mine_common import drawn

class Table(nnx.Module):
    def __init__(self, rngs, vocab_size):
        table = drawn(rngs, (vocab_size, 8))
        self.output_embedding = nnx.Param(table, out_sharding=("vocab", "embed"))

    def __call__(self, tokens, segment_ids=None, positions=None):
        return self.output_embedding[...][tokens]

    def export(self):
        return {"architectures": ["Table"]}, {"table": self.output_embedding[...]}
""",
    "code/mine_common.py": """
import jax

SCALE = 0.02

def drawn(rngs, shape):
    return SCALE * jax.random.normal(rngs.params(), shape)
""",
    "code/mine_data.py": """
import grain, numpy
import mine_noise.draw as draw

def windows(*, split, length, text_key, answer_token):
    assert (text_key, answer_token) == ("question", "<answer>"), (text_key, answer_token)
    return grain.MapDataset.source(draw.tokens(64, length + 1).astype(numpy.int32))
""",
    "code/mine_noise/draw.py": """
import numpy

def tokens(*shape):
    return numpy.random.default_rng(0).integers(0, 256, shape)
""",
    "code/mine_tx.py": """
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, optax
from mine_common import SCALE

class Counted(NamedTuple):
    count: jax.Array
    inner: Any

def make(learning_rate, *, rng_key, signature):
    assert (rng_key, signature) == ("7", ("a", "b")), (rng_key, signature)
    adam = optax.adam(SCALE * learning_rate)

    def update(updates, state, params=None):
        updates, inner = adam.update(updates, state.inner, params)
        return updates, Counted(state.count + 1, inner)

    return optax.GradientTransformation(
        lambda params: Counted(jnp.zeros([], jnp.int32), adam.init(params)), update
    )
""",
    "code/mine_eval.py": """
def count(trained):
    return {"tokens": trained.tokenizer.num_text_ids}
""",
}


def train(run, *more):
    config = str(run.parent / "config.py")
    words = ["train", config, "--workdir", str(run), "--num-processes", "1"]
    main([*words, "--data.options.text-key", "question", *more])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Half of the run; the config and its code lie beside it."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    train(folder / "run", "--num-steps", "2")
    return folder / "run"


@pytest.fixture
def again(run, tmp_path):
    """A copy of the run, beside a copy of its config and code."""
    return shutil.copytree(run.parent, tmp_path / "again") / "run"


# The run's copies of the files that its config names, and of what these import.
KEPT = {
    "model/*/mine_model.py": {"mine_layers/table.py", "mine_common.py"},
    "*/mine_data.py": {"mine_noise/draw.py"},
    "optimizer/*/mine_tx.py": {"mine_common.py"},
    "eval/mine_eval.py": set(),
}
LOSS = "eval RUN --num-processes 1 --tasks loss"
OWN = "eval RUN --num-processes 1 --tasks own"


def copy_of(run, pattern):
    (path,) = (run / "sources").glob(pattern)
    return path


def call(command, **paths):
    main([str(paths.get(word, word)) for word in command.split()])


@pytest.mark.seconds
def test_a_run_keeps_its_code_and_continues_where_the_files_lie_elsewhere(
    run, again, tmp_path, capsys
):
    for pattern, imported in KEPT.items():
        path = copy_of(again, pattern)
        names = {p.relative_to(path.parent).as_posix() for p in path.parent.rglob("*.py")}
        assert names == imported | {path.name}
    train(again)
    shutil.copytree(again.parent / "code", tmp_path / "code")
    shutil.copy(again.parent / "config.py", tmp_path)
    train(tmp_path / "whole")
    assert first_difference(again, tmp_path / "whole") is None
    config = json.loads((again / "config.json").read_text())
    assert config["data"]["options"] == {"text_key": "question", "answer_token": "<answer>"}
    assert values_of(again, "eval/count/tokens") == {0: 257, 2: 257, 4: 257}

    shutil.rmtree(again.parent / "code")  # the run has it all
    for command in (LOSS, OWN, "audit RUN --replay 4", "export RUN OUT"):
        call(command, RUN=again, OUT=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "steps 1 to 4 (of 2 sessions), computed again: the same digest" in printed
    assert "count tokens" in printed
    assert "mine_tx.py" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("mine_model.py", "--resume-overrides model.make"),
        ("mine_tx.py", "--resume-overrides optimizer.make"),
        ("mine_data.py", "other data"),
    ],
)
def test_changed_code_is_refused(again, file, named):
    path = again.parent / "code" / file
    path.write_text(path.read_text() + "\n# changed\n")
    with stopped(1, again, named):
        train(again, "--num-steps", "3")
    if named != "other data":
        train(again, "--num-steps", "3", *named.split())
        copies = [copy.read_text() for copy in (again / "sources").rglob(path.name)]
        assert sorted(text.endswith("# changed\n") for text in copies) == [False, True]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kept", "changed", "command"),
    [
        ("model/*/mine_model.py", "mine_common.py", "generate RUN --prompt a"),
        ("model/*/mine_model.py", "mine_layers/table.py", "export RUN OUT"),
        ("model/*/mine_model.py", "mine_model.py", "audit RUN --replay 1"),
        ("*/mine_data.py", "mine_noise/draw.py", LOSS),
        ("optimizer/*/mine_tx.py", "mine_tx.py", "audit RUN --replay 1"),
        ("eval/mine_eval.py", "mine_eval.py", OWN),
    ],
)
def test_code_runs_only_from_the_copy_that_the_run_recorded(
    again, kept, changed, command, tmp_path, capsys
):
    path = copy_of(again, kept)
    file, text = path.parent / changed, (path.parent / changed).read_text()
    for change in (lambda: file.write_text(f"print('it ran')\n{text}"), file.unlink):
        change()  # the file is still where it was in training
        capsys.readouterr()
        with stopped(1) as errors:
            call(command, RUN=again, OUT=tmp_path / "out")
        assert str(again / "sources") in errors.lines[-1]
        assert path.name in errors.lines[-1]
        assert f"--init-from {again}" in errors.lines[-1]
        assert "it ran" not in capsys.readouterr().out


@pytest.mark.seconds
def test_what_runs_no_recorded_code_needs_none(again, tmp_path, capsys):
    (again / "sources").rename(tmp_path / "sources")
    call("audit RUN", RUN=again)
    printed = capsys.readouterr().out
    assert "one trajectory" in printed
    assert all(str(again / "sources" / path.replace("*/", "")) in printed for path in KEPT)
    train(again, "--workdir", str(tmp_path / "new"), "--init-from", str(again))
    shutil.copytree(tmp_path / "sources" / "model", again / "sources" / "model")
    call("generate RUN --prompt a --max-new-tokens 1", RUN=again)


FOREIGN = """
import pathlib

pathlib.Path(__file__).with_name("it ran").touch()

def make(*args, **options):
    raise ValueError("it ran")
"""


def record(run, change):
    """Change the config in a run's config.json and checkpoints, which its journal would tell of."""
    (run / "journal.jsonl").unlink()
    for path in [run / "config.json", *run.glob("checkpoints/*/meta/data.json")]:
        fields = json.loads(path.read_text())
        if path.name == "config.json":
            change(fields)
        else:
            change(fields["config"])
            fields["checksum"] = checksum(fields)
        path.write_text(json.dumps(fields))


@pytest.mark.seconds
@pytest.mark.parametrize("way", ["text", "missing text", "link", "model", "optimizer"])
def test_no_command_runs_a_file_that_only_a_record_names(again, way, tmp_path):
    foreign, command = tmp_path / "foreign.py", OWN
    foreign.write_text(FOREIGN)
    source = {"type": "Source", "file": str(foreign), "function": "make", "sha256": None}
    if way == "text":
        record(again, lambda config: config["eval"].update(own=[f"{foreign}:make"]))
    elif way == "missing text":
        record(again, lambda config: config["eval"].update(own=[source]))
    elif way == "link":
        copy = copy_of(again, "eval/mine_eval.py")
        copy.rename(foreign)
        copy.symlink_to(foreign)
    elif way == "model":
        record(again, lambda config: config["model"].update(make=source))
        command = "generate RUN --prompt a"
    else:
        record(again, lambda config: config["optimizer"].update(make=source, options={}))
        command = "export RUN OUT"  # whose card names it
    if way == "optimizer":
        call(command, RUN=again, OUT=tmp_path / "out")
    else:
        with stopped(1) as errors:
            call(command, RUN=again)
        named = foreign if way == "text" else again / "sources"
        assert str(named) in errors.lines[-1]
    assert not (tmp_path / "it ran").exists()


def test_of_installed_packages_a_record_runs_optax_alone():
    config = OptaxConfig(make="optax:adam", learning_rate=1e-3)
    assert from_dict(to_dict(config)).make.load(field="optimizer.make") is optax.adam
    config = OptaxConfig(make="timeit:timeit", learning_rate=1e-3)
    assert config.make.load(field="optimizer.make") is timeit.timeit
    with refused(ValueError, "timeit:timeit", "record"):
        from_dict(to_dict(config)).make.load(field="optimizer.make")
