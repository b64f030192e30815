"""`maxmars launch tpu-vm`: a run on the hosts of a TPU, started again after each preemption.

The run goes on without this program, which creates the TPU, copies the checkout, starts every host
at once and shows the log; run again, it takes up where things stand. Only a TPU that was preempted
needs it, to be created anew.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from maxmars.launch import tools
from maxmars.launch.host_script import host_command, host_script, read_report
from maxmars.launch.job import Job
from maxmars.launch.tpu_commands import State, TpuVm

STOPPED = 75
"""Exit code of a run that was stopped and can go on."""

_POLL_S = 20.0
_SSH_RETRY_S = 15.0  # gcloud itself tries for a minute
_SSH_TRIES = 4
_END_S = 180  # for the last host to end after the first
_USERS_ERRORS = ("exited 1", "exited 2")
_CAPACITY = ("capacity", "resource_exhausted", "stockout")


class HostsLostError(Exception):
    """Not every host answers."""


class Launcher:
    """Brings a run to its end on one TPU."""

    def __init__(
        self,
        vm: TpuVm,
        job: Job,
        *,
        max_restarts: int,
        delete_when_done: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepare; `max_restarts` counts preemptions and other restarts of the run together."""
        self._vm, self._job, self._say = vm, job, say
        self._max_restarts, self._delete_when_done = max_restarts, delete_when_done
        self._restarts = 0
        self._states: dict[str, str] = {}  # of the hosts, at the end of an attempt

    def run(self) -> int:
        """Run to the end; the exit code: 0 when all steps are done, 75 after `stop`.

        Raises:
          ValueError: the run failed, the TPU cannot be had, or too many restarts.
        """
        tools.require("gcloud")
        while (reason := self._attempt()) is not None:
            self._restarts += 1
            if self._restarts > self._max_restarts:
                raise ValueError(
                    f"{reason}, and --max-restarts {self._max_restarts} are used up; the same "
                    f"command continues the run. {self._cost()}"
                )
            self._say(f"{reason}; restart {self._restarts} of at most {self._max_restarts}")
        states = set(self._states.values())
        if states != {"exited 0"}:
            self._say(f"the run was stopped and saved; the same command continues. {self._cost()}")
            return STOPPED
        self._say(f"done: all steps; results are in {self._job.workdir}")
        if self._delete_when_done:
            self._vm.remove()
            self._say(f"deleted the TPU {self._vm.name}")
        else:
            self._say(self._cost())
        return 0

    def _attempt(self) -> str | None:
        """Run on the TPU as long as it lasts; why to start again, or None at the end."""
        try:
            hosts = self._obtain()
            self._start(hosts)
            self._follow()
            self._states = self._on_all(f"wait {_END_S}", hosts)
        except HostsLostError as error:
            state = self._vm.state()
            preempted = state.phase in ("gone", "leaving", "missing")
            return f"the TPU was preempted ({state.text})" if preempted else str(error)
        states = set(self._states.values())
        if states == {"exited 0"} or any(state.startswith("stopped") for state in states):
            return None
        state = self._vm.state()
        if state.phase != "ready":
            return f"the TPU was preempted ({state.text})"
        ended = ", ".join(f"{host} {state}" for host, state in sorted(self._states.items()))
        if any(state in _USERS_ERRORS for state in states):
            raise ValueError(
                f"the run failed ({ended}); its log is above, each host's in "
                f"{self._job.workdir}/logs. {self._cost()}"
            )
        return f"the run ended early ({ended})"

    def _obtain(self) -> int:
        """Have the TPU ready, created if need be; the number of its hosts."""
        told = ""
        while True:
            state = self._vm.state()
            if state.text != told:
                told = state.text
                self._say(f"{self._vm.name}: {state.text}")
            match state.phase:
                case "ready":
                    return state.num_hosts
                case "failed":
                    raise ValueError(
                        f"{self._vm.name} is of no use: {state.text}. Delete it with "
                        f"`maxmars launch tpu-vm delete {self._where()}` and launch again."
                    )
                case "missing":
                    self._create()
                    continue
                case "gone":
                    self._vm.remove()
                    continue
            time.sleep(_POLL_S)

    def _create(self) -> None:
        if self._vm.accelerator is None:
            raise ValueError(f"there is no TPU {self._vm.name}; name its kind by --accelerator.")
        kind = f"{'spot ' if self._vm.spot else ''}{self._vm.accelerator}"
        count = "a" if self._vm.num_slices == 1 else f"{self._vm.num_slices} slices of"
        verb = "asking for" if self._vm.queued else "creating"
        self._say(f"{self._vm.name}: {verb} {count} {kind}")
        done = tools.run(self._vm.create())
        if done.code == 0 or "ALREADY_EXISTS" in done.errors:
            return
        short = any(word in done.errors.lower() for word in _CAPACITY)
        if short and self._restarts and self._restarts < self._max_restarts:
            self._restarts += 1
            self._say(f"there is no capacity; restart {self._restarts}")
            time.sleep(_POLL_S)
            return
        hint = " --queued waits for capacity." if short and not self._vm.queued else ""
        raise ValueError(f"gcloud could not create {self._vm.name}: {done.problem}.{hint}")

    def _start(self, hosts: int) -> None:
        """Have a process run on every host, all started at once."""
        with tempfile.TemporaryDirectory(prefix="maxmars-launch-") as folder:
            self._retry(self._vm.copy(write_files(self._job, Path(folder))), "scp")
        states = set(self._on_all("status", hosts).values())
        if states == {"running"}:
            self._say(f"the run is already under way on {hosts} hosts")
            return
        if "running" in states:  # on some of them only
            self._on_all("kill", hosts)
        self._say(f"installing on {hosts} hosts")
        installed = self._on_all("install", hosts, tell=True)
        failed = [host for host, state in installed.items() if state != "installed"]
        if failed:
            raise ValueError(f"could not install on {', '.join(sorted(failed))}: see above.")
        self._say(f"starting on {hosts} hosts")
        self._on_all("start", hosts)

    def _on_all(self, words: str, hosts: int, *, tell: bool = False) -> dict[str, str]:
        """State of every host after a command of the host script."""
        command = self._vm.ssh(host_command(self._job.name, words))
        for _ in range(_SSH_TRIES):
            done = tools.run(command)
            reports = dict(filter(None, map(read_report, done.output.splitlines())))
            if len(reports) >= hosts:
                if tell:
                    lines = done.output.splitlines()
                    self._tell([line for line in lines if read_report(line) is None])
                return reports
            self._check_ready()
            time.sleep(_SSH_RETRY_S)
        raise HostsLostError(f"{len(reports)} of {hosts} hosts answered by ssh ({done.problem})")

    def _retry(self, command: list[str], what: str) -> None:
        for _ in range(_SSH_TRIES):
            done = tools.run(command)
            if done.code == 0:
                return
            self._check_ready()
            time.sleep(_SSH_RETRY_S)
        raise HostsLostError(f"{what} fails ({done.problem})")

    def _check_ready(self) -> State:
        state = self._vm.state()
        if state.phase != "ready":
            raise HostsLostError(state.text)
        return state

    def _follow(self) -> None:
        """Show the first host's log until its process ends; a lost connection is taken up again."""
        failures, log = 0, FollowedLog(self._vm, self._say)
        while failures < _SSH_TRIES:
            before = log.seen
            if log.follow():
                return
            self._check_ready()
            failures = 1 if log.seen > before else failures + 1
            time.sleep(_SSH_RETRY_S)
        raise HostsLostError("the connection to the first host breaks again and again")

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            self._say(line)

    def _where(self) -> str:
        project = "" if self._vm.project is None else f" --project {self._vm.project}"
        return f"--name {self._vm.name} --zone {self._vm.zone}{project}"

    def _cost(self) -> str:
        return f"The TPU costs until `maxmars launch tpu-vm delete {self._where()}`."


