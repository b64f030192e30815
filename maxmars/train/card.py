"""The model card of an export: `README.md` as the Hugging Face hub shows it, and the loss as a PNG.

Config and environment are those of the exported checkpoint, which has digests; losses are those of
`metrics.jsonl` up to its step, and the trajectory is the journal's. Paths are shortened to their
last name, so that the card tells nothing of the directories and users of the machine.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from maxmars.checkpoint import Checkpoint
from maxmars.checkpoint.journal import read_journal
from maxmars.checkpoint.reader import DamagedError
from maxmars.config import TrainConfig, to_dict
from maxmars.config.checks import require
from maxmars.config.errors import EXTERNAL_ERRORS, about, in_words, pip_install
from maxmars.config.numbers import duration, short
from maxmars.data.open_corpus import PRESETS
from maxmars.distributed.files import Workdir, read_json, read_json_object, resolve, write_text
from maxmars.distributed.workdir import DATA
from maxmars.eval.hellaswag import METRICS, describe_count
from maxmars.eval.report import harness_rows
from maxmars.eval.trained_model import Exported, HFTarget
from maxmars.model.parameters import Parameters
from maxmars.train.audit import audit
from maxmars.train.journal import (
    began_in,
    changes_of_config,
    lines_to,
    run_seconds,
    sessions_of,
    shares,
    trajectory,
)
from maxmars.train.metrics import read_metrics
from maxmars.train.optimizer import evaluated_in_words, summarize_rules
from maxmars.train.steering import orders_in_words

CARD, CURVE, SOURCE_CARD = "README.md", "loss_curve.png", "SOURCE_README.md"

_PATH = re.compile(
    # Of a disk, also in hf:/path and file:///path, and gs://; of https:// nothing.
    r"(?<![\w./-])(?:gs:/|file://|~\w*)?/(?:[^\s'\"`(),;:=/]+/)*([^\s'\"`(),;:=/]+)/?"
)

Fields = Mapping[str, Any]


def read_report(path: str | Path) -> Fields:
    """What `maxmars eval TARGET --output FILE.json` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is another one.
    """
    fields = read_json_object(Path(path).expanduser())
    with about(path):
        told = "it is no report of `maxmars eval TARGET --output FILE.json`."
        require({"name", "environment"} <= fields.keys(), told)
    return fields


def write_card(
    directory: Path,
    exported: Exported,
    *,
    name: str,
    reports: Sequence[Fields] = (),
) -> list[str]:
    """Write the card, and the picture of the losses, into the directory of an export.

    Args:
      directory: it has the weights.
      exported: what `export_model` says of them.
      name: the name that the directory will have.
      reports: see `read_report`. A report on another model is refused.

    Returns:
      Lines for people: what the card lacks, and how it can be had.

    Raises:
      ValueError: a report is on another model, or a file of the run is damaged.
      OSError: the disk is full.
    """
    stored = exported.origin if isinstance(exported.origin, Checkpoint) else None
    run = _Run(stored) if stored and isinstance(stored.config, TrainConfig) else None
    measured = _measured(exported, run, reports)
    notes = []
    not_drawn = None if run is None else draw_losses(run.rows, directory / CURVE)
    if not_drawn is not None:
        notes.append(f"{CURVE} was not drawn: {not_drawn}")
    if not measured.scores:
        notes.append(
            f"HellaSwag is not measured: `{_eval_command(exported)}` does it, and an export with "
            "--report scores.json tells the result."
        )
    sections = {
        "Use": _use(directory, exported, name),
        "Architecture": _architecture(exported),
        "Training data": run and _data(run),
        "Training": run and _training(run),
        "Loss": _losses(run, measured, is_drawn=not_drawn is None) if run else measured.loss,
        "HellaSwag": _scores(measured, name),
        "lm-evaluation-harness": measured.tasks,
        "Hardware and versions": run and _hardware(run),
        "Audit": stored and _audit(stored, run),
        "How it was made": run and _commands(run),
        "Limits": _limits(exported, run),
        "License": _license(directory, exported, run),
    }
    fields = _front_matter(name, exported, run, measured)
    front = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    texts = [f"---\n{front}---", f"# {name}", _introduction(exported, stored, run)]
    texts += [f"## {heading}\n\n{text}" for heading, text in sections.items() if text]
    write_text(directory / CARD, "\n\n".join(texts) + "\n")
    return notes


# --- what is known --------------------------------------------------------------------------------


class _Run:
    """What a run recorded, up to the step of the exported checkpoint."""

    def __init__(self, stored: Checkpoint) -> None:
        self.stored, self.config = stored, stored.run_config()
        self.workdir: Workdir = resolve(stored.path).parent.parent
        self.rows = [row for row in read_metrics(self.workdir) if row["step"] <= stored.step]
        journal = read_journal(self.workdir)
        self.sessions = sessions_of(journal)
        self.lines = trajectory(lines_to(journal, stored.journal) or [])
        self.data: list[dict[str, Any]] = (read_json(self.workdir / DATA) or {}).get("parts", [])

    @cached_property
    def began(self) -> list[dict[str, Any]]:
        """The lines with which the sessions before the checkpoint began."""
        return began_in(self.lines)

    @property
    def is_from_scratch(self) -> bool:
        """Whether the journal says that the first weights were drawn at random."""
        first = self.began[:1]
        return bool(first) and first[0]["step"] == 0 and first[0]["init_from"] is None

    @property
    def first_weights(self) -> str:
        if self.is_from_scratch:
            return f"drawn at random (seed {self.config.seed})"
        start = self.began[0]["init_from"] if self.began else None
        if start is None:
            return "unknown"
        state = " with their optimizer's state" if start["optimizer_state"] else ""
        folder, _, step = start["weights"].rpartition("/checkpoints/")
        name = f"{_public(folder)}/checkpoints/{step}" if folder else _public(start["weights"])
        return f"those of `{name}`{state} (digest `{start['params_digest']}`)"

    def last(self, key: str) -> tuple[int, float] | None:
        """Step and value of the last line that has a metric."""
        return next(((r["step"], float(r[key])) for r in reversed(self.rows) if key in r), None)


@dataclass(kw_only=True)
class _Measured:
    """What was measured of the exported model: by reports on it, else by its run."""

    scores: list[tuple[str, str, float, int]] = field(default_factory=list)
    """On HellaSwag: protocol, metric, share of right answers, number of questions."""
    remark: str = ""
    """About questions that are longer than the model's context."""
    loss: str | None = None
    """Of a report, in words."""
    tasks: str = ""
    """Of lm-evaluation-harness, as a table."""


