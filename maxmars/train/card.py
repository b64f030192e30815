"""The model card of an export: `README.md` as the Hugging Face hub shows it.

Each fact has one source: config, environment and digests come from the exported checkpoint, losses
from the run's `metrics.jsonl` at its step, further scores from reports of `maxmars eval`. Paths are
cut to their last names in the finished text, so that no section can publish directories or user
names of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from etils import epath

from maxmars.checkpoint import Checkpoint
from maxmars.checkpoint.journal import lines_until, read_journal, session_starts, trajectory
from maxmars.checkpoint.reader import DamagedError
from maxmars.config import GPT2Config, ModelConfig, to_dict
from maxmars.config.checks import require
from maxmars.config.errors import EXTERNAL_ERRORS, about, in_words
from maxmars.config.numbers import short
from maxmars.distributed.files import read_json, read_json_object, write_text
from maxmars.distributed.workdir import DATA
from maxmars.eval.hellaswag import METRICS, describe_count
from maxmars.eval.report import harness_rows, loss_prefixes
from maxmars.eval.trained_model import Exported
from maxmars.model.parameters import Parameters
from maxmars.train.audit import audit
from maxmars.train.metrics import read_metrics, validation_keys
from maxmars.train.optimizer import evaluated_in_words, summarize_rules

CARD, SOURCE_CARD = "README.md", "SOURCE_README.md"

Fields = Mapping[str, Any]

# Folders of paths on disks, also in hf:/path and file:///path, and in gs://; none in https://.
_FOLDERS = re.compile(r"(?<![\w./-])(?:gs:/|file://|~\w*)?/(?:[^\s'\"`(),;:=/]+/)*(?=[^\s/])")
_USE = """\
```python
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained("{name}")  # this directory, or OWNER/NAME on the hub
tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```"""


class _Score(NamedTuple):
    data: str
    metric: str
    value: float
    text: str
    """The value, with its standard error if known."""
    sample: str
    """Number of windows, tokens or questions, and the harness."""


def read_report(path: str | Path) -> Fields:
    """The scores that `maxmars eval TARGET --output FILE.json` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is no such report.
    """
    fields = read_json_object(Path(path).expanduser())
    with about(path):
        problem = "it is no report of `maxmars eval TARGET --output FILE.json`."
        require({"name", "environment"} <= fields.keys(), problem)
    return fields


def write_card(
    directory: Path, exported: Exported, *, name: str, reports: Sequence[Fields] = ()
) -> None:
    """Write the card into the directory of an export; `name` is the model's name in the card.

    Raises:
      ValueError: a report is on another model, or a file of the run is damaged.
      OSError: the disk is full.
    """
    saved = exported.checkpoint
    training = [] if saved is None else _training(saved, exported.config)
    scores = [] if saved is None else [*_scores_of_run(saved)]
    scores += [score for report in reports for score in _scores_of_report(exported, report)]
    license_fields, license_text = _license(directory, exported)
    tags = ["maxmars", "jax", *(["gpt2"] if isinstance(exported.config, GPT2Config) else [])]
    if saved is not None:
        optimizer = type(saved.config.optimizer).__name__.removesuffix("Config").lower()
        tags += ["pretraining", optimizer]
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    front |= license_fields
    if scores:
        front["model-index"] = [{"name": name, "results": [*map(_result, scores)]}]
    limits = [f"- {note}" for note in exported.notes]
    if ("first weights", "random") in training:  # else the source may have been tuned
        limits.insert(0, "- A base model: it continues text and follows no instructions.")
    if exported.dtype != "float32":
        limits.append(f"- Losses and scores are those before the rounding to {exported.dtype}.")
    rows = [(score.data, score.metric, score.text, score.sample) for score in scores]
    sections = {
        "Use": _USE.format(kind=exported.architecture, name=name),
        "Training": training and _table(("", ""), training),
        "Audit": saved and _audit(_run_of(saved)),
        "Scores": rows and _table(("data", "metric", "value", "of"), rows),
        "Limits": "\n".join(limits),
        "License": license_text,
    }
    size = f"{short(exported.num_parameters)} parameters in {exported.dtype}"
    kind = f"{exported.architecture}, {size}"
    body = f"# {name}\n\n{kind}, written by maxmars from {exported.name}.\n"
    body += "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items() if text)
    fields = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    write_text(directory / CARD, f"---\n{fields}---\n\n{_FOLDERS.sub('', body)}")


def _run_of(saved: Checkpoint) -> epath.Path:
    return saved.path.parent.parent


def _training(saved: Checkpoint, model: ModelConfig) -> list[tuple[str, Any]]:
    """Rows of the table of training: the run's records up to the checkpoint of a model."""
    config, env, run = saved.config, saved.environment, _run_of(saved)
    mesh = " ".join(f"{axis}={size}" for axis, size in env["mesh"].items())
    began = session_starts(trajectory(lines_until(read_journal(run), saved.journal) or []))
    first = (began[0].init_from or {}).get("weights", "random") if began else "not recorded"
    first = first.replace("/checkpoints/", ", step ")  # `_FOLDERS` would leave the step alone
    losses = {row["step"]: row["train/loss"] for row in read_metrics(run) if "train/loss" in row}
    settings = {k: v for k, v in to_dict(config.optimizer).items() if v is not None}
    # Each command once, with the first step that it trained from.
    commands = {line.command or "a call in Python": line.step for line in reversed(began)}
    return [
        ("steps", f"{saved.step:,} of {config.num_steps:,}, {saved.tokens:,} tokens"),
        ("batch", f"{config.global_batch_size:,} sequences of {config.model.max_seq_len:,} tokens"),
        ("optimizer", summarize_rules(config.optimizer, Parameters(model))),
        ("settings", ", ".join(f"{k}={v}" for k, v in settings.items())),
        *([("weights", evaluated_in_words(config))] if saved.has_evaluation_params else []),
        ("schedule", f"{config.schedule.warmup_steps:,} steps up, then {config.schedule.decay}"),
        *(
            (f"data {p['name']}", f"{p['num_tokens']:,} tokens of {p['source']}")
            for p in _data(run)
        ),
        ("digest of the data", saved.data_digest),
        ("first weights", first),
        ("training loss, nats a token", losses.get(saved.step, "not recorded")),
        ("seed", config.seed),
        ("devices", f"{env['num_devices']} x {', '.join(env['device_kinds'])}, mesh {mesh}"),
        *((key, env[key]) for key in ("maxmars", "code", "jax", "flax", "optax")),
        ("digest of the checkpoint", saved.digest),
        *((f"command from step {step:,}", f"`{text}`") for text, step in [*commands.items()][::-1]),
    ]


