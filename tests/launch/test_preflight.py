"""What `maxmars launch` refuses and prints without gcloud, kubectl and SLURM: words come before
programs."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_cloud import launch, with_options
from running import gpus_for_jax

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.py")
LARGE_BATCH = str(Path(__file__).with_name("large_batch.py"))
RUN = ["--name", "run1", "--workdir", "/nfs/run1"]
TPU = ["tpu-vm", QUICKSTART, *RUN, "--zone", "us-east5-a", "--accelerator", "v5p-16"]
GKE = ["gke", LARGE_BATCH, *RUN, "--topology", "v5p:4x4x4"]
SLURM = ["slurm", QUICKSTART, *RUN]
STATUS = ["tpu-vm", "status", "--name", "run1", "--zone", "us-east5-a"]
GPT2 = "gpt2:size=small,optimizer=mars"
TPU_GPT2, GKE_GPT2 = ["tpu-vm", GPT2, *TPU[2:]], ["gke", GPT2, *RUN, "--topology", "v5p:2x2x4"]
TOKENS = "--data.path"
REFUSALS = [
    (2, TPU, "--name Run_1", "Run_1"),
    (2, TPU, "--name " + "x" * 41, "x" * 41),
    (2, TPU, "--zone us-east5-a;rm", "us-east5-a;rm"),
    (2, TPU, "--project a;b", "--project"),
    (2, TPU, "--accelerator h100:8", "--accelerator h100:8"),
    (2, TPU, "--accelerator v5p:4x4x16", "--accelerator v5p:4x4x16"),  # v5p-512 is 4x8x8
    (2, TPU, "--accelerator v5p-15", "v5p-16, v5p-8, v5p-32"),
    (2, TPU, "--accelerator v6e-2", "--accelerator v6e-2"),
    (2, TPU, "--accelerator v6e-8 --queued --num-slices 2", "8 chips of v6e"),
    (2, TPU, "--runtime-version v2;x", "v2;x"),
    (2, TPU, "--workdir runs/x", "runs/x"),
    (2, TPU, "--env A=B", "A=B"),
    (2, TPU, "--env NOT_SET_HERE", "--env NOT_SET_HERE"),
    (2, TPU, "--num-slices 2", "--queued"),
    (2, TPU, "--queued --num-slices 0", "--num-slices 0"),
    (1, TPU, "--queued --num-slices 2 -- --mesh.fsdp 16", "mesh.data=1"),
    (2, TPU, "--gcloud-flag x", "--gcloud-flag='x'"),
    (2, TPU, "--tunnel-through-iap --internal-ip", "--internal-ip"),
    (1, TPU, "-- --mesh.data 3", "data=3 fsdp=1 tensor=1"),
    (1, TPU, "-- --global-batch-size 12", "global_batch_size=12"),
    (2, TPU, "-- --workdir x", "--workdir"),
    (2, TPU, "-- --log.wandb online", "wandb"),
    (2, TPU, "--env WANDB_API_KEY -- --log.wandb offline", "wandb"),
    (2, TPU, "-- --log.tensorboard True", "tensorboardX"),
    (2, TPU_GPT2, f"-- {TOKENS} /mnt/tokens", f"{TOKENS} /mnt/tokens"),
    (2, TPU_GPT2, "", f"{TOKENS} data/"),  # gpt2's default is a relative directory
    (2, TPU, "-- --eval.data wiki.txt", "--eval.data wiki.txt"),
    (2, GKE, "--topology v5e:3x3", "v5e:3x3"),
    (2, GKE, "--topology h100:16", "--patch"),
    (2, GKE, "--num-slices 0", "--num-slices 0"),
    (2, GKE, "--claim a:b", "a:b"),
    (2, GKE, "--namespace A", "--namespace='A'"),
    (2, GKE, f"--patch {__file__}", __file__),  # no YAML
    (2, GKE, "--patch /dev/null", "/dev/null"),  # no mapping
    (2, GKE, "-- --log.wandb online", "wandb"),
    (2, GKE_GPT2, f"--claim disk:/mnt -- {TOKENS} /data/tokens", f"{TOKENS} /data/tokens"),
    (2, SLURM, ["--partition", "a\n#SBATCH --x"], "a\\n#SBATCH --x"),
    (2, SLURM, "--sbatch gres=gpu:8", "gres=gpu:8"),
    (2, SLURM, ["--sbatch", "--comment=a b"], "--comment=a b"),
    (2, SLURM, "--sbatch --array=1-3", "--array=1-3"),
    (2, SLURM, "--sbatch --output=/logs/%j.out", "--output=/logs/%j.out"),
    (2, SLURM, "--srun --quiet", "--quiet"),
    (2, SLURM, "--srun bash", "bash"),
    (2, SLURM, "--process-per gpu", "--gpus-per-node"),
    (2, SLURM, "--workdir gs://b/x", "gs://b/x"),
    (2, SLURM, ["--workdir", "a b"], "a b"),
    (2, SLURM, ["--name", "a b"], "a b"),
    (2, SLURM, "-- --log.wandb online", "WANDB_API_KEY"),
]
TAKEN = [
    (TPU_GPT2, f"-- {TOKENS} gs://bucket/tokens", ""),
    (TPU, "-- --eval.data gs://bucket/wiki", ""),
    (TPU_GPT2, f"--setup SETUP -- {TOKENS} /mnt/tokens", ""),
    (GKE_GPT2, f"--claim disk:/data -- {TOKENS} /data/tokens", ""),
    (SLURM, "--time 1-0", "#SBATCH --time=1-0\n"),
    (
        SLURM,
        "--gpus-per-node 4 --process-per gpu",
        "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n",
    ),
]


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """A PATH without programs, a home without a key."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def command(words, options):
    options = options.split() if isinstance(options, str) else options
    return with_options(words, options)


