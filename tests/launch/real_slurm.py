"""A real SLURM of two nodes on this machine, as Debian's slurm-wlm and munge bring it."""

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from running import free_port, wait_for

KILL_WAIT_S = 5
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")


def why_absent():
    """Why there can be no SLURM here; None where there can be one."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    own_namespaces = ["unshare", "--mount", "--uts", "true"]
    if os.geteuid() != 0 or subprocess.run(own_namespaces, capture_output=True).returncode != 0:
        return "only root may give each node a name and an /etc/hosts of its own"
    return None


class RealSlurm:
    """Runs inside a `with` block; `environment` leads SLURM's commands to it."""

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket takes no longer path
        self._folder.chmod(0o755)
        self.environment = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        self._daemons = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", "--user=root"], env=os.environ | self.environment
        )
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(timeout=30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self):
        folder, host = self._folder, socket.gethostname()
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        values = {"folder": folder, "host": host, "kill_wait_s": KILL_WAIT_S}
        values |= {f"{name}_port": free_port() for name in ("controller", "first", "second")}
        conf = Path(__file__).with_name("slurm.conf").read_text()
        (folder / "slurm.conf").write_text(conf.format(**values))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # taken for a GPU
        (folder / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {host}\n")
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(128))
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self._wait((folder / "munge.sock").exists)
        self._daemon("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for node in ("n1", "n2"):
            # Programs of a job find the other node by its name, and themselves by their own.
            slurmd = shlex.join(["slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf")])
            hosts = f"mount --bind {folder}/hosts /etc/hosts"
            enter = ["unshare", "--mount", "--uts", "bash", "-c"]
            self._daemon(*enter, f"hostname {node} && {hosts} && exec {slurmd}")
        nodes = ["sinfo", "--Node", "--partition=main", "--noheader", "--format=%T"]
        self._wait(lambda: self.ask(*nodes).split() == ["idle", "idle"])

    def _daemon(self, *command):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._daemons.append(subprocess.Popen(command, **quiet))

    def _wait(self, condition):
        def shown():
            return {path.name: path.read_text()[-2000:] for path in self._folder.glob("*.log")}

        wait_for(condition, 60, shown)

    def run(self, *command):
        """A command of SLURM after its end."""
        env = os.environ | self.environment
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def ask(self, *command):
        """What a command of SLURM prints."""
        return self.run(*command).stdout

    def job(self, number):
        """The fields of a job, such as JobState and Restarts."""
        fields = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)
