"""One process of `bench_train.py`: a config's own train step, or PyTorch's beside it.

    python tools/bench_worker.py maxmars|torch|torch-compiled CONFIG.json

It takes a first step, then answers each line of standard input with a line of JSON: a number N asks
for N steps, `describe` for what stays. The first line of its output tells of the first step.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxmars.config import TrainConfig

STARTED = time.perf_counter()
TRACED_STEPS = 2
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout


class MaxmarsSteps:
    """The train step and the input pipeline of a run, driven as `maxmars train` drives them."""

    def __init__(self, config: TrainConfig, scratch: Path) -> None:
        """Open the data and make the state; the first `run` compiles."""
        import jax

        from maxmars.data.batches import TrainBatches, open_data
        from maxmars.distributed import sharding
        from maxmars.model.parameters import Parameters
        from maxmars.train.auto import prepare
        from maxmars.train.step import init_train_state

        # What compiles twice here, once to run and once to be read, must be the same program.
        jax.config.update("jax_compilation_cache_dir", str(scratch / "programs"))
        self.num_compiles, self.compile_seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._count)
        self.scratch = scratch
        self.mesh = sharding.training_mesh(config)
        tokens = open_data(config.data, "train", model=config.model)
        self.train_step = prepare(
            config,
            Parameters(config.model, self.mesh),
            log=lambda text: print(text, file=sys.stderr),
        )
        self.config = self.train_step.config
        self.state = init_train_state(self.config, self.train_step.parameters)
        self.batches = TrainBatches(tokens, self.config, self.mesh)
        self.num_compiles, self.compile_seconds = 0, 0.0  # from here on of the step alone

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.compile_seconds += duration_secs
            self.num_compiles += 1

    def run(self, steps: int) -> dict[str, float]:
        """Seconds a step: in all, waiting for tokens, and of this thread's own work."""
        import jax

        jax.block_until_ready(self.state)
        started, busy, waited = time.perf_counter(), time.thread_time(), 0.0
        last, metrics = None, {}
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - asked
            self.state, metrics = self.train_step(self.state, batch)
            if last is not None:  # one step late, as the loop does
                last["train/consecutive_skips"].item()
            last = metrics
        jax.block_until_ready((self.state, metrics))
        return {
            "step": (time.perf_counter() - started) / steps,
            "data_wait": waited / steps,
            "host": (time.thread_time() - busy) / steps,
            "loss": metrics["train/loss"].item(),
            "compiles": self.num_compiles,
        }

    def describe(self) -> dict[str, Any]:
        """Versions, devices, memory, FLOPs, and the phases of some traced steps."""
        import jax

        from maxmars.checkpoint.environment import environment
        from maxmars.config.chips import peak_flops
        from maxmars.plan.compile import compiler_memory
        from maxmars.train.tracer import start_trace

        device = self.mesh.devices.flat[0]
        peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
        text = self.train_step.text()
        program = compiler_memory(self.train_step.lower().compile())  # from the cache
        start_trace(self.scratch / "trace")
        self.run(TRACED_STEPS)
        jax.profiler.stop_trace()
        self.batches.close()
        peak = peak_flops(device.device_kind)
        parameters = self.train_step.parameters
        return {
            "parameters": parameters.count,
            "flops_per_token": parameters.flops_per_token,
            "peak_flops": None if peak is None else peak * self.mesh.size,
            "peak_bytes": peak_bytes,
            "program_bytes": program["peak_memory_in_bytes"],
            "environment": environment(self.mesh),
            **self.parts(text),
            "plan": self.plan(),
        }

    def parts(self, text: str) -> dict[str, Any]:
        """Phases of the traced steps, and the operations that took most; why not, if it failed."""
        from trace_table import PHASES, format_trace, read_trace

        try:
            trace = read_trace(self.scratch / "trace", text)
        except ValueError as error:  # a new kind of device may name its operations otherwise
            return {"phases": {}, "longest": [], "operations": f"No operations: {error}"}
        phases = trace.seconds_of_phases()
        total = sum(op.seconds for op in trace.operations)
        longest = [
            {
                "name": op.name,
                "phase": op.phase,
                "source": op.jax_name,
                "ms": 1e3 * op.seconds / TRACED_STEPS,
                "share": op.seconds / total,
            }
            for op in trace.operations[:10]
        ]
        return {
            "phases": {name: phases[name] / trace.busy_seconds for name in PHASES},
            "longest": longest,
            "operations": format_trace(trace, steps=TRACED_STEPS),
        }

    def plan(self) -> dict[str, Any]:
        """What `maxmars plan` says of this config on these devices, with their own compiler."""
        from maxmars.config.chips import CHIPS, chip_name
        from maxmars.plan import Topology, make_plan

        devices = list(self.mesh.devices.flat)
        kind = chip_name(devices[0].device_kind)
        chip = None if kind is None else CHIPS[kind]
        topology = Topology(name="here", devices=devices, num_slices=1, chip=chip)
        try:
            found = make_plan(self.config, topology, evaluate=False).to_json()
        except ValueError as error:
            return {"error": str(error)}
        keys = ("memory", "time", "clock")
        return {key: found[key] for key in keys}


def make(kind: str, config: TrainConfig, scratch: Path) -> Any:
    """What takes the steps."""
    if kind == "maxmars":
        return MaxmarsSteps(config, scratch)
    import torch
    from torch_gpt2 import TorchSteps

    from maxmars.config import GPT2Config, to_dict
    from maxmars.train.auto import auto_dtype, with_compute_dtype

    if config.model.compute_dtype == "auto":  # the same on both sides
        platform = "gpu" if torch.cuda.is_available() else "cpu"
        config = with_compute_dtype(config, auto_dtype(platform))

    assert isinstance(config.model, GPT2Config), "PyTorch has a GPT-2 alone here"
    vocab_rows = config.model.padded_vocab_size
    return TorchSteps(to_dict(config), vocab_rows, compiled=kind == "torch-compiled")


def main() -> None:
    """Answer until the input ends."""
    from maxmars.config import from_dict

    kind, path = sys.argv[1:]
    config = from_dict(json.loads(Path(path).read_text()))
    with tempfile.TemporaryDirectory(prefix="bench-train-") as scratch:
        steps = make(kind, config, Path(scratch))
        made = time.perf_counter()
        found = steps.run(1)
        now = time.perf_counter()
        first = {"ready": now - STARTED, "first_step": now - made}
        compile_seconds = getattr(steps, "compile_seconds", None)
        print(json.dumps(found | first | {"compile": compile_seconds}), flush=True)
        for line in sys.stdin:
            if line.strip() == "describe":
                peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux
                print(json.dumps({"resident_bytes": peak} | steps.describe()), flush=True)
            else:
                print(json.dumps(steps.run(int(line))), flush=True)


if __name__ == "__main__":
    main()
