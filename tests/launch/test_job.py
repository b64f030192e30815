"""The packed checkout, and the names of machines."""

import shutil
import subprocess

import pytest
from refusals import refused

from maxmars.config.checkout import git_commit
from maxmars.config.checks import UsageError
from maxmars.config.chips import CHIPS, parse_shape
from maxmars.config.user_code import Source
from maxmars.launch.gke import GkeOptions
from maxmars.launch.job import pack
from maxmars.launch.tpu_vm import TpuOptions

TOP = {"pyproject.toml", "README.md"}  # which pip reads
PACKAGE = {f"maxmars/{name}.py" for name in ("b", "__init__", "cli/__init__", "cli/train")}


def git(checkout):
    return ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x"]


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for name in (
        "configs/a.py",
        "maxmars/b.py",
        "maxmars/__init__.py",
        "maxmars/cli/__init__.py",
        "maxmars/cli/train.py",
        "runs/big.bin",
        ".gitignore",
        "old.py",
        "tests/c.py",
        "tools/d.py",
        "maxmars/README.md",
        "README.md",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("runs\n" if name == ".gitignore" else "" if "py" in name else name)
    (root / "pyproject.toml").touch()
    subprocess.run([*git(root), "init", "-q"], check=True)
    track(root, ".")
    return root


def track(checkout, *files):
    subprocess.run([*git(checkout), "add", *files], check=True)


def names(packed):
    return set(packed.contents) - {"launch-constraints.txt", "launch-commit.txt"}


def unpacked(packed, folder):
    """The folder, with the archive's files as the hosts unpack them."""
    folder.mkdir()
    subprocess.run(["tar", "-xz", "-C", folder], input=packed.archive, check=True)
    return folder


def commit_of(packed, folder):
    """The commit that a run records which runs from the archive."""
    return git_commit(unpacked(packed, folder))


def test_the_present_state_of_a_git_checkout_and_its_commit(checkout, tmp_path):
    config = f"{checkout}/configs/a.py"
    assert commit_of(pack(config, root=checkout), tmp_path / "none") is None
    subprocess.run([*git(checkout), "commit", "-qm", "x"], check=True)
    commit = subprocess.check_output([*git(checkout), "rev-parse", "HEAD"], text=True).strip()
    assert commit_of(pack(config, root=checkout), tmp_path / "clean") == commit
    (checkout / "old.py").unlink()
    (checkout / "configs" / "a.py").write_text("changed = 1")
    (checkout / "new.py").touch()
    packed = pack(f"{config}:size=xl", root=checkout)
    assert names(packed) == {"configs/a.py", ".gitignore"} | PACKAGE | TOP
    assert packed.config == "configs/a.py:size=xl"
    assert commit_of(packed, tmp_path / "dirty") == f"{commit}-dirty"
    assert (tmp_path / "dirty" / "configs" / "a.py").read_text() == "changed = 1"
    assert "jax==" in (tmp_path / "dirty" / "launch-constraints.txt").read_text()
    assert pack(config, root=checkout).digest == packed.digest
    (checkout / "maxmars" / "b.py").write_text("changed")
    assert pack(config, root=checkout).digest != packed.digest


def test_what_git_does_not_track_goes_along_only_by_name(checkout):
    config = checkout / "configs" / "mine.py"  # not tracked either
    config.touch()
    for name in (".env", "runs/key.pem"):  # the second is ignored
        (checkout / name).write_text("secret")
    packed = pack(str(config), root=checkout)
    assert (
        names(packed) == {"configs/mine.py", "configs/a.py", "old.py", ".gitignore"} | PACKAGE | TOP
    )
    packed = pack(str(config), root=checkout, include=[".env", "runs/key.pem"])
    assert {".env", "runs/key.pem"} <= names(packed)
    for name in ("no.env", "../checkout/old.py", "/etc/passwd"):
        with refused(FileNotFoundError, f"--include {name}"):
            pack(str(config), root=checkout, include=[name])


@pytest.mark.parametrize(
    ("file", "line", "missing"),
    [
        ("maxmars/b.py", "", None),
        ("maxmars/cli/train.py", "from maxmars import b, new", "maxmars/new.py"),
        ("configs/a.py", "def f():\n  import new, json, jax", "new.py"),
        ("configs/optim.py", "import maxmars.new", "maxmars/new.py"),
        ("old.py", "import new", None),  # which the run does not import
    ],
)
def test_an_import_that_would_be_missing_is_named(checkout, file, line, missing):
    (checkout / "configs" / "optim.py").touch()
    (checkout / file).write_text(line)
    for name in ("maxmars/new.py", "new.py"):
        (checkout / name).touch()
    sources = [Source.parse(f"{checkout}/configs/optim.py:make")]

    def packed(*include):
        config = str(checkout / "configs" / "a.py")
        return names(pack(config, root=checkout, sources=sources, include=include))

    if missing is None:
        assert packed().isdisjoint({"maxmars/new.py", "new.py"})
        return
    with refused(UsageError, f" {missing},"):
        packed()
    assert missing in packed(missing)
    track(checkout, missing)
    assert missing in packed()


def test_what_a_config_imports_from_its_folder_goes_along(checkout, tmp_path):
    (checkout / "configs" / "a.py").write_text("from beside import x")
    (checkout / "configs" / "beside.py").touch()
    assert "configs/beside.py" in names(pack(str(checkout / "configs" / "a.py"), root=checkout))
    (tmp_path / "mine.py").write_text("import helper")
    (tmp_path / "helper.py").touch()
    packed = names(pack(str(tmp_path / "mine.py"), root=checkout))
    assert {"launch-config/mine.py", "launch-config/helper.py"} <= packed
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "optim.py").write_text("def (")
    with refused(ValueError, f"{tmp_path}/optim.py:1"):
        source = Source.parse(f"{tmp_path}/optim.py:make")
        pack(str(tmp_path / "mine.py"), sources=[source], root=checkout)


