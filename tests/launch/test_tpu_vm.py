"""`maxmars launch tpu-vm` against a `gcloud` that plays a TPU with two hosts."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_cloud import FakeCloud, launch, with_options
from running import finish_well, start, wait_for, write_config
from tiny import first_difference
from xla_flags import xla_flags

from maxmars.checkpoint import list_steps

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.py")
WHERE = ["--name", "run1", "--zone", "us-east5-a"]
TWO = ["--mesh.data", "2", "--mesh.fsdp", "8", "--global-batch-size", "16"]  # slices
START = ["tpu-vm", CONFIG, *WHERE, "--accelerator", "v5p-16", "--workdir", "/nfs/run1"]
START += ["--poll-s", "0.01"]


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    cloud = FakeCloud(tmp_path / "cloud", monkeypatch)
    yield cloud
    cloud.switch_off()


@pytest.mark.seconds
def test_a_queued_spot_tpu_from_request_to_deletion(cloud, capsys, monkeypatch, tmp_path):
    waiting = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    cloud.write("creations", [{"queued": waiting, "node": [*["CREATING"] * 3, "READY"]}])
    cloud.train(
        'echo "$PWD|$*|$WANDB_API_KEY|$JAX_PLATFORMS" >"$FAKE_CLOUD/seen$FAKE_HOST"; echo "step 1"'
    )
    monkeypatch.setenv("WANDB_API_KEY", "it's $ecret")
    setup = tmp_path / "mount.sh"
    setup.write_text('echo "$PWD|$WANDB_API_KEY" >"$FAKE_CLOUD/mounted$FAKE_HOST"\n')
    options = ["--spot", "--queued", "--delete-when-done", "--env", "WANDB_API_KEY"]
    options += ["--setup", str(setup), "--project", "my-project"]
    assert launch(*START, *options, "--", "--num-steps", "7", "--name", "o'hara") == 0
    output = capsys.readouterr().out
    states = re.findall(r"^run1: .* ([A-Z_]{5,})$", output, re.MULTILINE)
    assert [state for state in states if state != "CREATING"] == [*waiting[:-1], "READY"]
    assert "step 1\n" in output
    assert "/nfs/run1\n" in output
    create = next(call for call in cloud.calls() if " create " in call)
    assert set(create.split()) >= {
        "--node-id=run1",
        "--accelerator-type=v5p-16",
        "--runtime-version=v2-alpha-tpuv5",
        "--spot",
        "--project=my-project",
    }
    assert cloud.count("queued-resources delete run1 --force") == 1
    assert cloud.read("node") is None
    for host in range(2):  # started on both, at the top of the source
        seen = (cloud.folder / f"seen{host}").read_text().strip()
        directory, arguments, key, platforms = seen.split("|")
        assert directory.endswith(f"host{host}/maxmars-run1/source")
        words = "-P -m maxmars train quickstart --workdir /nfs/run1"
        assert arguments == f"{words} --num-steps 7 --name o'hara"
        assert key == "it's $ecret"
        assert platforms == "tpu,cpu"  # JAX fails where there is no TPU
        mounted = (cloud.folder / f"mounted{host}").read_text().strip()
        assert mounted == f"{directory}|{key}"
    assert "ecret" not in output + (cloud.folder / "calls").read_text()


@pytest.mark.seconds
def test_two_slices_train_as_one_until_one_is_preempted(cloud, capsys):
    waiting = ["WAITING_FOR_RESOURCES", "ACTIVE"]
    cloud.write("creations", [{"queued": waiting, "node": ["READY"]}] * 2)
    cloud.train("""
if [[ -f $FAKE_CLOUD/once && ! -f $HOME/old ]]; then
  touch "$FAKE_CLOUD/continued$FAKE_HOST"; exit 0
fi
touch "$HOME/old"
echo "step 1 of host $FAKE_HOST"
if [[ $FAKE_HOST == 0 ]]; then
  until grep -q follow "$FAKE_CLOUD/calls"; do sleep 0.1; done; sleep 0.3
  echo '["PREEMPTED"]' >"$FAKE_CLOUD/run1-1"; touch "$FAKE_CLOUD/once"
  kill -KILL $PPID
