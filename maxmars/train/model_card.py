"""The model card of an export: `README.md` as the Hugging Face hub shows it, and the loss as a PNG.

The card says what the run recorded: config and environment are those of the exported checkpoint,
which has digests; losses are those of `metrics.jsonl` up to its step; what these files lack, the
card calls unknown. Paths are shortened to their last name, so that the card tells nothing about
directories and users of the machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from maxmars.checkpoint import Checkpoint
from maxmars.checkpoint.reader import FORMAT_VERSION
from maxmars.config import TrainConfig, to_dict
from maxmars.config.numbers import duration, short
from maxmars.data.open_corpus import PRESETS
from maxmars.distributed.files import write_text
from maxmars.eval.trained_model import Exported, HFTarget
from maxmars.model.language_model import num_parameters
from maxmars.train.card_facts import (
    Facts,
    Fields,
    Measured,
    Score,
    eval_command,
    public,
    reported,
)
from maxmars.train.journal import run_seconds, shares
from maxmars.train.optimizer import describe_parameters, summarize_rules

CARD, CURVE, SOURCE_CARD = "README.md", "loss_curve.png", "SOURCE_README.md"

_MOST_DRAWN = 1e6  # nats a token; a larger one diverged, or is damaged
_WARM_UP = 0.05  # losses in this first share of the steps may lie above the figure


def write_card(
    directory: Path,
    exported: Exported,
    *,
    name: str,
    hub: str | None = None,
    reports: Sequence[Fields] = (),
) -> list[str]:
    """Write the card, and the picture of the losses, into the directory of an export.

    Args:
      directory: it has the weights.
      exported: what `export_model` says of them.
      name: the name that the directory will have.
      hub: OWNER/NAME of the model on the hub, if it will be there.
      reports: see `read_report`. A report on another model is refused.

    Returns:
      Lines for people: what the card lacks, and how it can be had.

    Raises:
      ValueError: a report is on another model.
      OSError: the disk is full.
    """
    measured = reported(exported, reports)
    source = exported.source
    facts = Facts(source) if isinstance(source, Checkpoint) else None
    notes: list[str] = []
    has_tokenizer = (directory / "tokenizer_config.json").is_file()
    title = name if hub is None else hub.rpartition("/")[2]
    target = name if hub is None else f"hf:{hub}"
    body = [f"# {title}", "", *_introduction(exported, facts)]
    body += _use(hub or name, target, title, has_tokenizer=has_tokenizer)
    body += _architecture(exported, facts)
    if facts is not None and facts.config is not None:
        if not measured.scores:
            found = facts.measured
            measured = dataclasses.replace(measured, scores=found.scores, remark=found.remark)
        drawn = draw_losses(facts.rows, directory / CURVE)
        notes += [] if drawn is None else [f"{CURVE} was not drawn: {drawn}"]
        body += _data(facts) + _training(facts) + _losses(facts, measured, drawn)
    elif measured.loss is not None:
        body += ["## Loss", "", _reported_loss(measured), ""]
    body += _scores(measured, target)
    body += _tasks(measured)
    if not measured.scores:
        notes.append(_how_toeval_command(exported))
    if facts is not None and facts.config is not None:
        body += _hardware(facts)
    if facts is not None:
        body += _receipts(facts)
    if facts is not None and facts.config is not None:
        body += _commands(facts)
    body += _limits(exported, facts) + _license(directory, exported, facts)
    front = yaml.safe_dump(
        _front_matter(title, exported, facts, measured), sort_keys=False, allow_unicode=True
    )
    write_text(directory / CARD, f"---\n{front}---\n\n" + "\n".join(body).rstrip() + "\n")
    return notes


def draw_losses(rows: Iterable[Fields], path: Path) -> str | None:
    """Draw the training and validation losses in lines of `metrics.jsonl` against the step.

    Returns:
      Why there is no picture; None if there is one.
    """
    lines = {}
    for key, name in (("train/loss", "training"), ("eval/loss", "validation")):
        points = [(row["step"], float(row[key])) for row in rows if key in row]
        points = [(step, loss) for step, loss in points if abs(loss) < _MOST_DRAWN]
        if points:
            lines[name] = np.array(points).T
    if not lines:
        return "metrics.jsonl of the run has no losses"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed; `pip install 'maxmars[report]'`, and export again"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    styles: dict[str, dict[str, Any]] = {
        "training": {"color": "#56B4E9", "linewidth": 1.2},
        "validation": {"color": "#000000", "linewidth": 1.6, "marker": "o", "markersize": 4},
    }
    for name, (steps, losses) in lines.items():
        axes.plot(steps, losses, label=f"{name} loss", **styles[name])
    last = max(steps[-1] for steps, _ in lines.values())
    late = np.concatenate([losses[steps >= _WARM_UP * last] for steps, losses in lines.values()])
    margin = 0.05 * float(np.ptp(late)) or 0.1
    axes.set_ylim(late.min() - margin, late.max() + margin)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.legend(frameon=False)
    # Without matplotlib's version, the same figure is the same file.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return None


def _front_matter(
    title: str, exported: Exported, facts: Facts | None, measured: Measured
) -> dict[str, Any]:
    """What the hub reads. A license is the user's choice, and left out."""
    tags = ["gpt2", "maxmars", "jax"]
    results = []
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if isinstance(exported.source, HFTarget):
        found |= _source_license(exported.source.directory)
    if facts is not None and facts.config is not None:
        tags += ["pretraining", *_optimizer_tags(facts.config)]
        named = (_hub_dataset(part["source"]) for part in facts.data)
        if datasets := sorted({name for name in named if name}):
            found["datasets"] = datasets
        last = facts.last("eval/loss")
        if last is not None and last[0] == facts.stored.step and np.isfinite(last[1]):
            names = ", ".join(part["name"] for part in facts.data) or "validation windows"
            metric = {"type": "loss", "name": "validation loss, nats a token", "value": last[1]}
            results.append(_result(names, names, [metric]))
    if measured.scores:
        metrics = [
            {
                "type": score.metric,
                "name": f"{score.metric} (protocol {score.protocol}{_questions(score)})",
                "value": score.share,
            }
            for score in measured.scores
        ]
        results.append(_result("HellaSwag", "Rowan/hellaswag", metrics))
    found["tags"] = tags
    if results:
        found["model-index"] = [{"name": title, "results": results}]
    return found


