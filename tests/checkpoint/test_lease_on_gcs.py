"""The lease through TensorStore's own client for `gs://`, against a server of a few requests.

The server keeps objects with generations and honours `ifGenerationMatch`, as the JSON API says. The
client has read where the server is by the time of its first use: hence a process of its own.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

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


class Server(ThreadingHTTPServer):
    """Objects of one bucket: name -> (generation, bytes)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.last, self.lock, self.writes = {}, 0, threading.Lock(), []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, content=b"", generation=0):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        self.wfile.write(content)

    def refused(self, name, query):
        """Whether the precondition fails; 0 stands for an object that is not there."""
        wanted = query.get("ifGenerationMatch")
        have = self.server.objects.get(name, (0,))[0]
        self.server.writes.append((name, None if wanted is None else int(wanted[0]), have))
        return wanted is not None and int(wanted[0]) != have

    def parse(self):
        parts = urlsplit(self.path)
        return unquote(parts.path.rpartition("/o/")[2]), parse_qs(parts.query)

    def do_GET(self):
        name, _ = self.parse()
        if name not in self.server.objects:
            return self.answer(404)
        generation, content = self.server.objects[name]
        return self.answer(200, content, generation)

    def do_POST(self):
        query = self.parse()[1]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            name = query["name"][0]
            if self.refused(name, query):
                return self.answer(412)
            self.server.last += 1
            self.server.objects[name] = (self.server.last, content)
            found = {"name": name, "generation": str(self.server.last)}
            return self.answer(200, json.dumps(found).encode(), self.server.last)

    def do_DELETE(self):
        name, query = self.parse()
        with self.server.lock:
            if self.refused(name, query):
                return self.answer(412)
            del self.server.objects[name]
            return self.answer(204)

    def log_message(self, *_):
        """Keep quiet."""


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_write_names_the_generation_that_it_replaces(server):
    environment = os.environ | {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], env=environment, capture_output=True, text=True, timeout=60
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
