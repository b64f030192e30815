import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tiny import ADAMW, tiny_config

from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    GrainConfig,
    GrainSource,
    GuardConfig,
    LogConfig,
    MarsConfig,
    MeshConfig,
    MixtureChange,
    MixtureConfig,
    MixturePart,
    ModuleConfig,
    OptaxConfig,
    ScheduleConfig,
    TokenShardsConfig,
    differences,
    from_dict,
    to_dict,
)
from maxmars.config.user_code import load_function

pytestmark = pytest.mark.smoke


def mixture(*weights, changes=()):
    """Directories a, b, ... with these weights; `changes` maps examples to new weights."""
    parts = (MixturePart(path=name, weight=w) for name, w in zip("abc", weights, strict=False))
    changed = (MixtureChange(at_example=i, weights=changes[i]) for i in changes)
    return MixtureConfig(parts=tuple(parts), changes=tuple(changed))


MIXTURE = MixtureConfig(
    parts=(MixturePart(path="a", weight=0.7), MixturePart(path="b", weight=0.3))
)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(optimizer=ADAMW, data=TokenShardsConfig(path="tokens")),
        tiny_config(data=MIXTURE),
        tiny_config(gradient_clip_norm=None, schedule=ScheduleConfig(warmup_steps=0)),
    ],
)
def test_a_config_survives_json(config):
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_unknown_classes_and_fields_are_named():
    fields = to_dict(tiny_config())
    with pytest.raises(ValueError, match=r"TrainConfig has no field speed; .* another version"):
        from_dict(fields | {"speed": 1})
    with pytest.raises(ValueError, match="unknown config type 'Nope'; known: TrainConfig"):
        from_dict({"type": "Nope"})


def test_differences_are_dotted_leaves():
    old = tiny_config()
    model = dataclasses.replace(old.model, num_layers=5)
    new = dataclasses.replace(old, seed=1, model=model, optimizer=ADAMW)
    rows = differences(old, new)
    assert rows[:2] == [("seed", 0, 1), ("model.num_layers", 3, 5)]
    assert rows[2][0] == "optimizer"
    assert differences(old, old) == []


def test_differences_reach_into_a_mixture():
    first, second = MIXTURE.parts
    other = MixtureConfig(parts=(first, dataclasses.replace(second, weight=0.5)))
    assert differences(MIXTURE, other) == [("parts.1.weight", 0.3, 0.5)]
    assert differences(MIXTURE, MixtureConfig(parts=(first,)))[0][0] == "parts"


