"""Make the figures that the Markdown files show, from the results in `.github/results`.

    maxmars report RUN --pack .github/results/tiny        # once, of each comparison
    python tools/figures.py

Each directory with a `compare.json` is a comparison, and a directory of several is one over sizes.
A Markdown file shows FIGURE.png of the report on `.github/results/A/B` as
`.github/figures/A-B-FIGURE.png`, such as `tiny-0.3M-loss_tokens.png` or `tiny-speed_up.png`. This
writes all that are shown, and ends with 1 where one is shown of which there is neither a result
nor a file.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from maxmars.compare.cells import COMPARISON
from maxmars.compare.report import write_report
from maxmars.compare.sizes import size_directories, write_reports_of_sizes

RESULTS, FIGURES = Path(".github", "results"), Path(".github", "figures")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, help="the repository, by default this")
    root = parser.parse_args().root
    missing = 0
    with tempfile.TemporaryDirectory(prefix="maxmars-figures-") as scratch:
        if (root / RESULTS).is_dir():
            shutil.copytree(root / RESULTS, Path(scratch) / "results")
        reported: dict[Path, list[str]] = {}
        for name in shown(root, FIGURES):
            target = root / FIGURES / name
            directory, figure = source(name, Path(scratch) / "results")
            if directory is None:
                is_kept = target.is_file()
                missing += not is_kept
                what = "kept as it is" if is_kept else "MISSING"
                print(f"{name}: {what}, no results in {RESULTS} are named so")
                continue
            if directory not in reported:
                reported[directory] = report(directory)
            if figure in reported[directory]:
                shutil.copy(directory / "figures" / figure, target)
                print(name)
            else:
                missing += 1
                print(f"{name}: MISSING, that report has {', '.join(reported[directory])}")
    return 1 if missing else 0


def shown(root: Path, directory: Path) -> list[str]:
    """Names of the figures in a directory that Markdown files of a repository show."""
    pages = [*root.glob("*.md"), *root.glob("[!.]*/**/*.md")]
    found = (re.findall(rf"{directory.as_posix()}/([\w./-]+\.png)", p.read_text()) for p in pages)
    return sorted({name for names in found for name in names})


def source(name: str, results: Path) -> tuple[Path | None, str]:
    """The directory of results that a figure is of, and its name in their report."""
    comparisons = {path.parent for path in results.rglob(COMPARISON)}
    directories = comparisons | {path.parent for path in comparisons} - {results}
    for directory in sorted(directories, key=lambda path: len(path.parts), reverse=True):
        prefix = "-".join(directory.relative_to(results).parts) + "-"
        if name.startswith(prefix):
            return directory, name.removeprefix(prefix)
    return None, name


def report(directory: Path) -> list[str]:
    """Write the report of a comparison, or over all sizes of one; returns its figures' names."""
    if (directory / COMPARISON).is_file():
        write_report(directory)
    else:
        write_reports_of_sizes(directory, size_directories(directory))
    return sorted(path.name for path in (directory / "figures").glob("*.png"))


if __name__ == "__main__":
    sys.exit(main())