def _result(name: str, kind: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": name, "type": kind, "split": "validation"},
        "metrics": metrics,
    }


def _optimizer_tags(config: TrainConfig) -> list[str]:
    name = type(config.optimizer).__name__.removesuffix("Config").lower()
    return [name] if name != "optax" else []


def _hub_dataset(source: str | None) -> str | None:
    """The name on the hub of what `maxmars data prepare` read; None if it was something else."""
    if source in PRESETS:
        return PRESETS[source].repository
    kind, _, rest = (source or "").partition(":")
    name = rest.partition(":")[0]
    return name if kind == "hf" and re.fullmatch(r"[\w.-]*\w/[\w.-]+", name) else None


def _introduction(exported: Exported, facts: Facts | None) -> list[str]:
    count = short(num_parameters(_unpadded(exported)))
    text = f"A GPT-2 of {count} parameters"
    if facts is None:
        text += f", written by maxmars from the Hugging Face model `{exported.name}`."
        text += " Of its training nothing is known here."
    elif facts.config is None:
        text += f", written by maxmars from the checkpoint `{exported.name}`, which was made by"
        is_old = facts.stored.format_version < FORMAT_VERSION
        text += " maxmars 0.1: its config is not read here." if is_old else " `maxmars import`"
        text += "" if is_old else f"{facts.imported_from}."
        text += " Of its training nothing is known here."
    else:
        step, total = facts.stored.step, facts.config.num_steps
        which = f"step {step:,} of {total:,}" if step < total else f"all {step:,} steps"
        text += f", pretrained by maxmars: {which} of the run"
        text += f" `{facts.workdir.name}`, {short(facts.tokens)} tokens"
        if (loss := facts.last("eval/loss")) is not None and loss[0] == step:
            text += f", validation loss {loss[1]:.4f} nats a token"
        text += "."
    return [text, ""]


def _unpadded(exported: Exported) -> Any:
    return dataclasses.replace(exported.config, vocab_pad_multiple=1)


