import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from tiny import ADAMW, tiny_config

from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    GrainConfig,
    GuardConfig,
    MarsConfig,
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
from maxmars.config.user_code import Source

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
        tiny_config(data=MIXTURE, eval=EvalConfig(own=(f"{__file__}:mixture",))),
        tiny_config(data=GrainConfig(source="a.py:f", options={"a": ["b"], "c": {"d": [1]}})),
        tiny_config(gradient_clip_norm=None, schedule=ScheduleConfig(warmup_steps=0)),
    ],
)
def test_a_config_survives_json(config):
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_removed_field_is_read_in_its_neutral_value_and_refused_in_others():
    record = to_dict(tiny_config())
    record["eval"]["hellaswag_too_long"] = "cut"
    record["optimizer"]["orthogonality_every"] = None
    record["model"]["document_end_id"] = record["data"]["map"] = None
    del record["eval"]["own"]  # as before the field was there
    for value in ("auto", None):
        assert from_dict(record | {"tpu_compiler_options": value}) == tiny_config()
    with refused(ValueError, "tpu_compiler_options", "LIBTPU_INIT_ARGS"):
        from_dict(record | {"tpu_compiler_options": {"xla_a": "1"}})


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


REFUSED = [
    # values out of range
    (lambda: GPT2Config(num_layers=0), "num_layers=0"),
    (lambda: GPT2Config(num_heads=5), "embed_dim=768", "num_heads=5"),
    (lambda: MixtureConfig(parts=()), "part"),
    (lambda: mixture(0.0), "(0.0,)"),
    (lambda: mixture(1.0, 0.0), "'b'", "weight"),
    (lambda: mixture(1.0, changes={5: (0.5, 0.5)}), "(0.5, 0.5)"),
    (lambda: mixture(1.0, changes={5: (1.0,), 3: (1.0,)}), "[5, 3]"),
    (lambda: AdamWConfig(learning_rate=math.inf), "learning_rate=inf"),
    (lambda: AdamWConfig(b1=1.0), "b1=1.0"),
    (lambda: ScheduleConfig(final_fraction=2.0), "final_fraction=2.0"),
    (lambda: ScheduleConfig(warmup_steps=7, decay_steps=6), "warmup_steps=7", "decay_steps=6"),
    (lambda: GuardConfig(max_consecutive_skips=-1), "max_consecutive_skips=-1"),
    (lambda: GuardConfig(loss_spike_threshold=5.0), "max_consecutive_skips=0"),
    (lambda: CheckpointConfig(every_minutes=0.0), "every_minutes=0.0"),
    (
        lambda: tiny_config(checkpoint=CheckpointConfig(keep_best=1), eval=EvalConfig(every=None)),
        "keep_best=1",
    ),
    (lambda: tiny_config(ema_decay=0.0), "ema_decay=0.0"),
    (lambda: tiny_config(ema_decay=1.0), "ema_decay=1.0"),
    (lambda: tiny_config(name=""), "name"),
    (lambda: tiny_config(seed=-1), "seed=-1"),
    (lambda: tiny_config(num_microbatches=3), "global_batch_size=16", "num_microbatches=3"),
    # values of another type
    (lambda: ScheduleConfig(decay="cosin"), "decay='cosin'", "cosine or linear or exponential"),
    (lambda: ScheduleConfig(warmup_steps=1e3), "warmup_steps=1000.0"),
    (lambda: tiny_config(num_steps=True), "num_steps=True"),
    (lambda: tiny_config(num_steps=np.int64(10)), "num_steps=np.int64(10)"),
    (lambda: AdamWConfig(learning_rate=np.float32(1)), "np.float32(1.0)"),
    (lambda: MarsConfig(exact="no"), "exact='no'"),
    (lambda: TokenShardsConfig(path=Path("a")), "PosixPath('a')"),
    (lambda: TokenShardsConfig(path="a", tokenizer="unknown"), "vocab_size"),
    (lambda: TokenShardsConfig(path="a", dtype="float32"), "dtype='float32'"),
    (lambda: MixtureChange(at_example=1, weights=[0.5]), "weights=[0.5]"),
    (lambda: MixtureConfig(parts=("a",)), "parts=('a',)", "MixturePart"),
    # functions of a user
    (lambda: GrainConfig(source="f"), "source='f'"),
    (lambda: ModuleConfig(make="f", vocab_size=8, max_seq_len=8), "model.make='f'"),
    (lambda: Source.parse("none.py:make").load(field="model.make"), "model.make='none.py:make'"),
    # what another version wrote
    (lambda: from_dict(to_dict(tiny_config()) | {"speed": 1}), "TrainConfig", "speed"),
    (lambda: from_dict({"type": "Nope"}), "'Nope'"),
    (lambda: from_dict({"type": "AdoptConfig", "b1": 0.9}), "optax.contrib:adopt"),
    (
        lambda: from_dict({"type": "AdEMAMixConfig", "b3": 0.9999}),
        "--optimizer.momentum-kernel.preset ademamix",
    ),
    (
        lambda: from_dict({"type": "SophiaConfig"}),
        "--optimizer.make tools/examples/sophia.py:sophia",
    ),
    (
        lambda: from_dict({"type": "EvalConfig", "hellaswag_too_long": "leave_out"}),
        "EvalConfig sets hellaswag_too_long",
        "--init-from",
    ),
    (
        lambda: from_dict({"type": "MarsConfig", "orthogonality_every": 5}),
        "MarsConfig sets orthogonality_every",
        "maxmars export",
        "--init-from",
    ),
    (
        lambda: from_dict({"type": "GPT2Config", "document_end_id": 256}),
        "document_end_id",
        "data.packing=split",
        "maxmars export",
    ),
    (lambda: from_dict({"type": "GrainConfig", "source": "a.py:f", "map": "a.py:g"}), "map"),
    (lambda: from_dict({"type": "PythonSourcesConfig", "packing": "best_fit"}), "best_fit"),
]


@pytest.mark.parametrize(("build", "named"), [(build, named) for build, *named in REFUSED])
def test_refusals(own_checks_only, build, named):
    with refused((ValueError, FileNotFoundError), *named):
        build()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"f": len}, "options.f is a builtin_function_or_method"),
        ({"a": {"b": np.float32(1)}}, "options.a.b is a float32"),
        ({"a": {1: 2}}, "options.a has the key 1"),
        ({"a": [0.0, math.inf]}, "options.a.1=inf"),
        ({"a": {"type": "b"}}, "'type'"),
        ({"a_b": 1, "a-b": 2}, "a_b and a-b"),
    ],
)
def test_options_that_config_json_cannot_hold_are_refused(options, named):
    for build in (
        lambda: OptaxConfig(make="a.py:f", learning_rate=0.1, options=options),
        lambda: ModuleConfig(make="a.py:f", vocab_size=8, max_seq_len=8, options=options),
        lambda: GrainConfig(source="a.py:f", options=options),
    ):
        with refused(ValueError, ".options", named):
            build()


def test_an_integer_is_a_number_too(own_checks_only):
    config = AdamWConfig(weight_decay=0)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