def _data(run: epath.Path) -> list[dict[str, Any]]:
    return (read_json(run / DATA) or {}).get("parts", [])


def _audit(run: epath.Path) -> str:
    try:
        text = audit(run, compare_arrays=False, log=lambda text: None).text
    except (*EXTERNAL_ERRORS, DamagedError) as error:
        return f"The run could not be audited: {in_words(error)}"
    return f"By `maxmars audit`, which computed no step again:\n\n```text\n{text}\n```"


def _scores_of_run(saved: Checkpoint) -> Iterator[_Score]:
    """The scores in the run's metrics at the checkpoint's step."""
    run = _run_of(saved)
    rows = [row for row in read_metrics(run) if row["step"] == saved.step]
    values = {key: value for row in rows for key, value in row.items()}
    training_data = ", ".join(part["name"] for part in _data(run)) or "validation split"
    windows = f"at most {saved.config.eval.num_windows:,} windows"
    for name in (None, *(validation.name for validation in saved.config.eval.data)):
        loss, bits = map(values.get, validation_keys(name))
        if loss is not None:
            yield from _loss_scores(name or training_data, float(loss), bits, windows)
    for protocol, prefix in METRICS.items():
        if f"eval/{prefix}_acc" in values:
            names, count = ("acc", "acc_norm"), int(values["eval/hellaswag_questions"])
            summary: dict[str, Any] = {
                name: float(values[f"eval/{prefix}_{name}"]) for name in names
            }
            for name in names:  # metrics have no standard errors: those of proportions
                variance = summary[name] * (1 - summary[name]) / max(count - 1, 1)
                summary[f"{name}_stderr"] = variance**0.5
            yield from _hellaswag_scores(protocol, summary, f"{count:,} questions")


