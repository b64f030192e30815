"""Does MARS reduce variance? The errors of its gradient estimates along a run, and a figure.

    python tools/gradient_variance.py [CONFIG] [--points 8] [--window 16] [--held 1024] [--seeds 1]
        [--gammas 0.025,0.05,0.1] [--output DIR] [--optimizer.learning-rate 4e-3 ...]

The run is that of `maxmars train CONFIG`, step by step; all estimates only look on. CONFIG is
compare_tiny:optimizer=mars unless it is given. `gradient_error.py` has the mathematics.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxmars.cli.parse import (  # noqa: E402
    ConfigArguments,
    asks_for_help,
    parse_arguments,
    split_positionals,
)
from maxmars.config import MarsConfig, TrainConfig, to_dict  # noqa: E402
from maxmars.config.checks import Fraction, Positive, UsageError  # noqa: E402

PROG = "gradient_variance.py"
DEFAULT_CONFIG = "compare_tiny:optimizer=mars"
JSON, TABLE, FIGURE = "gradient_variance.json", "gradient_variance.md", "gradient_variance.png"
APPROXIMATE, EXACT, CLIPPED = "approximate", "exact", ", clipped"
KINDS = (APPROXIMATE, EXACT)


@dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Measure how far MARS's gradient estimates are from the gradient, along a run.

    The run is CONFIG's. At some points of it, in each step of a window, the gradient of the whole
    loss is taken from a held batch: training windows that the run itself never reads, others in
    each step. Against it are measured g, MARS's corrected c (approximate and exact, as it is and
    with the clips) and their momenta, for several gamma. A twin of each estimate, on batches of its
    own, tells variance from bias.

    DIR gets gradient_variance.json with all numbers, a Markdown table and a figure (extra
    `report`). Each seed is kept when it is finished: the same command goes on after it.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "python tools/gradient_variance.py --optimizer.learning-rate 4e-3",
        "python tools/gradient_variance.py compare_tiny:optimizer=muon --seeds 3 --held 512",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "points",
        "window",
        "held",
        "seeds",
        "gammas",
        "spacing",
        "output",
        "draw",
        "num-steps",
    )

    points: Annotated[Positive[int], tyro.conf.arg(metavar="N")] = 8
    """Windows of steps, spread over the run; the last one ends with it."""
    window: Annotated[Positive[int], tyro.conf.arg(metavar="STEPS")] = 16
    """Consecutive steps that are measured at each point."""
    spacing: Literal["log", "linear"] = "log"
    """How the points are spread."""
    held: Annotated[Positive[int], tyro.conf.arg(metavar="N")] = 1024
    """Training windows of a held batch; a multiple of a microbatch of the run, and at least two."""
    gammas: Annotated[str | None, tyro.conf.arg(metavar="A,B,...")] = None
    """Values of gamma besides 0; None takes 0.025, 1 - b1 and 0.1."""
    b1: Annotated[Fraction | None, tyro.conf.arg(metavar="X")] = None
    """Decay of the momenta; None takes the optimizer's if it is MARS, else 0.95."""
    seeds: Annotated[Positive[int], tyro.conf.arg(metavar="N")] = 1
    """Runs: the config's seed, and those that follow it. Bands need two of them at least."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/gradient_variance")
    """Directory of the results."""
    draw: bool = False
    """Measure nothing: write table and figure anew from the JSON in DIR."""


# --- what is measured -----------------------------------------------------------------------------


def window_starts(num_steps: int, points: int, window: int, spacing: str) -> list[int]:
    """The first step, from 1, of each window; none overlap, and the last one ends with the run.

    The very first steps are left out where there is a choice: momenta have just begun there.

    Raises:
      UsageError: the windows do not fit into the run.
    """
    if points * window > num_steps:
        raise UsageError(
            f"--points {points} windows of --window {window} steps do not fit into "
            f"num_steps={num_steps}; lower one of them or raise --num-steps."
        )
    first, last = min(window, num_steps - points * window) + 1, num_steps - window + 1
    spread = np.geomspace if spacing == "log" else np.linspace
    ideal = spread(first, last, points).round().astype(int) if points > 1 else [last]
    starts: list[int] = []
    for number, start in enumerate(ideal):
        latest = num_steps - (points - number) * window + 1
        starts.append(min(max(start, starts[-1] + window if starts else 1), latest))
    return [int(start) for start in starts]


def chosen_gammas(text: str | None, b1: float) -> list[float]:
    """Zero and the other gammas, increasing.

    Raises:
      UsageError: a word is no number above zero.
    """
    if text is None:
        return sorted({0.0, 0.025, round(1 - b1, 12), 0.1})
    try:
        values = {float(word) for word in text.split(",")}
    except ValueError:
        values = {math.nan}
    if not all(0 < value < math.inf for value in values):
        raise UsageError(f"--gammas {text} must be numbers above 0, such as 0.025,0.05.")
    return sorted({0.0, *values})


class Batches:
    """Batches of the run, of the twin and held ones, which have no window in common.

    The run reads the first windows of the shuffled training data, as `maxmars train` does, the twin
    as many after them, and held batches are what is left, one after the other, and then anew.
    """

    def __init__(self, config: TrainConfig, mesh: Any, held: int, num_held: int) -> None:
        """Open the training data; `num_held` are the steps of one window.

        Raises:
          UsageError: the data are too few, or have a mask.
        """
        from maxmars.data.batches import open_data
        from maxmars.data.sampling import ENDLESS, num_windows, process_batches, training_examples
        from maxmars.distributed.sharding import local_rows

        self.tokens = tokens = open_data(config.data, "train", model=config.model)
        length, used = config.model.max_seq_len, 2 * config.num_steps * config.global_batch_size
        if tokens.changes or "mask" in tokens.types:
            raise UsageError(
                "gradients are compared over batches that all mean the same loss; choose data "
                "without a mask, as with --data.packing none, and without changes of weights."
            )
        there = ENDLESS
        if config.data.order != "random_windows":
            weights = dict(zip(tokens.streams, tokens.weights, strict=True))
            share = {s: w / sum(weights.values()) for s, w in weights.items() if w > 0}
            there = min(int(num_windows(s, length) / part) for s, part in share.items())
        self.num_held = min((there - used) // held, 1 << 20)
        if self.num_held < num_held:
            needed = used + num_held * held
            raise UsageError(
                f"the run, its twin and the held batches of a window need {needed:,} different "
                f"windows of {length} tokens, but the data have {there:,}; lower --held, --window "
                "or --num-steps."
            )
        examples = training_examples(
            tokens.streams,
            tokens.weights,
            length=length,
            seed=config.seed,
            order=config.data.order,
        )
        self._mesh, self._rows = mesh, config.microbatch_size
        self._steps = config.num_steps

        def read(microbatches: int, start: int) -> Any:
            rows = local_rows(mesh, (microbatches, self._rows))
            return process_batches(
                examples, rows, microbatches * self._rows, start, types=tokens.types
            )

        self._run = read(config.microbatches, 0)
        self._held = read(held // self._rows, used)

    def of_step(self, step: int) -> tuple[Any, Any]:
        """The batch of a step, from 1, and that of the twin."""
        return self._on_mesh(self._run[step - 1]), self._on_mesh(self._run[self._steps + step - 1])

    def held(self, number: int) -> Any:
        """The held batch of a measured step, from 0."""
        return self._on_mesh(self._held[number % self.num_held])

    def _on_mesh(self, batch: Any) -> Any:
        from maxmars.distributed.sharding import to_device

        return {name: to_device(self._mesh, local, self._rows) for name, local in batch.items()}


class Observer:
    """All estimators along a run, and their twins: four of a name, each with every γ.

    States are pairs, of the run's estimators and of the twins; each maps names to states whose
    first axis is γ.
    """

    def __init__(self, config: TrainConfig, mesh: Any, b1: float, gammas: Sequence[float]) -> None:
        """Build the jitted functions."""
        import jax
        import jax.numpy as jnp
        import optax
        from gradient_error import Estimator, Moments, held_gradient, make_estimator, moments

        from maxmars.model.language_model import make_model, mean_loss, param_shardings
        from maxmars.optim import clip_by_matrix_norm
        from maxmars.train.optimizer import matrix_specs
        from maxmars.train.step import Gradients, mean_loss_and_grads

        specs, shardings = matrix_specs(config.model), param_shardings(config.model, mesh)
        optimizer, gamma_array = config.optimizer, jnp.asarray(gammas, jnp.float32)
        threshold = optimizer.clip_threshold if isinstance(optimizer, MarsConfig) else 1.0
        matrix_clip = optax.identity()
        if threshold is not None:
            matrix_clip = clip_by_matrix_norm(threshold, specs)
        names = [f"{kind}{clip}" for kind, clip in itertools.product(KINDS, ("", CLIPPED))]

        def estimator(name: str, gamma: Any) -> Estimator:
            clip = matrix_clip if name.endswith(CLIPPED) else None
            return make_estimator(b1, gamma, exact=name.startswith(EXACT), clip=clip)

        def begin(name: str, params: Any) -> Any:
            return jax.vmap(lambda gamma: estimator(name, gamma).init(params))(gamma_array)

        def update(name: str, state: Any, grads: Any, prev_grads: Any) -> Any:
            def of_gamma(gamma: Any, state: Any) -> Any:
                return estimator(name, gamma).update(grads, state, prev_grads)

            return jax.vmap(of_gamma)(gamma_array, state)

        def loss(params: Any, rows: Any) -> jax.Array:
            return mean_loss(make_model(config.model, params), **rows)

        def gradient(params: Any, batch: Any) -> Any:
            return mean_loss_and_grads(loss, params, batch, shardings, rows_apart=False)[1]

        def clipped(grads: Any) -> Any:
            """By the global norm, as the optimizer gets them."""
            multiplier, limit = config.gradient_multiplier, config.gradient_clip_norm
            norm = multiplier * optax.tree.norm(grads)
            return Gradients(grads, norm, multiplier, limit).clipped()

        def observe(states: Any, params: Any, prev_params: Any, batches: tuple[Any, Any]) -> Any:
            """The estimates of the run and those of the twins, by name, and the next states."""
            estimates, next_states = [], []
            for state, batch in zip(states, batches, strict=True):
                plain = gradient(params, batch), gradient(prev_params, batch)
                shorter = clipped(plain[0]), clipped(plain[1])
                found = {
                    name: update(name, state[name], *(shorter if CLIPPED in name else plain))
                    for name in names
                }
                estimates.append({name: estimate for name, (estimate, _) in found.items()})
                next_states.append({name: after for name, (_, after) in found.items()})
            return *estimates, tuple(next_states)

        def measure(
            states: Any, params: Any, prev_params: Any, batches: tuple[Any, Any], held_batch: Any
        ) -> Any:
            own, twins, states = observe(states, params, prev_params, batches)
            held = held_gradient(jax.grad(loss), params, held_batch, specs)

            def products(estimate: Any, twin: Any) -> jax.Array:
                of_gammas: Moments = jax.vmap(lambda x, y: moments(x, y, held.gradient, specs))(
                    estimate, twin
                )
                return jnp.stack(of_gammas, axis=1)

            found = [
                jnp.stack([products(x, y) for x, y in zip(own[name], twins[name], strict=True)])
                for name in names
            ]
            noise = held.noise * (config.microbatch_size / config.global_batch_size)
            return states, (jnp.stack(found), jnp.stack([held.signal, held.floor, noise]))

        def begin_all(params: Any) -> Any:
            return tuple({name: begin(name, params) for name in names} for _ in range(2))

        self.names, self.specs = names, specs
        self.begin = jax.jit(begin_all)
        """From parameters to states."""
        self.advance = jax.jit(lambda *given: observe(*given)[-1], donate_argnums=0)
        """From states, x_t, x_{t−1}, and the batches of the run and of the twins to the next
        states."""
        self.measure = jax.jit(measure, donate_argnums=0)
        """From these and a held batch to the next states, `Moments` as [names, `Estimates`, gammas,
        moments, matrices], and ‖∇F‖², floor and noise of g as [3, matrices]."""


def measure_seed(
    config: TrainConfig, arguments: Arguments, b1: float, gammas: Sequence[float], progress: Any
) -> dict[str, Any]:
    """One run, with everything that is measured along it.

    Raises:
      RuntimeError: the run skipped a step.
    """
    import jax
    import jax.numpy as jnp
    from gradient_error import matrix_names

    from maxmars.checkpoint.digest import combine, digest
    from maxmars.checkpoint.environment import environment
    from maxmars.distributed import sharding
    from maxmars.train.auto import (
        choose_microbatches,
        choose_precision,
        choose_remat,
        memory_bytes_of,
    )
    from maxmars.train.optimizer import parameter_parts
    from maxmars.train.step import init_train_state, make_train_step

    mesh = sharding.training_mesh(config)
    config = choose_precision(config, mesh, progress.message)
    config = choose_microbatches(config, mesh, memory_bytes_of(mesh), progress.message)
    config = choose_remat(config, mesh, progress.message)
    held, window = arguments.held, arguments.window
    if held % config.microbatch_size or held < 2 * config.microbatch_size:
        raise UsageError(
            f"--held {held} must be a multiple of {config.microbatch_size}, the sequences of a "
            f"microbatch, and at least {2 * config.microbatch_size}."
        )
    starts = window_starts(config.num_steps, arguments.points, window, arguments.spacing)
    measured = [step for start in starts for step in range(start, start + window)]
    batches = Batches(config, mesh, held, window)
    observer = Observer(config, mesh, b1, gammas)
    train_step, state = make_train_step(config, mesh), init_train_state(config, mesh)

    # In gradients, since a measured step takes as long as a hundred others.
    cost, done = {True: 5 + held // config.microbatch_size, False: 5}, 0
    total = sum(cost[step in measured] for step in range(1, config.num_steps + 1))
    copy, found, losses = jax.jit(lambda params: jax.tree.map(jnp.copy, params)), [], []
    with jax.set_mesh(mesh):
        prev_params = copy(state.params)  # exact MARS does not read it in the first step
        observed = observer.begin(state.params)
        for step in range(1, config.num_steps + 1):
            own, twin = batches.of_step(step)
            given = (observed, state.params, prev_params, (own, twin))
            if step in measured:
                observed, moments = observer.measure(*given, batches.held(len(found)))
                found.append(jax.device_get(moments))
            else:
                observed = observer.advance(*given)
            prev_params = copy(state.params)
            state, metrics = train_step(state, own)
            losses.append(metrics["train/loss"].item())
            if metrics["train/skipped"].item():
                raise RuntimeError(
                    f"step {step} was skipped, with a loss of {losses[-1]:.4g}: its gradient is "
                    "not finite, or the guard refused it; lower the learning rate."
                )
            done += cost[step in measured]
            text = f"seed {config.seed}: step {step} of {config.num_steps}, loss {losses[-1]:.4f}"
            progress.update(text, done, total)
        params_digest = combine(digest(state.params))
        names = matrix_names(state.params, observer.specs)
    parts = {
        ".".join(str(key.key) for key in path): part
        for path, part in jax.tree.leaves_with_path(parameter_parts(config.model))
    }
    products, held_values = (
        np.stack(arrays).astype(np.float64) for arrays in zip(*found, strict=True)
    )
    return {
        "seed": config.seed,
        "config": to_dict(config),
        "environment": environment(mesh),
        "data_digest": batches.tokens.digest(),
        "final_params_digest": params_digest,
        "losses": losses,
        "windows": [[start, start + window - 1] for start in starts],
        "estimators": observer.names,
        "matrices": [{"name": n, "part": parts[n.partition("[")[0]]} for n in names],
        "held": by_window(held_values, window).mean(axis=1),
        "moments": by_window(products, window).mean(axis=1),
        "moments_by_step": by_window(products.sum(axis=-1), window),
        "held_by_step": by_window(held_values.sum(axis=-1), window),
    }


def by_window(array: np.ndarray, window: int) -> np.ndarray:
    """[windows, steps of a window, ...] of an array by measured step."""
    return array.reshape(-1, window, *array.shape[1:])


# --- the command ----------------------------------------------------------------------------------


def measure(arguments: Arguments, command: str, path: Path) -> dict[str, Any]:
    """All seeds: the content of the JSON, in which each seed is kept as soon as it is measured.

    Raises:
      UsageError: `path` is another measurement, or has all seeds.
    """
    from maxmars.distributed.files import write_text
    from maxmars.distributed.progress import Progress

    config, b1 = arguments.config, arguments.b1
    if b1 is None:
        b1 = config.optimizer.b1 if isinstance(config.optimizer, MarsConfig) else 0.95
    gammas = chosen_gammas(arguments.gammas, b1)
    window_starts(config.num_steps, arguments.points, arguments.window, arguments.spacing)
    files = [Path(__file__), Path(__file__).with_name("gradient_error.py")]
    measured = {
        "code": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
        "b1": b1,
        "gammas": gammas,
        "points": arguments.points,
        "window": arguments.window,
        "spacing": arguments.spacing,
        "held": arguments.held,
        "axes_of_moments": "windows, estimators, c and m, gammas, `Moments`, matrices",
        "config": to_dict(config),
    }
    seeds = finished_seeds(path, measured, arguments.seeds)
    with Progress() as progress:
        for number in range(len(seeds), arguments.seeds):
            of_seed = dataclasses.replace(config, seed=config.seed + number)
            seeds.append(to_json(measure_seed(of_seed, arguments, b1, gammas, progress)))
            found = to_json({"command": command, **measured, "seeds": seeds})
            write_text(path, json.dumps(found, allow_nan=False) + "\n")
    return found


def finished_seeds(path: Path, measured: dict[str, Any], num_seeds: int) -> list[Any]:
    """The seeds that an earlier command left in `path`, fewer than `num_seeds`.

    Raises:
      UsageError: `path` is another measurement, or has all seeds.
    """
    if not path.exists():
        return []
    there = json.loads(path.read_text())
    if any(there.get(key) != value for key, value in to_json(measured).items()):
        raise UsageError(f"{path} is another measurement; choose another --output.")
    if len(there["seeds"]) >= num_seeds:
        raise UsageError(
            f"--seeds {num_seeds}: {path} has {len(there['seeds'])} already; raise it, "
            "choose another --output, or --draw True for table and figure."
        )
    return list(there["seeds"])


def to_json(value: Any) -> Any:
    """A value of JSON: arrays and tuples as lists, with seven digits, which is what float32 has."""
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def run(argv: Sequence[str]) -> None:
    """Measure, or draw anew what was measured.

    Raises:
      UsageError, ValueError, OSError, ImportError, RuntimeError: what is wrong, in one line.
    """
    words, _ = split_positionals(argv)
    if not words and not asks_for_help(argv):
        argv = [DEFAULT_CONFIG, *argv]
    arguments = parse_arguments(Arguments, argv, prog=PROG, example=DEFAULT_CONFIG)

    from gradient_report import Result, draw, markdown

    from maxmars.compare.figures import require_matplotlib
    from maxmars.distributed.files import replacing, write_text

    require_matplotlib()  # before a measurement of minutes, not after it
    path = arguments.output / JSON
    if arguments.draw:
        if not path.exists():
            raise UsageError(
                f"--draw True: there is no {path}; measure first, or name its --output."
            )
        result = Result(json.loads(path.read_text()))
    else:
        command = " ".join(["python", f"tools/{PROG}", *argv])
        result = Result(measure(arguments, command, path))
    table = markdown(result, FIGURE)
    write_text(arguments.output / TABLE, table)
    with replacing(arguments.output / FIGURE) as temporary:
        draw(result, temporary)
    print(table)
    print(f"{arguments.output}: {JSON}, {TABLE}, {FIGURE}")


def main() -> None:
    try:
        run(sys.argv[1:])
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on after its last seed", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