def test_a_config_from_elsewhere_and_scripts_go_along(checkout, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("x = 1")
    packed = pack(str(config), root=checkout, scripts={"launch-setup.sh": config})
    assert {"launch-config/mine.py", "launch-setup.sh", "configs/a.py"} <= names(packed)
    assert packed.config == "launch-config/mine.py"
    assert packed.has("launch-config")


def test_the_files_of_a_configs_functions_go_along(checkout, tmp_path):
    for folder in (checkout / "configs", tmp_path):
        (folder / "lib").mkdir()
        for name in ("lib/data.py", "optim.py", "mine.py"):
            (folder / name).touch()
    (checkout / "data.py").touch()

    def packed(folder, *sources):
        config, functions = folder / "mine.py", [Source.parse(f"{folder}/{s}") for s in sources]
        return names(pack(str(config), sources=functions, root=checkout))

    there = packed(checkout / "configs", "lib/data.py:f", "optim.py:make", "../data.py:f")
    assert {"configs/mine.py", "configs/lib/data.py", "configs/optim.py", "data.py"} <= there
    there = packed(tmp_path, "lib/data.py:f", "optim.py:make")
    assert {f"launch-config/{name}" for name in ("mine.py", "lib/data.py", "optim.py")} <= there
    outside = {tmp_path: "../data.py:f", checkout / "configs": "../../lib/data.py:f"}
    for folder, source in outside.items():
        with refused(ValueError, f"{folder}/{source}"):
            packed(folder, source)
    with refused(FileNotFoundError, "none.py:f"):
        packed(tmp_path, "none.py:f")


def test_no_checkout_and_one_that_is_too_large(checkout, tmp_path):
    with refused(ValueError, tmp_path):
        pack("x.py", root=tmp_path)
    shutil.move(checkout / ".git", tmp_path / "moved")
    with refused(ValueError, "git"):
        pack(f"{checkout}/configs/a.py", root=checkout)
    shutil.move(tmp_path / "moved", checkout / ".git")
    with (checkout / "large.bin").open("wb") as file:
        file.truncate(50_000_001)
    track(checkout, "large.bin")
    with refused(ValueError, "large.bin"):
        pack(f"{checkout}/configs/a.py", root=checkout)


def test_the_archive_has_what_is_written(checkout, tmp_path):
    (checkout / "configs" / "mount.sh").write_text("mount")
    track(checkout, "configs/mount.sh")
    packed = pack(f"{checkout}/configs/a.py", root=checkout)
    packed.write(tmp_path / "written")

    def files(folder):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {p.relative_to(folder): (p.read_bytes(), p.stat().st_mode & 0o100) for p in paths}

    written = files(tmp_path / "written")
    assert {mode for _, mode in written.values()} == {0, 0o100}  # configs/mount.sh can be run
    assert written == files(unpacked(packed, tmp_path / "unpacked"))


def test_this_checkout_packs():
    packed = pack("configs/quickstart.py")
    assert {"maxmars/train/loop.py", "pyproject.toml", "configs/quickstart.py"} <= names(packed)
    assert not [name for name in names(packed) if name.startswith(("tests/", "tools/"))]
    assert len(packed.archive) < 600_000  # a ConfigMap takes 1 MB


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
