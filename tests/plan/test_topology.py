import importlib.util

import pytest
from refusals import refused

from maxmars.plan.topology import get_topology

UNKNOWN = ["v5e", "v5e:", "v9:4x4", "h100:x", "h100", "h100:8x8", "v6e-3", "v5e:0x4"]
NEAREST = {
    "v5e:3x3": "v5e:2x4, v5e:4x4, v5e:2x2",
    "v6e:5x8": "v6e:4x8, v6e:8x8, v6e:4x4",
    "v5e:4x2": "v5e:2x4, v5e:2x2, v5e:4x4",
    "v5e:4x4x4": "v5e:8x8",
    "v5p:4x4": "v5p:2x2x4, v5p:2x2x2, v5p:2x4x4",
    "v4:2x2x3": "v4:2x2x4",
    "v5p:8x4x4": "v5p:4x4x8",
    "tpu7x:16x24x40": "tpu7x:",
}


@pytest.mark.parametrize(
    ("name", "num_slices", "named"),
    [
        *[(name, 1, ()) for name in (*UNKNOWN, "cpu:0", "cpu:2x2", "h200:12")],
        *[(name, 1, (f"are {nearest}",)) for name, nearest in NEAREST.items()],
        ("cpu:8", 2, ("--num-slices 2",)),
        ("h100:8", 2, ("--num-slices 2",)),
        ("v5e:2x4", 2, ("8 chips of v5e",)),
        ("v5e:4x4", 0, ("--num-slices 0",)),
        ("cpu:4096", 1, ("4096",)),
    ],
)
def test_refusals(name, num_slices, named):
    with refused(ValueError, *named or [f"--topology {name}"]):
        get_topology(name, num_slices=num_slices)


@pytest.mark.parametrize(("name", "extra"), [("v5e:4x4", "tpu"), ("h100:8", "cuda")])
def test_a_missing_compiler_names_the_extra(name, extra):
    if importlib.util.find_spec({"tpu": "libtpu", "cuda": "jax_plugins"}[extra]) is not None:
        pytest.skip(f"the extra `{extra}` is installed")
    with refused(ImportError, f"[{extra}]'"):
        get_topology(name)
