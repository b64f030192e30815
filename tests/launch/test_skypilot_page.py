"""The page on SkyPilot and XPK: its files are YAML, and `maxmars` takes its commands."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import maxmars
from maxmars.cli.parse import parse_arguments
from maxmars.cli.train import TrainArguments
from maxmars.config.mesh import check_mesh, choose_mesh, mesh_shape

PAGE = (Path(maxmars.__file__).parent / "launch" / "skypilot.md").read_text()
TASKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
XPK = re.findall(r"--command '([^']*)'", PAGE)
VARIABLES = {  # of two nodes
    '"$(head -n 1 <<<"$SKYPILOT_NODE_IPS"):8476"': "10.0.0.1:8476",
    "$JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT": "xl-slice-job-0-0.xl:6002",
    '"$SKYPILOT_NUM_NODES"': "2",
    "$NNODES": "2",
    '"$SKYPILOT_NODE_RANK"': "1",
    "$NODE_RANK": "1",
}


def arguments_of(command):
    """What `maxmars train` reads, on the second node."""
    for name, value in VARIABLES.items():
        command = command.replace(name, value)
    command = command.replace("\\\n", "")
    assert "$" not in command
    _, flag, package, train, *words = shlex.split(command)
    assert (flag, package, train) == ("-m", "maxmars", "train")
    return parse_arguments(TrainArguments, words, prog="maxmars train")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["name"])
def test_a_task_of_skypilot(task):
    arguments = arguments_of(task["run"])
    assert arguments.workdir.startswith("gs://")  # any node can continue the run
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 134]
    nodes = task.get("num_nodes", 1)
    assert arguments.num_processes == (None if nodes == 1 else nodes)
    mesh = choose_mesh(arguments.config.mesh, arguments.config.model, 8)
    check_mesh(arguments.config, mesh_shape(mesh, 8 * nodes))


@pytest.mark.parametrize("command", XPK)
def test_a_command_of_xpk(command):
    arguments = arguments_of(command)
    has_gpus = "coordinator" in command
    assert (arguments.num_processes, arguments.process_id) == ((2, 1) if has_gpus else (None,) * 2)


def test_the_page_has_what_it_is_tested_for():
    assert (len(TASKS), len(XPK)) == (2, 2)
    assert "--restart-on-exit-codes 75" in PAGE
