"""MARS in your own code: a small vision transformer on images of digits, beside AdamW.

    python tools/examples/vision_transformer.py                     # all, at several learning rates
    python tools/examples/vision_transformer.py --optimizer mars --learning-rate 3e-3,1e-2 --seeds 5

The images are the 1,797 of 8 x 8 that scikit-learn ships (extra `peers`), or made on the spot with
`--images made`. Nothing here is of GPT-2: the model is made of Flax's layers, and what its matrices
are `matrix_specs_of` reads from these. For each optimizer and rate the table has the mean over the
seeds and their standard deviation, after the same initial weights and the same batches in a seed.
The star marks the rate with the least validation loss; the test images choose nothing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxmars.optim import MatrixSpec, mars
from maxmars.optim.nnx import matrix_specs_of

# Learning rates to try.
OPTIMIZERS = {
    "adamw": (3e-3, 1e-2, 3e-2),
    "mars": (1e-2, 3e-2, 1e-1),
    "mars_exact": (1e-2, 3e-2, 1e-1),
    "mars_shampoo": (1e-2, 3e-2, 1e-1),
}
NUM_CLASSES, BATCH = 10, 64


class Block(nnx.Module):
    """Attention and an MLP, each behind a LayerNorm."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        """Flax's own layers."""
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[images, patches, width] to the same."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class VisionTransformer(nnx.Module):
    """Logits of the classes of 8 x 8 images, from patches of 2 x 2."""

    def __init__(self, rngs: nnx.Rngs, width: int = 32, num_layers: int = 2, num_heads: int = 4):
        """Blocks in a list, the mean over patches, a linear head."""
        self.patches = nnx.Linear(4, width, rngs=rngs)
        # Flax's layers are known to the optimizers; a parameter of one's own says what it is.
        table = MatrixSpec(rows=(1,), cols=(0,), embedding=True)
        positions = 0.02 * jax.random.normal(rngs.params(), (16, width))
        self.positions = nnx.Param(positions, matrix_spec=table)
        self.blocks = nnx.List([Block(width, num_heads, rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, NUM_CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """[images, 8, 8] to [images, classes]."""
        x = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        x = self.patches(x) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def make_optimizer(
    name: str, rate: optax.Schedule, model: nnx.Module
) -> optax.GradientTransformation:
    """The optimizer of a name; matrices decay, tables and vectors do not."""
    specs = matrix_specs_of(model)
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, specs)
    ours: dict[str, Any] = {"matrix_specs": specs, "weight_decay": 0.1, "mask": decays}
    match name:
        case "adamw":
            return optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=decays)
        case "mars":
            return mars(rate, vector_weight_decay=0.0, **ours)
        case "mars_exact":
            return mars(rate, exact=True, vector_weight_decay=0.0, **ours)
        case "mars_shampoo":
            # Orthogonal updates have a spectral norm of one: what takes AdamW needs a smaller rate.
            scales = {"vector_learning_rate_scale": 0.15, "vector_weight_decay": 0.0}
            return mars(rate, variant="shampoo", **scales, **ours)
    raise ValueError(f"--optimizer {name} is unknown; it is all or of {', '.join(OPTIMIZERS)}.")


def loss_of(model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats."""
    logits = model(images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_run(name: str, data: dict[str, Any], epochs: int, **sizes: int) -> Any:
    """The jitted function from (learning rate, seed) to the losses and accuracy of one training.

    Rate and seed are arrays, so an optimizer compiles once.
    """
    images, labels = data["train"]
    steps_per_epoch = len(labels) // BATCH
    num_steps = steps_per_epoch * epochs
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, num_steps // 10, num_steps)

    def run(rate: jax.Array, seed: jax.Array) -> dict[str, jax.Array]:
        init_key, order_key = jax.random.split(jax.random.key(seed))
        model = VisionTransformer(nnx.Rngs(init_key), **sizes)
        tx = make_optimizer(name, lambda step: rate * shape(step), model)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        graph, state = nnx.split((model, nnx.clone(model), optimizer))

        def step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
            model, previous, optimizer = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(loss_of)(model, images[rows], labels[rows])
            extra = {}
            if name == "mars_exact":  # asks for the same batch at the parameters of the step before
                extra = {"prev_grads": nnx.grad(loss_of)(previous, images[rows], labels[rows])}
            nnx.update(previous, nnx.state(model))
            optimizer.update(model, grads, **extra)
            return nnx.state((model, previous, optimizer)), loss

        every = jnp.tile(jnp.arange(len(labels)), (epochs, 1))
        orders = jax.random.permutation(order_key, every, axis=1, independent=True)
        rows = orders[:, : steps_per_epoch * BATCH].reshape(num_steps, BATCH)
        state, losses = jax.lax.scan(step, state, rows)
        model = nnx.merge(graph, state)[0]
        test_images, test_labels = data["test"]
        return {
            "train_loss": losses[-steps_per_epoch:].mean(),
            "validation_loss": loss_of(model, *data["validation"]),
            "test_loss": loss_of(model, test_images, test_labels),
            "accuracy": (model(test_images).argmax(-1) == test_labels).mean(),
        }

    return jax.jit(run)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] in [0, 1] and their digits."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed: pip install -e '.[peers]', "
            "or give --images made."
        ) from None
    found: Any = load()
    return found["images"] / 16, found["target"]


def make_images(count: int = 1797) -> tuple[np.ndarray, np.ndarray]:
    """Images [count, 8, 8] of ten random patterns, with noise."""
    rng = np.random.default_rng(0)
    patterns = rng.random((NUM_CLASSES, 8, 8)) > 0.5
    labels = rng.integers(0, NUM_CLASSES, count)
    return patterns[labels] + rng.normal(0, 0.5, (count, 8, 8)), labels


def split(images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Shuffled: a sixth for the tests, a sixth for the choice of the rate, the rest to train on."""
    order, part = np.random.default_rng(0).permutation(len(labels)), len(labels) // 6
    bounds = {
        "test": order[:part],
        "validation": order[part : 2 * part],
        "train": order[2 * part :],
    }
    return {
        name: (jnp.asarray(images[rows], jnp.float32), jnp.asarray(labels[rows], jnp.int32))
        for name, rows in bounds.items()
    }


def table(results: dict[str, dict[float, list[dict[str, float]]]]) -> list[str]:
    """One line for each optimizer and rate, from what each seed found."""
    columns = {"train_loss": ".4f", "validation_loss": ".4f", "test_loss": ".4f", "accuracy": ".2%"}
    lines = [f"{'optimizer':13}{'rate':>6} " + "".join(f"{name:>18}" for name in columns)]
    for optimizer, by_rate in results.items():
        means = {r: np.mean([f["validation_loss"] for f in found]) for r, found in by_rate.items()}
        best = min(means, key=lambda rate: np.nan_to_num(means[rate], nan=np.inf))
        for rate, found in by_rate.items():
            line = f"{optimizer:13}{rate:>6.0e}{'*' if rate == best else ' '}"
            for name, form in columns.items():
                values = np.array([f[name] for f in found])
                spread = f" ± {values.std(ddof=1):{form}}" if len(values) > 1 else ""
                line += f"{values.mean():{form}}{spread}".rjust(18)
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", default="all", help=f"all, or of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--learning-rate", help="rates between commas; default: three each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", choices=("digits", "made"), default="digits")
    given = parser.parse_args()
    names = list(OPTIMIZERS) if given.optimizer == "all" else given.optimizer.split(",")
    try:
        data = split(*(load_digits() if given.images == "digits" else make_images()))
        rates = [float(rate) for rate in (given.learning_rate or "").split(",") if rate]

        def cells(name: str) -> dict[float, list[dict[str, float]]]:
            start, run = time.perf_counter(), make_run(name, data, given.epochs)
            found = {
                rate: [jax.device_get(run(rate, seed)) for seed in range(given.seeds)]
                for rate in rates or OPTIMIZERS.get(name, (1e-3,))
            }
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
            return found

        results = {name: cells(name) for name in names}
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(["", *table(results)]))


if __name__ == "__main__":
    main()