def _measured(exported: Exported, run: _Run | None, reports: Sequence[Fields]) -> _Measured:
    """Of two reports that say the same, the later one counts.

    Raises:
      ValueError: a report is on another model, or damaged.
    """
    measured, tasks = _Measured(), []
    if run is not None:
        at_step = (row for row in run.rows if row["step"] == run.stored.step)
        row = next((row for row in at_step if "eval/hellaswag_questions" in row), {})
        measured.scores = [
            (protocol, metric, float(row[key]), round(float(row["eval/hellaswag_questions"])))
            for protocol, prefix in METRICS.items()
            for metric in ("acc", "acc_norm")
            if (key := f"eval/{prefix}_{metric}") in row
        ]
        measured.remark = "Contexts longer than the model's lost their beginning."
    for report in reports:
        with about("--report"):
            result = _of_the_model(exported, report)
        if "loss" in result:
            measured.loss = (
                f"By `maxmars eval`: validation loss {result['loss']:.4f} nats a token, over "
                f"{result['loss_tokens']:,} tokens."
            )
        if "harness" in result:
            tasks += harness_rows(result)
            table = _table(("task", "few-shot", "metric", "score"), tasks)
            measured.tasks = f"{table}\n\n{result['harness']}; ± is one standard error."
        if "hellaswag" in result:
            summaries = result["hellaswag"]
            measured.scores = [
                (protocol, metric, summary[metric], summary["num_questions"])
                for protocol, summary in summaries.items()
                for metric in ("acc", "acc_norm")
            ]
            count = describe_count(summaries, report["hellaswag_left_out"])
            measured.remark = f"Scored: {count}."
    return measured


