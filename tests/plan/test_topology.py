import importlib.util

import pytest

from maxmars.plan.topology import get_topology


@pytest.mark.parametrize(
    "name", ["v5e", "v5e:", "v9:4x4", "h100:x", "h100", "h100:8x8", "v6e-3", "v5e:0x4"]
)
def test_unknown_topologies_are_refused(name):
    with pytest.raises(ValueError, match=rf"--topology {name} is unknown; write a TPU slice as"):
        get_topology(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v5e:3x3", "v5e:2x4, v5e:4x4, v5e:2x2"),
        ("v6e:5x8", "v6e:4x8, v6e:8x8, v6e:4x4"),
        ("v5e:4x2", "v5e:2x4, v5e:2x2, v5e:4x4"),
        ("v5e:4x4x4", "v5e:8x8"),
        ("v5p:4x4", "v5p:2x2x4, v5p:2x2x2, v5p:2x4x4"),
        ("v4:2x2x3", "v4:2x2x4"),
        ("v5p:8x4x4", "v5p:4x4x8"),
        ("tpu7x:16x24x40", "tpu7x:"),
    ],
)
def test_slices_that_do_not_exist_name_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"{name}: there is no such slice; .* are {nearest}"):
        get_topology(name)


def test_devices_without_slices():
    with pytest.raises(ValueError, match="--num-slices 2 needs a TPU topology such as v5e:4x4"):
        get_topology("cpu:8", num_slices=2)
    with pytest.raises(ValueError, match="needs devices that come in slices, which h100 devices"):
        get_topology("h100:8", num_slices=2)
    with pytest.raises(
        ValueError, match="Google Cloud joins only slices of several hosts, and 8 ch"
    ):
        get_topology("v5e:2x4", num_slices=2)
    with pytest.raises(ValueError, match="--num-slices 0 must be at least 1"):
        get_topology("v5e:4x4", num_slices=0)
    for name in ("cpu:0", "cpu:2x2"):
        with pytest.raises(ValueError, match=f"--topology {name} must be cpu:N"):
            get_topology(name)


def test_too_few_fake_devices():
    with pytest.raises(ValueError, match="needs 4096 fake CPU devices, but this process has"):
        get_topology("cpu:4096")


@pytest.mark.parametrize(("name", "extra"), [("v5e:4x4", "tpu"), ("h100:8", "cuda")])
def test_a_missing_compiler_names_the_extra(name, extra):
    if importlib.util.find_spec({"tpu": "libtpu", "cuda": "jax_plugins"}[extra]) is not None:
        pytest.skip(f"the extra `{extra}` is installed")
    with pytest.raises(ImportError, match=rf"pip install 'maxmars\[{extra}\]'"):
        get_topology(name)


def test_gpus_come_in_hosts_of_eight():
    with pytest.raises(
        ValueError, match="--topology h200:12 must have up to 8 GPUs, or a multiple"
    ):
        get_topology("h200:12")
