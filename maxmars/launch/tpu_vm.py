"""`maxmars launch tpu-vm`: a run on the hosts of a TPU, started again after each preemption.

This program creates the TPU, copies the code, starts every host at once and shows the log. The run
goes on without it, and the hosts restart the run by themselves; but only this program recreates a
preempted TPU, or starts a run again on a rebooted host.

`TpuVm` writes the `gcloud` commands for one TPU and reads its state. A TPU is one slice (a node, in
Google's words), or several slices of one queued resource, joined by the data center's network, by
whose metadata libtpu knows its slice. `_Watch` is the loop of a run, `host.sh` the script on hosts.
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
    failure_message,
    log,
    run_program,
)

_STOPPED = 75  # exit code of a run that was stopped and can continue
_LAST_HOST_S = 180  # longest wait for the last host after the first has ended
_CAPACITY = ("capacity", "resource_exhausted", "stockout")
# Errors of gcloud that a retry would meet again, also those of ssh.
_NO_PERMISSION = re.compile(
    r"not present in the SSH agent|PERMISSION_DENIED|does not have permission|"
    r"Required '[\w.]+' permission|HttpError\D{0,20}403|not authorized",
    re.IGNORECASE,
)
_REPORT = re.compile(r"\[maxmars-host\] (\S+) (\S.*)$")

# Runtime versions of the hosts, by Google's page "TPU software versions".
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
_PHASES_BY_BADNESS: tuple[Phase, ...] = ("ready", "coming", "leaving", "gone", "failed")


class UnansweredError(ValueError):
    """gcloud failed, and may succeed later, as when Google's service is overloaded."""

    tries: ClassVar[int] = 30


class UnreachedError(UnansweredError):
    """Not every host answers by ssh."""

    tries: ClassVar[int] = 4


@dataclass(frozen=True)
class State:
    """The state of a TPU."""

    phase: Phase
    text: str
    """Google's word for the state, with the reason if there is one."""
    num_hosts: int = 0
    """Number of hosts of all slices."""