fi
sleep 0.2; exit 75
""")
    assert launch(*START, "--queued", "--num-slices", "2", "--", *TWO) == 0
    output = capsys.readouterr().out
    assert "4 hosts\nstep 1 of host 0\n" in output
    assert "run1-1 PREEMPTED" in output
    assert cloud.count(" create ", "--node-count=2 --node-prefix=run1 ") == 2
    assert cloud.count("queued-resources delete run1 --force") == 1  # both slices go
    assert cloud.count("queued-resources ssh run1 --node=all --worker=all", " start") == 2
    assert len(list(cloud.folder.glob("continued[0-3]"))) == 4
    assert launch("tpu-vm", "status", *WHERE) == 0
    hosts = "".join(f"tpu-w-{host}: exited 0\n" for host in range(4))
    assert capsys.readouterr().out == f"run1: 2 slices READY\n{hosts}"
    assert launch(*START, "--queued", "--", *TWO[2:]) == 1
    assert "--num-slices=1" in capsys.readouterr().err


DOWN = "UNAVAILABLE: The service is currently unavailable."


@pytest.mark.seconds
def test_ssh_that_fails_after_gcloud_and_a_log_whose_connection_breaks(cloud, capsys):
    """Failures of gcloud are not counted as failures of ssh, of which four in a row end it."""
    cloud.write("outages", ["", *[DOWN] * 3])  # at the launcher: then the first ssh fails
    cloud.write("ssh_failures", 2)
    cloud.write("follow_lines", 3)
    cloud.train('for i in {1..12}; do echo "line $i"; sleep 0.05; done')
    assert launch(*START) == 0
    output = capsys.readouterr().out
    assert (output.count(DOWN), cloud.count(" scp ")) == (3, 2)
    lines = [line for line in output.splitlines() if line.startswith("line ")]
    assert lines == [f"line {i}" for i in range(1, 13)]
    assert (cloud.count(" follow 0"), cloud.count(" follow 3")) == (1, 1)


@pytest.mark.seconds
def test_gcloud_that_fails_for_a_while_is_asked_again(cloud, capsys):
    waiting = [*["WAITING_FOR_RESOURCES"] * 4, "ACTIVE"]
    cloud.write("creations", [{"queued": waiting, "node": ["READY"]}])
    cloud.write("outages", [*[""] * 5, *[DOWN] * 3])  # it has answered before
    cloud.train('echo "step 1"; echo \'["", "INTERNAL: try again"]\' >"$FAKE_CLOUD/outages"')
    assert launch(*START, "--queued", "--delete-when-done") == 0
    output = capsys.readouterr().out
    assert (output.count(DOWN), output.count("INTERNAL")) == (3, 1)
    assert cloud.read("node") is None
    cloud.write("outages", [DOWN])
    assert launch(*START) == 1  # the first question shows what is set up wrong
    assert DOWN in capsys.readouterr().err
    cloud.write("creations", [{"queued": waiting, "node": ["READY"]}])
    cloud.write("outages", [*[""] * 3, *[DOWN] * 100])
    assert launch(*with_options([*START, "--queued"], ["--poll-s", "0.0001"])) == 1
    assert DOWN in capsys.readouterr().err
    assert len(cloud.read("outages")) == 70


@pytest.mark.seconds
def test_a_deletion_whose_answer_is_lost_creates_nothing(cloud, capsys):
    cloud.write("lost_answer", "UNAVAILABLE: The connection was reset.")
    assert launch(*START, "--delete-when-done") == 0
    assert "connection was reset" in capsys.readouterr().out
    assert (cloud.count(" create "), cloud.read("node")) == (1, None)


DENIED = "PERMISSION_DENIED: Permission 'tpu.nodes.update' denied"
NO_ROUTE = "connect to host 10.0.0.2 port 22: No route to host"
NO_PROJECT = "The required property [project] is not set: it can be set by the attribute [project]"
SHORT = {"error": "There is no more capacity in the zone"}
QUEUE_FAILED, STOPPED = {"queued": ["FAILED"], "node": []}, {"node": ["STOPPED"]}
COSTS = "tpu-vm delete"  # until then
# What is wrong, options, what is told, and the numbers of creations, copies and other calls by ssh.
LASTING = {
    "ssh": ({"ssh_failures": 10_000}, "", ["255", COSTS], (1, 4, 4)),
    "rights": ({"ssh_failures": 10_000, "ssh_error": DENIED}, "", [DENIED, COSTS], (1, 1, 1)),
    "route": ({"ssh_failures": 10_000, "ssh_error": NO_ROUTE}, "", [NO_ROUTE, COSTS], (1, 4, 4)),
    "a host": ({"unreachable": [1]}, "", ["1 of 2 hosts", COSTS], (1, 4, 4)),
    "rights to ask": ({"describe_error": DENIED}, "", [DENIED], (0, 0, 0)),
    "project": ({"describe_error": NO_PROJECT}, "", ["--project"], (0, 0, 0)),
    "rights to create": ({"creations": [{"error": DENIED}]}, "", [DENIED], (1, 0, 0)),
    "capacity": ({"creations": [SHORT]}, "", ["--queued"], (1, 0, 0)),
    "request": ({"creations": [QUEUE_FAILED]}, "--queued", ["FAILED"], (1, 0, 0)),
    "TPU": ({"creations": [STOPPED]}, "", ["TPU STOPPED"], (1, 0, 0)),
}


@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_ends_the_launch(cloud, capsys, name):
    wrong, options, named, calls = LASTING[name]
    for file, value in wrong.items():
        cloud.write(file, value)
    assert launch(*with_options(START, ["--poll-s", "0.0001", *options.split()])) == 1
    error = capsys.readouterr().err
    assert [word for word in named if word not in error] == []
    assert tuple(map(cloud.count, (" create ", " scp ", " ssh "))) == calls
    assert cloud.count(" delete ") == 0


@pytest.mark.seconds
def test_flags_of_gcloud_and_hosts_behind_iap(cloud):
    options = ["--gcloud-flag", "--internal-ips", "--gcloud-flag=--network=my net", "--alpha"]
    assert launch(*START, *options, "--tunnel-through-iap") == 0
    (create,) = (call for call in cloud.calls() if " create " in call)
    assert " --internal-ips --network=my net " in create
    reaching = [call for call in cloud.calls() if " ssh " in call or " scp " in call]
    assert all(" --tunnel-through-iap " in call for call in reaching)
    assert launch("tpu-vm", "status", *WHERE, "--tunnel-through-iap") == 0
    assert launch("tpu-vm", "logs", *WHERE, "--internal-ip") == 0
    assert cloud.count(" --internal-ip ", " follow ") == 1


@pytest.mark.seconds
def test_a_run_that_fails_is_not_started_again(cloud, capsys):
    cloud.train("""echo "maxmars: error: no data"
