"""How XLA compiles for CPUs in the tests, where most programs run for less time than they compile.

Users have none of these flags: `cli/test_train_every_optimizer.py` trains the default optimizer
without them, and so do CI's quickstart and its run from the wheel.
"""

import importlib.metadata

# Level 0 of LLVM, in one piece, and loops that XLA writes for LLVM itself rather than through MLIR:
# programs compile in a third of the time. XLA's passes, which choose the collectives and the
# memory, stay as they are.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones know no other way
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def xla_flags(num_devices: int) -> str:
    """XLA_FLAGS of a process with so many fake CPU devices."""
    return " ".join([f"--xla_force_host_platform_device_count={num_devices}", *FLAGS])