def _of_the_model(exported: Exported, report: Fields) -> Fields:
    """The part of a report, which may be on two models, that is on the exported one."""
    digest = exported.origin.digest if isinstance(exported.origin, Checkpoint) else None
    models = [report, *filter(None, [report.get("against")])]
    for model in models:
        if model.get("digest") == digest and (digest or model["name"] == exported.name):
            return model
    which = "" if digest is None else f", digest {digest[:16]}"
    raise ValueError(
        f"these are scores of {' and '.join(model['name'] for model in models)}, and not of "
        f"{exported.name}{which}; `{_eval_command(exported)}` makes those."
    )


def draw_losses(rows: Iterable[Fields], path: Path) -> str | None:
    """Draw the training and validation losses in lines of `metrics.jsonl` against the step.

    Returns:
      Why there is no picture; None if there is one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return f"matplotlib is not installed; {pip_install('report')}, and export again"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats a token")
    losses: list[float] = []
    for key, style in (("train/loss", "-"), ("eval/loss", ".-k")):
        points = [(row["step"], float(row[key])) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=key)
            losses += [loss for _, loss in points]
    if not losses:
        return "metrics.jsonl of the run has no losses"
    low, high = np.nanpercentile(losses, [0, 95])  # the first losses may lie above the figure
    axes.set_ylim(low - 0.05, high + 0.05)
    axes.legend(frameon=False)
    # Without matplotlib's version, the same figure is the same file.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return None


# --- what the hub reads ---------------------------------------------------------------------------


def _front_matter(
    title: str, exported: Exported, run: _Run | None, measured: _Measured
) -> dict[str, Any]:
    """The fields at the top. A license is the user's choice, and left out."""
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    kind = ["gpt2"] if exported.config.make is None else []
    tags, results = [*kind, "maxmars", "jax"], []
    if isinstance(exported.origin, HFTarget):
        fields |= _source_license(exported.origin.directory)
    if run is not None:
        optimizer = type(run.config.optimizer).__name__.removesuffix("Config").lower()
        tags += ["pretraining", *([] if optimizer == "optax" else [optimizer])]
        if datasets := {name for part in run.data if (name := _hub_dataset(part["source"]))}:
            fields["datasets"] = sorted(datasets)
        last = run.last("eval/loss")
        if last is not None and last[0] == run.stored.step and np.isfinite(last[1]):
            names = ", ".join(part["name"] for part in run.data) or "validation windows"
            metric = {"type": "loss", "name": "validation loss, nats a token", "value": last[1]}
            results.append(_result(names, names, [metric]))
    if measured.scores:
        metrics = [
            {
                "type": metric,
                "name": f"{metric} (protocol {protocol}, {count:,} questions)",
                "value": share,
            }
            for protocol, metric, share, count in measured.scores
        ]
        results.append(_result("HellaSwag", "Rowan/hellaswag", metrics))
    fields["tags"] = tags
    if results:
        fields["model-index"] = [{"name": title, "results": results}]
    return fields


def _result(name: str, kind: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": name, "type": kind, "split": "validation"},
        "metrics": metrics,
    }


def _hub_dataset(source: str | None) -> str | None:
    """The name on the hub of what `maxmars data prepare` read; None if it was something else."""
    if source in PRESETS:
        return PRESETS[source].repository
    kind, _, rest = (source or "").partition(":")
    name = rest.partition(":")[0]
    return name if kind == "hf" and re.fullmatch(r"[\w.-]*\w/[\w.-]+", name) else None