[[ $FAKE_HOST == 1 ]] && exit 1; exit 75  # which waits for the other one, in vain
""")
    assert launch(*START, "--poll-s", "60") == 1
    captured = capsys.readouterr()
    assert "error: no data" in captured.out
    assert "tpu-w-1 exited 1" in captured.err
    assert "tpu-vm delete" in captured.err
    assert cloud.count("--command=bash maxmars-run1.sh start") == 1
    assert launch("tpu-vm", "status", *WHERE) == 0
    assert "tpu-w-0: lost\ntpu-w-1: exited 1\n" in capsys.readouterr().out


ENDS_TWICE = """
echo "$FAKE_HOST" >>"$FAKE_CLOUD/starts"
case $(grep -c "$FAKE_HOST" "$FAKE_CLOUD/starts") in
  1) exit 75 ;;
  2) kill -ABRT $$ ;;
esac
echo "trained on $FAKE_HOST"
"""


@pytest.mark.seconds
@pytest.mark.parametrize("most", [1, 2])
def test_each_host_starts_its_process_again_as_often_as_it_may(cloud, capsys, most):
    cloud.train(ENDS_TWICE)
    assert launch(*START, "--max-restarts", str(most)) == (1 if most == 1 else 0)
    assert capsys.readouterr().err.count("exited 134") == (2 if most == 1 else 0)
    starts = (cloud.folder / "starts").read_text().split()
    assert sorted(starts) == ["0"] * (1 + most) + ["1"] * (1 + most)
    assert cloud.count(" start ") == cloud.count(" scp ") == cloud.count(" create ") == 1
    assert launch("tpu-vm", "logs", *WHERE) == 0
    log = capsys.readouterr().out
    assert "restart 1 of" in log
    assert log.rstrip().endswith("trained on 0") == (most == 2)


TRAIN_UNTIL_STOPPED = """
trap 'echo saving; exit 75' TERM
echo "step 1"
for _ in {1..1200}; do sleep 0.05; done
"""


@pytest.mark.seconds
def test_status_logs_stop_and_a_second_watcher(cloud, capsys):
    cloud.train(TRAIN_UNTIL_STOPPED)
    assert launch("tpu-vm", "status", *WHERE) == 0
    assert capsys.readouterr().out == "run1: not there\n"
    codes = []
    watchers = [threading.Thread(target=lambda: codes.append(launch(*START)), daemon=True)]
    watchers[0].start()
    pids = [cloud.host(number) / "maxmars-run1" / "train.pid" for number in range(2)]
    wait_for(lambda: all(pid.exists() for pid in pids), 20)
    assert launch("tpu-vm", "status", *WHERE) == 0
    shown = capsys.readouterr().out  # among the lines of the watcher
    assert shown.count("run1: TPU READY\n") >= 2
    assert shown.count(": running\n") == 2
    watchers.append(threading.Thread(target=lambda: codes.append(launch(*START)), daemon=True))
    watchers[1].start()
    wait_for(lambda: cloud.count(" follow ") == 2, 20)
    assert launch("tpu-vm", "stop", *WHERE) == 0
    for watcher in watchers:
        watcher.join(20)
    output = capsys.readouterr().out
    assert codes == [75, 75]
    assert output.count(": stopped 75\n") == 2
    assert cloud.count(" start ") == 1
    assert launch("tpu-vm", "logs", *WHERE) == 0
    assert capsys.readouterr().out == "step 1\nsaving\n"
    assert launch("tpu-vm", "delete", *WHERE) == 0
    assert launch("tpu-vm", "delete", *WHERE) == 0
    assert capsys.readouterr().out == "run1: deleted\nrun1: there is none\n"


@pytest.mark.seconds
def test_hosts_of_which_one_has_lost_its_process_start_together(cloud):
    cloud.train('trap "exit 75" TERM; echo "$FAKE_HOST" >>"$FAKE_CLOUD/starts"; sleep 0.2')
    assert launch(*START) == 0
    cloud.train("exec -a maxmars sleep 60")
    script = cloud.host(1) / "maxmars-run1.sh"
    environment = os.environ | {"HOME": str(cloud.host(1)), "FAKE_HOST": "1"}
    command = ["bash", str(script), "start"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    cloud.train('echo "$FAKE_HOST" >>"$FAKE_CLOUD/starts"')
    before = (cloud.folder / "starts").read_text().split()
    assert launch(*START) == 0
    after = (cloud.folder / "starts").read_text().split()
    assert sorted(after[len(before) :]) == ["0", "1"]


@pytest.mark.seconds
def test_an_installation_or_a_setup_that_fails_shows_its_end(cloud, tmp_path, capsys):
    (cloud.folder / "pip_fails_on_1").touch()
    assert launch(*START) == 1
    captured = capsys.readouterr()
    assert "tpu-w-1" in captured.err
    assert "tpu-w-0" not in captured.err
    assert "launch-constraints.txt" in captured.out  # pip's output
    (cloud.folder / "pip_fails_on_1").unlink()
    setup = tmp_path / "mount.sh"
    setup.write_text("echo no such bucket >&2; exit 3\n")
    assert launch(*START, "--setup", str(setup)) == 1
    captured = capsys.readouterr()
    assert "tpu-w-0, tpu-w-1" in captured.err
    assert "no such bucket" in captured.out
    assert cloud.count(" start ") == 0
    assert launch(*START) == 0  # the same command goes on


@pytest.mark.seconds
def test_a_preempted_tpu_is_created_anew_when_there_is_capacity(cloud, capsys):
    ready = {"node": ["READY"]}
    cloud.write("creations", [ready, SHORT, SHORT, ready])
    cloud.train("""
