import pytest

from maxmars.config.chips import peak_flops


@pytest.mark.parametrize(
    ("device_kind", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("TPU7x", 1153.5e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v6e", 918e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GB200", None),
        ("NVIDIA L4", None),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_peak_flops(device_kind, flops):
    assert peak_flops(device_kind) == flops
