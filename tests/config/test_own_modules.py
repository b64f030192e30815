"""Code of the user's own in several files that import each other: it runs, is kept, hashed, packed
and computed again as one."""

import shutil
import sys

import pytest
from refusals import refused, stopped

from maxmars.cli import main
from maxmars.config.load import load_config
from maxmars.config.own_modules import digest_of, files_of
from maxmars.config.user_code import Source
from maxmars.distributed.recorded_code import keep_code, recorded_copy
from maxmars.launch.job import pack

FILES = {
    "several.py": """
from maxmars.config import *
from several_sizes import WIDTH

def get_config() -> TrainConfig:
    return TrainConfig(
        name="several", num_steps=2, global_batch_size=8,
        model=ModuleConfig(make="code/several_model.py:make", vocab_size=257, max_seq_len=16),
        data=GrainConfig(source="code/several_data.py:windows", tokenizer="byte"),
        optimizer=OptaxConfig(make="code/several_tx.py:make", learning_rate=1e-3),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=4),
        eval=EvalConfig(every=2, num_windows=8, batch_size=8, own=("code/several_eval.py:count",)),
        checkpoint=CheckpointConfig(every=1, keep_last=9),
    )
""",
    "several_sizes.py": "WIDTH = 8\n",
    "code/several_model.py": """
from several_layers.table import Table

def make(*, rngs, vocab_size, max_seq_len):
    return Table(rngs, vocab_size)
""",
    "code/several_layers/__init__.py": "",
    "code/several_layers/table.py": """
from flax import nnx
from .start import start

class Table(nnx.Module):
    def __init__(self, rngs, vocab_size):
        shape = (vocab_size, 8)
        self.output_embedding = nnx.Param(start(rngs, shape), out_sharding=("vocab", "embed"))

    def __call__(self, tokens, segment_ids=None, positions=None):
        return self.output_embedding[...][tokens]
""",
    "code/several_layers/start.py": """
import jax

def start(rngs, shape):
    from several_common import SCALE
    return SCALE * jax.random.normal(rngs.params(), shape)
""",
    "code/several_common.py": "SCALE = 0.02\n",
    "code/several_data.py": """
import grain, numpy
import several_noise.draw as draw

def windows(*, split, length):
    return grain.MapDataset.source(draw.tokens(64, length + 1).astype(numpy.int32))
""",
    "code/several_noise/draw.py": """
import numpy

def tokens(*shape):
    return numpy.random.default_rng(0).integers(0, 256, shape)
""",
    "code/several_tx.py": """
import optax
from several_common import SCALE

def make(learning_rate):
    return optax.sgd(SCALE * learning_rate)
""",
    "code/several_eval.py": """
from several_common import SCALE

def count(trained):
    return {"scale": SCALE}
""",
    "code/several_apart.py": "raise ValueError('nothing imports it')\n",
}


def write(folder, files=FILES):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    write(folder)
    train(folder / "run")
    return folder / "run"


def train(run, *more):
    config = str(run.parent / "several.py")
    main(["train", config, "--workdir", str(run), "--num-processes", "1", *more])


def copied(run, tmp_path):
    return shutil.copytree(run.parent, tmp_path / "again") / "run"


@pytest.mark.seconds
def test_a_run_keeps_what_its_code_imports(run, capsys):
    kept = [p.relative_to(run / "sources") for p in (run / "sources").rglob("*.*")]
    parts = {
        path.parts[0] if path.parts[0] in ("model", "optimizer", "eval") else "data": set()
        for path in kept
    }
    for path in kept:
        part = path.parts[0] if path.parts[0] in parts else "data"
        inside = path.parts[1:] if part == "data" else path.parts[2:]  # below the digest
        parts[part].add("/".join(inside))
    assert parts == {
        "data": {"several_data.py", "several_noise/draw.py"},
        "model": {
            "several_model.py",
            "several_layers/__init__.py",
            "several_layers/table.py",
            "several_layers/start.py",
            "several_common.py",
        },
        "optimizer": {"several_tx.py", "several_common.py"},
        "eval": {"several_eval.py", "several_common.py"},
    }
    for command in (
        ["eval", str(run), "--num-processes", "1", "--tasks", "own"],
        ["audit", str(run), "--replay", "2"],
    ):
        main(command)
    printed = capsys.readouterr().out
    assert "0.02" in printed
    assert "the same digest" in printed


@pytest.mark.seconds
def test_a_changed_neighbour_is_seen(run, tmp_path, capsys):
    again = copied(run, tmp_path)
    (kept,) = (again / "sources" / "model").rglob("several_common.py")
    kept.write_text("print('it ran')\nSCALE = 1\n")
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(again), "--replay", "2"])
    captured = capsys.readouterr()
    assert ended.value.code != 0
    assert "several_model.py" in captured.out + captured.err
    assert "it ran" not in captured.out
    before = load_config(str(again.parent / "several.py"))
    (again.parent / "code" / "several_common.py").write_text("SCALE = 0.02  # as before\n")
    after = load_config(str(again.parent / "several.py"))
    assert (before.model != after.model, before.data == after.data) == (True, True)


