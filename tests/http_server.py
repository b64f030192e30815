"""Local servers that stand in for others'."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    daemon_threads = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Keep quiet about clients that were killed."""


class Handler(BaseHTTPRequestHandler):
    def send(self, content, status=200, headers=()):
        """Answer with bytes, or with a value as JSON."""
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers = {"Content-Type": "application/json", **dict(headers)}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        """Keep quiet."""


@contextlib.contextmanager
def serving(handler, port=0, server=Server):
    """A server that answers within the block."""
    with server(("127.0.0.1", port), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()