@pytest.mark.parametrize(
    ("code", "words", "options", "named"), REFUSALS, ids=[f"{w[0]} {o}" for _, w, o, _ in REFUSALS]
)
def test_refusals(capsys, monkeypatch, code, words, options, named):
    if "WANDB_API_KEY" in options:
        monkeypatch.setenv("WANDB_API_KEY", "key")
    assert launch(*command(words, options)) == code
    error = capsys.readouterr().err
    assert error.startswith("maxmars: error: ")
    assert error.count("\n") == 1
    assert named in error


@pytest.mark.parametrize(
    ("words", "options", "shown"), TAKEN, ids=[f"{w[0]} {o}" for w, o, _ in TAKEN]
)
def test_what_is_taken(capsys, tmp_path, monkeypatch, words, options, shown):
    gpus_for_jax(tmp_path, monkeypatch)
    (tmp_path / "setup.sh").write_text("mount")
    options = options.replace("SETUP", str(tmp_path / "setup.sh"))
    assert launch(*command(words, f"--dry-run {options}")) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        (TPU, "--accelerator v5p:2x2x2 --price 4.2", "2 hosts, 8 x TPU v5p, 33.60"),
        (GKE, "--topology v5p-128", "16 hosts, 64 x TPU v5p"),
    ],
)
def test_a_slice_is_named_by_its_chips_or_by_googles_type(capsys, words, options, told):
    shown = []
    own = ["--price", "4.2"] if "--price" in options else []
    for given in (own, options.split()):
        assert launch(*command(words, ["--dry-run", *given])) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert told in shown[0].err


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (QUICKSTART, "--gpus-per-node 8", "one for 8 GPUs"),
        (QUICKSTART, "--gpus-per-node 8 --cpus-per-task 64", None),
        (QUICKSTART, "--gpus-per-node 8 --sbatch=--exclusive", None),
        (QUICKSTART, "-- --eval.data wiki.txt", "--eval.data wiki.txt is relative"),
        ("gpt2", "", "124M parameters train on CPUs"),
        ("gpt2", "--gpus-per-node 8 --cpus-per-task 64", "is relative"),
    ],
)
def test_what_is_unwise_under_slurm_is_warned_of(
    capsys, tmp_path, monkeypatch, config, options, said
):
    gpus_for_jax(tmp_path, monkeypatch)
    words = ["slurm", config, *RUN, "--dry-run", "--price", "2"]
    assert launch(*command(words, options)) == 0
    told = capsys.readouterr().err
    warnings = [line for line in told.splitlines() if "warning" in line]
    assert any(said in line for line in warnings) if said else not warnings
    assert ("8 x GPU, 16.00 an hour" in told) == ("8" in options)


def test_files_that_another_python_imports_are_not_tried_in_this_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("optim.py").write_text("import not_installed_here\n\ndef make(learning_rate): pass\n")
    own = "gpt2:optimizer=optim.py:make"
    data = ["--", TOKENS, "gs://bucket/tokens"]
    container = "--srun=--container-image=mine"
    for words in (["tpu-vm", *TPU_GPT2[2:]], ["gke", *GKE_GPT2[2:]], ["slurm", *RUN, container]):
        assert launch(words[0], own, *words[1:], "--dry-run", *data) == 0
    assert launch("slurm", own, *RUN, "--dry-run", *data) == 1
    assert "not_installed_here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "program"),
    [(TPU, "gcloud"), (STATUS, "gcloud"), (GKE, "kubectl"), (SLURM, "sbatch")],
)
def test_a_run_without_the_program_of_its_platform(capsys, words, program):
    assert launch(*words) == 1
    assert f"`{program}`" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="this JAX has CUDA")
def test_gpus_are_not_asked_for_to_train_on_cpus(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    words = [*SLURM, "--dry-run"]
    for asked in ("--sbatch=--gres=gpu:8", "--sbatch=--gpus=16", "--gpus-per-node=8"):
        assert launch(*words, asked) == 2  # no CUDA in this Python
        assert sys.executable in capsys.readouterr().err
    words.append("--gpus-per-node=8")
    setup = tmp_path / "setup.sh"
    setup.touch()
    for option in (f"--setup={setup}", f"--prolog={setup}", "--srun=--container-image=cuda"):
        assert launch(*words, option) == 0  # which may have it
    gpus_for_jax(tmp_path, monkeypatch)
    assert launch(*words) == 0
    capsys.readouterr()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the job would inherit
    assert launch(*words) == 2
    assert "JAX_PLATFORMS=cpu" in capsys.readouterr().err
