"""A local imitation of the Hugging Face hub, as far as models and data sets are read from it.

`huggingface_hub` reads HF_ENDPOINT, HF_HOME and the like when it is imported, so `conftest.py` sets
them for all tests, with the address of `PORT`; `FakeHub` listens there while a test needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

import http_server

PORT = 20_000 + os.getpid() % 10_000  # below the ports that systems give away
ENDPOINT = f"http://127.0.0.1:{PORT}"
_LARGE = (".safetensors", ".bin", ".png")


@dataclass
class Repository:
    """A model or a data set; each commit holds all of its files."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class FakeHub:
    """What the hub has, what it was asked, and how it fails."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Owner of each token."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path, and token of each request."""
    after_download: Callable[[], object] | None = None
    """Called once, after a large file was downloaded."""

    def add(
        self, name: str, files: dict[str, bytes] | Path, ref: str = "main", **options: bool
    ) -> str:
        """A new commit of a repository, which is made if it is missing; its SHA-1."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        repository = self.repositories.setdefault(name, Repository(**options))
        return repository.commit(files, ref)

    def fetched(self) -> list[str]:
        """Names of the files that were downloaded."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        names = [path.partition("/resolve/")[2].partition("/")[2] for path in paths]
        return [name for name in names if name]


class _Handler(http_server.Handler):
    hub: FakeHub

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, unquote(path), self.token))
        if self.token is not None and self.token not in self.hub.tokens:
            self._refuse(401, "Invalid credentials in Authorization header")
            return
        path = path.removeprefix("/datasets").strip("/")
        parts = [unquote(part) for part in path.split("/")]
        match parts:
            case ["api", "models" | "datasets", owner, name, *rest]:
                self._of_repository(f"{owner}/{name}", rest)
            case [owner, name, "resolve", revision, *file]:
                self._of_repository(f"{owner}/{name}", ["resolve", revision, *file])
            case _:
                self._refuse(404, "not found")

    do_GET = do_HEAD = do_POST = _answer  # noqa: N815

    def _of_repository(self, name: str, rest: list[str]) -> None:
        repository = self.hub.repositories.get(name)
        owner = self.hub.tokens.get(self.token or "")
        is_owner = owner == name.partition("/")[0]
        if repository is None or (repository.private and not is_owner):
            known = self.token is not None
            self._refuse(404 if known else 401, "Repository not found", "RepoNotFound")
            return
        action = rest[0] if rest else "revision"
        sha = repository.find(rest[1] if len(rest) > 1 else "main")
        if sha is None:
            self._refuse(404, "Invalid rev id", "RevisionNotFound")
            return
        files = repository.commits[sha]
        match action:
            case "revision":
                fields = {"private": repository.private, "tags": [], "gated": False}
                siblings = [{"rfilename": file} for file in files]
                self.send({"id": name, "sha": sha, "siblings": siblings, **fields})
            case "tree":
                is_recursive = "recursive=true" in self.path.lower()
                self.send(list(_tree(files, "/".join(rest[2:]), is_recursive)))
            case "paths-info":
                paths = self._asked_paths()
                self.send([entry for entry in _tree(files, "", True) if entry["path"] in paths])
            case "resolve":
                self._resolve(sha, "/".join(rest[2:]), files)
            case _:
                self._refuse(404, "not found")

    def _resolve(self, sha: str, file: str, files: dict[str, bytes]) -> None:
        if file not in files:
            self._refuse(404, "Entry not found", "EntryNotFound")
            return
        content, status = files[file], 200
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_entry(file, content)["oid"]}"'}
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            start, end, size = (
                int(first),
                min(int(last or len(content)) + 1, len(content)),
                len(content),
            )
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            content, status = content[start:end], 206
        self.send(content, status, headers)
        if self.command == "GET" and file.endswith(_LARGE) and self.hub.after_download is not None:
            called, self.hub.after_download = self.hub.after_download, None
            called()

    def _asked_paths(self) -> list[str]:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        return (json.loads(body) if body.startswith("{") else parse_qs(body))["paths"]

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        headers = {"X-Error-Message": message} | ({} if code is None else {"X-Error-Code": code})
        self.send({"error": message}, status, headers)


def _entry(file: str, content: bytes) -> dict:
    header = f"blob {len(content)}\0".encode()
    oid = hashlib.sha1(header + content).hexdigest()
    entry = {"type": "file", "path": file, "size": len(content), "oid": oid}
    if file.endswith(_LARGE):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> Iterator[dict]:
    """The files and folders in a folder, or also in those."""
    prefix = f"{folder}/" if folder else ""
    entries = [_entry(file, content) for file, content in files.items()]
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents} - {"."}
    entries += [{"type": "directory", "path": path, "oid": path, "size": 0} for path in folders]
    for entry in entries:
        inside = entry["path"].removeprefix(prefix)
        if entry["path"].startswith(prefix) and (recursive or "/" not in inside):
            yield entry


@contextmanager
def serving(hub: FakeHub) -> Iterator[None]:
    """Let the hub answer at `ENDPOINT` within the block; outside of it, nobody does."""
    with http_server.serving(type("Handler", (_Handler,), {"hub": hub}), PORT):
        yield
