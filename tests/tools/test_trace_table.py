"""Traces of real steps, and what is read from them."""

import json
import sys
from pathlib import Path

import jax
import pytest
from refusals import refused
from tiny import short_config

from maxmars.data.batches import batch_types
from maxmars.distributed.sharding import training_mesh
from maxmars.model.parameters import Parameters
from maxmars.train import train
from maxmars.train.resolve import resolve_config
from maxmars.train.step import make_train_step

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from trace_table import PHASES, Event, busy_ns, format_trace, phase_of, read_trace


@pytest.mark.parametrize(
    ("path", "phase"),
    [
        ("jit(<lambda>)/model/jvp()/closed_call/dot_general", "forward"),
        ("jit(<lambda>)/model/transpose(jvp())/closed_call/dot_general", "backward"),
        ("jit(f)/model/jvp()/checkpoint/rematted_computation/tanh", "backward"),
        ("jit(f)/optimizer/jit(clip)/max", "optimizer"),
        ("jit(f)/clip/sqrt", "clip"),
        ("jit(clip)/add", "other"),
    ],
)
def test_phases_come_from_the_scopes_of_the_step(path, phase):
    assert phase_of(path) == phase


def test_operations_at_the_same_time_are_busy_once():
    times = [(0.0, 10.0), (5.0, 10.0), (7.0, 1.0), (20.0, 1.0)]
    rest = {"name": "add", "program": 1, "device": ("cpu", 0)}
    events = [Event(start_ns=start, duration_ns=duration, **rest) for start, duration in times]
    assert busy_ns(events) == 16


def traced(folder):
    """The operations of a run's traced steps, and the share of each phase."""
    config = short_config(folder / "tokens", num_steps=4)
    train(config, folder / "run", profile=(2, 3))
    parameters = Parameters(config.model, training_mesh(config.mesh, config.model))
    program = make_train_step(
        resolve_config(config, parameters).config,
        parameters,
        batch_types(config.data, config.model),
    ).text()
    trace = read_trace(folder / "run" / "profile" / "host_000", program)
    phases = trace.seconds_of_phases().items()
    return trace, {phase: seconds / trace.busy_seconds for phase, seconds in phases}


@pytest.mark.smoke
@pytest.mark.slow
def test_a_traced_run_says_where_the_trace_is(tmp_path, capsys):
    trace, shares = traced(tmp_path)
    directory = tmp_path / "run" / "profile" / "host_000"
    assert len(list(directory.rglob("*.xplane.pb"))) == 1
    assert f"2 to 3 in {directory}" in capsys.readouterr().out
    assert set(shares) == set(PHASES)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares[name] for name in ("forward", "backward", "optimizer")) > 0
    assert trace.operations[0].name[:40] in format_trace(trace, steps=2)
    counts = [operation.count / 2 for operation in trace.operations]
    assert all(count.is_integer() for count in counts)  # of whole steps and all devices


@pytest.mark.gpu
def test_a_trace_of_this_machine_names_the_operations_of_all_phases(tmp_path):
    _, shares = traced(tmp_path)
    assert min(shares[name] for name in ("forward", "backward", "optimizer")) > 0


PROGRAM = """HloModule step

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %mul.1 = f32[4]{0} multiply(%x, %x), metadata={op_name="jit(f)/model/jvp()/mul"}
  ROOT %add.2 = f32[4]{0} add(%mul.1, %x), metadata={op_name="jit(f)/optimizer/add"}
}
"""


STATS = ("hlo_op", "program_id", "cuda_graph_id")


def write_trace(folder, planes):
    """A trace as XLA writes it: an event has a kernel, start and duration in ps, and stats."""
    text = ""
    for plane, events in planes.items():
        lines = metadata = ""
        for i, (kernel, start, duration, *stats) in enumerate(events, 1):
            metadata += f'event_metadata {{ key: {i} value {{ id: {i} name: "{kernel}" }} }} '
            lines += f"events {{ metadata_id: {i} offset_ps: {start} duration_ps: {duration} "
            for number, value in enumerate(stats, 1):
                kind = "str" if isinstance(value, str) else "uint64"
                lines += f"stats {{ metadata_id: {number} {kind}_value: {json.dumps(value)} }} "
            lines += "} "
        for i, stat in enumerate(STATS, 1):
            metadata += f'stat_metadata {{ key: {i} value {{ id: {i} name: "{stat}" }} }} '
        lines = f'name: "Stream #13(Compute)" {lines}'
        text += f'planes {{ name: "{plane}" lines {{ {lines} }} {metadata} }} '
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    (folder / "host.xplane.pb").write_bytes(data)


def test_kernels_of_a_gpu_count_once_and_not_what_the_host_starts(tmp_path):
    """Kernels on streams, whose stats name the operation."""
    kernels = [("kernel", 0, 3_000_000, "mul.1", 7), ("kernel", 5_000_000, 1_000_000, "add.2", 7)]
    host = [("call", 0, 90_000_000, "mul.1", 7), ("call", 95_000_000, 90_000_000, "add.2", 7)]
    write_trace(tmp_path, {"/device:GPU:0": kernels, "/host:CPU": host})
    trace = read_trace(tmp_path, PROGRAM)
    assert [(op.name, op.phase, op.count) for op in trace.operations] == [
        ("mul.1", "forward", 1),
        ("add.2", "optimizer", 1),
    ]
    assert trace.busy_seconds == pytest.approx(4e-6)


def test_kernels_of_a_cuda_graph_are_named_by_xla_or_serve_what_came_before(tmp_path):
    """`hlo_op` is the graph, and libraries' kernels have names of their own."""
    kernels = [("mul_1", 3_000_000), ("nvjet_bf16", 4_000_000), ("add_2", 1_000_000)]
    events = [
        (name, i * 10_000_000, duration, "command_buffer_1", 7, 11)
        for i, (name, duration) in enumerate(kernels, 1)
    ]
    write_trace(tmp_path, {"/device:GPU:0": events})
    trace = read_trace(tmp_path, PROGRAM)
    assert [(op.name, op.phase) for op in trace.operations] == [
        ("nvjet_bf16", "forward"),
        ("mul.1", "forward"),
        ("add.2", "optimizer"),
    ]


@pytest.mark.parametrize("steps", [(1, 2), (3, 2), (2, 5)])
def test_steps_that_cannot_be_traced_are_refused(tmp_path, steps):
    config = short_config(tmp_path / "tokens", num_steps=4)
    with refused(ValueError, "--profile {}:{}".format(*steps)):
        train(config, tmp_path / "run", profile=steps)
    assert not (tmp_path / "run").exists()


def test_a_directory_without_a_trace_is_refused(tmp_path):
    with refused(ValueError, tmp_path):
        read_trace(tmp_path, "HloModule x")
