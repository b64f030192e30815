"""Draw the figures that the Markdown files show from the rows in `.github/results`, in few bytes.

    python tools/figures.py

A page shows FIGURE.png of the report on `.github/results/A-B` as `.github/figures/A-B-FIGURE.png`,
such as `tiny-0.3M-loss_tokens.png`, and that of the report on all `A-*` together as `A-FIGURE.png`:
`tiny-speed_up.png`. A figure that the rows cannot draw stays as it is; this ends with 1 where one
is shown that is neither drawn nor there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from maxmars.compare.report import write_report
from maxmars.compare.summary import Summary, summarize
from maxmars.compare.trials import COMPARISON

RESULTS, FIGURES = Path(".github", "results"), Path(".github", "figures")
COLORS = 64


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, help="the repository, by default this")
    root = parser.parse_args().root
    missing = 0
    with tempfile.TemporaryDirectory(prefix="maxmars-figures-") as scratch:
        drawn = draw(shutil.copytree(root / RESULTS, Path(scratch) / "results"))
        for name in shown(root):
            target = root / FIGURES / name
            if name in drawn:
                with Image.open(drawn[name]) as image:
                    few = image.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE)
                few.save(target, optimize=True)
            missing += not target.is_file()
            print(name, "drawn" if name in drawn else "stays" if target.is_file() else "MISSING")
    return 1 if missing else 0


def shown(root: Path) -> list[str]:
    """Names of the figures that Markdown files of a repository show."""
    pages = [*root.glob("*.md"), *root.glob("[!.]*/**/*.md"), *(root / RESULTS).glob("*.md")]
    return sorted({n for p in pages for n in re.findall(r"figures/([\w.-]+\.png)", p.read_text())})


def draw(results: Path) -> dict[str, Path]:
    """Write the reports of each comparison, and of those with the same beginning of their names;
    returns their figures by name."""
    found: dict[str, Path] = {}
    groups: dict[str, dict[str, Summary]] = {}
    for directory in [path.parent for path in results.glob(f"*/{COMPARISON}")]:
        group, dash, name = directory.name.partition("-")
        groups[directory.name] = {"": summarize(directory)}
        if dash:
            groups.setdefault(group, {})[name] = groups[directory.name][""]
    for name, summaries in groups.items():
        ordered = dict(sorted(summaries.items(), key=lambda item: item[1].num_parameters))
        write_report(ordered, results / "reports" / name)
        found |= {
            f"{name}-{path.name}": path
            for path in (results / "reports" / name / "figures").glob("*.png")
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
