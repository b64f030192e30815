"""What the words after a command mean: what they change, and what is wrong with them."""

import pytest

from maxmars import cli
from maxmars.cli.parse import ConfigArguments, parse_arguments

pytestmark = pytest.mark.smoke

HEADER = """
from maxmars.config import *

def make(**fields):
    fields = dict(num_steps=3000, global_batch_size=8, model=GPT2Config.small()) | fields
    return TrainConfig(**dict(name="tiny", data=PythonSourcesConfig()) | fields)

def get_config():
"""
MARS = "    return make(optimizer=MarsConfig())\n"
MIXTURE = """
    parts = (MixturePart(path="a", weight=0.7), MixturePart(path="b", weight=0.3))
    return make(data=MixtureConfig(parts=parts), optimizer=AdamWConfig())
"""
OWN = """
    options = dict(rate=None, more=[], betas=[0.9, 0.99], names=["a"], mixed=[1, 0.5], on=True)
    options |= dict(deep=dict(number=1))
    return make(optimizer=OptaxConfig(make="own.py:make", learning_rate=0.1, options=options))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a config file in the current directory, a new one, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(body):
        (tmp_path / "tiny.py").write_text(HEADER + body)
        return "tiny.py"

    return write


def value_of(config, name):
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


CHANGES = [
    (MARS, "--optimizer.learning-rate 3e-3", {"optimizer.learning_rate": 3e-3}),
    (MARS, "--optimizer.learning_rate 1 --seed=5", {"optimizer.learning_rate": 1.0, "seed": 5}),
    (MARS, "--num-steps 1e3 --eval.num-windows 2_000", {"num_steps": 1000}),
    (MARS, f"--seed {2**32 - 1} --optimizer.eps 1e-30", {"seed": 2**32 - 1}),
    (MARS, "--model.use-bias False --optimizer.exact True", {"optimizer.exact": True}),
    (MARS, "--gradient-clip-norm None --mesh.fsdp 4", {"gradient_clip_norm": None}),
    (MARS, "--model.remat dots --log.wandb None", {"model.remat": "dots", "log.wandb": None}),
    (MARS, "--name=-x --eval.hellaswag-path None", {"name": "-x", "eval.hellaswag_path": None}),
    (MARS, "--seed 1 --seed 2", {"seed": 2}),
    (
        MARS,
        "--tpu-compiler-options xla_a=1 xla_b=c=d --seed 1",
        {"tpu_compiler_options": {"xla_a": "1", "xla_b": "c=d"}, "seed": 1},
    ),
    (MARS, "--tpu-compiler-options None", {"tpu_compiler_options": None}),
    (MARS, "--tpu-compiler-options auto", {"tpu_compiler_options": "auto"}),
    (OWN, "--optimizer.options.rate None", {"optimizer.options.rate": None}),
    (OWN, "--optimizer.options.betas 0.8", {"optimizer.options.betas": (0.8,)}),
    (OWN, "--optimizer.options.names b c", {"optimizer.options.names": ("b", "c")}),
    (OWN, "--optimizer.options.on False", {"optimizer.options.on": False}),
    (OWN, "--optimizer.options.deep.number 3", {"optimizer.options.deep.number": 3}),
    (
        OWN,
        "--name x --optimizer.options.betas 0.8 0.9 --optimizer.options.mixed -2 3 --seed 1",
        {
            "name": "x",
            "seed": 1,
            "optimizer.options.betas": (0.8, 0.9),
            "optimizer.options.mixed": (-2, 3.0),
        },
    ),
]


@pytest.mark.parametrize(("body", "words", "values"), CHANGES, ids=[row[1] for row in CHANGES])
def test_options_change_fields(write, body, words, values):
    config = parse_arguments(ConfigArguments, [write(body), *words.split()], prog="x").config
    found = {name: value_of(config, name) for name in values}
    assert found == values
    assert list(map(type, found.values())) == list(map(type, values.values()))


def test_options_may_come_before_the_config(write):
    words = ["--seed", "1", "--name=x", write(MARS), "--num-steps", "2"]
    config = parse_arguments(ConfigArguments, words, prog="x").config
    assert (config.seed, config.name, config.num_steps) == (1, "x", 2)


def test_options_change_a_part_of_a_mixture(write):
    words = "tiny.py --data.parts.1.weight 0.1 --data.parts.0.path c --data.order random_windows"
    write(MIXTURE)
    data = parse_arguments(ConfigArguments, words.split(), prog="x").config.data
    assert [(part.path, part.weight) for part in data.parts] == [("c", 0.7), ("b", 0.1)]
    assert data.order == "random_windows"


WRONG = [
    (MARS, "--model.num-layer 3", ["--model.num-layer ", "`--model.num-layers`"]),
    (MARS, "--batch-size 3", ["--batch-size ", "`--global-batch-size`"]),
    (MARS, "--xyzzy 3", ["--xyzzy", "train tiny.py"]),
    (MARS, "3", ["'3'", "train tiny.py"]),
    (MARS, "--model.use-bias maybe", ["--model.use-bias maybe", "True or False"]),
    (MARS, "--num-steps=many", ["--num-steps many", "integer"]),
    (MARS, "--num-steps 1.5", ["--num-steps 1.5", "integer"]),
    (MARS, "--eval.every often", ["--eval.every often", "integer or None"]),
    (MARS, "--model.remat atention", ["--model.remat atention", "full or", "`attention`"]),
    (MARS, "--seed 1 --num-steps", ["--num-steps"]),
    (MARS, "--seed --num-steps 1", ["--seed"]),
    (MARS, "--name -x", ["--name"]),
    (MARS, "--model.num-heads 5", ["embed_dim=768", "num_heads=5"]),
    (MARS, "--optimizer.b1 1.5", ["--optimizer.b1 1.5 must lie in [0, 1)"]),
    (MARS, "--optimizer.learning-rate abc", ["--optimizer.learning-rate abc", "number"]),
    (MARS, "--num-steps -5", ["--num-steps -5 must be greater than zero"]),
    (MARS, "--num-steps 1e400", ["--num-steps 1e400"]),
    (MARS, "--mesh.fsdp 0", ["--mesh.fsdp 0 must be greater than zero"]),
    (MARS, "--optimizer.eps nan", ["--optimizer.eps nan", "finite"]),
    (MARS, "--checkpoint.best-metric eval/los", ["--checkpoint.best-metric eval/los"]),
    (MARS, "--schedule.warmup-steps 9 --schedule.decay-steps 5", ["warmup_steps=9", "steps=5"]),
    (MARS, "--num-microbatches 3", ["global_batch_size=8", "num_microbatches=3"]),
    (MARS, "--start-timeout-s 0", ["--start-timeout-s 0.0 must be greater"]),
    (MARS, "--tpu-compiler-options", ["--tpu-compiler-options"]),
    (MARS, "--tpu-compiler-options a=1 b", ["--tpu-compiler-options b", "NAME=VALUE"]),
    (MARS, "--tpu-compiler-options autp", ["--tpu-compiler-options autp", "`auto`"]),
    (MIXTURE, "--data.parts.1.weight -1", ["--data.parts.1.weight -1"]),
    (OWN, "--optimizer.options.rate 3", ["--optimizer.options.rate 3"]),
    (OWN, "--optimizer.options.more 3", ["--optimizer.options.more 3"]),
    (OWN, "--optimizer.options.more None", ["--optimizer.options.more None"]),
    (OWN, "--optimizer.options.betas 0.9 x", ["--optimizer.options.betas x", "number"]),
    (OWN, "--optimizer.options.mixed 0.5 1", ["--optimizer.options.mixed 0.5", "integer"]),
    (OWN, "--optimizer.options.mixed 1 0.5 1", ["--optimizer.options.mixed 1 0.5 1", "2 values"]),
    (OWN, "--optimizer.options.betas", ["--optimizer.options.betas"]),
    (OWN, "--optimizer.options.on 1", ["--optimizer.options.on 1"]),
    (OWN, "--optimizer.options.deep.nmuber 1", ["nmuber", "`--optimizer.options.deep.number`"]),
]


@pytest.mark.parametrize(("body", "words", "named"), WRONG, ids=[row[1] for row in WRONG])
def test_what_is_wrong_is_one_line(write, capsys, tmp_path, body, words, named):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", write(body), *words.split()])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("maxmars: error: ")
    assert printed.err.count("\n") == 1
    assert [part for part in named if part not in printed.err] == []
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.py"]


@pytest.mark.seconds
def test_the_value_of_an_unknown_option_is_not_told(write, capsys):
    """It may be a secret, and schedulers keep what a job printed."""
    for words in (["--data.options.api-keyy", "hunter2"], ["--data.options.api-keyy=hunter2"]):
        with pytest.raises(SystemExit):
            cli.main(["train", write(MARS), *words])
        error = capsys.readouterr().err
        assert "--data.options.api-keyy" in error
        assert "hunter2" not in error
