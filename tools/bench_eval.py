"""HellaSwag beside lm-evaluation-harness: the same weights and questions, in one run.

    python tools/bench_eval.py QUESTIONS [--model DIR] [--num-questions 600] [--rounds 3]
        [--peer-batch-sizes 1,8,32] [--no-peer] [--output F.json]

QUESTIONS is a file in HellaSwag's own format. `--model` is a Hugging Face GPT-2; without it, the
weights are random and of GPT-2 small's shapes. `--no-peer` times maxmars alone.
It needs the extras `hf` and `peers`, and the GPT-2 vocabulary (TIKTOKEN_CACHE_DIR). Nothing else is
downloaded.

Timed is what is done for each question: texts to tokens, the model, the log-likelihoods; on our
side the protocol `lm_eval` alone, on the peer's `HFLM.loglikelihood` on the requests of its own
task. The peer's loading of the data set, and our compiling, which is shown apart, do not count. The
peer's batch size is the fastest of those named, found on some of the questions. Both compute in
float32, use all cores and take turns. Printed are the medians, the lowest and highest of the
rounds' ratios, and how far apart the log-likelihoods are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SEARCHED = 32  # questions on which the peer's batch sizes are compared
_TASK = """\
include: {task}
task: hellaswag_local
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {questions}
training_split: null
"""

Run = Callable[[], np.ndarray]
"""Scores all questions: log-likelihoods [questions, 4]."""


def ours(directory: Path, questions: Path, count: int) -> Run:
    """maxmars on one device."""
    from maxmars.eval import load
    from maxmars.eval.hellaswag import HellaSwag, load_questions

    asked = load_questions(questions, num_questions=count)
    model = load(directory)

    def encode() -> HellaSwag:
        mesh, tokenizer = model.mesh, model.tokenizer
        return HellaSwag(model.config, mesh, tokenizer, asked, protocols=("lm_eval",))

    compiled = encode()

    def run() -> np.ndarray:
        encode()  # its time counts, but its programs would be compiled again
        return compiled(model.params)["lm_eval"].log_likelihoods

    return run


def peer(directory: Path, questions: Path, count: int) -> Callable[[int], Run]:
    """lm-evaluation-harness with a batch size."""
    import datasets
    import transformers

    lm_eval, models, tasks = map(
        importlib.import_module, ("lm_eval", "lm_eval.models.huggingface", "lm_eval.tasks")
    )
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    task_file = Path(str(lm_eval.__file__)).parent / "tasks" / "hellaswag" / "hellaswag.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        text = _TASK.format(task=task_file, questions=questions.absolute())
        Path(scratch, "hellaswag_local.yaml").write_text(text)
        manager = tasks.TaskManager(include_path=scratch, include_defaults=False)
        task: Any = manager.load(["hellaswag_local"])["tasks"]["hellaswag_local"]
    task.build_all_requests(limit=count, rank=0, world_size=1)
    model = transformers.GPT2LMHeadModel.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def with_batch_size(batch_size: int) -> Run:
        harness = models.HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu"
        )

        def run() -> np.ndarray:
            found = harness.loglikelihood(task.instances, disable_tqdm=True)
            return np.array([value for value, _ in found]).reshape(-1, 4)

        return run

    return with_batch_size


def timed(run: Run) -> tuple[float, np.ndarray]:
    """Seconds, and what was found."""
    started = time.perf_counter()
    found = run()
    return time.perf_counter() - started, found


def make_model(arguments: argparse.Namespace, directory: Path) -> None:
    """Write the weights, with tokenizer files, as a Hugging Face directory."""
    from maxmars.eval.trained_model import export_model

    source = arguments.model
    if source is None:
        import transformers

        transformers.set_seed(0)
        shapes = transformers.GPT2Config()  # its defaults are GPT-2 small's
        source = directory.with_name("random")
        transformers.GPT2LMHeadModel(shapes).save_pretrained(source)
    export_model(source, directory)


def compare(directory: Path, arguments: argparse.Namespace) -> None:
    """Run both sides in turns and print what was measured."""
    questions, count = arguments.questions, arguments.num_questions
    sides = {"maxmars": ours(directory, questions, count)}
    if not arguments.no_peer:
        few = peer(directory, questions, min(_SEARCHED, count))
        seconds = {size: timed(few(size))[0] for size in arguments.peer_batch_sizes}
        best = min(seconds, key=lambda size: seconds[size])
        rates = ", ".join(f"{size}: {min(_SEARCHED, count) / s:.1f}" for size, s in seconds.items())
        print(f"peer's questions/s by batch size: {rates}; taken: {best}", flush=True)
        sides["peer"] = peer(directory, questions, count)(best)
    first = {name: timed(run)[0] for name, run in sides.items()}
    rounds, scores = [], {}
    for _ in range(arguments.rounds):
        times = {}
        for name, run in sides.items():
            times[name], scores[name] = timed(run)
        rounds.append(times)
    rates = {name: [count / times[name] for times in rounds] for name in sides}
    for name, values in rates.items():
        print(
            f"{name:8} {statistics.median(values):8.1f} questions/s "
            f"({min(values):.1f} to {max(values):.1f}); first time {count / first[name]:.1f}"
        )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"questions_per_sec": rates}, indent=2))
    if arguments.no_peer:
        return
    ratios = [times["peer"] / times["maxmars"] for times in rounds]
    print(
        f"ratio    {statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f}) over "
        f"{count} questions; log-likelihoods differ by at most "
        f"{np.abs(scores['maxmars'] - scores['peer']).max():.1e}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model", type=Path, help="Hugging Face GPT-2; default: random weights")
    parser.add_argument("--num-questions", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="time maxmars alone")
    parser.add_argument("--output", type=Path, help="also write the rates as JSON")
    parser.add_argument(
        "--peer-batch-sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1, 8, 32],
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        os.environ.update(offline | {"HF_DATASETS_CACHE": f"{scratch}/datasets"})
        directory = Path(scratch) / "model"
        make_model(arguments, directory)
        compare(directory, arguments)


if __name__ == "__main__":
    main()
