"""What options change; `test_wrong_words.py` has those that are wrong."""

import pytest

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
# Words of a command line, and what each has changed.
CHANGES = {
    "every kind": (
        MARS,
        {
            "--seed=5 config.py --num-steps 1e3": {"seed": 5, "num_steps": 1000},
            "--optimizer.learning-rate 1": {"optimizer.learning_rate": 1.0},
            "--optimizer.eps 1e-30 --eval.num_windows 2_000": {"eval.num_windows": 2000},
            "--model.use-bias False --optimizer.exact True": {"optimizer.exact": True},
            "--gradient-clip-norm None --mesh.fsdp 4": {"gradient_clip_norm": None},
            "--model.remat dots --log.wandb None": {"model.remat": "dots", "log.wandb": None},
            "--tpu-compiler-options xla_a=1 xla_b=c=d": {
                "tpu_compiler_options": {"xla_a": "1", "xla_b": "c=d"}
            },
            "--name=-x --eval.hellaswag-path None": {"name": "-x", "eval.hellaswag_path": None},
        },
    ),
    "the last of two": (
        MARS,
        {
            f"config.py --seed 1 --seed {2**32 - 1}": {"seed": 2**32 - 1},
            "--tpu-compiler-options None": {"tpu_compiler_options": None},
        },
    ),
    "a word for all": (
        MARS,
        {"config.py --tpu-compiler-options auto": {"tpu_compiler_options": "auto"}},
    ),
    "of an own function": (
        OWN,
        {
            "config.py --optimizer.options.rate None": {"optimizer.options.rate": None},
            "--optimizer.options.betas 0.8": {"optimizer.options.betas": (0.8,)},
            "--optimizer.options.names b c": {"optimizer.options.names": ("b", "c")},
            "--optimizer.options.mixed -2 3": {"optimizer.options.mixed": (-2, 3.0)},
            "--optimizer.options.on False": {"optimizer.options.on": False},
            "--optimizer.options.deep.number 3": {"optimizer.options.deep.number": 3},
        },
    ),
    "of a mixture": (
        MIXTURE,
        {
            "config.py --data.parts.1.weight 0.1": {"data.parts.1.weight": 0.1},
            "--data.parts.0.path c": {"data.parts.0.path": "c", "data.parts.0.weight": 0.7},
            "--data.order random_windows": {"data.order": "random_windows"},
        },
    ),
}


def value_of(config, name):
    for part in name.split("."):
        is_field = not isinstance(config, (dict, tuple))
        key = int(part) if isinstance(config, tuple) else part
        config = getattr(config, part) if is_field else config[key]
    return config


@pytest.mark.parametrize("name", CHANGES)
def test_options_change_fields(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body, changes = CHANGES[name]
    (tmp_path / "config.py").write_text(HEADER + body)
    config = parse_arguments(ConfigArguments, " ".join(changes).split(), prog="x").config
    for fields in changes.values():
        for field, value in fields.items():
            assert (value_of(config, field), type(value_of(config, field))) == (value, type(value))
