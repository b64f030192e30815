"""What parts of maxmars cost on this machine; `bench_train.py` measures whole train steps.

    python tools/bench.py device                           the ceilings of steps on an accelerator
    python tools/bench.py checkpoint [--size small]        a save, a restore, host memory
    python tools/bench.py eval QUESTIONS [--model DIR]     HellaSwag beside lm-evaluation-harness
    python tools/bench.py generate [--target RUN]          tokens/s of generation

`--help` after one of them lists its options; `--output F.json` writes what was measured. Sides take
turns, so that what else the machine does falls on all; printed are medians, with the lowest and the
highest. What each one measures, and what it leaves out, stands at its function.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# A process that measures memory counts from before JAX is there, so functions import what loads it.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Rates = dict[str, list[float]]


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int) -> Rates:
    """What each side returns in each round, in turns; a first turn warms up and does not count."""
    for run in sides.values():
        run()
    found: Rates = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            found[name].append(run())
    return found


def spread(values: Sequence[float], form: str = ",.2f") -> str:
    """The median, and the lowest and the highest."""
    middle, low, high = (format(f(values), form) for f in (statistics.median, min, max))
    return f"{middle:>12} ({low} to {high})"


def print_rates(rates: Rates, unit: str, form: str = ",.2f", first: str | None = None) -> None:
    """A line for each side: its rate, and the ratio to that of `first` in the same round."""
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates[first or name], strict=True)]
        ratio = "" if first is None else spread(ratios, ".3f")
        print(f"{name:34}{spread(values, form):34} {unit}{ratio}", flush=True)


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# --- device ---------------------------------------------------------------------------------------

REPEATS = 10  # runs that are timed together, so that the host's part is small


def bench_device(args: argparse.Namespace) -> dict[str, Any]:
    """TFLOP/s of a bfloat16 matrix product, and GB/s of a copy, on the first device.

    The product is of random numbers (zeros run faster), the copy reads and writes a gigabyte at the
    size of 8192.
    """
    import jax
    import jax.numpy as jnp

    from maxmars.checkpoint.environment import environment
    from maxmars.config import MeshConfig
    from maxmars.config.chips import peak_flops
    from maxmars.distributed.sharding import make_mesh

    device, count = jax.devices()[0], 2**28 * args.size // 8192
    x, y = (
        jax.random.normal(jax.random.key(seed), (args.size, args.size), jnp.bfloat16)
        for seed in range(2)
    )
    array = jax.random.normal(jax.random.key(2), (count,))
    multiply, negate = jax.jit(jnp.matmul), jax.jit(jnp.negative)

    def repeated(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready([run() for _ in range(REPEATS)])

    product, copy = repeated(lambda: multiply(x, y)), repeated(lambda: negate(array))
    rates = alternate(
        {
            "matmul_flops": lambda: REPEATS * 2 * args.size**3 / seconds(product),
            "copy_bytes_per_sec": lambda: REPEATS * 8 * count / seconds(copy),
        },
        args.rounds,
    )
    for name, unit, scale in (
        ("matmul_flops", "TFLOP/s", 1e12),
        ("copy_bytes_per_sec", "GB/s", 1e9),
    ):
        print_rates({name: [rate / scale for rate in rates[name]]}, unit, ",.1f")
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,power.limit",
            "--format=csv,noheader",
        ]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = None
    return rates | {
        "date": time.strftime("%Y-%m-%d"),
        "device_kind": device.device_kind,
        "driver": driver,
        "peak_flops": peak_flops(device.device_kind),
        "environment": environment(make_mesh(MeshConfig(), [device])),
    }


# --- checkpoint -----------------------------------------------------------------------------------

SAVES = 3


def bench_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds that training is blocked by a save, that it takes, and that a restore takes.

    The state is float32 parameters and `--moments` arrays of the same shapes, random, on one
    device. Each round is a process that saves three times while it changes the state, as training
    does (the first save, which compiles the digests, does not count), and one that restores, with
    digests checked, through the operating system's cache. Memory is the process's peak (Linux)
    beyond what it held before it made the state, over the state: on a CPU a save holds it twice.
    """
    numbers: Rates = {}
    found: dict[str, Any] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-") as scratch:
            with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
                saved, restored = fresh.map(
                    functools.partial(measure_checkpoint, args, scratch), ("save", "restore")
                )
            on_disk = sum(p.stat().st_size for p in Path(scratch).rglob("*") if p.is_file())
        found = {key: saved[key] for key in ("state_bytes", "device")} | {"bytes_on_disk": on_disk}
        peaks = {"save peak": saved["peak"], "restore peak": restored["peak"]}
        for name, value in (saved["seconds"] | restored["seconds"] | peaks).items():
            numbers.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    size, disk = (found[key] / 1e9 for key in ("state_bytes", "bytes_on_disk"))
    print(f"state {size:.2f} GB on {found['device']}, {disk:.2f} GB on disk")
    for name, unit in {"blocked": "s", "total": "s", "restore": "s"}.items():
        print_rates({name: numbers[name]}, unit)
    for name in ("save peak", "restore peak"):
        print_rates({f"{name}, host memory": numbers[name]}, "of the state")
    return found | numbers


