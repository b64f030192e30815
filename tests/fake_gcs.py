"""A bucket store on this machine: what TensorStore, gcsfs and Google's client ask of `gs://`.

Objects have generations, and writes and deletions honour `ifGenerationMatch`, as the JSON API says.
There is one bucket, `bucket`; of those that are named like `status-403`, every request gets that.
"""

import base64
import json
import os
import re
import threading
from urllib.parse import parse_qs, unquote, urlsplit

import http_server

_BUCKET = re.compile(r"/storage/v1/b/([^/]+)$")
_OBJECTS = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o$")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)$")
_COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)$")


class Server(http_server.Server):
    """Objects: name -> (generation, bytes).

    `failing` decides whether a read of contents fails, from its number (0, 1, ...) and name: with
    503, which gcsfs tries again for half a minute, or with 400 and the text that it returns.
    `on_request` is called with the path of each request before the answer.
    """

    request_queue_size = 256  # gcsfs connects a hundred times at once; of five the rest would wait

    def __init__(self, address, handler):
        super().__init__(address, handler)
        self.objects, self.last, self.lock = {}, 0, threading.RLock()
        self.writes = []  # name, generation that the writer expected, generation that was there
        self.uploads = []  # name and content so far of each resumable upload
        self.reads = []  # name and number of bytes of each read of contents
        self.lists = []  # prefixes
        self.failing = lambda number, name: False
        self.on_request = lambda path: None

    @property
    def environment(self):
        return os.environ | self.variables

    @property
    def variables(self):
        """Where a process of its own finds the server; clients read them at their first use."""
        return {
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "STORAGE_EMULATOR_HOST": self.url,
            "GOOGLE_CLOUD_PROJECT": "project",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # would look for buckets over gRPC
            "NO_GCE_CHECK": "true",
        }

    def text(self, name):
        return self.objects[name][1].decode()

    def put_directory(self, directory, name):
        """Upload the files of a directory on the disk, and of those in it."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(directory)}", path.read_bytes())

    def put(self, name, content):
        with self.lock:
            self.last += 1
            self.objects[name] = (self.last, content)


def crc32c(content):
    """As the store gives it, by a library that comes with gcsfs; nothing where there is none."""
    try:
        import google_crc32c
    except ImportError:
        return ""
    return base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()


def serve():
    return http_server.serving(Handler, server=Server)


class Handler(http_server.Handler):
    protocol_version = "HTTP/1.1"
    # The content follows the headers in a packet of its own, for which Nagle's algorithm would wait
    # until the client has acknowledged the first: 40 ms.
    disable_nagle_algorithm = True

    def answer(self, status, content=b"", headers=()):
        self.send(content, status, headers)

    def fail(self, status, text=""):
        self.answer(status, {"error": {"code": status, "message": text or f"status {status}"}})

    def metadata(self, name):
        generation, content = self.server.objects[name]
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "bucket",
            "generation": str(generation),
            "size": str(len(content)),
            "crc32c": crc32c(content),
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def handle_request(self):
        method, length = self.command.lower(), int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if asked := re.search(r"/b/status-(\d+)", parts.path):
            return self.fail(int(asked[1]))
        for pattern, prefix in ((_COPY, "copy"), (_OBJECT, "object"), (_OBJECTS, "objects")):
            match = pattern.fullmatch(parts.path)
            if match:
                bucket, *names = map(unquote, match.groups())
                if bucket != "bucket":
                    return self.fail(404, "The specified bucket does not exist.")
                with self.server.lock:
                    self.server.on_request(unquote(parts.path))
                    return getattr(self, f"{method}_{prefix}")(names, query, body)
        match = _BUCKET.fullmatch(parts.path)
        if match and match[1] == "bucket":
            return self.answer(200, {"kind": "storage#bucket", "name": "bucket"})
        return self.fail(404)

    do_GET = do_POST = do_DELETE = handle_request  # noqa: N815

    def get_object(self, names, query, body):
        (name,) = names
        if name not in self.server.objects:
            return self.fail(404)
        generation, content = self.server.objects[name]
        if query.get("alt") != "media":
            return self.answer(200, self.metadata(name))
        number = len(self.server.reads)
        self.server.reads.append((name, 0))
        if failure := self.server.failing(number, name):
            return self.fail(400, failure) if isinstance(failure, str) else self.fail(503)
        headers = {"x-goog-generation": generation}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.server.reads[number] = (name, len(content))
            return self.answer(200, content, headers)
        first, last = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
        if first > last:
            return self.answer(416, b"", headers)
        self.server.reads[number] = (name, last + 1 - first)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self.answer(206, content[first : last + 1], headers)

    def delete_object(self, names, query, body):
        (name,) = names
        if self.refused(name, query):
            return self.fail(412)
        if self.server.objects.pop(name, None) is None:
            return self.fail(404)
        return self.answer(204)

    def get_objects(self, names, query, body):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        self.server.lists.append(prefix)
        start, end = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], set()
        for name in sorted(self.server.objects):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            inner, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
            if cut:
                prefixes.add(f"{prefix}{inner}{delimiter}")
            else:
                items.append(self.metadata(name))
        # All on one page, which the API allows whatever maxResults is.
        return self.answer(200, {"items": items, "prefixes": sorted(prefixes)})

    def post_objects(self, names, query, body):
        if "upload_id" in query:  # a part of a resumable upload; all but the last end in 308
            name, content = self.server.uploads[int(query["upload_id"])]
            content += body
            _, last, size = re.split("[-/]", self.headers.get("Content-Range", "0-0/1"))
            if int(last) + 1 < int(size):
                return self.answer(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
            return self.write(name, query, bytes(content))
        match query.get("uploadType"):
            case "media":
                return self.write(query["name"], query, body)
            case "multipart":  # metadata and content, as gcsfs sends small files
                boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1]
                parts = body.split(f"--{boundary}".encode())[1:3]
                metadata, content = (part.partition(b"\n\n")[2][:-1] for part in parts)
                return self.write(json.loads(metadata)["name"], query, content)
            case "resumable":
                name = query.get("name") or json.loads(body)["name"]
                self.server.uploads.append((name, bytearray()))
                place = f"{self.server.url}{self.path}&upload_id={len(self.server.uploads) - 1}"
                return self.answer(200, b"", {"Location": place})
        return self.fail(400)

    def post_copy(self, names, query, body):
        name, _, target = names
        if name not in self.server.objects:
            return self.fail(404)
        self.server.put(target, self.server.objects[name][1])
        return self.answer(200, {"done": True, "resource": self.metadata(target)})

    def write(self, name, query, content):
        if self.refused(name, query):
            return self.fail(412)
        self.server.put(name, content)
        return self.answer(200, self.metadata(name))

    def refused(self, name, query):
        """Whether the precondition fails; 0 stands for an object that is not there."""
        wanted = query.get("ifGenerationMatch")
        have = self.server.objects.get(name, (0,))[0]
        self.server.writes.append((name, None if wanted is None else int(wanted), have))
        return wanted is not None and int(wanted) != have
