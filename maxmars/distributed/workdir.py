"""The files of a run's working directory: name, contents and writer of each.

The primary process writes them, if nothing else is said, once the run owns the directory. The names
stand in this room because training, evaluation, `compare` and the command line all import them.
"""

from __future__ import annotations

# A resume needs only the checkpoints and the tokens.
CHECKPOINTS = "checkpoints"  # STEP/ of each checkpoint that is kept; checkpoint/writer.py, all

# What the run is, written anew by train/run.py at each start.
CONFIG = "config.json"  # the resolved config, and requested values that were "auto"
ENVIRONMENT = "environment.json"  # versions, code, devices and mesh
DATA = "data.json"  # digest, and of each part of the data: name, source, tokens and documents
PARAMETERS = "parameters.txt"  # shape, matrix, update rule, rate and decay of each parameter
TOKENIZER = "tokenizer"  # of the data, for `generate`, `eval` and `export`
# Copies of the user's own files; the config has the SHA-256 of each.
SOURCES = "sources"
MODEL_SOURCE = "sources/model"
OPTIMIZER_SOURCE = "sources/optimizer"
EVAL_SOURCE = "sources/eval"
KEPT_SOURCES = {
    SOURCES: "data",
    MODEL_SOURCE: "model",
    OPTIMIZER_SOURCE: "optimizer",
    EVAL_SOURCE: "eval",
}

# What happened. Files of lines only grow, but for the lines of steps that are made again.
JOURNAL = "journal.jsonl"  # begin, saves and end of each session; checkpoint/journal.py
METRICS = "metrics.jsonl"  # `step`, `tokens` and metrics; train/sinks.py
SUMMARY = "summary.json"  # results of the run, at the end of a session; train/summary.py
LOGS = "logs"  # host_000.log of each process, what it printed; distributed/progress.py
VERIFIED = "verified"  # host_000.jsonl of each process, its hashed files; data/verification.py
PROFILE = "profile"  # host_000/ of each process, traces of `--profile`; train/tracer.py
WANDB = "wandb.json"  # the id of the run at Weights & Biases; train/sinks.py

# Written before the run owns the directory, so it is no part of the journal.
STARTS = "starts.json"  # failed starts in a row; distributed/run_process.py


def of_process(folder: str, process: int, suffix: str = "") -> str:
    """The relative path of a process's own file or folder in a folder."""
    return f"{folder}/host_{process:03d}{suffix}"