[[ -f $FAKE_CLOUD/once ]] && exit 0  # on the new hosts, if not on the old ones before
sleep 0.3; touch "$FAKE_CLOUD/once"; echo '["PREEMPTED"]' >"$FAKE_CLOUD/node"; exit 75
""")
    assert launch(*START, "--spot") == 0
    output = capsys.readouterr().out
    assert "restart 3 of" in output
    assert cloud.count(" create ") == 4
    assert cloud.count(" scp ") == 2  # the new hosts knew nothing
    assert " delete --name run1 --zone us-east5-a`" in output


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_hosts_preempted_and_killed_end_as_if_undisturbed(cloud, tmp_path, capsys, monkeypatch):
    """First the processes end with their hosts and continue on new ones; then the one with JAX's
    coordinator is killed, and the other ends with it."""
    monkeypatch.chdir(tmp_path)
    fields = "num_steps=60, num_microbatches=1, model=dataclasses.replace(MODEL, num_layers=1)"
    fields += ", mesh=MeshConfig(fsdp=2), eval=EvalConfig(every=None)"
    write_config(tmp_path, f"{fields}, checkpoint=CheckpointConfig(every=15)")
    slurm = {"JOB_ID": os.getpid(), "STEP_NODELIST": "127.0.0.1", "NTASKS": 2, "LOCALID": 0}
    variables = "".join(f"export SLURM_{name}={value}\n" for name, value in slurm.items())
    cloud.train(
        f"export JAX_PLATFORMS=cpu PYTHONPATH={ROOT} MAXMARS_CACHE={tmp_path / 'cache'}\n"
        f"export XLA_FLAGS='{xla_flags(1)}'\n"
        f"{variables}export SLURM_PROCID=$FAKE_HOST\n"  # what finds the processes here
        f'exec {sys.executable} "$@"\n'
    )
    disturbed, codes = tmp_path / "disturbed", []
    command = ["tpu-vm", "config.py", *WHERE, "--accelerator", "v5p-16", "--spot", "--queued"]
    command += ["--workdir", str(disturbed), "--poll-s", "1"]
    watcher = threading.Thread(target=lambda: codes.append(launch(*command)), daemon=True)
    watcher.start()

    def send(signal, host):
        os.kill(int((cloud.host(host) / "maxmars-run1" / "train.pid").read_text()), signal)

    metrics = disturbed / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") >= 8, 150)
    cloud.write("queued", ["SUSPENDING", "SUSPENDED"])
    cloud.write("node", ["PREEMPTED"])
    for host in range(2):  # as a machine that is taken away does
        send(signal.SIGTERM, host)
    wait_for(lambda: max(list_steps(disturbed / "checkpoints"), default=0) >= 30, 150)
    send(signal.SIGKILL, 0)
    watcher.join(240)
    assert codes == [0]
    output = capsys.readouterr().out
    assert "preempted" in output
    assert int(output.split("continuing from step ")[1].split()[0]) >= 8
    rows = map(json.loads, metrics.read_text().splitlines())
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == list(range(1, 61))
    log = (cloud.host(1) / "maxmars-run1" / "train.log").read_text()
    assert re.findall("restart [0-9] of", log) == ["restart 1 of"]
    assert cloud.count(" create ") == cloud.count(" start ") == 2
    assert "done: 60 steps" in (disturbed / "logs" / "host_001.log").read_text()
    finish_well([start(tmp_path, "undisturbed")])
    assert first_difference(tmp_path / "undisturbed", disturbed) is None
