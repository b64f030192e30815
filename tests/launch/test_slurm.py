"""`maxmars launch slurm`: the script runs under programs that play SLURM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cloud import launch, program, put_on_path, with_options
from running import gpus_for_jax

from maxmars.config import load_config
from maxmars.config.user_code import sources_in
from maxmars.launch import wheel

pytestmark = pytest.mark.smoke

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.py")

SBATCH = '#!/bin/bash\nprintf "%s\\n" "$*" >>"$FAKE_CLOUD/calls"\n'
SBATCH += '[[ ! -f $FAKE_CLOUD/refuse ]] || { echo "ERROR: Invalid partition" >&2; exit 1; }\n'
SBATCH += 'echo "42;cluster"\n'
SCONTROL = """#!/bin/bash
printf '%s\\n' "$*" >>"$FAKE_CLOUD/calls"
if [[ $1 == show ]]; then echo "JobId=42 JobState=$(cat "$FAKE_CLOUD/job_state")"; fi
"""
SQUEUE = """#!/bin/bash
echo "squeue $*" >>"$FAKE_CLOUD/calls"
case "$*" in
  *--steps*41*) echo "  41.batch batch main"; echo "  41.0 python3 main" ;;
  *--steps*) ;;
  *) echo 41; echo 42 ;;
esac
"""
# One task of each of two nodes, with what a real one gives them, and says of them.
SRUN = """#!/bin/bash
printf '%s\n' "$@" >"$FAKE_CLOUD/srun"
while [[ $1 == --* ]]; do shift; done
unset SLURM_CPUS_PER_TASK  # a step does not inherit it since 22.05
[[ -z ${SRUN_CPUS_PER_TASK:-} ]] || export SLURM_CPUS_PER_TASK=$SRUN_CPUS_PER_TASK
worst=0  # srun returns the highest code of its tasks
for task in 0 1; do
  SLURM_PROCID=$task SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST='n[1-2]' \
    SLURM_STEP_TASKS_PER_NODE='1(x2)' "$@"
  code=$?
  ((code == 0)) || echo "srun: error: n$task: task $task: Exited with exit code $code"
  ((code <= worst)) || worst=$code
done >>"$FAKE_CLOUD/runs/run1/slurm-$SLURM_JOB_ID.out"
exit $worst
"""
TASK = f"""#!/bin/bash
exec {sys.executable} - "$@" <<'END'
import json, os, sys
names = [n for n in os.environ if n.startswith(("SLURM", "PYTHON", "WANDB", "MODULE", "JAX"))]
seen = {{"cwd": os.getcwd(), "argv": sys.argv[1:], "env": {{n: os.environ[n] for n in names}}}}
with open(os.environ["FAKE_CLOUD"] + "/tasks", "a") as file:
    file.write(json.dumps(seen) + "\\n")
sys.exit(int(open(os.environ["FAKE_CLOUD"] + "/code").read()))
END
"""


# Names three functions of the user's own.
OWN = f"""
import dataclasses, runpy
from maxmars.config import GrainPart, MixtureConfig, OptaxConfig

