"""`maxmars launch tpu-vm`: a run on the hosts of a TPU, started again after each preemption.

The run goes on without this program, which creates the TPU, copies the code, starts every host
at once and shows the log; run again, it takes up where things stand. The hosts start the run again
by themselves. Only a TPU that was preempted needs this program, to be created anew, and a host that
was rebooted.

`TpuVm` writes the `gcloud` commands for one TPU and reads its state. A TPU is one slice, a node of
Google's, or several slices of one queued resource, which the data center's network joins: each
host's metadata then says which slice it is of, as libtpu and JAX read. `bring_to_its_end` is the
loop of a run. `host.sh` is the script that runs on each host.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Suppress, UseAppendAction, arg

from maxmars.config.checks import Positive, UsageError
from maxmars.config.chips import TPU_TYPES, Shape, parse_shape
from maxmars.launch import wheel
from maxmars.launch.job import (
    CONSTRAINTS,
    SETUP,
    STARTS_AGAIN,
    Job,
    RunOptions,
    check_name,
    check_word,
    log,
    problem,
    run_program,
)

_STOPPED = 75  # exit code of a run that was stopped and can go on
_END_S = 180  # for the last host to end after the first
_CAPACITY = ("capacity", "resource_exhausted", "stockout")
# What gcloud says when another try would fail as well: at once, and where ssh never worked.
_NO_PERMISSION = re.compile(
    r"not present in the SSH agent|PERMISSION_DENIED|does not have permission|"
    r"Required '[\w.]+' permission|HttpError\D{0,20}403|not authorized",
    re.IGNORECASE,
)
_REPORT = re.compile(r"\[maxmars-host\] (\S+) (\S.*)$")

# Of the hosts, by Google's page "TPU software versions".
_SOFTWARE = {
    "v6e": "v2-alpha-tpuv6e",
    "v5p": "v2-alpha-tpuv5",
    "v5e": "v2-alpha-tpuv5-lite",
    "v4": "tpu-ubuntu2204-base",
}

Kind = Literal["tpu-vm", "queued-resources"]
Phase = Literal["missing", "coming", "ready", "leaving", "gone", "failed"]

# Phases of Google's states of a node and of a queued resource; any other state is `coming`.
_PHASES: dict[str, Phase] = {
    "READY": "ready",
    "PREEMPTED": "gone",
    "TERMINATED": "gone",
    "SUSPENDED": "gone",
    "DELETING": "leaving",
    "STOPPING": "leaving",
    "SUSPENDING": "leaving",
    "HIDING": "leaving",
    "STOPPED": "failed",
    "HIDDEN": "failed",
    "FAILED": "failed",
}
_WORST: tuple[Phase, ...] = ("ready", "coming", "leaving", "gone", "failed")


class UnansweredError(ValueError):
    """gcloud failed, and may work later, as when Google's service is overloaded."""

    tries: ClassVar[int] = 30


class UnreachedError(UnansweredError):
    """Not every host answers by ssh."""

    tries: ClassVar[int] = 4


@dataclass(frozen=True)
class State:
    """The state of a TPU."""

    phase: Phase
    text: str
    """Google's own word, and its reason if it gives one."""
    num_hosts: int = 0
    """Of all slices."""