# --- the sections ---------------------------------------------------------------------------------


def _introduction(exported: Exported, stored: Checkpoint | None, run: _Run | None) -> str:
    kind = "GPT-2" if exported.config.make is None else exported.architecture
    what = f"A {kind} of {short(exported.num_parameters)} parameters"
    if run is None:
        source = f"the Hugging Face model `{exported.name}`"
        if stored is not None:
            source = f"the checkpoint `{exported.name}`, which was made by another version"
        return f"{what}, written by maxmars from {source}. Of its training nothing is known here."
    stored = run.stored
    step, total = stored.step, run.config.num_steps
    steps = f"step {step:,} of {total:,}" if step < total else f"all {step:,} steps"
    loss = run.last("eval/loss")
    with_loss = f", validation loss {loss[1]:.4f} nats a token" if loss and loss[0] == step else ""
    return (
        f"{what}, pretrained by maxmars: {steps} of the run `{run.workdir.name}`, "
        f"{short(stored.tokens)} tokens{with_loss}."
    )


def _use(directory: Path, exported: Exported, address: str) -> str:
    """How to load the model: by its address in transformers, and a GPT-2 as a target of maxmars."""
    kind = exported.architecture
    has_tokenizer = (directory / "tokenizer.json").is_file()
    classes, text = kind, ""
    if has_tokenizer:
        classes = f"AutoTokenizer, {kind}"
        text = f"""\
tokenizer = AutoTokenizer.from_pretrained("{address}")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
"""
    in_python = f"""\
```python
from transformers import {classes}

model = {kind}.from_pretrained("{address}")
{text}```"""
    if not has_tokenizer or exported.config.make is not None:
        return in_python
    return f"""\
{in_python}

```sh
maxmars generate {shlex.quote(address)} --prompt Once
```"""


def _architecture(exported: Exported) -> str:
    config: Any = exported.config
    of_gpt2 = {}
    if config.make is None:
        by_layer = "of layer i divided by i + 1, too"
        of_gpt2 = {
            "layers": config.num_layers,
            "width": config.embed_dim,
            "attention heads": config.num_heads,
            "attention logits": by_layer if config.scale_attn_by_inverse_layer_idx else None,
            "biases": "yes" if config.use_bias else "none (written as zeros)",
        }
    return _pairs(
        {
            "class": exported.architecture,
            **of_gpt2,
            "context": f"{config.max_seq_len:,} tokens",
            "vocabulary": f"{config.vocab_size:,} tokens",
            "parameters": f"{exported.num_parameters:,}",
            "weights": f"{exported.dtype}, {short(exported.num_bytes)}B",
        }
    )


def _data(run: _Run) -> str:
    total = sum(part["weight"] for part in run.data) or 1.0
    columns = ("name", "source", "tokenizer", "share", "training tokens", "training documents")
    rows = [
        (
            part["name"],
            part["source"] or "unknown",
            part["tokenizer"],
            _percent(part["weight"] / total),
            f"{part['num_tokens']:,}",
            "unknown" if part["num_documents"] is None else f"{part['num_documents']:,}",
        )
        for part in run.data
    ]
    return f"""\
{_table(columns, rows)}

Digest of the data, by which the run knows them: `{run.stored.data_digest}`."""


