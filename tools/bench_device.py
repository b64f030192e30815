"""What the first device reaches: a large bfloat16 matrix product and a copy, the ceilings of steps.

    python tools/bench_device.py [--size 8192] [--rounds 10] [--output F.json]

The product is of random numbers (zeros run faster), the copy reads and writes a gigabyte; the first
runs warm up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from maxmars.checkpoint.environment import environment
from maxmars.config import MeshConfig
from maxmars.config.chips import peak_flops
from maxmars.distributed.sharding import make_mesh

REPEATS = 10  # runs that are timed together, so that the host's part is small


def seconds(run: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of one run, in each round."""
    jax.block_until_ready([run() for _ in range(3)])
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready([run() for _ in range(REPEATS)])
        found.append((time.perf_counter() - started) / REPEATS)
    return found


def driver() -> str | None:
    """What `nvidia-smi` says of card and driver; None without it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="also write what was found as JSON")
    args = parser.parse_args()
    device = jax.devices()[0]
    x, y = (
        jax.random.normal(jax.random.key(seed), (args.size, args.size), jnp.bfloat16)
        for seed in range(2)
    )
    multiply = jax.jit(jnp.matmul)
    products = [2 * args.size**3 / s for s in seconds(lambda: multiply(x, y), args.rounds)]
    count = 2**28 * args.size // 8192  # of float32: a gigabyte
    array = jax.random.normal(jax.random.key(2), (count,))
    negate = jax.jit(jnp.negative)
    copies = [8 * count / s for s in seconds(lambda: negate(array), args.rounds)]
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "driver": driver(),
        "peak_flops": peak_flops(device.device_kind),
        "matmul_flops": products,
        "copy_bytes_per_sec": copies,
        "environment": environment(make_mesh(MeshConfig(), [device])),
    }
    print(
        f"{device.device_kind}: bfloat16 product of {args.size} x {args.size} at "
        f"{statistics.median(products) / 1e12:.1f} TFLOP/s ({min(products) / 1e12:.1f} to "
        f"{max(products) / 1e12:.1f}), memory read and written at "
        f"{statistics.median(copies) / 1e9:.0f} GB/s"
    )
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
