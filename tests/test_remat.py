import dataclasses

import jax
import pytest
from tiny import MODEL, short_config, tiny_config

from maxmars import hlo, remat
from maxmars.remat import POLICIES, choose_remat, with_remat
from maxmars.sharding import make_mesh
from maxmars.train import train
from maxmars.train_step import make_train_step

AUTO = tiny_config(model=dataclasses.replace(MODEL, remat="auto"))
NEEDED = {None: 2000, "dots": 1200, "attention": 600, "full": 190}


@pytest.fixture
def compiled(monkeypatch):
    """Replaces the compiler by a table; returns the policies that were compiled."""
    found = []

    def peak_bytes(config, mesh, *, tpu):
        found.append(config.model.remat)
        return NEEDED[config.model.remat] * 10**6

    monkeypatch.setattr(remat, "_peak_bytes", peak_bytes)
    return found


def choose(limit, say, config=AUTO):
    return choose_remat(config, make_mesh(config.mesh), say, memory_bytes=lambda _: limit)


@pytest.mark.parametrize(
    ("megabytes", "policy"), [(2106, None), (2105, "dots"), (1263, "attention"), (200, "full")]
)
def test_the_least_arithmetic_that_fits_in_95_percent(compiled, megabytes, policy):
    said = []
    assert choose(megabytes * 10**6, said.append) == with_remat(AUTO, policy)
    assert compiled == list(POLICIES)[: POLICIES.index(policy) + 1]
    assert len(said) == 1
    assert said[0].startswith(f"model.remat=auto: {policy} needs {NEEDED[policy] / 1e3:.2f} GB of ")
    assert "nothing fits" not in said[0]


def test_where_nothing_fits_it_recomputes_all_and_says_so(compiled):
    said = []
    assert choose(199 * 10**6, said.append).model.remat == "full"
    assert said[0].endswith("nothing fits; raise num_microbatches or mesh.fsdp")


def test_a_program_that_the_compiler_refuses_does_not_fit(monkeypatch):
    def refuse(config, mesh):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"
        )

    monkeypatch.setattr(remat, "make_train_step", refuse)
    said = []
    choose(10**9, said.append)
    assert said[0].startswith("model.remat=auto: full is refused by the compiler")


def test_what_a_compiled_step_needs_is_what_counts():
    said = []
    config = with_remat(AUTO, None)
    step = make_train_step(config, make_mesh(config.mesh))
    needed = hlo.memory(step.lower().compile()).most_bytes(tpu=False)
    assert choose(int(needed / remat.USABLE) + 2, said.append).model.remat is None
    assert f"None needs {needed / 1e9:.2f} GB" in said[0]


def test_a_policy_that_is_given_stays(compiled):
    config = with_remat(AUTO, "dots")
    assert choose(1, pytest.fail, config) == config
    assert compiled == []


def test_where_the_memory_is_not_known_nothing_is_compiled_or_recomputed(compiled):
    said = []
    assert choose_remat(AUTO, make_mesh(AUTO.mesh), said.append) == with_remat(AUTO, None)
    assert said == ["model.remat=auto: None, as this device's memory is not known"]
    assert compiled == []


@pytest.mark.slow
def test_a_run_on_a_cpu_recomputes_nothing_and_continues_under_auto(tmp_path, capsys):
    model = dataclasses.replace(MODEL, remat="auto")
    config = short_config(tmp_path / "tokens", model=model)
    train(dataclasses.replace(config, num_steps=1), tmp_path / "run")
    assert "model.remat=auto: None, as this device's memory is not known" in capsys.readouterr().out
    changed = dataclasses.replace(config, model=dataclasses.replace(MODEL, remat="attention"))
    train(changed, tmp_path / "run")
    assert "continuing from step 1" in capsys.readouterr().out