def _training(run: _Run) -> str:
    config, stored, schedule = run.config, run.stored, run.config.schedule
    rate, skipped = run.last("train/learning_rate"), run.last("train/skipped")
    settings = {k: v for k, v in to_dict(config.optimizer).items() if v is not None}
    epochs = None
    if len(run.data) == 1 and run.data[0]["num_tokens"]:
        with_replacement = config.data.order == "random_windows"
        epochs = f"{stored.tokens / run.data[0]['num_tokens']:.3g}"
        epochs += " times the training tokens, drawn with replacement" * with_replacement
    changes = changes_of_config(run.lines)
    rows = {
        "steps": f"{stored.step:,} of {config.num_steps:,}",
        "tokens": f"{stored.tokens:,}",
        "epochs": epochs,
        "batch": f"{config.global_batch_size:,} sequences of {config.model.max_seq_len:,} tokens",
        "optimizer": summarize_rules(config.optimizer, Parameters(config.model)),
        "settings": ", ".join(f"{k}={v}" for k, v in settings.items()),
        "schedule": f"{schedule.warmup_steps:,} steps of warm-up, then {schedule.decay} to "
        f"{schedule.final_fraction:.3g} of the peak at step {config.decay_steps:,}",
        "learning rate at the end": f"{rate[1]:.3g}" if rate else None,
        "gradient clip (norm)": config.gradient_clip_norm,
        **{f"changed at step {step:,}": told for step, told in changes.items()},
        "steered": "; ".join(orders_in_words(run.lines)) or None,
        "first weights": run.first_weights,
        "evaluated and exported": _public(evaluated_in_words(config))
        if stored.has_evaluation_params
        else None,
        "computed in": getattr(config.model, "compute_dtype", None),
        "seed": config.seed,
        "skipped steps": f"{skipped[1]:.0f}" if skipped and skipped[1] else None,
    }
    return _pairs(rows)


def _losses(run: _Run, measured: _Measured, *, is_drawn: bool) -> str:
    def told(key: str) -> str:
        last = run.last(key)
        if last is None:
            return "not recorded"
        return f"{last[1]:.4f}" + f" (at step {last[0]:,})" * (last[0] != run.stored.step)

    windows = f"{run.config.eval.num_windows:,} windows of {run.stored.model.max_seq_len:,}"
    rows = {
        "training, of the batch of the step": told("train/loss"),
        f"validation, {windows} tokens": told("eval/loss"),
    }
    picture = f"![Training and validation loss against the step]({CURVE})\n\n" * is_drawn
    reported = f"\n\n{measured.loss}" if measured.loss else ""
    return f"{picture}Mean negative log-likelihood, nats a token:\n\n{_pairs(rows)}{reported}"


def _scores(measured: _Measured, target: str) -> str:
    if not measured.scores:
        command = shlex.join(["maxmars", "eval", target, "--tasks", "hellaswag"])
        return f"Not measured. This measures it:\n\n```sh\n{command}\n```"
    rows = [
        (protocol, metric, _percent(share), _interval_95(share, count), f"{count:,}")
        for protocol, metric, share, count in measured.scores
    ]
    return f"""\
{_table(("protocol", "metric", "right answers", "95 % interval", "questions"), rows)}

`lm_eval` is the protocol of lm-evaluation-harness and of the MARS paper, `completion` that of \
nanoGPT and llm.c. The intervals are Wilson's. Guesses are right in 25 % of the questions. \
{measured.remark}"""


def _interval_95(share: float, count: int) -> str:
    import scipy.stats  # takes a second

    interval = scipy.stats.binomtest(round(share * count), count).proportion_ci(method="wilson")
    return f"{_percent(interval.low)} to {_percent(interval.high)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _hardware(run: _Run) -> str:
    here, seconds = run.stored.environment, run_seconds(run.sessions)
    mesh = " ".join(f"{axis}={size}" for axis, size in here["mesh"].items())
    names = ("maxmars", "git_commit", "code", "python", "jax", "jaxlib", "flax", "optax")
    versions = ", ".join(f"{name} {here[name]}" for name in names if here.get(name))
    rates = [float(row[key]) for row in run.rows if (key := "perf/tokens_per_sec") in row]
    rate = f"; {short(np.median(rates))} tokens/s (median)" if rates else ""
    reached = max((session.last_step for session in run.sessions), default=run.stored.step)
    in_steps = f"{shares(seconds)['steps']:.0%} went into steps"
    return f"""\
- {here["num_devices"]} x {", ".join(here["device_kinds"])}, processes: \
{here["num_processes"]}, mesh {mesh}
- {duration(sum(seconds.values()))} to step {reached:,}, of which {in_steps}; \
starts: {len(run.sessions)}{rate}
- {versions}"""


