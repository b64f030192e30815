"""The lease through TensorStore's own client for `gs://`.

The client has read where the server is by the time of its first use: hence a process of its own.
"""

import json
import subprocess
import sys

import fake_gcs

CLIENT = """
import json, time
from etils import epath
from maxmars.checkpoint.lease import Lease
duration = 1.0

def open_lease():
    try:
        lease = Lease.open(epath.Path("gs://bucket/run/checkpoints"), duration)
        lease.check()
        return lease
    except ValueError as error:
        return str(error)

first = open_lease()
time.sleep(1.5 * duration)
refused = open_lease()
first.check()
first._stop.set()
first._thread.join()
second = open_lease()
try:
    first.check()
    lost = None
except OSError as error:
    lost = str(error)
first.release()
second.check()
second.release()
print(json.dumps([refused, lost]))
"""


def test_every_write_names_the_generation_that_it_replaces():
    with fake_gcs.serve() as server:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT],
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    refused, lost = json.loads(done.stdout)
    assert refused.startswith("gs://bucket/run/checkpoints is being written by process ")
    assert lost.startswith("this run lost its ownership of gs://bucket/run/checkpoints")
    assert server.objects == {}
    assert {name for name, _, _ in server.writes} == {"run/checkpoints/owner.json"}
    assert all(wanted is not None for _, wanted, _ in server.writes)
    assert server.writes[0][1] == 0
    assert len(server.writes) >= 5  # made, renewed, taken over, tried by the first, deleted
