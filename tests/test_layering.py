"""The structure of the package and the repository: layers, sizes, and what is imported when."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maxmars"

# From top to bottom. A module imports only from rows below its own; a folder is one entry here.
ROWS = (
    {"__main__"},
    {"cli"},
    {"launch", "compare", "verify_resume", "eval_table"},
    {"plan", "train", "eval_report", "report"},
    {"step_reporter", "run_summary"},
    {"run"},
    {"lm_eval_adapter"},
    {"evaluate", "generate", "init_from", "resume", "skipped_steps", "convert", "watchdog"},
    {"trained_model", "remat", "precision"},
    {"train_step", "checkpoint"},
    {"gradients"},
    {"model_parts"},
    {"optimizer_factory", "hellaswag", "hf"},
    {"loglikelihood", "kv_cache"},
    {"step_trace", "trackers", "goodput", "progress_line"},
    {
        "model",
        "optim",
        "data",
        "metrics",
        "host_log",
        "hlo",
        "guard",
        "sampling",
        "program_cache",
    },
    {"attention", "cross_entropy"},
    {"blocked_attention", "narrowing_matmul"},
    {"sharding", "distributed", "digest", "orbax_io"},
    {"cluster", "roll_call", "lost_peers"},
    {"preemption", "workdir", "cpu_settings"},
    {"mesh_checks"},
    {"config"},
    {"optimizer_config", "data_config"},
    {"config_checks"},
)

# Inside a folder, downwards as well.
COMMANDS = "any file that is not named in the other rows"
FOLDERS = {
    "checkpoint": (
        "__init__",
        "checkpointer",
        "parameters",
        "restore",
        "retention",
        "lock",
        "lease",
        "contents",
        "directory",
    ),
    "cli": ("__init__", COMMANDS, "train_arguments", "config_file", "data_tables"),
    "compare": (
        "terminal",
        "comparison",
        "report_files",
        "summary",
        "batched_cells",
        "one_cell",
        "programs",
        "cell_progress",
        "search",
        "record",
        "cells",
        "statistics",
        "__init__",
    ),
    "data": (
        "__init__",
        "pipeline",
        "inspect",
        "merge",
        "prepare",
        "tfds_writer",
        "local_copy",
        "formats",
        "tfds_stream",
        "examples",
        "streams",
        "partial_directory",
        "split_rule",
        "shard_writer",
        "sources",
        "tokenize",
        "open_corpus",
        "corpus",
        "tokenizer",
        "gpt2_vocabulary",
    ),
    "hellaswag": ("__init__", "in_loop", "scores", "protocols", "questions", "comparison"),
    "hf": (
        "__init__",
        "load",
        "write",
        "layout",
        "safetensors_writer",
        "safetensors_files",
        "tokenizer_files",
        "bpe",
        "config_json",
    ),
    "hlo": ("__init__", "loops", "groups", "arrays", "text"),
    "plan": (
        "tables",
        "__init__",
        "fit",
        "compiled",
        "estimate",
        "memory",
        "traffic",
        "topology",
        "flops",
        "chips",
    ),
    "report": ("run_report", "figures", "document", "curves", "__init__"),
    "launch": (
        "__init__",
        "tpu_vm",
        "gke",
        "slurm",
        "tpu_commands",
        "host_script",
        "job",
        "source",
        "machines",
        "tools",
    ),
    "optim": (
        "__init__",
        "mars",
        "soap",
        "sophia",
        "soap_layout",
        "eigenbasis",
        "decompositions",
        "scale_by_mars",
        "rules",
        "orthogonalize",
        "orthogonalization_plan",
        "matrix_layout",
        "newton_schulz",
        "nnx_specs",
        "matrix_spec",
        "schedules",
    ),
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
LONGER_FILES = {"config.py": 450}  # one dataclass after the other; the order is the structure

TOP_LEVEL = {"pyproject.toml", "maxmars", "configs", "tests", "tools", "README.md"}


def layer(module: str) -> tuple[int, int] | None:
    """Row of a module, and row inside its folder; None for one that the lists do not know."""
    name, _, inside = module.partition(".")
    row = next((row for row, names in enumerate(ROWS) if name in names), None)
    if row is None:
        return None
    if name not in FOLDERS:
        return (row, 0) if not inside else None
    order, inside = FOLDERS[name], inside or "__init__"
    if inside in order:
        return row, order.index(inside)
    return (row, order.index(COMMANDS)) if COMMANDS in order else None


def modules_of(package: Path) -> dict[str, Path]:
    """Module names relative to the package (`data.pipeline`, `optim`), without its root."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            modules[".".join(parts)] = path
    return modules


