import pytest

from maxmars.config.chips import peak_flops

NAMES = {
    275e12: ["TPU v4"],
    197e12: ["TPU v5 lite", "TPU v5e"],
    459e12: ["TPU v5", "TPU v5p"],
    918e12: ["TPU v6 lite", "TPU v6e"],
    1153.5e12: ["TPU7x"],
    312e12: ["NVIDIA A100-SXM4-80GB"],
    989e12: ["NVIDIA H100 80GB HBM3", "NVIDIA H200"],
    756e12: ["NVIDIA H100 PCIe"],
    2250e12: ["NVIDIA B200"],
    None: ["NVIDIA H200 MIG 1g.18gb", "NVIDIA GB200", "NVIDIA L4", "TPU v4 lite", "cpu"],
}


@pytest.mark.parametrize(
    ("name", "flops"), [(name, flops) for flops, names in NAMES.items() for name in names]
)
def test_peak_flops(name, flops):
    assert peak_flops(name) == flops