def test_what_belongs_together(tmp_path):
    write(tmp_path)
    assert [*files_of(tmp_path / "several.py")] == ["several.py", "several_sizes.py"]
    assert "several_apart.py" not in files_of(tmp_path / "code" / "several_model.py")
    alone = tmp_path / "code" / "several_common.py"
    source = Source.parse(f"{alone}:SCALE")
    assert source.sha256 == digest_of({"any name": alone.read_bytes()})
    # Modules of the standard library and maxmars are not looked for, whatever lies there.
    write(tmp_path, {"json.py": "1 / 0", "maxmars/config.py": "1 / 0"})
    write(tmp_path, {"plain.py": "import json, maxmars.config\nfrom . import nothing\n"})
    assert [*files_of(tmp_path / "plain.py")] == ["plain.py"]


def test_a_neighbour_may_import_the_file_that_imports_it(tmp_path):
    files = {
        "mutual.py": "from mutual_too import f\n\nK = 3\n",
        "mutual_too.py": "def f():\n    from mutual import K\n    return K\n",
    }
    write(tmp_path, files)
    assert Source.parse(f"{tmp_path}/mutual.py:f").load()() == 3


def test_a_name_of_an_installed_package_is_refused(tmp_path):
    write(tmp_path, {"named.py": "import scipy\n", "scipy.py": "X = 1\n"})
    with refused(ValueError, "scipy.py", "rename"):
        Source.parse(f"{tmp_path}/named.py:X").load()


def test_what_an_earlier_session_kept_is_not_in_the_way(tmp_path):
    """`helper.py` that became a package, and a name of a part's folder."""
    write(tmp_path, {"early.py": "import early_helper\n\ndef f(): return early_helper.X\n"})
    run, sources = tmp_path / "run", []
    for files in ({"early_helper.py": "X = 1\n"}, {"early_helper/__init__.py": "X = 2\n"}):
        write(tmp_path, files)
        sources.append(Source.parse(f"{tmp_path}/early.py:f"))
        keep_code(sources[-1], run, "sources")
        (tmp_path / "early_helper.py").unlink(missing_ok=True)
    assert [*recorded_copy(sources[1], run, "sources", "").files()] == [
        "early.py",
        "early_helper/__init__.py",
    ]
    assert [*recorded_copy(sources[0], run, "sources", "").files()] == [
        "early.py",
        "early_helper.py",
    ]


def test_an_edited_file_runs_anew_and_another_of_its_name_is_refused(tmp_path):
    files = {
        "edited.py": "from edited_by import X\nimport edited_too as Y\n\ndef f(): return X, Y.Z\n"
    }
    files |= {"edited_by.py": "X = 1\n", "edited_too.py": "from edited_by import X as Z\n"}
    write(tmp_path / "a", files)
    write(tmp_path / "b", files)
    source = f"{tmp_path}/a/edited.py:f"
    first = Source.parse(source).load()
    assert Source.parse(source).load() is first
    assert Source.parse(f"{tmp_path}/b/edited.py:f").load()() == (1, 1)  # the same text
    (tmp_path / "a" / "edited_by.py").write_text("X = 2\n")
    assert Source.parse(source).load()() == (2, 2)
    assert first()[0] == 1
    assert not [*tmp_path.rglob("*.pyc")]
    with refused(ValueError, "edited_by", "b"):
        Source.parse(f"{tmp_path}/b/edited.py:f").load()
    sys.modules.pop("edited_by")


def test_a_name_that_cannot_be_imported_is_named_with_the_file_that_wanted_it(tmp_path):
    write(tmp_path)
    write(
        tmp_path,
        {"code/lacking_tx.py": "import lacking_too\n", "code/lacking_too.py": "import lacks_it\n"},
    )
    config = f"quickstart:optimizer={tmp_path}/code/lacking_tx.py:make"
    with stopped(1, "lacks_it", "lacking_too.py:1"):
        main(["train", config, "--workdir", str(tmp_path / "run"), "--num-processes", "1"])


def test_all_of_it_is_packed(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    sources = [Source.parse(f"{tmp_path}/code/several_{part}.py:make") for part in ("model", "tx")]
    contents = pack("several.py", sources=sources).contents
    packed = {name for name in contents if "several" in name}
    expected = {
        name for name in FILES if not name.endswith(("data.py", "draw.py", "eval.py", "apart.py"))
    }
    assert packed == expected