def _scores_of_report(exported: Exported, report: Fields) -> Iterator[_Score]:
    """The scores of the exported model in a report, which may be on two models.

    Raises:
      ValueError: the exported model is not in the report.
    """
    digest = None if exported.checkpoint is None else exported.checkpoint.digest
    models = [report, *filter(None, [report.get("against")])]
    # The digest identifies a checkpoint, wherever the run lies now; a Hugging Face model has none.
    matching = [
        m for m in models if m.get("digest") == digest and (digest or m["name"] == exported.name)
    ]
    names = " and ".join(model["name"] for model in models)
    require(bool(matching), f"--report has scores of {names}, and not of {exported.name}.")
    scores = matching[0]
    for key in loss_prefixes(scores):
        data, tokens = key.rstrip("/") or "validation split", scores[f"{key}loss_tokens"]
        bits = scores.get(f"{key}bits_per_byte")
        yield from _loss_scores(data, scores[f"{key}loss"], bits, f"{tokens:,} tokens")
    for protocol, summary in scores.get("hellaswag", {}).items():
        count = describe_count({protocol: summary}, report["hellaswag_left_out"])
        yield from _hellaswag_scores(protocol, summary, count)
    for task, shots, metric, text in harness_rows(scores) if "harness" in scores else ():
        sample = f"{shots} examples, {scores['harness']}"
        yield _Score(task, metric, float(text.partition(" ")[0]), text, sample)


def _loss_scores(data: str, loss: float, bits_per_byte: Any, sample: str) -> Iterator[_Score]:
    yield _Score(data, "loss, nats a token", loss, f"{loss:.4f}", sample)
    if bits_per_byte is not None:
        bits = float(bits_per_byte)  # a string in metrics.jsonl if not finite
        yield _Score(data, "bits_per_byte", bits, f"{bits:.4f}", sample)


def _hellaswag_scores(protocol: str, summary: Fields, sample: str) -> Iterator[_Score]:
    for name in ("acc", "acc_norm"):
        text = f"{summary[name]:.4f} ± {summary[f'{name}_stderr']:.4f}"
        yield _Score("Rowan/hellaswag", f"{name} ({protocol})", summary[name], text, sample)


def _result(score: _Score) -> dict[str, Any]:
    """An entry of the hub's `model-index`."""
    kind = re.match(r"\w+", score.metric)
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": score.data, "type": score.data, "split": "validation"},
        "metrics": [{"type": kind and kind[0], "name": score.metric, "value": score.value}],
    }


def _license(directory: Path, exported: Exported) -> tuple[dict[str, Any], str]:
    """License fields and text: those of the card for a Hugging Face model, else a reminder."""
    original = exported.target.directory / CARD
    if exported.checkpoint is not None or not original.is_file():
        return {}, "Not chosen yet: add a line like `license: apache-2.0` to the first block."
    (directory / SOURCE_CARD).write_bytes(original.read_bytes())
    try:
        # Front matter is YAML between two lines of `---` at the top.
        parts = original.read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None
    except (ValueError, yaml.YAMLError):
        fields = None
    names = ("license", "license_name", "license_link")
    fields = {n: fields[n] for n in names if n in fields} if isinstance(fields, dict) else {}
    verdict = f"says `{fields['license']}`" if "license" in fields else "names none"
    return fields, f"`{SOURCE_CARD}`, the card of the model that this was written from, {verdict}."


def _table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
