"""Every choice of `configs/gpt2.py`, pinned as text.

All fields of one size, then what the other sizes and the other data have in their place.

After a deliberate change: bash tools/test.sh tests/test_goldens.py --update-goldens
"""

import difflib
import json
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from refusals import refused

from maxmars.config import load_config, to_dict
from maxmars.config.load import choices_of
from maxmars.distributed.sharding import AXES, RULES
from maxmars.model.parameters import Parameters
from maxmars.train.optimizer import make_schedule

GOLDENS = Path(__file__).parent / "goldens"
GPT2 = Path(__file__).parents[1] / "configs" / "gpt2.py"
CHOICES = choices_of("gpt2")
SIZES = CHOICES["size"]
*OPTIMIZERS, _ = CHOICES["optimizer"]  # the last stands for an optimizer of the user's own
# XL has 25 heads, so its tensor axis is 1 or 5.
MESHES = {size: [(1, 8, 1), (2, 4, 1) if size == "xl" else (2, 2, 2)] for size in SIZES}


def load(size, optimizer, data="openwebtext"):
    return load_config(f"{GPT2}:size={size},optimizer={optimizer},data={data}")


def check(path, text):
    stored = path.read_text() if path.exists() else ""
    diff = difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "now")
    update = "after a deliberate change: bash tools/test.sh tests/test_goldens.py --update-goldens"
    assert stored == text, "\n".join([*diff, update])


@pytest.fixture
def check_golden(request):
    def check_or_update(name, text):
        if request.config.getoption("--update-goldens"):
            (GOLDENS / name).write_text(text)
        check(GOLDENS / name, text)

    return check_or_update


def test_a_golden_that_differs_names_the_flag_that_updates_it(tmp_path):
    (tmp_path / "one.txt").write_text("batch = 1\n")
    check(tmp_path / "one.txt", "batch = 1\n")
    for name in ("one.txt", "missing.txt"):
        with refused(AssertionError, "+batch = 2", "--update-goldens"):
            check(tmp_path / name, "batch = 2\n")


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


def columns_of(spec, rule):
    axes = "/".join("".join(map(str, a)) or "-" for a in (spec.batch, spec.rows, spec.cols))
    rate = f"lr*{rule.learning_rate_scale:g}"
    return [spec.kind, axes, rule.name, rate, f"{rule.weight_decay:g}"]


def recipe(config):
    """Each field of a config by its dotted name, and what follows from them."""

    def flat(fields, prefix=""):
        for name, value in fields.items():
            if isinstance(value, dict) and value:
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield prefix + name, json.dumps(value)

    schedule, peak = make_schedule(config), config.optimizer.learning_rate
    steps = (0, 1, 1000, 2000, 10_000, 50_000, 100_000, 200_000)
    rates = {f"learning rate at {s:,}": f"{peak * float(schedule(s)):.4g}" for s in steps}
    return dict(flat(to_dict(config))) | {"tokens a step": f"{config.tokens_per_step:,}"} | rates


def groups(config):
    """What an optimizer does with each parameter."""
    specs = leaves(Parameters(config.model).specs)
    return {
        path: "  ".join(columns_of(spec, config.optimizer.rule_of(spec.kind)))
        for path, spec in specs
    }


def changes(old, new):
    """A line for each field that is not as before, and the optimizers that have this value of it.

    Args:
      old, new: optimizer -> name of a field -> its value, as text.
    """
    found = {}
    for optimizer in OPTIMIZERS:
        before, now = old[optimizer], new[optimizer]
        for field in [*before, *(field for field in now if field not in before)]:
            value = now.get(field, "absent")
            if before.get(field, "absent") != value:
                # A name is told by the config that it is of.
                value = value.replace(f"-{optimizer}", "-OPTIMIZER") if field == "name" else value
                found.setdefault((field, value), []).append(optimizer)
    return "".join(
        f"  {field} = {value}: {'all' if len(names) == len(OPTIMIZERS) else ' '.join(names)}\n"
        for (field, value), names in found.items()
    )


def by_optimizer(describe, size, data="openwebtext"):
    return {optimizer: describe(load(size, optimizer, data)) for optimizer in OPTIMIZERS}


def test_parameters(check_golden):
    text, small = "", by_optimizer(groups, "small")
    for size in SIZES:
        model = load(size, "mars").model
        abstract = Parameters(model).abstract
        axes, meshes = dict(leaves(Parameters(model).axes)), MESHES[size]
        header = ["parameter", "shape", "logical axes"]
        rows = [header + [f"on data,fsdp,tensor = {','.join(map(str, mesh))}" for mesh in meshes]]
        for path, leaf in leaves(abstract):
            row = [path, "x".join(map(str, leaf.shape)), " ".join(axes[path])]
            rows.append(row + [spec_on(mesh, axes[path], leaf.shape) for mesh in meshes])
        text += f"size={size}: {Parameters(model).count:,} parameters\n{table(rows)}"
        text += changes(small, by_optimizer(groups, size)) + "\n"
    for optimizer, found in small.items():
        rows = [["parameter", "kind  batch/rows/cols  rule  rate  decay"], *found.items()]
        text += f"size=small,optimizer={optimizer}\n{table(rows)}\n"
    check_golden("parameters.txt", text)


def test_hyperparameters_of_one_size(check_golden):
    recipes = by_optimizer(recipe, "small")
    shared = dict(set.intersection(*(set(found.items()) for found in recipes.values())))
    text = "".join(f"{k} = {v}\n" for k, v in recipes["mars"].items() if k in shared)
    for optimizer, found in recipes.items():
        own = (f"  {k} = {v}\n" for k, v in found.items() if k not in shared)
        text += f"\nsize=small,optimizer={optimizer}\n{''.join(own)}"
    check_golden("recipes.txt", text)


@pytest.mark.seconds
def test_how_sizes_and_data_differ(check_golden):
    text, small = "", by_optimizer(recipe, "small")
    for size in SIZES:
        found = by_optimizer(recipe, size)
        text += f"size={size}, where size=small has another value\n{changes(small, found)}"
        edu = by_optimizer(recipe, size, "fineweb_edu")
        text += f"size={size},data=fineweb_edu, where openwebtext has\n{changes(found, edu)}\n"
    check_golden("sizes.txt", text)


def test_no_golden_is_left_over():
    names = {"parameters.txt", "recipes.txt", "sizes.txt"}
    assert {path.name for path in GOLDENS.iterdir()} == names