def imports_of(module: str, path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every import of another module of the package, lazy ones included."""
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["maxmars", *filter(None, folder.split("."))]
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            target = name.removeprefix("maxmars.")
            if target == name:
                continue  # another package, or the root, which everything may import
            while target not in known and "." in target:
                target = target.rpartition(".")[0]  # a name in a module
            if target in known:
                yield node.lineno, target


def violations(package: Path) -> list[str]:
    """Imports that do not go downwards, and modules that the lists do not know."""
    modules, found = modules_of(package), []
    for module, path in modules.items():
        own = layer(module)
        if own is None:
            found.append(f"{module} is in no layer; give it a row in {Path(__file__).name}")
            continue
        for line, target in imports_of(module, path, set(modules)):
            below = layer(target)
            if below is None:
                continue  # reported as a module
            same_folder = module.partition(".")[0] == target.partition(".")[0]
            if not (below > own if same_folder else below[0] > own[0]):
                found.append(f"{module}:{line} imports {target}, which is not below it")
    return found


def test_imports_go_downwards():
    assert violations(PACKAGE) == []


PLANTED = {
    "config.py": ("def f():\n    from maxmars.train import train\n", "config:2 imports train"),
    "model.py": ("from maxmars import metrics\n", "model:1 imports metrics"),
    "sharding.py": ("import maxmars.model as m\n", "sharding:1 imports model"),
    "data/tokenizer.py": ("from .sources import x\n", "data.tokenizer:1 imports data.sources"),
    "data/sources.py": ("from maxmars.data import y\n", "data.sources:1 imports data,"),
    "cli/train.py": ("from maxmars.cli.plan import run\n", "cli.train:1 imports cli.plan"),
    "utils.py": ("", "utils is in no layer"),
    "optim/helpers.py": ("", "optim.helpers is in no layer"),
}
ALLOWED = {
    "__init__.py": "",
    "train.py": "import maxmars\nfrom maxmars import __version__, metrics\nimport jax.numpy\n",
    "metrics.py": "from . import config\nfrom maxmars.config import TrainConfig\n",
    "data/__init__.py": "from maxmars.data.pipeline import batches\n",
    "data/pipeline.py": "from maxmars.data import sources\nfrom maxmars.sharding import RULES\n",
    "cli/plan.py": "from maxmars.cli.config_file import load_config\n",
    "cli/config_file.py": "from ..config import TrainConfig\n",
}


@pytest.mark.parametrize("planted", [None, *PLANTED])
def test_the_checker_finds_a_planted_violation(tmp_path, planted):
    files = ALLOWED | {name: "" for name in PLANTED if name not in ("utils.py", "optim/helpers.py")}
    if planted is not None:
        files[planted] = PLANTED[planted][0]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = violations(tmp_path)
    if planted is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(PLANTED[planted][1])


def test_optim_is_a_library_of_its_own():
    modules = modules_of(PACKAGE)
    for module, path in modules.items():
        if module.partition(".")[0] == "optim":
            for line, target in imports_of(module, path, set(modules)):
                assert target.partition(".")[0] in ("optim", "sharding"), (
                    f"{module}:{line} imports {target}; optim takes mesh helpers of sharding only"
                )


def test_files_and_functions_are_small():
    too_long = []
    for path in PACKAGE.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        lines, limit = len(text.splitlines()), LONGER_FILES.get(name, MAX_FILE_LINES)
        if lines > limit:
            too_long.append(f"{name} has {lines} lines, over {limit}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # The docstring does not count: it describes each argument.
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = node.end_lineno - body[0].lineno + 1 if body else 0
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{node.name} in {name} has {length} lines")
    assert too_long == []


def test_importing_the_package_and_its_commands_does_not_load_jax():
    commands = [m for m in modules_of(PACKAGE) if m.partition(".")[0] == "cli"]
    names = ["maxmars", "maxmars.config", *(f"maxmars.{m}" for m in commands)]
    program = f"import sys, {', '.join(names)}; print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "False"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a git checkout lists its files")
def test_the_top_level_of_the_repository_stays_small():
    # A checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    files = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    names = {line.partition("/")[0] for line in files.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL
