import dataclasses
import json

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest
from flax import nnx
from tiny import MODEL, short_config, tiny_config

from maxmars import plan, precision
from maxmars.model import GPT2, mean_loss
from maxmars.plan.topology import get_topology
from maxmars.precision import choose_precision, fastest_dtype
from maxmars.resume import continued_config
from maxmars.sharding import make_mesh
from maxmars.train import train

AUTO = dataclasses.replace(MODEL, compute_dtype="auto")


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Replaces what Linux says of the processor, and the version of jaxlib."""

    def replace(flags, jaxlib_version=(0, 12, 0)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(jaxlib.version, "__version_info__", jaxlib_version)

    return replace


@pytest.mark.parametrize(
    ("flags", "version", "expected"),
    [
        ("avx512_bf16 amx_bf16 amx_tile", (0, 11, 2), "bfloat16"),
        ("avx512_bf16 amx_bf16 amx_tile", (0, 12, 0, 1), "bfloat16"),
        ("avx512_bf16 amx_bf16 amx_tile", (0, 11, 1), "float32"),
        ("avx512_bf16 amx_int8 amx_tile", (0, 12, 0), "float32"),
    ],
)
def test_a_cpu_takes_bfloat16_where_it_is_faster(processor, flags, version, expected):
    processor(flags, version)
    assert fastest_dtype("cpu")[0] == expected
    assert fastest_dtype("tpu")[0] == fastest_dtype("cuda")[0] == "bfloat16"


def test_a_system_that_does_not_describe_its_processor_takes_float32(monkeypatch, tmp_path):
    monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "absent")
    dtype, reason = fastest_dtype("cpu")
    assert (dtype, "amx_bf16" in reason) == ("float32", True)


def test_what_is_chosen_is_said_and_what_is_given_stays(processor):
    processor("amx_bf16")
    said = []
    config = tiny_config(model=AUTO)
    mesh = make_mesh(config.mesh)
    chosen = choose_precision(config, mesh, said.append)
    assert chosen.model == dataclasses.replace(MODEL, compute_dtype="bfloat16")
    assert said == [
        "model.compute_dtype=auto: bfloat16, as this processor has a matrix unit for it (amx_bf16)"
    ]
    assert choose_precision(tiny_config(), mesh, pytest.fail) == tiny_config()


def test_all_hosts_must_have_it(processor, monkeypatch):
    processor("amx_bf16")
    monkeypatch.setattr(precision.distributed, "everywhere", lambda ok: False)
    said = []
    config = tiny_config(model=AUTO)
    assert choose_precision(config, make_mesh(config.mesh), said.append) == tiny_config()
    assert said[0].endswith("float32, as another host has no fast bfloat16")


class CompilationError(Exception):
    """Raised in place of compiling."""


def test_a_plan_is_in_the_type_that_train_chooses(processor, monkeypatch):
    def compile_it(config, *_):
        assert config.model.compute_dtype == "bfloat16"
        raise CompilationError

    monkeypatch.setattr(plan, "compile_chosen", compile_it)
    monkeypatch.setattr(plan.fit, "compile_train_step", compile_it)
    processor("amx_bf16")
    config, topology = tiny_config(model=AUTO), get_topology("cpu:8")
    with pytest.raises(CompilationError):
        plan.make_plan(config, topology)
    with pytest.raises(CompilationError):
        plan.fit.find_fit(config, topology, 10**9)


def test_a_model_whose_type_was_not_chosen_says_so():
    model = nnx.eval_shape(lambda: GPT2(AUTO, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"model\.compute_dtype=auto must be chosen first"):
        jax.eval_shape(mean_loss, model, jnp.zeros((1, MODEL.max_seq_len + 1), jnp.int32))


def test_a_run_keeps_its_type_where_another_would_be_chosen(tmp_path):
    config = tiny_config(model=AUTO)
    stored = tiny_config(model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    mesh = make_mesh(config.mesh)
    kept = continued_config(stored, config, tmp_path, mesh=mesh, overrides=(), say=pytest.fail)
    assert kept == stored


@pytest.mark.slow
def test_a_run_keeps_its_type_on_a_machine_that_would_choose_another(tmp_path, processor, capsys):
    config = short_config(tmp_path / "tokens", model=AUTO)
    processor("amx_bf16")
    train(dataclasses.replace(config, num_steps=1), tmp_path / "run")
    assert "model.compute_dtype=auto: bfloat16" in capsys.readouterr().out
    processor("")
    train(dataclasses.replace(config, num_steps=2), tmp_path / "run")
    shown = capsys.readouterr().out
    assert "continuing from step 1" in shown
    assert "compute_dtype" not in shown
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["model"]["compute_dtype"] == "bfloat16"