@dataclass(frozen=True, kw_only=True)
class TpuVm:
    """A TPU by the name of its run: show it, follow its log, stop the run, delete it."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch tpu-vm status --name run1 --zone us-east5-a",
        "maxmars launch tpu-vm delete --name run1 --zone us-east5-a",
    )

    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, and of its TPU."""
    zone: Annotated[str, arg(metavar="ZONE")]
    """Zone of the TPU, such as us-east5-a."""
    project: Annotated[str | None, arg(metavar="ID")] = None
    """Google Cloud project; None takes the default of gcloud."""
    tunnel_through_iap: bool = False
    """Reach the hosts by Google's Identity-Aware Proxy, for hosts without an external address."""
    internal_ip: bool = False
    """Reach the hosts by their internal addresses, from a machine in their network."""
    alpha: bool = False
    """Use `gcloud alpha`, for flags that only the alpha release has."""
    queued: Suppress[bool | None] = None
    """Whether the TPU belongs to a queued resource; None if unknown."""
    num_slices: Suppress[int] = 1
    """Number of nodes of the queued resource."""

    def check(self) -> None:
        """Check the words that go to gcloud.

        Raises:
          UsageError: a word is invalid; the message names the option.
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
    def delete_command(self) -> str:
        """The command that deletes this TPU, in backquotes."""
        project = "" if self.project is None else f" --project {self.project}"
        return f"`maxmars launch tpu-vm delete --name {self.name} --zone {self.zone}{project}`"

    @property
    def cost(self) -> str:
        """A sentence for the end of a message."""
        return f"The TPU costs until {self.delete_command}."

    def gcloud(self, kind: Kind, *words: str, alpha: bool = False) -> list[str]:
        """A gcloud command on TPUs in the zone."""
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
        return self._host_command("scp", [*files, f"{self.name}:"])

    def ssh(self, words: str, *, worker: Literal["all", "0"] = "all") -> list[str]:
        """The command that runs host.sh with words on all hosts at once, or on the first."""
        command = f"--command=bash maxmars-{self.name}.sh {words}"
        alive = "--ssh-flag=-oServerAliveInterval=30"  # ends the connection if the host is gone
        return self._host_command("ssh", [self.name], command, alive, worker=worker)

    def _host_command(
        self, verb: str, words: Sequence[str], *options: str, worker: str = "all"
    ) -> list[str]:
        iap = self.tunnel_through_iap  # so far only an option of `gcloud alpha`
        way = ["--tunnel-through-iap"] if iap else ["--internal-ip"] if self.internal_ip else []
        options = (f"--worker={worker}", *way, *options, "--quiet")
        if self.num_slices == 1:
            return self.gcloud("tpu-vm", verb, *words, *options, alpha=iap)
        node = f"--node={worker}"
        # Several slices share the name of their queued resource, and `--node` chooses among them.
        return self.gcloud("queued-resources", verb, *words, node, *options, alpha=iap)

    def get(self, kind: Kind, node: str | None = None) -> dict[str, Any] | None:
        """Google's description of the queued resource, the TPU or one of its slices; None if it
        does not exist.

        Raises:
          ValueError: gcloud fails.
        """
        command = self.describe(kind, node)
        done = run_program(command)
        if done.returncode == 0:
            return json.loads(done.stdout)
        if "NOT_FOUND" in done.stderr or "was not found" in done.stderr:
            return None
        raise _gcloud_error(command, done)

    def as_deployed(self) -> TpuVm:
        """This TPU with `queued` and `num_slices` as Google has them.

        Raises:
          ValueError: gcloud fails.
        """
        queued = self.get("queued-resources")
        slices = 1 if queued is None else max(1, len(_node_names(queued)))
        return dataclasses.replace(self, queued=queued is not None, num_slices=slices)

    def state(self) -> State:
        """State of the TPU, or of its queued resource if that is not active.

        Raises:
          ValueError: gcloud fails, or the TPU has another number of slices.
        """
        nodes = [self.name]
        queued = None if self.queued is False else self.get("queued-resources")
        if queued is not None:
            nodes = _node_names(queued) or nodes
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
        # Slices train together, so the worst of them decides.
        worst = max(states, key=lambda state: _PHASES_BY_BADNESS.index(state.phase))
        ready = len(nodes) > 1 and worst.phase == "ready"
        text = f"{len(nodes)} slices READY" if ready else worst.text
        return State(worst.phase, text, sum(state.num_hosts for state in states))

    def remove(self) -> bool:
        """Delete the TPU and its queued resource; returns whether there was one.

        Raises:
          ValueError: gcloud fails.
        """
        kinds: tuple[Kind, ...] = ("queued-resources", "tpu-vm")
        for kind in kinds[1:] if self.queued is False else kinds:
            if self.get(kind) is not None:
                command = self.delete(kind)
                if (done := run_program(command)).returncode != 0:
                    raise _gcloud_error(command, done)
                return True
        return False

    def run_on_hosts(self, words: str) -> dict[str, str]:
        """Run a command of host.sh on the hosts; returns the state of each host that answers.

        Raises:
          ValueError: no host answers.
        """
        done = run_program(self.ssh(words))
        states = _read_reports(done.stdout.splitlines())
        if not states:
            raise ValueError(f"no host of {self.name} answered: {failure_message(done)}")
        return states

    def follow_log(self, lines_shown: int = 0) -> tuple[bool, int]:
        """Print the first host's log, after its first `lines_shown` lines, until its process ends.

        Returns:
          Whether the process has ended (else the connection has), and the number of lines shown.
        """
        with subprocess.Popen(
            self.ssh(f"follow {lines_shown}", worker="0"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as ssh:
            assert ssh.stdout is not None
            for line in ssh.stdout:
                if _REPORT.search(line):
                    return True, lines_shown
                number, tab, text = line.rstrip("\n").partition("\t")
                if tab and number.isdecimal() and int(number) > lines_shown:
                    lines_shown = int(number)
                    log(text)
        return False, lines_shown


def _gcloud_error(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> ValueError:
    text = f"`{' '.join(command[:5])} ...` failed: {failure_message(done)}"
    return ValueError(text) if _NO_PERMISSION.search(done.stderr) else UnansweredError(text)


def _node_names(queued: dict[str, Any]) -> list[str]:
    """Names of the nodes of a queued resource. A specification of several nodes has a count and a
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
    """States in the report lines of hosts, by host."""
    return {match[1]: match[2] for line in lines if (match := _REPORT.search(line))}