def _use(address: str, target: str, title: str, *, has_tokenizer: bool) -> list[str]:
    """How to load the model: by its address in transformers, and as a target of maxmars."""
    names = "AutoTokenizer, GPT2LMHeadModel" if has_tokenizer else "GPT2LMHeadModel"
    code = [f"from transformers import {names}", ""]
    code.append(f'model = GPT2LMHeadModel.from_pretrained("{address}")')
    commands = []
    if has_tokenizer:
        code += [
            f'tokenizer = AutoTokenizer.from_pretrained("{address}")',
            'inputs = tokenizer("Once", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        ]
        commands = [
            shlex.join(["maxmars", "generate", target, "--prompt", "Once"]),
            shlex.join(["maxmars", "import", target, f"runs/{title}"]),
        ]
    lines = ["## Use", "", "```python", *code, "```", ""]
    return [*lines, "```sh", *commands, "```", ""] if commands else lines


def _architecture(exported: Exported, facts: Facts | None) -> list[str]:
    config = exported.config
    rows = {
        "layers": config.num_layers,
        "width": config.embed_dim,
        "attention heads": config.num_heads,
        "context": f"{config.max_seq_len:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "parameters": f"{num_parameters(_unpadded(exported)):,}",
        "biases": "yes" if config.use_bias else "none (written as zeros)",
        "weights": f"{exported.dtype}, {short(exported.num_bytes)}B",
    }
    if config.scale_attn_by_inverse_layer_idx:
        rows["attention logits"] = "of layer i divided by i + 1, too"
    if facts is not None and facts.data:
        rows["tokenizer"] = facts.data[0]["tokenizer"]
    return ["## Architecture", "", *_table(rows)]


def _data(facts: Facts) -> list[str]:
    digest = facts.stored.data_digest
    lines = ["## Training data", ""]
    if not facts.data:
        lines += ["Name and counts of the data were not recorded (`data.json` of the run).", ""]
    else:
        lines += ["| name | source | share | training tokens | training documents |"]
        lines += ["|---|---|---:|---:|---:|"]
        total = sum(part["weight"] for part in facts.data) or 1.0
        for part in facts.data:
            documents = part["num_documents"]
            cells = (
                part["name"],
                "unknown" if part["source"] is None else part["source"],
                _percent(part["weight"] / total),
                f"{part['num_tokens']:,}",
                "unknown" if documents is None else f"{documents:,}",
            )
            lines.append(_row(*cells))
        lines.append("")
    text = f"Digest of the data, by which the run knows them: `{digest or 'none recorded'}`."
    return [*lines, text, ""]


def _training(facts: Facts) -> list[str]:
    config, stored = facts.config, facts.stored
    assert config is not None
    schedule = config.schedule
    decay = f"{schedule.warmup_steps:,} steps of warm-up, then {schedule.decay} to"
    decay += f" {schedule.final_fraction:.3g} of the peak at step {config.decay_steps:,}"
    rows: dict[str, Any] = {
        "steps": f"{stored.step:,} of {config.num_steps:,}",
        "tokens": f"{facts.tokens:,}",
    }
    if len(facts.data) == 1 and facts.data[0]["num_tokens"]:
        epochs = f"{facts.tokens / facts.data[0]['num_tokens']:.3g}"
        if config.data.order == "random_windows":
            epochs += " times the training tokens, drawn with replacement"
        rows["epochs"] = epochs
    rows |= {
        "batch": f"{config.global_batch_size:,} sequences of {config.model.max_seq_len:,} tokens",
        "optimizer": summarize_rules(config.optimizer, config.model),
        "peak learning rate": config.optimizer.learning_rate,
        "schedule": decay,
    }
    if (rate := facts.last("train/learning_rate")) is not None:
        rows[f"learning rate at step {rate[0]:,}"] = f"{rate[1]:.3g}"
    settings = {k: v for k, v in to_dict(config.optimizer).items() if v is not None}
    rows["settings"] = ", ".join(f"{k}={v}" for k, v in settings.items())
    rows["gradient clip (norm)"] = config.gradient_clip_norm
    rows |= {f"changed at step {step:,}": told for step, told in facts.changes.items()}
    rows["first weights"] = facts.origin or "unknown: the journal does not say"
    rows["computed in"] = getattr(config.model, "compute_dtype", None)
    rows["seed"] = config.seed
    if (skipped := facts.last("train/skipped")) is not None and skipped[1]:
        rows["skipped steps"] = f"{skipped[1]:.0f} (their updates were not applied)"
    table = describe_parameters(config.optimizer, config.model)
    return [
        "## Training",
        "",
        *_table(rows),
        "<details><summary>Every parameter: its matrix, rule, rate (times the run's) and decay"
        "</summary>",
        "",
        "```text",
        public(table),
        "```",
        "",
        "</details>",
        "",
    ]


def _losses(facts: Facts, measured: Measured, not_drawn: str | None) -> list[str]:
    lines = ["## Loss", ""]
    if not_drawn is None:
        lines += [f"![Training and validation loss against the step]({CURVE})", ""]
    found = []
    for key, name in (("train/loss", "training"), ("eval/loss", "validation")):
        last = facts.last(key)
        where = "" if last is None or last[0] == facts.stored.step else f" (at step {last[0]:,})"
        found.append([name, "not recorded" if last is None else f"{last[1]:.4f}{where}"])
    assert facts.config is not None
    windows = f"{facts.config.eval.num_windows:,} windows of {facts.stored.model.max_seq_len:,}"
    rows = {
        "training, of the batch of the step": found[0][1],
        f"validation, {windows} tokens": found[1][1],
    }
    lines += ["Mean negative log-likelihood, nats a token:", "", *_table(rows)]
    if measured.loss is not None:
        lines += [_reported_loss(measured), ""]
    return lines


def _reported_loss(measured: Measured) -> str:
    loss, count = measured.loss, measured.loss_tokens
    return f"By `maxmars eval`: validation loss {loss:.4f} nats a token, over {count:,} tokens."


def _scores(measured: Measured, target: str) -> list[str]:
    lines = ["## HellaSwag", ""]
    if not measured.scores:
        command = shlex.join(["maxmars", "eval", target, "--tasks", "hellaswag"])
        return [*lines, "Not measured. This measures it:", "", "```sh", command, "```", ""]
    lines += ["| protocol | metric | right answers | 95 % interval | questions |"]
    lines += ["|---|---|---:|---:|---:|"]
    for score in measured.scores:
        interval, count = score.interval_95, score.num_questions
        cells = (
            score.protocol,
            score.metric,
            _percent(score.share),
            "unknown" if interval is None else " to ".join(map(_percent, interval)),
            "not recorded" if count is None else f"{count:,}",
        )
        lines.append(_row(*cells))
    told = (
        "`lm_eval` is the protocol of lm-evaluation-harness and of the MARS paper, `completion` "
        "that of nanoGPT and llm.c. The intervals are Wilson's. Guesses are right in 25 % of the "
        f"questions. {measured.remark}"
    )
    return [*lines, "", told, ""]


def _tasks(measured: Measured) -> list[str]:
    if not measured.tasks:
        return []
    lines = ["## lm-evaluation-harness", "", "| task | few-shot | metric | score |"]
    lines += ["|---|---:|---|---:|", *(_row(*row) for row in measured.tasks)]
    return [*lines, "", f"{measured.harness}; ± is one standard error.", ""]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _hardware(facts: Facts) -> list[str]:
    environments = [(began["step"], began["environment"]) for began in facts.began]
    environments = environments or [(None, facts.stored.environment)]
    lines = ["## Hardware and versions", ""]
    before = None
    for step, environment in environments:
        if (text := _devices(environment)) != before:
            lines.append(f"- {text}" if step is None else f"- from step {step:,}: {text}")
            before = text
    if facts.sessions:
        seconds = run_seconds(facts.sessions)
        reached = max(session.last_step for session in facts.sessions)
        text = f"- {duration(sum(seconds.values()))} to step {reached:,}, of which"
        text += f" {shares(seconds)['steps']:.0%} went into steps; starts: {len(facts.sessions)}"
        rates = [float(r[key]) for r in facts.rows if (key := "perf/tokens_per_sec") in r]
        lines.append(text + (f"; {short(np.median(rates))} tokens/s (median)" if rates else ""))
    elif facts.config is not None:
        lines.append("- time unknown: the run has no `journal.jsonl`")
    versions = {
        name: version
        for name in ("maxmars", "git_commit", "code", "python", "jax", "jaxlib", "flax", "optax")
        if (version := facts.stored.environment.get(name))
    }
    if versions:
        lines.append("- " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return [*lines, ""]


def _devices(environment: Fields) -> str:
    kinds = ", ".join(map(str, environment.get("device_kinds") or ["unknown devices"]))
    text = f"{environment.get('num_devices', '?')} x {kinds}"
    processes = environment.get("num_processes")
    text += f", processes: {processes}" if processes else ""
    mesh = environment.get("mesh")
    if isinstance(mesh, dict):
        text += f", mesh {' '.join(f'{axis}={size}' for axis, size in mesh.items())}"
    return text


def _receipts(facts: Facts) -> list[str]:
    lines = ["## Receipts", ""]
    lines += [
        f"Digest of the exported checkpoint, over all of its arrays: "
        f"`{facts.stored.digest}`. The exported arrays agree with their digests."
    ]
    if facts.config is None:
        return [*lines, ""]
    audited = facts.audited
    if isinstance(audited, str):
        return [*lines, "", f"The run could not be audited: {public(audited)}", ""]
    lines += [
        "",
        f"`maxmars audit`: **{audited.verdict}**, steps {audited.first_step:,} to "
        f"{audited.last_step:,} (sessions: {audited.sessions}, lines of its journal: "
        f"{audited.lines}). "
        "Journal, metrics and what the checkpoints say of themselves were compared; no "
        "step was computed again (`maxmars audit RUN --replay K` does that).",
        "",
    ]
    details = [f"- broken: {public(problem)}" for problem in audited.problems]
    details += [f"- changed {public(change)}" for change in audited.changes]
    if audited.first_step:
        details.append(f"- steps before {audited.first_step:,}: the records of an older maxmars")
    return [*lines, *details, ""] if details else lines


def _commands(facts: Facts) -> list[str]:
    lines = ["## How it was made", ""]
    commands = [
        (session.first_step, session.command)
        for session in facts.sessions
        if session.first_step < facts.stored.step or not session.first_step
    ]
    known = [(step, command) for step, command in commands if command is not None]
    if not known:
        text = "The command was not recorded; the run may have been started in Python."
        return [*lines, text, ""]
    groups = itertools.groupby(known, key=lambda pair: pair[1])
    told = [next(group) for _, group in groups]
    shell = [public(command) for _, command in told]
    if len(told) > 1:
        shell = [f"{line}  # from step {step}" for line, (step, _) in zip(shell, told, strict=True)]
    return [*lines, "```sh", *shell, "```", "", "Paths are shortened to their last name.", ""]


def _limits(exported: Exported, facts: Facts | None) -> list[str]:
    lines = []
    if facts is not None and facts.is_from_scratch:
        lines.append("- A base model: it continues text, and was not tuned to follow instructions.")
    if exported.dtype != "float32":
        lines.append(f"- Losses and scores are those before the rounding to {exported.dtype}.")
    lines += [f"- {public(note)}" for note in exported.notes]
    return ["## Limits", "", *lines, ""] if lines else []


def _license(directory: Path, exported: Exported, facts: Facts | None) -> list[str]:
    lines = ["## License", ""]
    if isinstance(exported.source, HFTarget):
        original = exported.source.directory / CARD
        if original.is_file():
            (directory / SOURCE_CARD).write_bytes(original.read_bytes())
            said = _source_license(original.parent).get("license")
            text = f"`{SOURCE_CARD}` is the card of the model that this was written from"
            return [*lines, text + (f", which says `{said}`." if said else "."), ""]
    text = "Not chosen yet: add a line like `license: apache-2.0` to the first block of this file."
    if facts is None or facts.config is None:
        text = "That of the original, which is not recorded here: add a line like `license: mit` "
        text += "to the first block of this file."
    return [*lines, text, ""]


def _source_license(source: Path) -> dict[str, Any]:
    """The fields about the license in the card of a Hugging Face directory."""
    try:
        front = (source / CARD).read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(front[1]) if len(front) == 3 and not front[0] else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    names = ("license", "license_name", "license_link")
    fields = fields if isinstance(fields, dict) else {}
    return {name: fields[name] for name in names if name in fields}


def _how_toeval_command(exported: Exported) -> str:
    return (
        f"HellaSwag is not measured: `{eval_command(exported)}` does it, and an export with "
        "--report scores.json tells the result."
    )


def _questions(score: Score) -> str:
    return f", {score.num_questions:,} questions" if score.num_questions else ""


def _table(rows: Mapping[str, Any]) -> list[str]:
    found = [_row(name, value) for name, value in rows.items() if value is not None]
    return ["| | |", "|---|---|", *found, ""]


def _row(*cells: Any) -> str:
    return f"| {' | '.join(public(str(cell)).replace('|', chr(92) + '|') for cell in cells)} |"
