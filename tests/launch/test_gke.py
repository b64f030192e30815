"""`maxmars launch gke`: the manifests, and what is asked of a `kubectl` that writes it down."""

import base64
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from fake_cloud import launch, put_on_path, with_options

from maxmars.launch import wheel

pytestmark = pytest.mark.smoke

CONFIG = str(Path(__file__).with_name("large_batch.py"))
START = ["gke", CONFIG, "--name", "run1", "--workdir", "/mnt/run1"]
TPU = [*START, "--topology", "v5p:4x4x4"]

# Writes its words and, of `create`, the file; `get` finds what is named in the file `there`, and
# claims with the accessModes in `modes`.
KUBECTL = """#!/bin/bash
printf '%s\\n' "$*" >>"$FAKE_CLOUD/calls"
case $1 in
  create) file="${2#--filename=}"; cp -p "$file" "$FAKE_CLOUD/$(basename "$file")" ;;
  get)
    if [[ $2 == pvc/* && -f $FAKE_CLOUD/modes ]]; then cat "$FAKE_CLOUD/modes"; exit; fi
    grep -qsx "$2" "$FAKE_CLOUD/there" || { echo "NotFound" >&2; exit 1; }
    ;;
  logs) echo "step 1" ;;
  delete) [[ ! -f $FAKE_CLOUD/forbidden ]] || { echo "ERROR: forbidden" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    put_on_path(tmp_path, {"kubectl": KUBECTL}, monkeypatch)
    return tmp_path


def manifest(capsys, *arguments):
    """The JobSet of a dry run."""
    assert launch(arguments[0], "--dry-run", *arguments[1:]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def pod_of(jobset):
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job, job["template"]["spec"], job["template"]["spec"]["containers"][0]


def variables(container):
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_text_that_kubectl_would_take_for_something_else_is_quoted(capsys, tmp_path):
    """Its parser knows more numbers and truth values than PyYAML."""
    words = ["y", "N", "1e3", "0o17", "1.5e3"]
    labels = "".join(f" key{word}: '{word}'\n" for word in words)
    patch = tmp_path / "patch.yaml"
    patch.write_text(f"metadata:\n labels:\n{labels.replace(' key', '  key')}")
    assert launch("gke", "--dry-run", *TPU[1:], "--patch", str(patch)) == 0
    text = capsys.readouterr().out
    for word in words:
        assert f" key{word}: '{word}'\n" in text
    assert "\n  name: run1\n" in text


def test_a_tpu_slice(capsys):
    jobset = manifest(capsys, *TPU, "--num-slices", "2", "--max-restarts", "3")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    job, pod, container = pod_of(jobset)
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (16, 16, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert "[tpu,gcs]" in container["command"][2]
    assert variables(container)["JAX_PLATFORMS"] == "tpu,cpu"  # no CPUs in the place of chips
    # 1, 2 and 78 fail the JobSet; 75, and nodes that go, restart it.
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [1, 2, 78]
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


PATCH = """
spec:
  replicatedJobs:
  - name: slice-job
    template: {spec: {template: {
      metadata: {annotations: {networking.gke.io/interfaces: "[]"}},
      spec: {
        initContainers: [{name: nccl, image: gib}],
        containers: [{
          name: maxmars,
          env: [{name: NCCL_NET, value: gIB}, {name: PYTHONUNBUFFERED, value: "0"}],
          volumeMounts: [{name: gib, mountPath: /usr/local/gib}, {name: shm, mountPath: /dev/shm}]
        }],
        volumes: [{name: gib, emptyDir: {}}, {name: shm, emptyDir: {sizeLimit: 1Gi}}]
      }
    }}}
