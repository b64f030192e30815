"""A real training run that is killed with SIGKILL once and continued, and whether it shows.

    python tools/kill_and_resume.py CONFIG --steps N --workdir DIR [--output F.json]
        [--data.path TOKENS ...]

Trains CONFIG (with the overrides) by `maxmars train`, saves after every tenth of the steps, and
kills the process half-way between two checkpoints in the middle of the run. The steps since the
last checkpoint, which the killed process had computed undisturbed, are computed again by the one
that continues: their losses and gradient norms must agree to the last bit. At the end
`maxmars audit` must find one trajectory and replay its last tenth. Exits with 1 if either fails.

On GPUs set XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true: cuDNN's attention else adds up
its gradients in any order.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxmars.checkpoint import list_steps  # noqa: E402
from maxmars.train.metrics import read_metrics  # noqa: E402

KEYS = ("train/loss", "train/grad_norm")
POLL_S = 0.2


def rows(workdir: Path) -> dict[int, dict[str, Any]]:
    """The metrics by step."""
    found: dict[int, dict[str, Any]] = {}
    for row in read_metrics(workdir):
        found.setdefault(row["step"], {}).update(row)
    return found


def command(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """`maxmars train` with ten checkpoints and every step in the metrics."""
    every = args.steps // 10
    return [
        *(sys.executable, "-m", "maxmars", "train", args.config, "--workdir", str(args.workdir)),
        *("--num-steps", str(args.steps), "--checkpoint.every", str(every), "--log.every", "1"),
        *overrides,
    ]


def train(words: list[str], workdir: Path, kill_at: int | None = None) -> float:
    """Seconds until the run ended, or was killed after the metrics of a step.

    Raises:
      SystemExit: it failed, or ended before it was killed.
    """
    started = time.monotonic()
    with subprocess.Popen(words, cwd=ROOT) as process:
        try:
            while process.poll() is None:
                if kill_at is not None and max(rows(workdir), default=0) >= kill_at:
                    break
                time.sleep(POLL_S)
            code = process.poll()
        finally:
            process.kill()
    if code not in (None, 0):
        sys.exit(f"kill_and_resume.py: training failed with exit code {code}; see above.")
    if kill_at is not None and code is not None:
        sys.exit("kill_and_resume.py: the run ended before it was killed; give more --steps.")
    return time.monotonic() - started


def quarter_losses(found: dict[int, dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Mean training loss of the last twentieth before each quarter, and the validation loss."""
    wide, points = max(1, steps // 20), []
    for quarter in range(1, 5):
        step = steps * quarter // 4
        losses = [found[s]["train/loss"] for s in range(step - wide + 1, step + 1) if s in found]
        last = max((s for s, r in found.items() if "eval/loss" in r and s <= step), default=None)
        points.append(
            {
                "step": step,
                "train_loss": sum(losses) / len(losses),
                "eval_loss": None if last is None else found[last]["eval/loss"],
            }
        )
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="as for `maxmars train`")
    parser.add_argument("--steps", type=int, required=True, help="a multiple of ten, at least 20")
    parser.add_argument("--workdir", type=Path, required=True, help="is made anew")
    parser.add_argument("--output", type=Path, help="also write what was found as JSON")
    args, overrides = parser.parse_known_args()
    if args.steps < 20 or args.steps % 10:
        parser.error("--steps must be a multiple of ten, for ten checkpoints, and at least 20.")
    shutil.rmtree(args.workdir, ignore_errors=True)
    words = command(args, overrides)
    every = args.steps // 10
    seconds = train(words, args.workdir, kill_at=5 * every + (every + 1) // 2)
    before = rows(args.workdir)
    resumed_from = max(list_steps(args.workdir / "checkpoints"))
    seconds += train(words, args.workdir)
    after = rows(args.workdir)
    stretch = [s for s, row in before.items() if s > resumed_from and "train/loss" in row]
    wrong = [s for s in stretch if any(before[s][key] != after[s][key] for key in KEYS)]
    audit_file = args.workdir.with_suffix(".audit.json")
    replay = ["--replay", str(every), "--output", str(audit_file)]
    audit_words = [sys.executable, "-m", "maxmars", "audit", str(args.workdir), *replay]
    audit = subprocess.run(audit_words, cwd=ROOT, capture_output=True, text=True, check=False)
    verdict = json.loads(audit_file.read_text())["verdict"] if audit_file.exists() else "no audit"
    tokens = json.loads((args.workdir / "config.json").read_text())
    found = {
        "config": args.config,
        "steps": args.steps,
        "tokens_a_step": tokens["global_batch_size"] * tokens["model"]["max_seq_len"],
        "seconds": seconds,
        "killed_after_step": max(before),
        "resumed_from_step": resumed_from,
        "compared_steps": len(stretch),
        "different_steps": wrong,
        "audit": verdict,
        "audit_text": audit.stdout + audit.stderr,
        "first_loss": after[min(s for s in after if "train/loss" in after[s])]["train/loss"],
        "losses": quarter_losses(after, args.steps),
    }
    print(audit.stdout, audit.stderr)
    print(
        f"killed after step {max(before)}, continued from step {resumed_from}: of {len(stretch)} "
        f"steps that were computed twice, {len(wrong)} differ; {verdict}"
    )
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2))
    sys.exit(1 if wrong or not stretch or audit.returncode else 0)


if __name__ == "__main__":
    main()
