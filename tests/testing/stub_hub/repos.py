"""Repos of the stub: commits of whole files, refs, and the requests that read them.

Sources: huggingface_hub 2.4 on the wire; a blob's name is its git hash, SHA-1 of ``blob <size>\\0`` and content.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from tests.testing.stub_hub.answers import Answer, Refusal, as_json

# The Hub keeps these files in LFS regardless of their size.
LARGE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".onnx", ".mp4", ".parquet")
NO_COMMIT = "0" * 40


@dataclass(frozen=True)
class File:
    path: str
    content: bytes

    @property
    def is_large(self) -> bool:
        return self.path.endswith(LARGE)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode()
        )

    @property
    def blob(self) -> str:
        """Return the file's git hash."""
        held = self.pointer if self.is_large else self.content
        return hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.blob

    def as_json(self) -> dict[str, Any]:
        facts = {"type": "file", "oid": self.blob, "size": len(self.content), "path": self.path}
        if self.is_large:
            facts["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self.pointer)}
        return facts

    def as_sibling(self) -> dict[str, Any]:
        """Return the file as in the repo's info, where the tree's ``oid`` is called ``sha256``."""
        facts = {"rfilename": self.path, "size": len(self.content), "blobId": self.blob}
        if self.is_large:
            facts["lfs"] = {"sha256": self.sha256, "size": len(self.content), "pointerSize": len(self.pointer)}
        return facts


@dataclass(frozen=True)
class Commit:
    sha: str
    parent: str | None
    files: Mapping[str, File]
    title: str
    at: datetime


@dataclass
class Repo:
    """Commits and their refs (``refs/heads/main`` to a sha)."""

    id: str
    type: str = "model"
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str | None:
        return self.refs.get("refs/heads/main")

    def commit(self, ref: str, files: Mapping[str, bytes | str | None], title: str) -> Commit:
        """Add a commit on top of the ref (a new branch starts at the default branch); None deletes a file."""
        parent = self.refs.get(ref, self.head)
        kept = dict(self.commits[parent].files) if parent else {}
        for path, content in files.items():
            if content is None:
                kept.pop(path, None)
            else:
                kept[path] = File(path, content.encode() if isinstance(content, str) else content)
        identity = [self.id, parent, len(self.commits), title, sorted((file.path, file.etag) for file in kept.values())]
        sha = hashlib.sha1(repr(identity).encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, kept, title, datetime.now(UTC))
        self.refs[ref] = sha
        return self.commits[sha]

    def at(self, revision: str) -> Commit:
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in self.refs:
                return self.commits[self.refs[name]]
        if revision in self.commits:
            return self.commits[revision]
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def history(self, revision: str) -> list[Commit]:
        found = [self.at(revision)]
        while found[-1].parent:
            found.append(self.commits[found[-1].parent])
        return found

    def answer(self, url: str, parts: list[str], query: Mapping[str, str], page: int) -> Answer:
        """Answer one request of the repo's API; ``parts`` is the path after ``/api/models/{repo}``."""
        with_blobs = query.get("blobs", "").lower() == "true"
        match parts:
            case []:
                return as_json(self._info("main", with_blobs))
            case ["revision", revision]:
                return as_json(self._info(revision, with_blobs))
            case ["refs"]:
                return as_json(self._refs())
            case ["commits", revision]:
                start = int(query.get("p", 0)) * page
                history = self.history(revision)
                further = {**query, "p": str(int(query.get("p", 0)) + 1)}
                link = {"Link": f'<{url}?{urlencode(further)}>; rel="next"'} if len(history) > start + page else {}
                return as_json([_described(commit) for commit in history[start : start + page]], link)
            case ["tree", revision, *within]:
                return as_json(self._tree(revision, "/".join(within), query.get("recursive", "").lower() == "true"))
            case _:
                raise Refusal(404, "Not found")

    def _info(self, revision: str, with_blobs: bool) -> dict[str, Any]:
        commit = self.at(revision)
        siblings = [file.as_sibling() if with_blobs else {"rfilename": path} for path, file in commit.files.items()]
        return {
            "id": self.id,
            "modelId": self.id,
            "author": self.id.split("/")[0],
            "sha": commit.sha,
            "lastModified": _moment(commit.at),
            "private": self.private,
            "gated": False,
            "disabled": False,
            "tags": [],
            "siblings": siblings,
        }

    def _refs(self) -> dict[str, list[dict[str, str]]]:
        kinds = {
            "branches": "refs/heads/",
            "converts": "refs/convert/",
            "tags": "refs/tags/",
            "pullRequests": "refs/pr/",
        }
        return {
            kind: [
                {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": sha}
                for ref, sha in self.refs.items()
                if ref.startswith(prefix)
            ]
            for kind, prefix in kinds.items()
        }

    def _tree(self, revision: str, within: str, recursive: bool) -> list[dict[str, Any]]:
        start = f"{within}/" if within else ""
        files = [file for path, file in self.at(revision).files.items() if path.startswith(start)]
        if within and not files:
            raise Refusal(404, f"{within} does not exist", "EntryNotFound")
        folders = sorted(
            {
                start + "/".join(steps[: depth + 1])
                for file in files
                for steps in [file.path.removeprefix(start).split("/")[:-1]]
                for depth in range(len(steps) if recursive else min(1, len(steps)))
            }
        )
        shown = [file for file in files if recursive or "/" not in file.path.removeprefix(start)]
        listed = [{"type": "directory", "path": path, "size": 0, "oid": NO_COMMIT} for path in folders]
        return [*listed, *(file.as_json() for file in shown)]

    def resolve(self, revision: str, path: str) -> Answer:
        commit = self.at(revision)
        if path not in commit.files:
            refusal = Refusal(404, "Entry not found", "EntryNotFound").answer
            return Answer(refusal.status, refusal.body, {**refusal.headers, "X-Repo-Commit": commit.sha})
        file = commit.files[path]
        headers = {"Content-Type": "application/octet-stream", "X-Repo-Commit": commit.sha, "ETag": f'"{file.etag}"'}
        return Answer(200, file.content, headers)


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _described(commit: Commit) -> dict[str, Any]:
    return {
        "id": commit.sha,
        "title": commit.title,
        "message": "",
        "authors": [{"user": "someone"}],
        "date": _moment(commit.at),
    }