@dataclass(frozen=True, kw_only=True)
class TpuVm:
    """A TPU by the name of its run: look at it, follow its log, stop the run, delete it."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch tpu-vm status --name run1 --zone us-east5-a",
        "maxmars launch tpu-vm delete --name run1 --zone us-east5-a",
    )

    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, which is that of its TPU."""
    zone: Annotated[str, arg(metavar="ZONE")]
    """Zone of the TPU, such as us-east5-a."""
    project: Annotated[str | None, arg(metavar="ID")] = None
    """Google Cloud project; None takes gcloud's own."""
    tunnel_through_iap: bool = False
    """Reach the hosts by Google's Identity-Aware Proxy, as those without an external address."""
    internal_ip: bool = False
    """Reach the hosts by their internal addresses, from a machine in their network."""
    alpha: bool = False
    """Use `gcloud alpha`, for flags that only it has."""
    queued: Suppress[bool | None] = None
    """Whether it was asked for by a queued resource; None if that is not known."""
    num_slices: Suppress[int] = 1
    """Nodes of the queued resource."""

    def check(self) -> None:
        """Check the words that go to gcloud.

        Raises:
          UsageError: names the option that is wrong.
        """
        check_name(self.name)
        if self.tunnel_through_iap and self.internal_ip:
            raise UsageError("take one of --tunnel-through-iap and --internal-ip.")
        zone = r"[a-z]+-[a-z]+[0-9]+-[a-z][a-z0-9]*"  # us-south1-ai1b is one
        check_word(self.zone, "--zone", zone, "us-east5-a, a zone that has TPUs")
        if self.project is not None:
            project = r"[a-z][-a-z0-9.:]*[a-z0-9]"
            check_word(self.project, "--project", project, "my-project, a project's ID")

    @property
    def where(self) -> str:
        """The options of `maxmars launch tpu-vm ACTION` that name this TPU."""
        project = "" if self.project is None else f" --project {self.project}"
        return f"--name {self.name} --zone {self.zone}{project}"

    def gcloud(self, kind: Kind, *words: str, alpha: bool = False) -> list[str]:
        """A command on TPUs in the zone."""
        project = [] if self.project is None else [f"--project={self.project}"]
        release = ["alpha"] if alpha or self.alpha else []
        where = [f"--zone={self.zone}", *project]
        return ["gcloud", *release, "compute", "tpus", kind, *words, *where]

    def describe(self, kind: Kind, node: str | None = None) -> list[str]:
        """The command that prints the queued resource, the TPU or one of its slices as JSON."""
        return self.gcloud(kind, "describe", node or self.name, "--format=json")

    def delete(self, kind: Kind) -> list[str]:
        """The command that deletes the TPU, or its queued resource and all slices."""
        force = ["--force"] if kind == "queued-resources" else []
        return self.gcloud(kind, "delete", self.name, *force, "--quiet")

    def copy(self, files: Sequence[str]) -> list[str]:
        """The command that copies files to the home directory on every host."""
        return self._on_hosts("scp", [*files, f"{self.name}:"])

    def ssh(self, words: str, *, worker: Literal["all", "0"] = "all") -> list[str]:
        """The command that gives words to host.sh on all hosts at once, or on the first."""
        command = f"--command=bash maxmars-{self.name}.sh {words}"
        alive = "--ssh-flag=-oServerAliveInterval=30"  # notices that a host is gone
        return self._on_hosts("ssh", [self.name], command, alive, worker=worker)

    def _on_hosts(
        self, verb: str, words: Sequence[str], *options: str, worker: str = "all"
    ) -> list[str]:
        iap = self.tunnel_through_iap  # which `gcloud compute tpus tpu-vm` does not know yet
        way = ["--tunnel-through-iap"] if iap else ["--internal-ip"] if self.internal_ip else []
        options = (f"--worker={worker}", *way, *options, "--quiet")
        if self.num_slices == 1:
            return self.gcloud("tpu-vm", verb, *words, *options, alpha=iap)
        node = f"--node={worker}"
        # Of several slices the queued resource has the name, and `--node` chooses among them.
        return self.gcloud("queued-resources", verb, *words, node, *options, alpha=iap)

    def get(self, kind: Kind, node: str | None = None) -> dict[str, Any] | None:
        """What Google knows of the queued resource, the TPU or one of its slices; None if it is not
        there.

        Raises:
          ValueError: gcloud cannot tell.
        """
        command = self.describe(kind, node)
        done = run_program(command)
        if done.returncode == 0:
            return json.loads(done.stdout)
        if "NOT_FOUND" in done.stderr or "was not found" in done.stderr:
            return None
        raise _failed(command, done)

    def as_it_is(self) -> TpuVm:
        """The same TPU as Google knows it: whether by a queued resource, and its slices.

        Raises:
          ValueError: gcloud cannot tell.
        """
        queued = self.get("queued-resources")
        slices = 1 if queued is None else max(1, len(_slices(queued)))
        return dataclasses.replace(self, queued=queued is not None, num_slices=slices)

    def state(self) -> State:
        """Ask for the state of the TPU, and of its queued resource if it has one.

        Raises:
          ValueError: gcloud cannot tell, or it has another number of slices.
        """
        nodes = [self.name]
        queued = None if self.queued is False else self.get("queued-resources")
        if queued is not None:
            nodes = _slices(queued) or nodes
            if len(nodes) != self.num_slices:
                raise ValueError(
                    f"--num-slices={self.num_slices}, but {self.name} is there with {len(nodes)}; "
                    "give that number, or delete it by `maxmars launch tpu-vm delete` first."
                )
            state = queued.get("state", {})
            word = state.get("state", "UNKNOWN")
            if word != "ACTIVE":
                reason = state.get("failedData", {}).get("error", {}).get("message")
                text = f"queued resource {word}" + (f": {reason}" if reason else "")
                return State(_PHASES.get(word, "coming"), text)
        states = []
        for name in nodes:
            node = self.get("tpu-vm", name)
            if node is None and queued is not None:
                which = "a TPU" if len(nodes) == 1 else "all its slices"
                return State("gone", f"queued resource ACTIVE without {which}")
            if node is None:
                return State("missing", "not there")
            word = node.get("state", "UNKNOWN")
            text = f"{'TPU' if len(nodes) == 1 else name} {word}"
            num_hosts = max(1, len(node.get("networkEndpoints") or []))
            states.append(State(_PHASES.get(word, "coming"), text, num_hosts))
        # Slices train together, so all are as well off as the worst of them.
        worst = max(states, key=lambda state: _WORST.index(state.phase))
        ready = len(nodes) > 1 and worst.phase == "ready"
        text = f"{len(nodes)} slices READY" if ready else worst.text
        return State(worst.phase, text, sum(state.num_hosts for state in states))

    def remove(self) -> bool:
        """Delete the TPU and its queued resource; whether there was one.

        Raises:
          ValueError: gcloud cannot delete it.
        """
        kinds: tuple[Kind, ...] = ("queued-resources", "tpu-vm")
        for kind in kinds[1:] if self.queued is False else kinds:
            if self.get(kind) is not None:
                command = self.delete(kind)
                if (done := run_program(command)).returncode != 0:
                    raise _failed(command, done)
                return True
        return False

    def ask_hosts(self, words: str) -> dict[str, str]:
        """State of each host that answers, after a command of host.sh.

        Raises:
          ValueError: no host answers.
        """
        done = run_program(self.ssh(words))
        states = _read_reports(done.stdout.splitlines())
        if not states:
            raise ValueError(f"no host of {self.name} answered: {problem(done)}")
        return states

    def follow_log(self, seen: int = 0) -> tuple[bool, int]:
        """Show the first host's log, without its first `seen` lines, until its process ends.

        Returns:
          False if the connection ended before the process, and the number of lines shown so far.
        """
        with subprocess.Popen(
            self.ssh(f"follow {seen}", worker="0"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as ssh:
            assert ssh.stdout is not None
            for line in ssh.stdout:
                if _REPORT.search(line):
                    return True, seen
                number, tab, text = line.rstrip("\n").partition("\t")
                if tab and number.isdecimal() and int(number) > seen:
                    seen = int(number)
                    log(text)
        return False, seen


def _failed(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> ValueError:
    text = f"`{' '.join(command[:5])} ...` failed: {problem(done)}"
    return ValueError(text) if _NO_PERMISSION.search(done.stderr) else UnansweredError(text)


def _slices(queued: dict[str, Any]) -> list[str]:
    """Names of the nodes of a queued resource. Several of one specification have a number and a
    prefix in place of a name."""
    names = []
    for spec in queued.get("tpu", {}).get("nodeSpec", []):
        if "nodeId" in spec:
            names.append(spec["nodeId"])
        else:
            many = spec.get("multisliceParams", {})
            count = int(many.get("nodeCount", 1))
            names += [f"{many.get('nodeIdPrefix', 'node')}-{number}" for number in range(count)]
    return names


def _read_reports(lines: Iterable[str]) -> dict[str, str]:
    """States that hosts report, by host."""
    return {match[1]: match[2] for line in lines if (match := _REPORT.search(line))}


@dataclass(frozen=True, kw_only=True)
class TpuOptions(RunOptions, TpuVm):
    """Train on a TPU, which is created if need be; the same command again takes up the run.

    What follows -- goes to `maxmars train`.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch tpu-vm gpt2 --name run1 --workdir gs://bucket/run1 \\",
        "  --zone us-east5-a --accelerator v6e-8 -- --data.path gs://bucket/tokens",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "name",
        "workdir",
        "zone",
        "accelerator",
        "project",
        "spot",
        "queued",
        "setup",
        "delete-when-done",
        "dry-run",
    )

    accelerator: Annotated[str, arg(metavar="TYPE")]
    """Kind and size: v5p-128, v5litepod-16, v6e-64, v4-32; or its chips, as for `maxmars plan`:
    v5p:4x4x4."""
    num_slices: int = 1
    """TPUs of this kind that train as one, each a slice. Needs --queued, and a mesh.data (the only
    axis between slices) that is a multiple of it."""
    spot: bool = False
    """Cheaper, and may be taken away at any time; it is then created anew."""
    queued: bool = False
    """Ask by a queued resource, which waits until there is capacity."""
    runtime_version: Annotated[str | None, arg(metavar="VERSION")] = None
    """Software of the hosts; None takes Google's choice for JAX on this kind."""
    gcloud_flag: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="FLAG")] = ()
    """Any other flag of gcloud's `create`, as one word: --gcloud-flag=--reserved. May be
    repeated."""
    delete_when_done: bool = False
    """Delete the TPU when all steps are done; it costs until it is deleted."""
    poll_s: Annotated[Positive[float], arg(metavar="SECONDS")] = 20.0
    """Seconds between two questions for the TPU's state, before ssh is tried again, and before a
    host starts the run again."""

    def check(self) -> None:
        super().check()
        if self.slice.tpu_type is None:
            kinds = ", ".join(f"{kind}-N" for kind in TPU_TYPES)
            raise UsageError(
                f"--accelerator {self.accelerator} is no slice of TPU VMs, which are {kinds}, such "
                "as v5p-128, or by their chips v5p:4x4x4."
            )
        for flag in self.gcloud_flag:
            pattern = r"--[a-z][-a-z0-9]*(=[^\x00-\x1f]*)?"
            check_word(flag, "--gcloud-flag", pattern, "--network=NETWORK, one flag of gcloud")
        if self.runtime_version is not None:
            version = r"[a-z0-9][-a-z0-9._]*"
            check_word(self.runtime_version, "--runtime-version", version, "v2-alpha-tpuv5")
        self.slice.check_slices(self.num_slices)
        if self.num_slices > 1 and not self.queued:
            raise UsageError(
                f"--num-slices={self.num_slices} needs --queued: only a queued resource joins "
                "slices into one TPU."
            )

    @functools.cached_property
    def slice(self) -> Shape:
        """One slice.

        Raises:
          UsageError: there is none of that name.
        """
        return parse_shape(self.accelerator, "--accelerator")

    def create(self) -> list[str]:
        """The command that creates the TPU, or the request for it."""
        version = self.runtime_version or _SOFTWARE[self.slice.kind]
        spot = ["--spot"] if self.spot else []
        own = [f"--accelerator-type={self.slice.tpu_type}", *spot]
        options = [*own, *self.gcloud_flag, "--quiet"]
        if not self.queued:
            return self.gcloud("tpu-vm", "create", self.name, f"--version={version}", *options)
        nodes = [f"--node-id={self.name}"]
        if self.num_slices > 1:  # they get the names NAME-0, NAME-1, ...
            nodes = [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"]
        words = ["create", self.name, *nodes, f"--runtime-version={version}"]
        return self.gcloud("queued-resources", *words, *options)


def bring_to_its_end(tpu: TpuOptions, job: Job) -> int:
    """Look at the TPU and its hosts, do the one thing that is missing, and look again.

    Nothing is remembered from before, so that the same command may be given again after this
    program was killed. A host answers a command of host.sh by a line such as
    `[maxmars-host] t1v-n-3 exited 0`. The run itself refuses starts that come to nothing, by an
    error of its own.

    Returns:
      0 when all steps are done, 75 after `stop`.

    Raises:
      ValueError: the run failed, the TPU cannot be had or reached, or too many restarts.
    """
    delete = f"`maxmars launch tpu-vm delete {tpu.where}`"
    cost = f"The TPU costs until {delete}."
    starts = 0  # of the run, seen or made here, and creations for lack of capacity
    failures: Counter[type] = Counter()  # of gcloud and of ssh, one after another
    seen = 0  # lines of the first host's log
    shown, answered = "", False
    copied = is_new = is_watched = is_done = False

    def count_start(reason: str) -> int:
        if starts > tpu.max_restarts:
            raise ValueError(
                f"{reason}, and --max-restarts {tpu.max_restarts} are used up; the same command "
                f"continues the run. {cost}"
            )
        if starts:
            log(f"{reason}; restart {starts} of at most {tpu.max_restarts}")
        return starts + 1

    while True:
        try:
            if is_done:  # before a look, after which a TPU that is gone would be created anew
                tpu.remove()
                log(f"deleted the TPU {tpu.name}")
                return 0
            state = tpu.state()
            answered = True
            if state.text != shown:
                log(f"{tpu.name}: {state.text}")
                shown = state.text
            if state.phase != "ready":  # also while it is repaired: the disks may be new then
                copied = is_watched = False
            match state.phase:
                case "missing":
                    starts, is_new = count_start("the TPU is not there"), True
                    _create(tpu, is_first=starts == 1)
                case "gone":
                    tpu.remove()
                case "failed":
                    raise ValueError(
                        f"{tpu.name} is of no use: {state.text}. Delete it with {delete} and "
                        "launch again."
                    )
                case "ready":
                    hosts, before, has_ended = state.num_hosts, seen, False
                    if not copied:
                        _copy(tpu, job, hosts)
                        copied = True
                    if is_watched:
                        has_ended, seen = tpu.follow_log(seen)
                    # The last host may end some time after the first.
                    states = _on_all(tpu, f"wait {_END_S}" if has_ended else "status", hosts)
                    is_cut = seen > before and not has_ended  # there are more lines
                    if is_watched and (is_cut or all(map(_is_under_way, states.values()))):
                        time.sleep(tpu.poll_s)  # as the hosts do between two starts
                    elif is_watched:
                        if tpu.state().phase == "ready":  # not taken away meanwhile
                            code = _end(tpu, job, states, cost)
                            is_done = code == 0 and tpu.delete_when_done
                            if code is not None and not is_done:
                                return code
                            is_watched = False
                    else:
                        if all(map(_is_under_way, states.values())):
                            log(f"the run is already under way on {hosts} hosts")
                            starts = max(starts, 1)
                        else:
                            if not is_new:
                                starts = count_start("not every host has a process")
                            _start(tpu, states, hosts)
                        is_new, is_watched, seen = False, True, 0
                case _:
                    time.sleep(tpu.poll_s)
            failures.clear()
        except UnansweredError as error:
            failures[type(error)] += 1
            # A first question that fails shows a wrong project or no network, for which the user is
            # still there. In a run of days one answer that stays away is nothing.
            if not answered:
                raise
            if failures[type(error)] >= error.tries:
                raise ValueError(
                    f"{error}. The same command tries again; {delete} ends the TPU, which costs "
                    "until then, and has the next launch make a new one."
                ) from error
            log(f"{error}; trying again")
            time.sleep(tpu.poll_s)


def _create(tpu: TpuOptions, *, is_first: bool) -> None:
    """Create the TPU, if there is capacity."""
    verb = "asking for" if tpu.queued else "creating"
    count = "a" if tpu.num_slices == 1 else f"{tpu.num_slices} slices of"
    log(f"{tpu.name}: {verb} {count} {'spot ' if tpu.spot else ''}{tpu.accelerator}")
    done = run_program(tpu.create())
    if done.returncode == 0 or "ALREADY_EXISTS" in done.stderr:
        return
    # A preempted TPU often finds no capacity for some minutes. Before the first start the user
    # should hear of it.
    short = any(word in done.stderr.lower() for word in _CAPACITY)
    if not short or is_first:
        hint = " --queued waits for capacity." if short and not tpu.queued else ""
        raise ValueError(f"gcloud could not create {tpu.name}: {problem(done)}.{hint}")
    log("there is no capacity")
    time.sleep(tpu.poll_s)


def _copy(tpu: TpuOptions, job: Job, hosts: int) -> None:
    """Copy the source, host.sh and the environment to every host."""
    with tempfile.TemporaryDirectory(prefix="maxmars-launch-") as folder:
        done = run_program(tpu.copy(_write_files(tpu, job, Path(folder))))
    if done.returncode:
        _on_all(tpu, "status", hosts)  # tells how many hosts fail, if some do
        raise UnreachedError(f"scp fails ({problem(done)})")


def _start(tpu: TpuOptions, states: Mapping[str, str], hosts: int) -> None:
    """Have a process on every host, all started at once: they meet at the coordinator."""
    if any(map(_is_under_way, states.values())):  # on some of them only
        _on_all(tpu, "kill", hosts)
    log(f"installing on {hosts} hosts")
    installed = _on_all(tpu, "install", hosts, show=True)
    failed = [host for host, state in installed.items() if state != "installed"]
    if failed:
        raise ValueError(f"could not install on {', '.join(sorted(failed))}: see above.")
    log(f"starting on {hosts} hosts")
    _on_all(tpu, "start", hosts)


def _end(tpu: TpuOptions, job: Job, states: Mapping[str, str], cost: str) -> int | None:
    """The exit code where the run has ended on all hosts; None where hosts have lost it, as by a
    reboot.

    Raises:
      ValueError: the run failed.
    """
    different = set(states.values())
    if different == {"exited 0"}:
        log(f"done: all steps; results are in {job.workdir}")
        if not tpu.delete_when_done:
            log(cost)
        return 0
    if any(state.startswith("stopped") for state in different):
        log(f"the run was stopped and saved; the same command continues. {cost}")
        return _STOPPED
    if not any(state.startswith("exited") for state in different - {"exited 0"}):
        return None
    _on_all(tpu, "kill", len(states))  # the others would wait for the one that failed
    listed = ", ".join(f"{host} {state}" for host, state in sorted(states.items()))
    raise ValueError(
        f"the run failed ({listed}); its log is above, each host's in {job.workdir}/logs. {cost}"
    )


def _on_all(tpu: TpuOptions, words: str, hosts: int, *, show: bool = False) -> dict[str, str]:
    """State of every host after a command of host.sh, whose output is shown or not.

    Raises:
      UnreachedError: not every host answers.
      ValueError: nor will it.
    """
    done = run_program(tpu.ssh(words))
    lines = done.stdout.splitlines()
    states = _read_reports(lines)
    if len(states) < hosts:
        text = f"{len(states)} of {hosts} hosts answered by ssh ({problem(done)})"
        if _NO_PERMISSION.search(done.stderr):
            raise ValueError(
                f"{text}. The TPU costs until `maxmars launch tpu-vm delete {tpu.where}`."
            )
        raise UnreachedError(text)
    for line in lines if show else ():
        if not _REPORT.search(line):
            log(line)
    return states


def _is_under_way(state: str) -> bool:
    return state.startswith(("running", "restarting"))


def launch(options: TpuOptions, job: Job) -> int:
    """Bring a run to its end, also one that is under way; its exit code, or 130 after Ctrl-C.

    Raises:
      ValueError: see `bring_to_its_end`.
    """
    try:
        return bring_to_its_end(options, job)
    except KeyboardInterrupt:
        log(
            "\nno longer watching: the run goes on, but nothing restarts it after a preemption. "
            "The same command watches again; `maxmars launch tpu-vm stop` ends the run."
        )
        return 130


def host_script(options: TpuOptions, job: Job) -> str:
    """The script on each host: the values of this run, then host.sh."""
    values = {
        "name": job.name,
        "digest": job.code.digest,
        "python": f"python{sys.version_info.major}.{sys.version_info.minor}",
        "wheel": wheel.NAME,
        "constraints": CONSTRAINTS,
        "setup": "" if options.setup is None else SETUP,
        "max_restarts": str(options.max_restarts),
        "pause": str(options.poll_s),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    train = f"train=({shlex.join(job.python_arguments())})"
    body = Path(__file__).with_name("host.sh").read_text()
    return "\n".join(["#!/usr/bin/env bash", *lines, train, STARTS_AGAIN, body])


def _environment_file(environment: Iterable[tuple[str, str]]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in environment)


def _file_names(job: Job) -> list[str]:
    """Files in the home directory of each host: the source, the script, the environment."""
    return [f"maxmars-{job.name}{end}" for end in (".tar.gz", ".sh", ".env")]


def _write_files(options: TpuOptions, job: Job, folder: Path) -> list[str]:
    archive, script, environment = paths = [folder / name for name in _file_names(job)]
    archive.write_bytes(job.code.archive)
    script.write_text(host_script(options, job))
    environment.touch(mode=0o600)  # has the secrets
    environment.write_text(_environment_file(job.environment.items()))
    return [str(path) for path in paths]


def _here_document(name: str, text: str) -> str:
    """A bash command that writes a text, which ends with a newline, to a file as it is."""
    end, lines = "END_OF_FILE", text.split("\n")
    while end in lines:  # an argument of the run may hold such a line
        end += "_"
    return f"cat >{name} <<'{end}'\n{text}{end}"


def describe(options: TpuOptions, job: Job) -> str:
    """All commands and files, as a bash script without secrets."""
    archive, script, environment = files = _file_names(job)
    kind: Kind = "queued-resources" if options.queued else "tpu-vm"
    return f"""\
#!/usr/bin/env bash
# What `maxmars launch tpu-vm` does; this was a dry run.
set -euo pipefail

# {archive}: {job.code.size}
{_here_document(script, host_script(options, job))}
{_here_document(environment, _environment_file((n, "<redacted>") for n in job.environment))}

# Create the TPU, and wait until it is there:
{shlex.join(options.create())}
{shlex.join(options.describe(kind))}

# On all hosts at once: copy, install, start; then show the log of the first:
{shlex.join(options.copy(files))}
{shlex.join(options.ssh("install"))}
{shlex.join(options.ssh("start"))}
{shlex.join(options.ssh("follow 0", worker="0"))}

# After a preemption, and at `maxmars launch tpu-vm delete`:
# {shlex.join(options.delete(kind))}
"""
