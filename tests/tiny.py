"""A tiny model and training config that tests share."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from token_directories import write_shards
from trees import first_devices

from maxmars.checkpoint import read
from maxmars.checkpoint.journal import Began
from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    LogConfig,
    MarsConfig,
    MeshConfig,
    OptaxConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    TokenShardsConfig,
    TrainConfig,
    to_dict,
)
from maxmars.data.batches import ValidationBatches
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.data.windows import segments_and_positions
from maxmars.eval import TrainedModel
from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import Parameters
from maxmars.train.audit import audit
from maxmars.train.metrics import read_metrics
from maxmars.train.step import init_train_state, make_train_step

MODEL = GPT2Config(
    num_layers=3,
    num_heads=4,
    embed_dim=32,
    max_seq_len=16,
    vocab_size=257,
    vocab_pad_multiple=8,
    compute_dtype="float32",
)


def random_params(config: GPT2Config, seed: int = 0):
    """Weights larger than initial ones, so that predictions are far from uniform."""
    rng, abstract = np.random.default_rng(seed), Parameters(config).abstract

    def draw(axes, leaf):
        mean, std = (1.0, 0.1) if axes[-1] == "norm" else (0.0, 0.2)
        return rng.normal(mean, std, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(
        draw, Parameters(config).axes, abstract, is_leaf=lambda x: isinstance(x, tuple)
    )


def trained_model(mesh):
    """The model with such weights and the tokenizer of bytes, as one that was trained."""
    params = jax.device_put(random_params(MODEL), Parameters(MODEL, mesh).shardings)
    return TrainedModel(
        config=MODEL, params=params, tokenizer=ByteTokenizer(), name="tiny", mesh=mesh
    )


def tiny_config(**changes) -> TrainConfig:
    """A few steps of a tiny GPT-2 under MARS."""
    config = TrainConfig(
        name="tiny",
        num_steps=6,
        global_batch_size=16,
        num_microbatches=2,
        model=MODEL,
        optimizer=MarsConfig(),
        schedule=ScheduleConfig(warmup_steps=2),
        data=PythonSourcesConfig(),
        mesh=MeshConfig(),
        eval=EvalConfig(every=3, num_windows=20, batch_size=8),
        checkpoint=CheckpointConfig(every=2),
        log=LogConfig(every=1),
    )
    return dataclasses.replace(config, **changes)


ADAMW = AdamWConfig()
SOPHIA_FILE = Path(__file__).parents[1] / "tools" / "examples" / "sophia.py"


def sophia(every: int) -> OptaxConfig:
    """The example of an optimizer that requests a further gradient, every so many steps."""
    options = {"update_hessian_every": every}
    return OptaxConfig(make=f"{SOPHIA_FILE}:sophia", options=options, learning_rate=6e-4)


def short_config(tokens, **changes) -> TrainConfig:
    """Two steps under AdamW on random tokens, which are written into `tokens` if it is missing."""
    if not tokens.exists():
        stream = np.random.default_rng(0).integers(0, 200, 2000)
        write_shards(tokens, stream, stream[:400], vocab_size=257)
    config = tiny_config(
        num_steps=2,
        num_microbatches=1,
        data=TokenShardsConfig(path=str(tokens)),
        schedule=ScheduleConfig(warmup_steps=0),
        eval=EvalConfig(every=2, num_windows=16, batch_size=16),
        checkpoint=CheckpointConfig(every=1, keep_last=9),
        optimizer=ADAMW,
    )
    return dataclasses.replace(config, **changes)


def six_steps(folder, num_steps=6, **changes) -> TrainConfig:
    """`short_config` with a checkpoint every two steps and an evaluation every three."""
    return short_config(
        folder / "tokens",
        num_steps=num_steps,
        eval=EvalConfig(every=3, num_windows=16, batch_size=16),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
        **changes,
    )


def parameters_of(config) -> Parameters:
    """The parameters of a config's model, on as few devices as its mesh can have."""
    return Parameters(config.model, first_devices(config.mesh))


def first_state(config):
    """The train step of a config, and its first state."""
    parameters = parameters_of(config)
    return make_train_step(config, parameters), init_train_state(config, parameters)


def batch_of(step, tokens):
    """Tokens of whatever shape before the window as the batch of a train step, on its mesh."""
    wanted = step.abstract_batch["tokens"]
    return {"tokens": jax.device_put(tokens.reshape(wanted.shape), wanted.sharding)}


def packed_rows(seed, rows=16):
    """Rows of several documents as a batch before it is split: each row has another number of
    targets, the first has none."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, MODEL.max_seq_len + 1)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.1] = 256
    mask = np.arange(tokens.shape[1]) <= np.arange(rows)[:, None]
    return {"tokens": tokens, "mask": mask, **segments_and_positions(tokens == 256)}


def split_on_mesh(step, rows):
    """Such rows as the batch of a train step, in its microbatches and on its mesh."""
    wanted = step.abstract_batch["tokens"]
    return {k: jax.device_put(v.reshape(wanted.shape), wanted.sharding) for k, v in rows.items()}


def random_batch(step, rng=0):
    """A batch of random tokens."""
    shape = step.abstract_batch["tokens"].shape
    return batch_of(step, np.random.default_rng(rng).integers(0, 257, shape).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class FirstStep:
    """Parameters before the first step of a config of one microbatch, its gradient, the change of
    the parameters, and its metrics."""

    before: dict
    grads: dict
    update: dict
    metrics: dict


def take_first_step(config) -> FirstStep:
    step, state = first_state(config)
    batch, before = random_batch(step), jax.device_get(state.params)
    loss = jax.jit(jax.grad(lambda p, tokens: mean_loss(make_model(config.model, p), tokens)))
    grads = jax.device_get(loss(before, np.asarray(batch["tokens"])[0]))
    state, metrics = step(state, batch)
    update = jax.tree.map(np.subtract, jax.device_get(state.params), before)
    return FirstStep(before, grads, update, jax.device_get(metrics))


def validation_batches(tokens, config, mesh) -> ValidationBatches:
    """The windows that a run of a config scores."""
    return ValidationBatches(
        tokens,
        mesh,
        num_windows=config.eval.num_windows,
        batch_size=config.eval_batch_size,
    )


def audited(workdir, **options):
    """What `maxmars audit` finds."""
    return audit(workdir, log=lambda text: None, **options)


def series(workdir) -> dict[tuple[int, str], float | str]:
    """The losses and gradient norms of a run, by step and name."""
    return {
        (line["step"], key): line[key]
        for line in read_metrics(workdir)
        for key in ("train/loss", "train/grad_norm")
        if key in line
    }


def values_of(workdir, key) -> dict[int, float | str]:
    """A metric of a run by step."""
    return {line["step"]: line[key] for line in read_metrics(workdir) if key in line}


def first_difference(one, other) -> str | None:
    """The first difference between two runs, in words; None if there is none."""
    ours, theirs = series(one), series(other)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return f"{key} is {ours.get(key)} and {theirs.get(key)}"
    ours, theirs = (read(run / "checkpoints").digests for run in (one, other))
    wrong = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    return f"arrays differ: {wrong}" if wrong else None


def began_at(step, *, start=0.0):
    """The line that a session of some run begins with."""
    return Began(
        step=step,
        start=start,
        digest="",
        position=0,
        command=None,
        config=to_dict(tiny_config()),
        data="",
        environment={},
        init_from=None,
    )
