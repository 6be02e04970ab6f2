"""A Hugging Face Hub in one process, for tests of push and load. Standard library only.

Answers what huggingface_hub 1.31 and later and transformers need for create_repo, create_commit, upload_file,
upload_folder, push_to_hub, hf_hub_download, snapshot_download, from_pretrained, list_repo_tree and model_info.
Mocks of one HTTP client would miss the other (hub 1.x uses httpx, 2.x httpx2), a server does not.

There is no Xet: clients must run with HF_HUB_DISABLE_XET=1. HF_ENDPOINT, HF_TOKEN and HF_HOME are read when
huggingface_hub is imported, so the client belongs in a subprocess (see ``run_client`` in conftest.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Blob:
    """One file; ``lfs`` files are known by the SHA-256 of their content, others by git's hash."""

    data: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        if self.lfs:
            return self.sha256
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repo:
    """A model repository: commits are whole snapshots, ``head`` is the only branch."""

    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    head: str = ""

    def commit(self, files: dict[str, Blob]) -> str:
        content = json.dumps([self.head, len(self.commits), sorted((path, blob.oid) for path, blob in files.items())])
        self.head = hashlib.sha1(content.encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    def resolve(self, revision: str) -> str | None:
        if revision == "main":
            return self.head
        return revision if revision in self.commits else None

    @property
    def files(self) -> dict[str, bytes]:
        """The newest content by path."""
        return {path: blob.data for path, blob in self.commits[self.head].items()}


class LocalHub:
    """``with LocalHub() as hub:`` serves on a free port; ``hub.repos`` maps ids to what was pushed."""

    def __init__(self, user: str = "tester", token: str = "hf_test"):
        self.user, self.token = user, token
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}  # LFS objects by SHA-256
        self.lock = threading.RLock()
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        port = self.server.server_port
        self.endpoint = f"http://127.0.0.1:{port}"
        # Another host name for LFS content: clients follow redirects to the same host already for the HEAD request,
        # and would then miss its X-Repo-Commit header.
        self.storage = f"http://localhost:{port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *args) -> None:
        pass

    def _handle(self) -> None:
        parts = [part for part in urlsplit(self.path).path.split("/") if part]  # still percent-encoded
        body = self._body()
        with self.hub.lock:
            try:
                self._route(parts, body)
            except Exception as error:
                traceback.print_exc()
                self._send(500, {"error": repr(error)})

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _route(self, parts: list[str], body: bytes) -> None:
        match parts:
            case ["_lfs", oid]:
                return self._lfs(oid, body)
            case ["api", "validate-yaml"]:
                return self._send(200, {"errors": [], "warnings": []})
            case ["api", "whoami-v2"] if self._authorized:
                return self._send(
                    200, {"type": "user", "name": self.hub.user, "orgs": [], "auth": {"type": "access_token"}}
                )
            case ["api", "repos", "create"] if self._authorized:
                return self._create(json.loads(body))
            case ["api", "models", owner, name, *rest]:
                return self._model(f"{owner}/{name}", [unquote(part) for part in rest], body)
            case [_, repository, "info", "lfs", "objects", "batch"] if (
                repository.endswith(".git") and self._authorized
            ):
                return self._lfs_batch(json.loads(body))
            case [owner, name, "resolve", revision, *path]:
                return self._file(f"{owner}/{name}", unquote(revision), "/".join(map(unquote, path)))
        self._error(404 if self._authorized else 401, "", f"no route {self.command} {self.path}")

    # -- routes ------------------------------------------------------------------------------------------------------

    def _create(self, request: dict[str, Any]) -> None:
        repo_id = f"{request.get('organization') or self.hub.user}/{request['name']}"
        answer = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.hub.repos:
            return self._send(409, {"error": "You already created this model repo", **answer})
        self.hub.repos[repo_id] = Repo()
        self.hub.repos[repo_id].commit(
            {".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}
        )
        self._send(200, answer)

    def _model(self, repo_id: str, rest: list[str], body: bytes) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            return self._error(404, "RepoNotFound", "Repository not found")
        verb, revision, *path = [*rest, "main"] if len(rest) == 1 else rest or ["revision", "main"]
        oid = repo.resolve(revision)
        if oid is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.commits[oid]
        match self.command, verb:
            case "GET", "revision":
                siblings = [{"rfilename": name} for name in sorted(files)]
                info = {
                    "_id": oid[:24],
                    "id": repo_id,
                    "modelId": repo_id,
                    "sha": oid,
                    "siblings": siblings,
                    "tags": [],
                }
                info |= {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
                return self._send(200, info | {"lastModified": DATE, "createdAt": DATE})
            case "GET", "tree":
                return self._tree(files, "/".join(path), oid)
            case "POST", "paths-info":
                wanted = json.loads(body)["paths"]
                return self._send(200, [_entry(name, files[name]) for name in wanted if name in files])
            case "POST", "preupload" if self._authorized:
                modes = [
                    {"path": f["path"], "uploadMode": _mode(f), "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                return self._send(200, {"files": modes})
            case "POST", "commit" if self._authorized:
                return self._commit(repo_id, repo, dict(files), body)
        self._error(404 if self._authorized else 401, "", f"no route {self.command} {self.path}")

    def _tree(self, files: dict[str, Blob], folder: str, oid: str) -> None:
        # All repositories here are flat or nearly so: answering recursively is allowed and enough.
        found = [_entry(name, blob) for name, blob in sorted(files.items()) if name.startswith(folder)]
        if folder and not found:
            return self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": oid})
        self._send(200, found)

    def _commit(self, repo_id: str, repo: Repo, files: dict[str, Blob], body: bytes) -> None:
        for line in filter(None, body.splitlines()):
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]))
                case "lfsFile" if value["oid"] in self.hub.uploads:
                    files[value["path"]] = Blob(self.hub.uploads[value["oid"]], lfs=True)
                case "lfsFile":
                    return self._send(400, {"error": f"LFS object {value['oid']} was not uploaded"})
                case "deletedFile":
                    files.pop(value["path"], None)
        oid = repo.commit(files)
        url = f"{self.hub.endpoint}/{repo_id}/commit/{oid}"
        self._send(
            200, {"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": None, "hookOutput": ""}
        )

    def _lfs_batch(self, request: dict[str, Any]) -> None:
        objects = []
        for wanted in request["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.uploads:
                answer["actions"] = {"upload": {"href": f"{self.hub.endpoint}/_lfs/{wanted['oid']}"}}
            objects.append(answer)
        self._send(200, {"transfer": "basic", "objects": objects})

    def _lfs(self, oid: str, body: bytes) -> None:
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return self._send(400, {"error": "the content does not have this SHA-256"})
            self.hub.uploads[oid] = body
            return self._send(200, {})
        self._content(Blob(self.hub.uploads[oid], lfs=True))

    def _file(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            return self._error(404, "RepoNotFound", "Repository not found")
        oid = repo.resolve(revision)
        if oid is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        blob = repo.commits[oid].get(path)
        commit = {"X-Repo-Commit": oid}
        if blob is None:
            return self._error(404, "EntryNotFound", "Entry not found", commit)
        if not blob.lfs:
            return self._content(blob, commit)
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        self._send(302, b"", commit | linked | {"Location": f"{self.hub.storage}/_lfs/{blob.sha256}"})

    # -- answers -----------------------------------------------------------------------------------------------------

    def _content(self, blob: Blob, headers: dict[str, str] | None = None) -> None:
        data, status = blob.data, 200
        headers = {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes", **(headers or {})}
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes=") and self.command == "GET":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) if last else len(data) - 1
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        self._send(status, data, headers)

    def _send(self, status: int, body: bytes | dict | list = b"", headers: dict[str, str] | None = None) -> None:
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    @property
    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
    return entry
