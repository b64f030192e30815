"""Results of trials that never ran, and rows that are not as a comparison wrote them."""

import json
from collections.abc import Callable

from maxmars.compare.curves import Curve
from maxmars.compare.search import next_trials
from maxmars.compare.trials import Comparison, Contender, Row, Trial


def made_comparison(config, grids, names, *, num_seeds=3, **changes) -> Comparison:
    """Contenders of the same config and grids, to be compared with the first of them."""
    grids = tuple(grids)
    contenders = tuple(Contender(name=name, config=config, grids=grids) for name in names)
    fields = {"seeds": tuple(range(num_seeds)), "budget": 1, "finalists": 1} | changes
    return Comparison(contenders=contenders, baseline=contenders[0].name, **fields)


def made_row(trial: Trial, loss: float, **changes) -> Row:
    """A trial that ended at this loss, and of which nothing else is known but the changes."""
    fields = {
        "diverged": None,
        "step_time_s": None,
        "seconds": 1.0,
        "initial_weights": "",
        "tokens": "",
        "curve": None,
        "train_losses": (),
        "final_state": None,
        "environment": {},
    }
    return Row(trial=trial, loss=loss, **fields | changes)


def made_rows(comparison: Comparison, row_of: Callable[[Trial], Row]) -> dict[Trial, Row]:
    """The rows of a comparison that runs one trial at a time, in their order."""
    rows: dict[Trial, Row] = {}
    while trials := next_trials(comparison, rows):
        assert len(rows) < 200
        rows[trials[0]] = row_of(trials[0])
    return rows


def made_curve(loss: float) -> Curve:
    """Two evaluations, of which the first is at 6 nats."""
    points = {"steps": (0, 1), "tokens": (0, 100), "losses": (6.0, loss)}
    return Curve(loss_of="validation loss", **points, step_time_s=0.1)


def change_rows(workdir, change, contender="lion"):
    """Replace each row of a contender by `change(row)`: fields, a line of text, or None."""
    path = workdir / "rows.jsonl"
    lines = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        changed = change(row) if row["cell"]["contender"] == contender else row
        lines.append(changed if isinstance(changed, str | None) else json.dumps(changed))
    path.write_text("".join(f"{line}\n" for line in lines if line is not None))


def change_comparison(workdir, change):
    """Change what `compare.json` says of a comparison."""
    path = workdir / "compare.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