"""


def test_gpus_of_two_nodes_need_a_patch_and_are_told_who_they_are(capsys, tmp_path):
    patch = tmp_path / "gib.yaml"
    patch.write_text(PATCH)
    words = [*START, "--topology", "h200:16", "--patch", str(patch)]
    job, pod, container = pod_of(manifest(capsys, *words))
    assert job["template"]["metadata"]["annotations"] == {"networking.gke.io/interfaces": "[]"}
    assert job["template"]["metadata"]["labels"] == {"xpk.google.com/workload": "run1"}
    assert pod["initContainers"] == [{"name": "nccl", "image": "gib"}]
    assert {v["name"] for v in pod["volumes"]} == {"source", "shm", "gib"}
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert [m["mountPath"] for m in container["volumeMounts"]] == [
        "/maxmars-source",
        "/dev/shm",
        "/usr/local/gib",
    ]
    values = variables(container)
    assert (values["NCCL_NET"], values["PYTHONUNBUFFERED"]) == ("gIB", "0")
    assert values["JAX_PLATFORMS"] == "cuda,cpu"
    assert "LD_LIBRARY_PATH" in values
    assert job["completions"] == 2
    assert container["resources"]["requests"] == {"nvidia.com/gpu": 8}
    place = "--coordinator run1-slice-job-0-0.run1:8476 --num-processes 2 --process-id "
    assert place + '"$JOB_COMPLETION_INDEX"' in container["command"][2]
    assert "[cuda,gcs]" in container["command"][2]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}


def test_options_that_change_the_pods(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--claim", "tokens:/data", "b:/b", "--service-account", "ksa"]
    options += ["--spot", "--no-install", "--image", "mine:1", "--env", "JAX_PLATFORMS"]
    jobset = manifest(capsys, *TPU, *options)
    assert jobset["metadata"]["labels"] == {"xpk.google.com/workload": "run1"}
    _, pod, container = pod_of(jobset)
    assert pod["serviceAccountName"] == "ksa"
    claims = {v["name"]: v["persistentVolumeClaim"] for v in pod["volumes"][2:]}
    paths = {m["mountPath"]: claims.get(m["name"]) for m in container["volumeMounts"]}
    assert paths["/data"] == {"claimName": "tokens"}
    assert paths["/b"] == {"claimName": "b"}
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x4"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
    assert pod["tolerations"] == [spot | {"effect": "NoSchedule"}]
    assert container["image"] == "mine:1"
    assert "JAX_PLATFORMS" not in variables(container)  # the Secret has it
    script = container["command"][2]
    assert "[tpu,gcs]" not in script
    assert f"--no-index --no-deps --force-reinstall ./{wheel.NAME}" in script
    assert "exec python3 -P -m maxmars train" in script


def test_words_are_quoted_in_the_script(capsys, tmp_path):
    word = "$(touch bad)\n'x': {y} $(PYTHONUNBUFFERED) $$$(MY)"
    setup = tmp_path / "setup.sh"
    setup.write_text("true\n")
    _, _, container = pod_of(manifest(capsys, *TPU, "--setup", str(setup), "--", "--name", word))
    values = variables(container)
    # What Kubernetes makes of it: $$ is a dollar, and $(NAME) the value of a variable that is set.
    script = re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[1] is None else values.get(match[1], match[0]),
        container["command"][2],
    )
    assert shlex.quote(word) in script
    assert "bash launch-setup.sh" in script
    subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.seconds
def test_what_is_created(cloud, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "it's: $hush")
    assert launch(*TPU, "--env", "WANDB_API_KEY", "--namespace", "team") == 0
    output = capsys.readouterr().out
    assert "ConfigMap run1-source" in output
    calls = (cloud / "calls").read_text()
    assert [line.split()[0] for line in calls.splitlines()] == ["get", "delete", *["create"] * 3]
    assert "hush" not in output + calls
    secret = cloud / "secret.json"
    assert json.loads(secret.read_text())["stringData"] == {"WANDB_API_KEY": "it's: $hush"}
    assert secret.stat().st_mode & 0o077 == 0
    packed = json.loads((cloud / "configmap.json").read_text())
    assert packed["metadata"] == {"name": "run1-source", "namespace": "team"}
    archive = base64.b64decode(packed["binaryData"]["source.tar.gz"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        names = {"tests/launch/large_batch.py", "launch-constraints.txt", wheel.NAME}
        assert set(tar.getnames()) == names
    jobset = json.loads((cloud / "jobset.json").read_text())
    _, _, container = pod_of(jobset)
    assert container["envFrom"] == [{"secretRef": {"name": "run1-environment"}}]
    assert "hush" not in json.dumps(jobset)
    assert launch(*TPU, "--env", "WANDB_API_KEY", "--dry-run") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("apiVersion: ")  # the JobSet alone
    assert "hush" not in printed.out + printed.err
    assert ("kB" in printed.err, "WANDB_API_KEY" in printed.err) == (True, True)  # what it lacks


def test_ctrl_c_ends_the_log_and_not_the_run(tmp_path, monkeypatch):
    kubectl = '#!/bin/bash\necho "step 1"; exec sleep 60\n'
    put_on_path(tmp_path, {"kubectl": kubectl}, monkeypatch)
    command = [sys.executable, "-m", "maxmars", "launch", "gke", "logs", "--name", "run1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes["start_new_session"] = True
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:
        assert process.stdout.readline() == "step 1\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: kubectl gets it too
        assert process.stdout.read().count("\n") == 2  # an empty line, and that the run goes on
    assert process.returncode == 130


def test_a_jobset_that_is_there(cloud, capsys):
    (cloud / "there").write_text("jobset/run1\n")
    assert launch(*TPU) == 1
    assert "JobSet run1" in capsys.readouterr().err
    assert launch("gke", "status", "--name", "run1") == 1  # the fake has no pods
    assert launch("gke", "logs", "--name", "run1") == 0
    assert launch("gke", "delete", "--name", "run1") == 0
    calls = (cloud / "calls").read_text()
    assert "get pods --selector=jobset.sigs.k8s.io/jobset-name=run1" in calls
    assert "delete configmap/run1-source secret/run1-environment" in calls
    (cloud / "forbidden").touch()
    assert launch("gke", "delete", "--name", "run1") == 1
    assert "ERROR: forbidden" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("modes", "options", "code"),
    [
        ('["ReadWriteOnce","ReadWriteMany"]', "", 0),
        ('["ReadWriteOnce"]', "", 1),
        ('["ReadWriteOnce"]', "--topology v6e:2x4", 0),  # one pod
        ('["ReadOnlyMany"]', "", 1),
        ('["ReadOnlyMany"]', "--workdir gs://bucket/run1", 0),
        (None, "--topology v6e:2x4", 1),  # there is no such claim
    ],
)
def test_a_claim_must_be_for_all_pods(cloud, capsys, modes, options, code):
    if modes is not None:
        (cloud / "modes").write_text(modes)
    words = with_options([*TPU, "--claim", "disk:/mnt"], options.split())
    assert launch(*words) == code
    assert ("create" in (cloud / "calls").read_text()) == (code == 0)
    assert code == 0 or "disk" in capsys.readouterr().err


@pytest.mark.seconds
def test_more_than_a_configmap_holds(cloud, capsys):
    (cloud / "setup.sh").write_bytes(os.urandom(1_100_000))
    assert launch(*TPU, "--setup", str(cloud / "setup.sh")) == 1
    assert "1 MB" in capsys.readouterr().err
