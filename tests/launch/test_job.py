"""What goes along to other machines, and the names of machines."""

import io
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from refusals import refused
from running import run_python

from maxmars.checkpoint.environment import package_digest
from maxmars.config.checks import UsageError
from maxmars.config.chips import CHIPS, parse_shape
from maxmars.config.user_code import Source
from maxmars.launch import wheel
from maxmars.launch.gke import GkeOptions
from maxmars.launch.job import pack
from maxmars.launch.tpu_vm import TpuOptions

pytestmark = pytest.mark.smoke

CONFIG = "def get_config():\n    pass\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files of the user's own."""
    root = tmp_path / "mine"
    files = {
        "config.py": f"import sizes\n{CONFIG}",
        "sizes.py": "",
        "lib/data.py": "from noise import draw\n",
        "lib/noise/draw.py": "",
        "optim.py": "",
        "b1=0.9,b=2/config.py": CONFIG,
        "old.py": "",
        ".env": "secret",
        "tokens/meta.json": "{}",
        "tokens/deep/train.bin": "0",
        "tokens/.hidden": "",
        "tokens/__pycache__/x.pyc": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.chdir(root)
    return root


def names(packed):
    return set(packed.contents) - {"launch-constraints.txt", wheel.NAME}


def unpacked(packed, folder):
    """The folder, with the archive's files as the hosts unpack them."""
    folder.mkdir()
    subprocess.run(["tar", "-xz", "-C", folder], input=packed.archive, check=True)
    return folder


def test_what_a_run_names_goes_along_and_nothing_else(folder):
    assert names(pack("config.py")) == {"config.py", "sizes.py"}
    sources = [Source.parse(name) for name in ("lib/data.py:f", "optim.py:make")]
    packed = pack(f"{folder}/config.py", sources=sources)
    own = {"config.py", "sizes.py", "optim.py", "lib/data.py", "lib/noise/draw.py"}
    assert names(packed) == own
    assert packed.config == "config.py"
    assert "jax==" in packed.contents["launch-constraints.txt"].decode()
    packed = pack("config.py", include=[".env", "./tokens"])
    tokens = {"tokens/meta.json", "tokens/deep/train.bin"}
    assert names(packed) == {"config.py", "sizes.py", ".env"} | tokens
    assert packed.has("tokens")
    assert not packed.has("lib")
    packed = pack("config.py", scripts={"launch-setup.sh": folder / "old.py"})
    assert "launch-setup.sh" in names(packed)
    assert names(pack("quickstart")) == set()


@pytest.mark.parametrize(
    ("config", "here", "there"),
    [
        ("quickstart:data=gs://b/x", "quickstart:data=gs://b/x", "quickstart:data=gs://b/x"),
        ("config.py:data=gs://b/x", "config.py:data=gs://b/x", "/there/config.py:data=gs://b/x"),
        ("./config.py:data=a/b.py", "config.py:data=a/b.py", "/there/config.py:data=a/b.py"),
        (
            "gpt2:size=xl,optimizer=./optim.py:make",
            "gpt2:size=xl,optimizer=optim.py:make",
            "gpt2:size=xl,optimizer=/there/optim.py:make",
        ),
        (
            "./b1=0.9,b=2/config.py:optimizer=./b1=0.9/optim.py:make",
            "b1=0.9,b=2/config.py:optimizer=b1=0.9/optim.py:make",
            "/there/b1=0.9,b=2/config.py:optimizer=/there/b1=0.9/optim.py:make",
        ),
    ],
)
def test_config_where_the_files_are(folder, config, here, there):
    packed = pack(config)
    assert packed.config_in(Path()) == here
    assert packed.config_in(Path("/there")) == there


def test_a_link_to_the_folder_leads_into_it(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    packed = pack(f"{tmp_path}/link/config.py", include=[f"{tmp_path}/link/lib"])
    assert packed.config == "config.py"
    assert packed.has("lib/data.py")
    (folder / "far").symlink_to(tmp_path / "elsewhere")  # a folder by its link alone
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokens.bin").touch()
    assert pack("config.py", include=["far"]).has("far/tokens.bin")


def test_the_same_files_give_the_same_bytes(folder):
    packed = pack("config.py")
    assert pack("config.py").archive == packed.archive
    (folder / "sizes.py").write_text("changed = 1")
    changed = pack("config.py")
    assert changed.digest != packed.digest
    assert changed.wheel_sha256 == packed.wheel_sha256


def test_what_is_absent_or_elsewhere_is_refused(folder, tmp_path):
    (tmp_path / "outside.py").write_text(CONFIG)
    with refused(UsageError, "../outside.py"):
        pack("../outside.py")
    with refused(UsageError, "outside.py"):
        pack("config.py", sources=[Source.parse(f"{tmp_path}/outside.py:f")])
    for name in ("../outside.py", "/etc/passwd"):
        with refused(UsageError, name):
            pack("config.py", include=[name])
    with refused(FileNotFoundError, "none.env"):
        pack("config.py", include=["none.env"])
    with refused(FileNotFoundError, "none.py"):
        pack("config.py", sources=[Source.parse("none.py:f")])


def test_an_import_from_another_folder_is_named(folder):
    (folder / "lib" / "data.py").write_text("def f():\n  import old, json, jax\n")
    with refused(UsageError, "lib/data.py", "old.py"):
        pack("config.py", sources=[Source.parse("lib/data.py:f")])
    (folder / "old.py").rename(folder / "lib" / "old.py")
    assert "lib/old.py" in names(pack("config.py", sources=[Source.parse("lib/data.py:f")]))


def test_too_much(folder):
    (folder / "large").mkdir()
    with (folder / "large" / "large.bin").open("wb") as file:
        file.truncate(2**42)  # more than any memory
    with refused(ValueError, "large.bin"):
        pack("config.py", include=["large"])


def test_the_archive_has_what_is_written(folder, tmp_path):
    (folder / "mount.sh").write_text("mount")
    packed = pack("config.py", include=["mount.sh"])
    packed.write(tmp_path / "written")

    def files(folder):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {p.relative_to(folder): (p.read_bytes(), p.stat().st_mode & 0o100) for p in paths}

    written = files(tmp_path / "written")
    assert {mode for _, mode in written.values()} == {0, 0o100}  # mount.sh can be run
    assert written == files(unpacked(packed, tmp_path / "unpacked"))


@pytest.mark.slow
def test_the_wheel_has_this_maxmars(tmp_path):
    with zipfile.ZipFile(io.BytesIO(wheel.make_wheel())) as archive:
        archive.extractall(tmp_path)
    assert not [*tmp_path.rglob("__pycache__")]
    (info,) = tmp_path.glob("*.dist-info")
    listed = {line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()}
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert listed == files
    assert {"maxmars/config/files/quickstart.py", "maxmars/launch/host.sh"} <= files
    program = "import maxmars.checkpoint.environment as e; print(e.__file__, e.package_digest())"
    path = {"PYTHONPATH": str(tmp_path)}
    done = run_python("-P", "-c", program, environment=os.environ | path)
    file, digest = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert digest == package_digest()


def test_this_maxmars_is_small_enough():
    assert len(pack("quickstart").archive) < 600_000  # a ConfigMap takes 1 MB


@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "devices"),
    [
        ("v5p:4x4x4", 16, 4, 64),
        ("v5p-128", 16, 4, 64),
        ("v5litepod-16", 4, 4, 16),
        ("v5p:2x2x1", 1, 4, 4),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x4", 1, 8, 8),
        ("v5e:4x4", 4, 4, 16),
        ("tpu7x:2x2x4", 4, 4, 32),
        ("h100:2", 1, 2, 2),
        ("a100-80gb:64", 8, 8, 64),
    ],
)
def test_hosts_of_topologies(topology, hosts, chips, devices):
    shape = parse_shape(topology)
    assert (shape.num_hosts, shape.chips_per_host, shape.num_devices) == (hosts, chips, devices)


def test_gke_has_nodes_of_every_chip():
    for kind, chip in CHIPS.items():
        size = {2: "4x4", 3: "2x2x4", None: "8"}[chip.topology_axes]
        options = GkeOptions(config="x", name="x", workdir="/x", topology=f"{kind}:{size}")
        labels = [label.removeprefix("cloud.google.com/gke-") for label in options.node_labels]
        assert labels == (["tpu-accelerator", "tpu-topology"] if "x" in size else ["accelerator"])


@pytest.mark.parametrize(
    ("accelerator", "chips", "software"),
    [
        ("v4-8", 4, "tpu-ubuntu2204-base"),
        ("v5litepod-16", 16, "v2-alpha-tpuv5-lite"),
        ("v5p-128", 64, "v2-alpha-tpuv5"),
        ("v6e-8", 8, "v2-alpha-tpuv6e"),
    ],
)
def test_chips_and_software_of_accelerators(accelerator, chips, software):
    options = TpuOptions(
        config="quickstart", name="x", workdir="/x", zone="us-east5-a", accelerator=accelerator
    )
    assert options.slice.num_chips == chips
    assert f"--version={software}" in options.create()