@dataclass(frozen=True, kw_only=True)
class TpuOptions(RunOptions, TpuVm):
    """Train on a TPU, which is created if it does not exist; the same command again continues the
    run.

    Options after -- go to `maxmars train`.
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
    """Type of the TPU: v5p-128, v5litepod-16, v6e-64, v4-32; or its chips, as for `maxmars plan`:
    v5p:4x4x4."""
    num_slices: int = 1
    """Number of TPU slices of this type that train together. Needs --queued, and a mesh.data (the
    only axis between slices) that is a multiple of it."""
    spot: bool = False
    """Take a spot TPU, which is cheaper and may be preempted at any time; it is then recreated."""
    queued: bool = False
    """Request the TPU by a queued resource, which waits for capacity."""
    runtime_version: Annotated[str | None, arg(metavar="VERSION")] = None
    """Software version of the hosts; None takes Google's choice for JAX on this type."""
    gcloud_flag: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="FLAG")] = ()
    """Another flag of gcloud's `create`, as one word: --gcloud-flag=--reserved. May be repeated."""
    delete_when_done: bool = False
    """Delete the TPU when all steps are done; it costs until it is deleted."""
    poll_s: Annotated[Positive[float], arg(metavar="SECONDS")] = 20.0
    """Seconds between two looks at the TPU, and before a retry of ssh or a restart of the run."""

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
        """Shape of one slice.

        Raises:
          UsageError: there is no such TPU.
        """
        return parse_shape(self.accelerator, "--accelerator")

    def create(self) -> list[str]:
        """The command that creates the TPU, or its queued resource."""
        version = self.runtime_version or _SOFTWARE[self.slice.kind]
        spot = ["--spot"] if self.spot else []
        accelerator = f"--accelerator-type={self.slice.tpu_type}"
        options = [accelerator, *spot, *self.gcloud_flag, "--quiet"]
        if not self.queued:
            return self.gcloud("tpu-vm", "create", self.name, f"--version={version}", *options)
        nodes = [f"--node-id={self.name}"]
        if self.num_slices > 1:  # they get the names NAME-0, NAME-1, ...
            nodes = [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"]
        words = ["create", self.name, *nodes, f"--runtime-version={version}"]
        return self.gcloud("queued-resources", *words, *options)


@dataclass
class _Watch:
    """A run on a TPU as this program sees it. Nothing is stored between two calls of the command,
    which may be given again after this program was killed."""

    tpu: TpuOptions
    job: Job
    starts: int = 0  # of the run, seen or made here, with creations that found no capacity
    shown_state: str = ""
    lines_shown: int = 0  # of the first host's log
    has_answered: bool = False  # gcloud, at least once
    is_copied: bool = False
    is_new: bool = False  # the TPU was created here, and the run not yet started on it
    is_followed: bool = False  # the run was started here or found under way: its log is shown
    is_done: bool = False

    def step(self) -> int | None:
        """Look at the TPU, and do the one thing that is missing; returns the exit code of this
        program if the run has ended, else None. After an UnansweredError it may be called again."""
        if self.is_done:  # before a look, after which a TPU that is gone would be created anew
            self.tpu.remove()
            log(f"deleted the TPU {self.tpu.name}")
            return 0
        state = self.tpu.state()
        self.has_answered = True
        if state.text != self.shown_state:
            log(f"{self.tpu.name}: {state.text}")
            self.shown_state = state.text
        if state.phase == "ready":
            return self._step_on_hosts(state.num_hosts)
        self.is_copied = self.is_followed = False  # a TPU under repair may get new disks
        if state.phase == "failed":
            raise ValueError(
                f"{self.tpu.name} is of no use: {state.text}. Delete it with "
                f"{self.tpu.delete_command} and launch again."
            )
        if state.phase == "missing":
            self._count_start("the TPU is not there")
            self.is_new = True
            _create(self.tpu, is_first=self.starts == 1)
        elif state.phase == "gone":
            self.tpu.remove()
        else:
            time.sleep(self.tpu.poll_s)
        return None

    def _step_on_hosts(self, num_hosts: int) -> int | None:
        """Copy the code, start the run or follow it, on a TPU that is ready; see `step`."""
        lines_before, has_ended = self.lines_shown, False
        if not self.is_copied:
            _copy(self.tpu, self.job, num_hosts)
            self.is_copied = True
        if self.is_followed:
            has_ended, self.lines_shown = self.tpu.follow_log(self.lines_shown)
        # The last host may end some time after the first.
        command = f"wait {_LAST_HOST_S}" if has_ended else "status"
        states = _run_on_every_host(self.tpu, command, num_hosts)
        all_under_way = all(map(_is_under_way, states.values()))
        if self.is_followed:
            is_cut = self.lines_shown > lines_before and not has_ended  # the log has more lines
            if is_cut or all_under_way:
                time.sleep(self.tpu.poll_s)  # as the hosts do between two starts
            elif self.tpu.state().phase == "ready":  # not taken away meanwhile
                code = _exit_code(self.tpu, self.job, states)
                self.is_done = code == 0 and self.tpu.delete_when_done
                self.is_followed = False
                return None if self.is_done else code
            return None
        if all_under_way:
            log(f"the run is already under way on {num_hosts} hosts")
            self.starts = max(self.starts, 1)
        else:
            if not self.is_new:
                self._count_start("not every host has a process")
            _start(self.tpu, states, num_hosts)
        self.is_new, self.is_followed, self.lines_shown = False, True, 0
        return None

    def _count_start(self, reason: str) -> None:
        """Count a start. Raises a ValueError beyond --max-restarts."""
        most = self.tpu.max_restarts
        if self.starts > most:
            raise ValueError(
                f"{reason}, and --max-restarts {most} are used up; the same command continues the "
                f"run. {self.tpu.cost}"
            )
        if self.starts:
            log(f"{reason}; restart {self.starts} of at most {most}")
        self.starts += 1


def run_to_completion(tpu: TpuOptions, job: Job) -> int:
    """Watch a run to its end: look, do the one thing that is missing, and look again.

    A host answers a command of host.sh by a line such as `[maxmars-host] t1v-n-3 exited 0`. The run
    itself ends with an error if its restarts make no progress.

    Returns:
      0 when all steps are done, 75 after `stop`.

    Raises:
      ValueError: the run failed, the TPU cannot be had or reached, or too many restarts.
    """
    watch = _Watch(tpu, job)
    failures: Counter[type] = Counter()  # consecutive ones, of gcloud and of ssh
    while True:
        try:
            if (code := watch.step()) is not None:
                return code
            failures.clear()
        except UnansweredError as error:
            failures[type(error)] += 1
            # The first call fails for a wrong project or without a network, while the user is still
            # at the terminal. In a run of days one missing answer means nothing.
            if not watch.has_answered:
                raise
            if failures[type(error)] >= error.tries:
                raise ValueError(
                    f"{error}. The same command tries again; {tpu.delete_command} ends the TPU, "
                    "which costs until then, and has the next launch make a new one."
                ) from error
            log(f"{error}; trying again")
            time.sleep(tpu.poll_s)


def _create(tpu: TpuOptions, *, is_first: bool) -> None:
    """Create the TPU, if there is capacity; without capacity only the first creation raises."""
    verb = "asking for" if tpu.queued else "creating"
    count = "a" if tpu.num_slices == 1 else f"{tpu.num_slices} slices of"
    log(f"{tpu.name}: {verb} {count} {'spot ' if tpu.spot else ''}{tpu.accelerator}")
    done = run_program(tpu.create())
    if done.returncode == 0 or "ALREADY_EXISTS" in done.stderr:
        return
    # After a preemption there often is no capacity for some minutes, but at the first start the
    # user should know.
    short = any(word in done.stderr.lower() for word in _CAPACITY)
    if not short or is_first:
        hint = " --queued waits for capacity." if short and not tpu.queued else ""
        raise ValueError(f"gcloud could not create {tpu.name}: {failure_message(done)}.{hint}")
    log("there is no capacity")
    time.sleep(tpu.poll_s)


def _copy(tpu: TpuOptions, job: Job, num_hosts: int) -> None:
    """Copy the archive, host.sh and the environment to every host."""
    with tempfile.TemporaryDirectory(prefix="maxmars-launch-") as folder:
        done = run_program(tpu.copy(_write_files(tpu, job, Path(folder))))
    if done.returncode:
        # Raises with the number of hosts that answer, unless all do.
        _run_on_every_host(tpu, "status", num_hosts)
        raise UnreachedError(f"scp fails ({failure_message(done)})")


def _start(tpu: TpuOptions, states: Mapping[str, str], num_hosts: int) -> None:
    """Start a process on every host, all at once, as they join at the coordinator."""
    if any(map(_is_under_way, states.values())):  # on some hosts only
        _run_on_every_host(tpu, "kill", num_hosts)
    log(f"installing on {num_hosts} hosts")
    installed = _run_on_every_host(tpu, "install", num_hosts, show=True)
    failed = [host for host, state in installed.items() if state != "installed"]
    if failed:
        raise ValueError(f"could not install on {', '.join(sorted(failed))}: see above.")
    log(f"starting on {num_hosts} hosts")
    _run_on_every_host(tpu, "start", num_hosts)


def _exit_code(tpu: TpuOptions, job: Job, states: Mapping[str, str]) -> int | None:
    """Exit code of this program for a run that is not under way on all hosts; None if hosts have
    lost it, as by a reboot, so that it must be started again. A run that failed raises."""
    distinct = set(states.values())
    if distinct == {"exited 0"}:
        log(f"done: all steps; results are in {job.workdir}")
        if not tpu.delete_when_done:
            log(tpu.cost)
        return 0
    if any(state.startswith("stopped") for state in distinct):
        log(f"the run was stopped and saved; the same command continues. {tpu.cost}")
        return _STOPPED
    if not any(state.startswith("exited") for state in distinct - {"exited 0"}):
        return None
    _run_on_every_host(tpu, "kill", len(states))  # others would wait for the host that failed
    listed = ", ".join(f"{host} {state}" for host, state in sorted(states.items()))
    raise ValueError(
        f"the run failed ({listed}); its log is above, each host's in {job.workdir}/logs. "
        f"{tpu.cost}"
    )


def _run_on_every_host(
    tpu: TpuOptions, words: str, num_hosts: int, *, show: bool = False
) -> dict[str, str]:
    """Run a command of host.sh on every host; returns the state of each. `show` prints the output.
    If not every host answers, it raises an UnreachedError, or a ValueError if access is refused."""
    done = run_program(tpu.ssh(words))
    lines = done.stdout.splitlines()
    states = _read_reports(lines)
    if len(states) < num_hosts:
        text = f"{len(states)} of {num_hosts} hosts answered by ssh ({failure_message(done)})"
        if _NO_PERMISSION.search(done.stderr):
            raise ValueError(f"{text}. {tpu.cost}")
        raise UnreachedError(text)
    for line in lines if show else ():
        if not _REPORT.search(line):
            log(line)
    return states


def _is_under_way(state: str) -> bool:
    return state.startswith(("running", "restarting"))


def launch(options: TpuOptions, job: Job) -> int:
    """Watch a run to its end, also one that is under way; returns its exit code, or 130 after
    Ctrl-C.

    Raises:
      ValueError: see `run_to_completion`.
    """
    try:
        return run_to_completion(options, job)
    except KeyboardInterrupt:
        log(
            "\nno longer watching: the run goes on, but nothing restarts it after a preemption. "
            "The same command watches again; `maxmars launch tpu-vm stop` ends the run."
        )
        return 130


def host_script(options: TpuOptions, job: Job) -> str:
    """The script for each host: the values of this run, then host.sh."""
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
    """Files in the home directory of each host: the archive, the script, the environment."""
    return [f"maxmars-{job.name}{end}" for end in (".tar.gz", ".sh", ".env")]


def _write_files(options: TpuOptions, job: Job, folder: Path) -> list[str]:
    archive, script, environment = paths = [folder / name for name in _file_names(job)]
    archive.write_bytes(job.code.archive)
    script.write_text(host_script(options, job))
    environment.touch(mode=0o600)  # has the secrets
    environment.write_text(_environment_file(job.environment.items()))
    return [str(path) for path in paths]


def _here_document(name: str, text: str) -> str:
    """A bash command that writes a text, which ends with a newline, to a file without changes."""
    end, lines = "END_OF_FILE", text.split("\n")
    while end in lines:  # an argument of the run may hold such a line
        end += "_"
    return f"cat >{name} <<'{end}'\n{text}{end}"


def describe(options: TpuOptions, job: Job) -> str:
    """All commands and files of a launch as a bash script, without secrets."""
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
