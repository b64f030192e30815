"""Draw the figures that the Markdown files show from the rows in `.github/results`, in few bytes.

    python tools/figures.py

A page shows FIGURE.png of the report on `.github/results/A/B` as `.github/figures/A-B-FIGURE.png`,
such as `tiny-0.3M-loss_tokens.png` or, of all sizes, `tiny-speed_up.png`. A figure that the rows
cannot draw stays as it is; this ends with 1 where one is shown that is neither drawn nor there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from maxmars.compare.cells import COMPARISON
from maxmars.compare.report import write_report
from maxmars.compare.sizes import size_directories, write_reports_of_sizes

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
    """Write the reports of all comparisons, and those over sizes; returns their figures by name."""
    reported = set()
    for directory in {path.parent for path in results.rglob(COMPARISON)}:
        if directory.parent != results and directory.parent not in reported:
            write_reports_of_sizes(directory.parent, size_directories(directory.parent))
            reported.add(directory.parent)
        elif directory.parent == results:
            write_report(directory)
    return {
        "-".join([*path.relative_to(results).parts[:-2], path.name]): path
        for path in results.rglob("figures/*.png")
    }


if __name__ == "__main__":
    sys.exit(main())