def get_config():
    config = runpy.run_path({CONFIG!r})["get_config"]()
    sources = "data.py:data", "more.py:more"
    parts = tuple(GrainPart(source=source, weight=1.0) for source in sources)
    optimizer = OptaxConfig(make="optim.py:optim", learning_rate=1e-3)
    return dataclasses.replace(config, data=MixtureConfig(parts=parts), optimizer=optimizer)
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    programs = {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN, "squeue": SQUEUE}
    programs["scancel"] = '#!/bin/bash\necho "scancel $*" >>"$FAKE_CLOUD/calls"\n'
    put_on_path(tmp_path, programs, monkeypatch)
    program(tmp_path / "task", TASK)
    (tmp_path / "job_state").write_text("RUNNING Requeue=1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*options):
    words = ["slurm", CONFIG, "--name", "run1", "--workdir", "runs/run1"]
    return launch(*with_options(words, options))


def submit(cloud, capsys, *options):
    """The script of a run, with the Python of the tasks in the place of this one."""
    assert start("--nodes", "2", *options) == 0
    told = capsys.readouterr().out
    assert told.startswith("submitted job 42")
    assert "--name run1`" in told
    path = cloud / "runs" / "run1" / "run1.sbatch"
    assert f"--parsable {path}\n" in (cloud / "calls").read_text()
    text = path.read_text()
    assert f" {sys.executable} -P -m maxmars train" in text
    path.write_text(text.replace(f" {sys.executable} ", f" {cloud / 'task'} "))
    return path


def run_job(cloud, path, code, restarts=0):
    """Exit code of the job, and what scontrol was asked, if its tasks end with `code`."""
    (cloud / "code").write_text(str(code))
    (cloud / "calls").write_text("")
    job = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": str(restarts), "SLURM_CPUS_PER_TASK": "12"}
    done = subprocess.run(["bash", str(path)], env=os.environ | job, cwd="/", capture_output=True)
    return done.returncode, (cloud / "calls").read_text().splitlines()


def test_the_script_runs_a_copy_on_each_node(cloud, capsys, monkeypatch):
    gpus_for_jax(cloud, monkeypatch)
    train = ["--mesh.tensor", "2", "--name", "$(touch bad) 'x'"]
    path = submit(cloud, capsys, "--gpus-per-node", "8", "--", *train)
    options = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
    for option in (
        "--job-name=run1",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        f"--output={cloud}/runs/run1/slurm-%j.out",
        "--open-mode=append",
        "--signal=TERM@180",
        "--requeue",
    ):
        assert f"#SBATCH {option}" in options
    assert run_job(cloud, path, 0) == (0, [])
    tasks = [json.loads(line) for line in (cloud / "tasks").read_text().splitlines()]
    assert len(tasks) == 2
    (copy,) = (cloud / "runs" / "run1").glob("source-*")
    (note,) = copy.glob("package/*.dist-info/direct_url.json")
    assert json.loads(note.read_text())["url"] == (copy / wheel.NAME).as_uri()
    for number, task in enumerate(tasks):
        assert task["cwd"] == str(cloud)  # relative paths begin where the user is
        assert task["argv"] == [
            *("-P", "-m", "maxmars", "train"),
            "quickstart",
            "--workdir",
            str(cloud / "runs" / "run1"),
            *train,
        ]
        assert task["env"]["PYTHONPATH"] == f"{copy}/package"
        assert task["env"]["SLURM_PROCID"] == str(number)  # by which JAX knows its place
        assert task["env"]["SLURM_CPUS_PER_TASK"] == "12"
        assert "JAX_PLATFORMS" not in task["env"]  # a login node has no GPUs, the nodes have


@pytest.mark.seconds
def test_a_run_that_saved_is_queued_again(cloud, capsys):
    path = submit(cloud, capsys, "--max-restarts", "3")
    show = "show job 42"
    for code in (75, 134, 137):
        assert run_job(cloud, path, code) == (code, [show, "requeue 42"])
    assert run_job(cloud, path, 1) == (1, [])  # an error would come again
    assert run_job(cloud, path, 75, restarts=3) == (75, [])
    # By scancel, which also makes the run save, and by `maxmars launch slurm stop`.
    for state in ("CANCELLED Requeue=1", "RUNNING Requeue=0"):
        (cloud / "job_state").write_text(state)
        assert run_job(cloud, path, 75) == (75, [show])


def test_options_setup_prolog_and_environment(cloud, capsys, monkeypatch):
    setup, prolog = cloud / "setup.sh", cloud / "prolog.sh"
    setup.write_text('echo "$SLURM_PROCID" >>"$FAKE_CLOUD/set_up"\n')
    text = 'export MODULE="cuda $NOT_SET" PYTHONPATH=/site\nreturn 1\n'  # as of an [[ ]] at its end
    prolog.write_text(text)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    options = ["--constraint", "[h100&ib|b200*2]", "--sbatch", "--gres=gpu:8"]
    options += ["--srun", "--container-image=a b#c", "--srun=--kill-on-bad-exit=1"]
    options += ["--setup", str(setup), "--prolog", str(prolog), "--env", "WANDB_API_KEY"]
    path = submit(cloud, capsys, *options)
    assert "secret" not in path.read_text()
    lines = path.read_text().splitlines()
    assert "#SBATCH --constraint=[h100&ib|b200*2]" in lines
    assert lines.index("#SBATCH --requeue") < lines.index("#SBATCH --gres=gpu:8")
    prolog.unlink()  # the run has a copy
    assert run_job(cloud, path, 0)[0] == 0
    assert (cloud / "set_up").read_text().split() == ["0", "1"]
    words = (cloud / "srun").read_text().splitlines()
    own = ["--kill-on-bad-exit=0", "--wait=300"]
    assert words[:4] == [*own, "--container-image=a b#c", "--kill-on-bad-exit=1"]
    tasks = [json.loads(line)["env"] for line in (cloud / "tasks").read_text().splitlines()]
    (copy,) = (cloud / "runs" / "run1").glob("source-*")  # goes before what the prolog adds
    seen = {"MODULE": "cuda ", "WANDB_API_KEY": "secret", "PYTHONPATH": f"{copy}/package:/site"}
    assert all(task.items() >= seen.items() for task in tasks)
    assert len(tasks) == 2


@pytest.mark.parametrize("own", [1, 2, 78])
def test_a_process_that_failed_by_itself_ends_the_job(cloud, capsys, own):
    """Whatever the others end with: JAX aborts those that lose it, or they save."""
    path = submit(cloud, capsys)
    task = cloud / "task"
    for other in (75, 134):
        task.write_text(f"#!/bin/bash\n((SLURM_PROCID)) && exit {other}\nexit {own}\n")
        assert run_job(cloud, path, 0) == (max(own, other), [])
    task.write_text("#!/bin/bash\nexit 134\n")  # after somebody has queued the job again
    assert run_job(cloud, path, 0) == (134, ["show job 42", "requeue 42"])


def test_stop_ends_the_requeueing_and_then_asks_the_steps_to_save(cloud, capfd):
    assert launch("slurm", "status", "--name", "run1") == 0
    assert capfd.readouterr().out == "41\n42\n"
    assert launch("slurm", "stop", "--name", "run1") == 0
    squeue, *calls = (cloud / "calls").read_text().splitlines()
    assert squeue.endswith("--name=run1")
    asked = [call for call in calls if not call.startswith("squeue")]
    assert asked == [
        "update JobId=41 Requeue=0",
        "update JobId=42 Requeue=0",
        "scancel --signal=TERM 41",
        "scancel 42",  # waits in the queue
    ]
    assert len(capfd.readouterr().out.splitlines()) == 2


@pytest.mark.seconds
def test_functions_that_a_config_names_go_along(cloud, capsys):
    (cloud / "mine").mkdir()
    (cloud / "mine" / "config.py").write_text(OWN)
    for name in ("data", "more", "optim"):
        (cloud / "mine" / f"{name}.py").write_text(f"def {name}(): pass")
    words = ["mine/config.py", "--name", "run1", "--workdir", "runs/run1", "--nodes", "1"]
    assert launch("slurm", *words) == 0
    (copy,) = (cloud / "runs" / "run1").glob("source-*/mine")
    assert {path.name for path in copy.iterdir()} == {"config.py", "data.py", "more.py", "optim.py"}
    config = load_config(str(copy / "config.py"))
    functions = [source.load().__name__ for source in sources_in(config)]
    assert sorted(functions) == ["data", "more", "optim"]
    assert launch("slurm", *words, "--", "--optimizer.make", "mine/data.py:data") == 2
    assert "mine/data.py:data" in capsys.readouterr().err


@pytest.mark.seconds
def test_sbatch_refuses(cloud, capsys):
    (cloud / "refuse").touch()
    assert start() == 1
    assert "Invalid partition" in capsys.readouterr().err