def test_derived_values():
    config = tiny_config(num_steps=10, global_batch_size=24, num_microbatches=3)
    assert config.microbatch_size == 8
    assert config.tokens_per_step == 24 * 16
    assert config.decay_steps == 10
    assert tiny_config(eval=EvalConfig(batch_size=None)).eval_batch_size == 8
    assert GPT2Config(vocab_size=257, vocab_pad_multiple=64).padded_vocab_size == 320
    assert GPT2Config(vocab_size=256, vocab_pad_multiple=64).padded_vocab_size == 256
    assert GPT2Config.xl().head_dim == 64


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GPT2Config(num_layers=0), "num_layers=0 must be greater than zero"),
        (lambda: GPT2Config(num_heads=5), "embed_dim=768 must be a multiple of model.num_heads=5"),
        (
            lambda: GPT2Config(document_end_id=50257),
            r"document_end_id=50257 must lie in \[0, model",
        ),
        (lambda: MixtureConfig(parts=()), "needs at least one part"),
        (lambda: MixturePart(path="a", weight=-0.1), "weight=-0.1 must not be negative"),
        (lambda: mixture(0.0), r"weights \(0.0,\) of a mixture must be 1 finite numbers, none neg"),
        (lambda: mixture(float("inf")), "MixturePart.weight=inf must be a finite number"),
        (lambda: mixture(1.0, 0.0), r"path='b', weight=0.0\) never has a weight above 0; leave it"),
        (
            lambda: mixture(1.0, changes={5: (0.5, 0.5)}),
            r"weights \(0.5, 0.5\) of a mixture must be 1",
        ),
        (lambda: mixture(1.0, changes={5: (0.0,)}), r"weights \(0.0,\) of a mixture must be"),
        (
            lambda: mixture(1.0, changes={5: (1.0,), 3: (1.0,)}),
            r"order of at_example, which is \[5, 3\]",
        ),
        (lambda: mixture(1.0, changes={0: (1.0,)}), "at_example=0 must be greater than zero"),
        (lambda: AdamWConfig(learning_rate=math.inf), "learning_rate=inf must be a finite number"),
        (lambda: AdamWConfig(weight_decay=math.nan), "weight_decay=nan must be a finite number"),
        (lambda: AdamWConfig(learning_rate=0.0), "learning_rate=0.0 must be greater than zero"),
        (lambda: AdamWConfig(b1=1.0), r"b1=1.0 must lie in \[0, 1\)"),
        (lambda: MarsConfig(gamma=-0.1), "gamma=-0.1 must not be negative"),
        (lambda: MarsConfig(clip_threshold=0.0), "clip_threshold=0.0 must be greater than zero"),
        (lambda: MarsConfig(vector_b2=1.5), r"vector_b2=1.5 must lie in \[0, 1\)"),
        (lambda: ScheduleConfig(warmup_steps=-1), "warmup_steps=-1 must not be negative"),
        (lambda: ScheduleConfig(final_fraction=2.0), r"final_fraction=2.0 must lie in \[0, 1\]"),
        (lambda: MeshConfig(fsdp=0), "fsdp=0 must be greater than zero"),
        (
            lambda: GuardConfig(loss_spike_threshold=0.0),
            "loss_spike_threshold=0.0 must be greater than zero",
        ),
        (
            lambda: GuardConfig(max_consecutive_skips=-1),
            "max_consecutive_skips=-1 must not be negative",
        ),
        (
            lambda: GuardConfig(loss_spike_threshold=5.0),
            "max_consecutive_skips=0 stops the run at the first",
        ),
        (lambda: EvalConfig(num_windows=0), "num_windows=0 must be greater than zero"),
        (lambda: CheckpointConfig(keep_last=0), "keep_last=0 must be greater than zero"),
        (
            lambda: CheckpointConfig(every_minutes=0.0),
            "every_minutes=0.0 must be greater than zero",
        ),
        (
            lambda: tiny_config(
                checkpoint=CheckpointConfig(keep_best=1), eval=EvalConfig(every=None)
            ),
            "checkpoint.keep_best=1 needs evaluations to choose by",
        ),
        (lambda: LogConfig(every=0), "every=0 must be greater than zero"),
        (lambda: tiny_config(name=""), "name must not be empty"),
        (lambda: tiny_config(seed=-1), "seed=-1 must lie in"),
        (lambda: tiny_config(num_steps=0), "num_steps=0 must be greater than zero"),
        (
            lambda: tiny_config(num_microbatches=3),
            "global_batch_size=16 must be a multiple of num_microbatches=3",
        ),
        (
            lambda: ScheduleConfig(warmup_steps=7, decay_steps=6),
            r"warmup_steps=7 must not exceed schedule.decay_steps=6",
        ),
    ],
)
def test_bad_values(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ScheduleConfig(decay="cosin"),
            "ScheduleConfig.decay='cosin' must be cosine or linear or exponential or wsd.",
        ),
        (
            lambda: ScheduleConfig(warmup_steps=1e3),
            "ScheduleConfig.warmup_steps=1000.0 must be an integer.",
        ),
        (lambda: tiny_config(num_steps="10"), "TrainConfig.num_steps='10' must be an integer."),
        (lambda: tiny_config(num_steps=True), "TrainConfig.num_steps=True must be an integer."),
        (
            lambda: tiny_config(num_steps=np.int64(10)),
            "TrainConfig.num_steps=np.int64(10) must be an integer.",
        ),
        (lambda: AdamWConfig(learning_rate=None), "learning_rate=None must be a number."),
        (lambda: AdamWConfig(learning_rate=np.float32(1)), "np.float32(1.0) must be a number."),
        (lambda: MarsConfig(exact="no"), "MarsConfig.exact='no' must be True or False."),
        (
            lambda: GPT2Config(remat="ful"),
            "remat='ful' must be auto or full or attention or dots or None.",
        ),
        (lambda: TokenShardsConfig(path=Path("a")), "PosixPath('a') must be text."),
        (
            lambda: TokenShardsConfig(path="a", order="mixed"),
            "order='mixed' must be shuffled or sequential or random_windows.",
        ),
        (
            lambda: MixtureChange(at_example=1, weights=[0.5]),
            "weights=[0.5] must be a tuple, each item a number.",
        ),
        (
            lambda: MixtureConfig(parts=("a",)),
            "parts=('a',) must be a tuple, each item MixturePart(...) or GrainPart(...).",
        ),
        (
            lambda: tiny_config(mesh={"fsdp": 2}),
            "TrainConfig.mesh={'fsdp': 2} must be MeshConfig(...).",
        ),
        (
            lambda: GrainSource(source="a.py:f", options=None),
            "GrainSource.options=None must be a dict.",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(own_checks_only, build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_an_integer_is_a_number_too(own_checks_only):
    config = AdamWConfig(weight_decay=0)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"f": len}, "options.f is a builtin_function_or_method, which config.json cannot hold"),
        ({"a": {"b": np.float32(1)}}, "options.a.b is a float32, which config.json cannot hold"),
        ({"a": {1: 2}}, "options.a has the key 1, which must be text"),
        ({"a": [0.0, math.inf]}, "options.a.1=inf must be a finite number."),
        ({"a": {"type": "b"}}, "options.a: no option may be called 'type'."),
        ({"a_b": 1, "a-b": 2}, "options has a_b and a-b, which are one option of the command line"),
    ],
)
def test_options_that_config_json_cannot_hold_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(f"OptaxConfig.{message}")):
        OptaxConfig(make="a.py:f", learning_rate=0.1, options=options)
    with pytest.raises(ValueError, match=re.escape(f"ModuleConfig.{message}")):
        ModuleConfig(make="a.py:f", vocab_size=8, max_seq_len=8, options=options)
    with pytest.raises(ValueError, match=re.escape(f"GrainConfig.{message}")):
        GrainConfig(source="a.py:f", options=options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GrainConfig(source="f"), "source='f' must name a file and a .*my_data.py:windows"),
        (
            lambda: OptaxConfig(make="f", learning_rate=0.1),
            "optimizer.make='f' must name a file and a function in it, as my_optimizer.py:make",
        ),
        (
            lambda: ModuleConfig(make="f", vocab_size=8, max_seq_len=8),
            "model.make='f' must name a file and a function in it, as my_model.py:make",
        ),
        (
            lambda: load_function("none.py:make", field="model.make"),
            "model.make='none.py:make': there is no file none.py",
        ),
    ],
)
def test_the_error_of_a_function_that_is_not_there_names_its_field(build, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build()