class FollowedLog:
    """The log of the first host, line by line as it comes."""

    def __init__(self, vm: TpuVm, say: Callable[[str], None]) -> None:
        """Give each line to `say`, once."""
        self._vm, self._say = vm, say
        self.seen = 0

    def follow(self) -> bool:
        """Show lines until the host's process ends; False if the connection ended before."""
        command = host_command(self._vm.name, f"follow {self.seen}")
        with subprocess.Popen(
            self._vm.ssh(command, worker="0"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as ssh:
            assert ssh.stdout is not None
            for line in ssh.stdout:
                if read_report(line) is not None:
                    return True
                number, tab, text = line.rstrip("\n").partition("\t")
                if tab and number.isdecimal() and int(number) > self.seen:
                    self.seen = int(number)
                    self._say(text)
        return False


def write_files(job: Job, folder: Path) -> list[str]:
    """Write the files that every host gets; the one with secrets can be read by the user only."""
    stem = f"maxmars-{job.name}"
    (folder / f"{stem}.tar.gz").write_bytes(job.source.archive)
    (folder / f"{stem}.sh").write_text(host_script(job))
    environment = folder / f"{stem}.env"
    environment.touch(mode=0o600)
    environment.write_text(job.environment_file(redacted=False))
    return [str(folder / f"{stem}{end}") for end in (".tar.gz", ".sh", ".env")]


def describe(vm: TpuVm, job: Job) -> str:
    """All commands and files, as a bash script without secrets."""
    stem = f"maxmars-{job.name}"
    on_hosts = [host_command(job.name, words) for words in ("install", "start", "follow 0")]
    commands = [vm.ssh(on_hosts[0]), vm.ssh(on_hosts[1]), vm.ssh(on_hosts[2], worker="0")]
    delete = vm.delete_queued() if vm.queued else vm.delete()
    wait = vm.describe_queued() if vm.queued else vm.describe()
    files = [f"{stem}.tar.gz", f"{stem}.sh", f"{stem}.env"]
    size_kb = len(job.source.archive) / 1000
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# What `maxmars launch tpu-vm` does; this was a dry run.",
            "set -euo pipefail",
            "",
            f"# {files[0]}: {job.source.num_files} files of the checkout, {size_kb:.0f} kB",
            f"cat >{files[1]} <<'END_OF_FILE'",
            f"{host_script(job)}END_OF_FILE",
            f"cat >{files[2]} <<'END_OF_FILE'",
            f"{job.environment_file(redacted=True)}END_OF_FILE",
            "",
            "# Create the TPU, and wait until it is there:",
            shlex.join(vm.create()),
            shlex.join(wait),
            "",
            "# On all hosts at once: copy, install, start; then show the log of the first:",
            shlex.join(vm.copy(files)),
            *map(shlex.join, commands),
            "",
            "# After a preemption, and at `maxmars launch tpu-vm delete`:",
            f"# {shlex.join(delete)}",
            "",
        ]
    )


def ask_hosts(vm: TpuVm, words: str) -> dict[str, str]:
    """State of the hosts after a command of the host script.

    Raises:
      ValueError: no host answers.
    """
    done = tools.run(vm.ssh(host_command(vm.name, words)))
    reports = dict(filter(None, map(read_report, done.output.splitlines())))
    if not reports:
        raise ValueError(f"no host of {vm.name} answered: {done.problem}")
    return reports
