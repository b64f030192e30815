"""A local imitation of the Hugging Face hub, as far as `datasets` needs it to stream files.

The folder `root/OWNER/NAME/REVISION/` holds the files of a dataset at a revision, with the slashes
of the revision's name as `--`.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from http_server import Handler, serving


def commit_of(repository: str, revision: str) -> str:
    return hashlib.sha1(f"{repository} {revision}".encode()).hexdigest()


class _Hub(Handler):
    root: Path

    def _folder(self, repository: str, revision: str) -> Path | None:
        """The folder of a revision, which may be given by name or by commit."""
        for folder in (self.root / repository).glob("*"):
            name = folder.name.replace("--", "/")
            if revision in (name, commit_of(repository, name)):
                self.commit = commit_of(repository, name)
                return folder
        return None

    def _route(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            repository, action = "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "revision"
            self._api(repository, action, parts[5:] or ["main"])
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            self._resolve("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        else:
            self.send({"error": "not found"}, 404)

    do_GET = do_HEAD = do_POST = lambda self: self._route()  # noqa: N815

    def _api(self, repository: str, action: str, rest: list[str]) -> None:
        folder = self._folder(repository, rest[0])
        if folder is None:
            self.send({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        if action == "revision":
            files = [{"rfilename": e["path"]} for e in _entries(folder, "") if e["type"] == "file"]
            fields = {"private": False, "disabled": False, "gated": False}
            fields |= {"tags": [], "downloads": 0}
            self.send({"id": repository, "sha": self.commit, "siblings": files, **fields})
        elif action == "tree":
            self.send(_entries(folder, "/".join(rest[1:]), "recursive=true" in self.path.lower()))
        elif action == "paths-info":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            try:
                paths = json.loads(body)["paths"]
            except ValueError:
                paths = [unquote(p.partition("=")[2]) for p in body.split("&") if "paths=" in p]
            self.send([e for e in _entries(folder, "") if e["path"] in paths])
        else:
            self.send({"error": "not found"}, 404)

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        folder = self._folder(repository, revision)
        if folder is None or not (folder / name).is_file():
            self.send({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        data = (folder / name).read_bytes()
        status, headers = 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        headers |= {"X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.partition("=")[2].partition("-")
            start, end = int(first or 0), min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        self.send(data, status, headers)


def _entries(folder: Path, under: str, recursive: bool = True) -> list[dict]:
    base = folder / under
    paths = sorted(base.rglob("*") if recursive else base.glob("*")) if base.is_dir() else []
    return [
        {
            "type": "file" if path.is_file() else "directory",
            "oid": hashlib.sha1(str(path).encode()).hexdigest(),
            "size": path.stat().st_size if path.is_file() else 0,
            "path": path.relative_to(folder).as_posix(),
        }
        for path in paths
    ]


@contextmanager
def fake_hub(root: Path) -> Iterator[str]:
    """Serve the datasets under `root`; the address for HF_ENDPOINT."""
    with serving(type("Hub", (_Hub,), {"root": root})) as server:
        yield server.url
