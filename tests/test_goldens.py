"""Every choice of `configs/gpt2.py`, pinned as text.

After a deliberate change: pytest tests/test_goldens.py --update-goldens
"""

import difflib
import itertools
import json
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from maxmars.config import differences, load_config, to_dict
from maxmars.distributed.sharding import AXES, RULES
from maxmars.model.language_model import graph_and_abstract_params, logical_axes, num_parameters
from maxmars.train.optimizer import make_schedule, parameter_groups

GOLDENS = Path(__file__).parent / "goldens"
GPT2 = Path(__file__).parents[1] / "configs" / "gpt2.py"
SIZES = ("tiny", "small", "medium", "large", "xl")
OPTIMIZERS = (
    "adamw",
    "nadamw",
    "ademamix",
    "muon",
    "moonlight",
    "lion",
    "adopt",
    "sophia",
    "soap",
    "mars",
    "mars_exact",
    "mars_lion",
    "mars_shampoo",
    "mars_m",
)
# XL has 25 heads, so its tensor axis is 1 or 5.
MESHES = {size: [(1, 8, 1), (2, 4, 1) if size == "xl" else (2, 2, 2)] for size in SIZES}


def load(size, optimizer, data="openwebtext"):
    return load_config(f"{GPT2}:size={size},optimizer={optimizer},data={data}")


@pytest.fixture
def check_golden(request):
    def check(name, text):
        path = GOLDENS / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        stored = path.read_text() if path.exists() else ""
        diff = difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "now")
        assert stored == text, "\n".join(diff)

    return check


def leaves(tree):
    """Pairs of dotted path and leaf; a tuple is a leaf."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in flat]


def table(rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines) + "\n"


def spec_on(mesh_shape, axes, shape):
    mesh = AbstractMesh(mesh_shape, AXES)
    spec = RULES.spec(*axes)
    local = NamedSharding(mesh, spec).shard_shape(shape)
    return f"{'x'.join(map(str, local))} {tuple(spec)}"


def group_columns(group):
    spec = group.spec
    axes = "/".join("".join(map(str, a)) or "-" for a in (spec.batch, spec.rows, spec.cols))
    rate = f"lr*{group.learning_rate_scale:g}"
    return [group.kind, axes, group.rule, rate, f"{group.weight_decay:g}"]


@pytest.mark.parametrize("size", SIZES)
def test_parameters(check_golden, size):
    configs = {optimizer: load(size, optimizer) for optimizer in OPTIMIZERS}
    model = configs["mars"].model
    _, abstract = graph_and_abstract_params(model)
    axes = dict(leaves(logical_axes(model)))
    meshes = MESHES[size]
    header = ["parameter", "shape", "logical axes"]
    header += [f"on data,fsdp,tensor = {','.join(map(str, mesh))}" for mesh in meshes]
    rows = [header]
    for path, leaf in leaves(abstract):
        row = [path, "x".join(map(str, leaf.shape)), " ".join(axes[path])]
        row += [spec_on(mesh, axes[path], leaf.shape) for mesh in meshes]
        rows.append(row)
    text = f"{num_parameters(model):,} parameters\n\n{table(rows)}"
    for optimizer, config in configs.items():
        groups = leaves(parameter_groups(config.optimizer, model))
        rows = [["parameter", "kind", "batch/rows/cols", "rule", "rate", "decay"]]
        rows += [[path, *group_columns(group)] for path, group in groups]
        text += f"\noptimizer={optimizer}\n{table(rows)}"
    check_golden(f"gpt2_{size}.txt", text)


@pytest.mark.parametrize(("size", "optimizer"), list(itertools.product(SIZES, OPTIMIZERS)))
def test_hyperparameters(check_golden, size, optimizer):
    config = load(size, optimizer)
    schedule, peak = make_schedule(config), config.optimizer.learning_rate
    steps = (0, 1, 1000, 2000, 10_000, 50_000, 100_000, 200_000)
    rates = table([[f"{s:,}", f"{peak * float(schedule(s)):.4g}"] for s in steps])
    text = json.dumps(to_dict(config), indent=2)
    text += f"\n\ntokens a step: {config.tokens_per_step:,}\nlearning rate by step:\n{rates}"
    check_golden(f"gpt2_{size}_{optimizer}.txt", text)


@pytest.mark.parametrize("size", SIZES)
def test_what_fineweb_edu_changes(check_golden, size):
    text = ""
    for optimizer in OPTIMIZERS:
        old, new = load(size, optimizer), load(size, optimizer, "fineweb_edu")
        changes = [f"  {name}: {a} -> {b}\n" for name, a, b in differences(old, new)]
        text += f"optimizer={optimizer}\n{''.join(changes)}"
    check_golden(f"gpt2_{size}_fineweb_edu.txt", text)


def test_no_golden_is_left_over():
    names = {f"gpt2_{size}.txt" for size in SIZES}
    names |= {f"gpt2_{size}_fineweb_edu.txt" for size in SIZES}
    names |= {f"gpt2_{s}_{o}.txt" for s, o in itertools.product(SIZES, OPTIMIZERS)}
    assert {path.name for path in GOLDENS.iterdir()} == names