def measure_checkpoint(args: argparse.Namespace, scratch: str, action: str) -> dict[str, Any]:
    """Save or restore in this process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from maxmars.checkpoint import Checkpointer
    from maxmars.config import CheckpointConfig, GPT2Config, MeshConfig, load_config
    from maxmars.distributed.sharding import make_mesh
    from maxmars.model.parameters import Parameters

    config = load_config(f"{ROOT / 'configs' / 'gpt2.py'}:size={args.size},optimizer=adamw")
    assert isinstance(config.model, GPT2Config)
    layers = args.layers or config.model.num_layers
    model = dataclasses.replace(config.model, num_layers=layers)
    config = dataclasses.replace(config, model=model, checkpoint=CheckpointConfig(keep_last=1))
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    sharding = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding),
        Parameters(config.model).abstract,
    )
    moments = {f"moment_{i}": params for i in range(args.moments)}
    abstract = {"params": params, "opt_state": moments}
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    before, device = memory_bytes("VmRSS"), jax.devices()[0].device_kind
    result: dict[str, Any] = {"state_bytes": size, "device": device}
    with Checkpointer(scratch, config, mesh=mesh) as checkpointer:
        if action == "save":
            result["seconds"] = save(checkpointer, abstract)
        else:
            restore = seconds(lambda: jax.block_until_ready(checkpointer.restore(abstract).state))
            result["seconds"] = {"restore": restore}
    return result | {"peak": (memory_bytes("VmHWM") - before) / size}


def save(checkpointer: Any, abstract: Any) -> dict[str, list[float]]:
    import jax

    @functools.partial(jax.jit, static_argnums=1)
    def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape)

    # Leaf by leaf, so that no temporary is large.
    leaves, treedef = jax.tree.flatten(abstract)
    state = jax.tree.unflatten(treedef, [normal(i, a.shape) for i, a in enumerate(leaves)])
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.001, tree), donate_argnums=0)
    blocked, total = [], []
    for step in range(1, SAVES + 1):
        jax.block_until_ready(state)
        started = time.perf_counter()
        blocked.append(checkpointer.save(step, state, data_position=8 * step))
        state = change(state)  # donates what was saved
        checkpointer.latest_step()  # waits for the save
        total.append(time.perf_counter() - started)
    return {"blocked": blocked[1:], "total": total[1:]}


def memory_bytes(key: str) -> int:
    """This process's resident memory: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


# --- eval -----------------------------------------------------------------------------------------

TASK = """\
include: {task}
task: hellaswag_local
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {questions}
training_split: null
"""


def bench_eval(args: argparse.Namespace) -> dict[str, Any]:
    """HellaSwag's questions a second, and how far apart the log-likelihoods are.

    Timed is what is done for each question: texts to tokens, the model, the log-likelihoods; here
    the protocol `lm_eval` alone, there `HFLM.loglikelihood` on the requests of its own task, in
    batches of `--peer-batch-size`. Loading data and compiling do not count. Both compute in
    float32 on all cores. Needs the extras `hf` and `peers`, and GPT-2's vocabulary
    (TIKTOKEN_CACHE_DIR); `--no-peer` needs no `peers`. Without `--model` the weights are random.
    """
    import numpy as np

    from maxmars.eval import load
    from maxmars.eval.hellaswag import HellaSwag, load_questions
    from maxmars.eval.trained_model import export_model

    scores: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        os.environ["HF_DATASETS_CACHE"] = f"{scratch}/datasets"
        directory, source = Path(scratch, "model"), args.model
        if source is None:
            import transformers

            transformers.set_seed(0)
            source = Path(scratch, "random")  # the defaults of the config are GPT-2 small's
            transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(source)
        export_model(source, directory)
        model = load(directory)
        asked = load_questions(args.questions, num_questions=args.num_questions)

        def encode() -> HellaSwag:
            mesh, tokenizer = model.mesh, model.tokenizer
            return HellaSwag(model.config, mesh, tokenizer, asked, protocols=("lm_eval",))

        compiled = encode()

        def ours() -> None:
            encode()  # its time counts, but its programs would be compiled again
            scores["maxmars"] = compiled(model.params)["lm_eval"].log_likelihoods

        runs = {"maxmars": ours}
        if not args.no_peer:
            runs["peer"] = peer(directory, args, len(asked), scores)
        sides = {name: lambda run=run: len(asked) / seconds(run) for name, run in runs.items()}
        rates = alternate(sides, args.rounds)
    print_rates(rates, "questions/s", ".1f", None if args.no_peer else "peer")
    if not args.no_peer:
        apart = np.abs(scores["maxmars"] - scores["peer"]).max()
        print(f"log-likelihoods of {len(asked)} questions differ by at most {apart:.1e}")
    return {"questions_per_sec": rates}