def _audit(stored: Checkpoint, run: _Run | None) -> str:
    text = (
        f"Digest of the exported checkpoint, over all of its arrays: `{stored.digest}`. The "
        "exported arrays agree with their digests."
    )
    if run is None:
        return text
    try:
        audited = audit(run.workdir, compare_arrays=False, log=lambda text: None)
    except (*EXTERNAL_ERRORS, DamagedError) as error:
        return f"{text}\n\nThe run could not be audited: {_public(in_words(error))}"
    verdict, *details = audited.text.removeprefix(f"{audited.workdir}: ").splitlines()
    details = [f"- {_public(line.strip())}" for line in details]
    return f"""\
{text}

`maxmars audit`: **{audited.verdict}**{verdict.removeprefix(audited.verdict)}. The journal, the \
metrics and what the checkpoints say of themselves were compared; no step was computed again \
(`maxmars audit RUN --replay K` does that).

{chr(10).join(details)}""".rstrip()


def _commands(run: _Run) -> str:
    first_steps: dict[str, int] = {}
    for line in run.began:
        if line["command"]:
            first_steps.setdefault(_public(line["command"]), line["step"])
    if not first_steps:
        return "The command was not recorded; the run may have been started in Python."
    shell = [f"{command}  # from step {step}" for command, step in first_steps.items()]
    if len(shell) == 1:
        shell = list(first_steps)
    return "\n".join(["```sh", *shell, "```", "", "Paths are shortened to their last name."])


def _limits(exported: Exported, run: _Run | None) -> str:
    lines = []
    if run is not None and run.is_from_scratch:
        lines.append("- A base model: it continues text, and was not tuned to follow instructions.")
    if exported.dtype != "float32":
        lines.append(f"- Losses and scores are those before the rounding to {exported.dtype}.")
    return "\n".join([*lines, *(f"- {_public(note)}" for note in exported.notes)])


def _license(directory: Path, exported: Exported, run: _Run | None) -> str:
    target = exported.origin
    if isinstance(target, HFTarget) and (original := target.directory / CARD).is_file():
        (directory / SOURCE_CARD).write_bytes(original.read_bytes())
        said = _source_license(target.directory).get("license")
        says = f", which says `{said}`" if said else ""
        return f"`{SOURCE_CARD}` is the card of the model that this was written from{says}."
    known = "That of the original, which is not recorded here" if run is None else "Not chosen yet"
    return f"{known}: add a line like `license: apache-2.0` to the first block of this file."


def _source_license(source: Path) -> dict[str, Any]:
    """The fields about the license in the card of a Hugging Face directory; its other text may be
    anything."""
    try:
        front = (source / CARD).read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(front[1]) if len(front) == 3 and not front[0] else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    names = ("license", "license_name", "license_link")
    return {n: fields[n] for n in names if n in fields} if isinstance(fields, dict) else {}


def _eval_command(exported: Exported) -> str:
    """The command that measures the exported model, for people."""
    origin = exported.origin
    target = origin.path if isinstance(origin, Checkpoint) else origin.origin
    return shlex.join(["maxmars", "eval", str(target), "--output", "scores.json"])


def _public(text: str) -> str:
    """A text with its paths shortened to their last names."""
    return _PATH.sub(r"\1", text)


def _pairs(rows: Mapping[str, Any]) -> str:
    """A table of names and values; what is None is left out."""
    return _table(("", ""), [pair for pair in rows.items() if pair[1] is not None])


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[_public(str(cell)).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
