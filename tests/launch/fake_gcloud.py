"""Stands for `gcloud` in tests: one TPU whose hosts are folders, its state in files.

In the folder $FAKE_CLOUD: `queued` and `node` hold the states that `describe` tells one after the
other (the last stays), while there is such a thing; `creations` what the next creations lead to;
`ssh_failures` how often ssh fails; `follow_lines` after how many lines the first connection that
follows a log breaks; `hosts` their number in each slice; `nodes` the names of the
slices, and a file of such a name the states of that one; `calls` every command line; `ssh_error`
what ssh says when it fails; `unreachable` numbers of hosts that ssh does not reach, of this TPU;
`describe_error` what every `describe` fails with; `outages` a list, of which each `describe` and
`delete` takes the first entry and fails with it, unless it is empty; `lost_answer` what one
`delete` fails with that deletes all the same.
As with gcloud, IAP is known to `alpha` alone, and a queued resource of several slices names no
`nodeId` at first.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])


def read(name, default=None):
    path = CLOUD / name
    return json.loads(path.read_text()) if path.exists() else default


def write(name, value):
    part = CLOUD / f"{name}.part{os.getpid()}"
    part.write_text(json.dumps(value))
    part.rename(CLOUD / name)


def fail(message, code=1):
    print(f"ERROR: (gcloud.compute.tpus) {message}", file=sys.stderr)
    sys.exit(code)


def describe(name):
    states = read(name)
    if states is None:
        fail(f"NOT_FOUND: Resource '{name}' was not found")
    if len(states) > 1:
        write(name, states[1:])
    return states[0]


def host(number):
    return CLOUD / f"host{number}"


def create(name, options, names):
    creations = read("creations", [])
    now = creations.pop(0) if creations else {"queued": ["ACTIVE"], "node": ["READY"]}
    write("creations", creations)
    if "error" in now:
        fail(now["error"])
    nodes = names
    if "node-count" in options:
        nodes = [f"{options['node-prefix']}-{i}" for i in range(int(options["node-count"]))]
    elif name == "queued":
        nodes = [options["node-id"]]
    write("nodes", nodes)
    if name == "queued":
        write("queued", now["queued"])
    if now["node"]:
        write("node", now["node"])
    for number in range(read("hosts") * len(nodes)):
        host(number).mkdir()


def delete(name):
    if name == "queued":
        (CLOUD / "queued").unlink()
    for node in ("node", *read("nodes", [])):
        (CLOUD / node).unlink(missing_ok=True)
    for path in CLOUD.glob("host[0-9]*"):
        for pid in sorted(path.glob("maxmars-*/*.pid")):  # `run` before `train`
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)
        gone = CLOUD / f"gone-{os.getpid()}-{path.name}"  # as a process may still write there
        path.rename(gone)
        (CLOUD / "unreachable").unlink(missing_ok=True)  # a new TPU has other hosts
        shutil.rmtree(gone, ignore_errors=True)


def workers(options):
    """Numbers of the hosts that are meant, slice by slice."""
    nodes, hosts = range(len(read("nodes", ["run1"]))), range(read("hosts"))
    if len(nodes) > 1:
        assert "node" in options  # such a name is no TPU's
    if options.get("node", "0") != "all":
        nodes = [int(options.get("node", "0"))]
    if options["worker"] != "all":
        hosts = [int(options["worker"])]
    return [node * read("hosts") + worker for node in nodes for worker in hosts]


def reach():
    if read("node") is None or read("node")[0] != "READY":
        fail("TPU is in an unusable state")
    left = read("ssh_failures", 0)
    if left:
        write("ssh_failures", left - 1)
        fail(read("ssh_error", "ssh exited with 255"), 255)


def ssh(options):
    reach()
    lines = read("follow_lines") if " follow " in options["command"] else None
    if lines is not None:
        (CLOUD / "follow_lines").unlink()
        options["command"] += f" | head -n {lines}"
    running, failed = [], False
    for number in workers(options):
        if number in read("unreachable", []):
            failed = True
            continue
        environment = os.environ | {
            "HOME": str(host(number)),
            "PATH": f"{CLOUD / 'bin'}:/usr/bin:/bin",
            "FAKE_HOST": str(number),
        }
        command = ["bash", "-c", options["command"]]
        running.append(subprocess.Popen(command, cwd=host(number), env=environment))
    codes = [one.wait() for one in running]
    if failed:
        fail("##### Command execution on worker failed with exit status 255.", 255)
    sys.exit(max(codes))


def copy(sources, options):
    reach()
    for number in workers(options):
        if number not in read("unreachable", []):
            for source in sources:
                shutil.copy(source, host(number))
    if read("unreachable"):
        fail("##### Command execution on worker failed with exit status 255.", 255)


def main():
    with (CLOUD / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    words = [word for word in sys.argv[1:] if word != "alpha"]
    assert words[:2] == ["compute", "tpus"]
    kind, verb, *rest = words[2:]
    if "--tunnel-through-iap" in rest and kind == "tpu-vm" and sys.argv[1] != "alpha":
        fail("unrecognized arguments: --tunnel-through-iap", 2)
    options = dict(word[2:].partition("=")[::2] for word in rest if word.startswith("--"))
    names = [word for word in rest if not word.startswith("--")]
    assert options["zone"] == "us-east5-a"
    thing = "queued" if kind == "queued-resources" else "node"
    if verb in ("describe", "delete"):
        outages = read("outages", [])
        write("outages", outages[1:])
        if outages and outages[0]:
            fail(outages[0])
    if verb == "describe" and read("describe_error"):
        fail(read("describe_error"))
    if verb == "describe":
        if thing == "node" and names[0] not in read("nodes", ["run1"]):
            fail(f"NOT_FOUND: Resource '{names[0]}' was not found")
        own = thing == "node" and (CLOUD / names[0]).exists()
        state = describe(names[0] if own else thing)
        endpoints = [{"ipAddress": f"10.0.0.{i}"} for i in range(read("hosts"))]
        node = {"state": state, "networkEndpoints": endpoints}
        data = {"failedData": {"error": {"message": "no quota"}}} if state == "FAILED" else {}
        nodes = read("nodes", ["run1"])
        many = {"nodeCount": len(nodes), "nodeIdPrefix": "run1"}
        spec = {"nodeSpec": [{"nodeId": name} for name in nodes]}
        if len(nodes) > 1 and state != "ACTIVE":
            spec = {"nodeSpec": [{"multisliceParams": many}]}
        request = {"state": {"state": state} | data, "tpu": spec}
        print(json.dumps(node if thing == "node" else request))
    elif verb == "create":
        create(thing, options, names)
    elif verb == "delete":
        delete(thing)
        if lost := read("lost_answer"):
            (CLOUD / "lost_answer").unlink()
            fail(lost)
    elif verb == "ssh":
        ssh(options)
    elif verb == "scp":
        copy(names[:-1], options)


main()