def peer(
    directory: Path, args: argparse.Namespace, count: int, scores: dict[str, Any]
) -> Callable[[], None]:
    """lm-evaluation-harness on so many questions; leaves its log-likelihoods in `scores`."""
    import datasets
    import numpy as np
    import transformers

    lm_eval, models, tasks = map(
        importlib.import_module, ("lm_eval", "lm_eval.models.huggingface", "lm_eval.tasks")
    )
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    file = Path(str(lm_eval.__file__)).parent / "tasks" / "hellaswag" / "hellaswag.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        text = TASK.format(task=file, questions=args.questions.absolute())
        Path(scratch, "hellaswag_local.yaml").write_text(text)
        manager = tasks.TaskManager(include_path=scratch, include_defaults=False)
        task: Any = manager.load(["hellaswag_local"])["tasks"]["hellaswag_local"]
    task.build_all_requests(limit=count, rank=0, world_size=1)
    model = transformers.GPT2LMHeadModel.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def run() -> None:
        harness = models.HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=args.peer_batch_size, device="cpu"
        )
        found = harness.loglikelihood(task.instances, disable_tqdm=True)
        scores["peer"] = np.array([value for value, _ in found]).reshape(-1, 4)

    return run


# --- generate -------------------------------------------------------------------------------------

PROMPT, VOCAB_SIZE = 64, 50257


def bench_generate(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s over all rows, greedy, after prompts of 64 random tokens, on one device.

    At once, and streaming as `maxmars generate` does. Compiling does not count. The model is GPT-2
    small with random weights, or `--target`.
    """
    import jax
    import numpy as np

    from maxmars.config import GPT2Config, MeshConfig
    from maxmars.data.tokenizer import ByteTokenizer
    from maxmars.distributed import sharding
    from maxmars.eval.generate import GREEDY, INTERACTIVE_CHUNK, generate_tokens, stream_tokens
    from maxmars.eval.trained_model import TrainedModel, load
    from maxmars.model.parameters import init_params

    class AnyTokens(ByteTokenizer):
        """Stands for GPT-2's: nothing is decoded, only the size counts."""

        vocab_size = VOCAB_SIZE

    if args.target:
        model = load(args.target)
    else:
        config = GPT2Config(num_layers=args.layers, compute_dtype=args.compute_dtype)
        mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
        params = jax.jit(lambda: init_params(config, 0), out_shardings=sharding.replicated(mesh))()
        tokenizer = AnyTokens()
        model = TrainedModel(config=config, params=params, tokenizer=tokenizer, name="", mesh=mesh)
    found = []
    for rows in map(int, args.batch_sizes.split(",")):
        shape = (rows, PROMPT)
        prompts = np.random.default_rng(0).integers(0, model.tokenizer.vocab_size, shape, np.int32)
        options = {"max_new_tokens": args.new_tokens, "sampling": GREEDY, "batch_size": rows}

        along: dict[str, Any] = options | {"chunk": INTERACTIVE_CHUNK}
        ways = {
            "at once": lambda p=prompts, o=options: generate_tokens(model, list(p), **o),
            "streaming": lambda p=prompts, o=along: list(stream_tokens(model, list(p), **o)),
        }
        count = rows * args.new_tokens
        sides = {name: lambda way=way, n=count: n / seconds(way) for name, way in ways.items()}
        rates = alternate(sides, args.rounds)
        print_rates({f"{rows} rows, {name}": r for name, r in rates.items()}, "tokens/s", ",.1f")
        medians = {name: statistics.median(values) for name, values in rates.items()}
        found.append({"batch": rows, **medians})
    return {"compute_dtype": getattr(model.config, "compute_dtype", None), "tokens_per_sec": found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="device|checkpoint|eval|generate")

    def command(run: Callable[[argparse.Namespace], dict[str, Any]], rounds: int) -> Any:
        found = commands.add_parser(
            run.__name__.removeprefix("bench_"),
            description=run.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        found.set_defaults(run=run)
        found.add_argument("--rounds", type=int, default=rounds, help=f"of all sides ({rounds})")
        found.add_argument("--output", type=Path, metavar="F.json")
        return found

    device = command(bench_device, 10)
    device.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    checkpoint = command(bench_checkpoint, 5)
    checkpoint.add_argument("--directory", help="where to write (the temporary directory)")
    checkpoint.add_argument("--size", default="small", choices=("small", "medium", "large", "xl"))
    checkpoint.add_argument("--layers", type=int, help="fewer for a quick look")
    checkpoint.add_argument("--moments", type=int, default=2, help="AdamW has 2, MARS 3")
    evaluate = command(bench_eval, 3)
    evaluate.add_argument("questions", type=Path, help="a file in HellaSwag's own format")
    evaluate.add_argument("--model", type=Path, help="a Hugging Face GPT-2 (random weights)")
    evaluate.add_argument("--num-questions", type=int, default=600)
    evaluate.add_argument("--no-peer", action="store_true", help="time maxmars alone")
    evaluate.add_argument("--peer-batch-size", type=int, default=8)
    generate = command(bench_generate, 5)
    generate.add_argument("--batch-sizes", default="1,8")
    generate.add_argument("--new-tokens", type=int, default=128)
    generate.add_argument("--layers", type=int, default=12)
    generate.add_argument("--compute-dtype", default="float32")
    generate.add_argument("--target", help="a run, in place of random weights")
    args = parser.parse_args(argv)
    found = args.run(args)
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
