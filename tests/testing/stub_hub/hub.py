"""The stub Hub: its server, its routes, and the controls for tests."""

import hashlib
import http.server
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.testing.stub_hub.answers import Answer, Refusal, as_json
from tests.testing.stub_hub.deliveries import Deliveries
from tests.testing.stub_hub.failures import Failure, corrupted
from tests.testing.stub_hub.repos import Repo
from tests.testing.stub_hub.webhooks import Webhooks

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
OF_A_REPO = {"revision", "refs", "commits", "tree", "resolve"}


@dataclass(frozen=True)
class Request:
    """A received request; names of ``headers`` are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class StubHub:
    """Hub on loopback in its own threads; ``denied`` maps a repo id to the status and code of each response."""

    def __init__(self, *, token: str | None = None, echoes_secrets: bool = True):
        """Start the Hub; webhooks need ``token`` (None: any), and show secrets only if ``echoes_secrets``."""
        self.token = token
        self.deliveries = Deliveries(lambda name: self.webhooks.get(name))
        self.webhooks = Webhooks(echoes_secrets)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.denied: dict[str, tuple[int, str]] = {}
        self.requests: list[Request] = []
        self.page = 50
        self._failures: list[Failure] = []
        self._lock = threading.RLock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # A short poll interval makes closing quick.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="stub-hub", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        for failure in self._failures:
            failure.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        self.deliveries.close()

    def script(self, pattern: str, how: int | str, times: int | None = 1, **details: Any) -> Failure:
        """Fail the next matching requests; see `Failure`. Scripts apply in the order of their creation."""
        failure = Failure(pattern, how, times, **details)
        with self._lock:
            self._failures.append(failure)
        return failure

    def repo(self, repo: str, type: str = "model") -> Repo:
        return self.repos.setdefault((type, repo), Repo(repo, type))

    def head(self, repo: str, ref: str = "main") -> str:
        return self.repo(repo).at(ref).sha

    def push(
        self,
        repo: str,
        files: Mapping[str, bytes | str | None],
        ref: str = "main",
        tag: str | None = None,
        deliver: bool = True,
        message: str = "Upload",
        type: str = "model",
    ) -> str:
        """Commit files (None deletes one), move the branch or full ref, deliver it, and return the commit's sha."""
        name = ref if ref.startswith("refs/") else f"refs/heads/{ref}"
        with self._lock:
            made = self.repo(repo, type)
            old = made.refs.get(name)
            sha = made.commit(name, files, message).sha
            moved = [{"ref": name, "oldSha": old, "newSha": sha}]
            if deliver:
                self.emit(repo, "update", "repo.content", type=type, updatedRefs=moved)
            if tag is not None:
                self.tag(repo, tag, sha, deliver=deliver, type=type)
        return sha

    def tag(self, repo: str, tag: str, revision: str = "main", deliver: bool = True, type: str = "model") -> None:
        made = self.repo(repo, type)
        old, sha = made.refs.get(f"refs/tags/{tag}"), made.at(revision).sha
        made.refs[f"refs/tags/{tag}"] = sha
        if deliver:
            moved = [{"ref": f"refs/tags/{tag}", "oldSha": old, "newSha": sha}]
            self.emit(repo, "update", "repo.content", type=type, updatedRefs=moved)

    def emit(self, repo: str, action: str, scope: str, type: str = "model", **parts: Any) -> None:
        """Deliver any event about a repo (``movedTo=``, ``updatedConfig=``, ``discussion=``, ...) to its watchers."""
        made = self.repo(repo, type)
        web = f"{self.url}/{'' if type == 'model' else type + 's/'}{repo}"
        payload = {
            "event": {"action": action, "scope": scope},
            "repo": {
                "type": type,
                "name": repo,
                "id": hashlib.sha1(repo.encode()).hexdigest()[:24],
                "private": made.private,
                "url": {"web": web, "api": f"{self.url}/api/{type}s/{repo}"},
                "owner": {"id": hashlib.sha1(repo.split("/")[0].encode()).hexdigest()[:24]},
                **({"headSha": made.head} if scope.startswith("repo") and made.head else {}),
            },
            **parts,
        }
        with self._lock:
            for webhook in self.webhooks.values():
                if webhook.is_for(type, repo, scope):
                    self.deliveries.add(webhook, payload)

    def answer(self, request: Request) -> Answer | Failure:
        with self._lock:
            self.requests.append(request)
            line = f"{request.method} {request.path}"
            failure = next((failure for failure in self._failures if failure.is_for(line)), None)
            if failure is not None:
                failure.met += 1
                if isinstance(failure.how, int):
                    refused = Refusal(failure.how, "scripted").answer
                    return Answer(failure.how, refused.body, {**refused.headers, **failure.headers})
                if failure.how in ("hang", "drop"):
                    return failure
        try:
            answer = self._route(request)
        except Refusal as refusal:
            answer = refusal.answer
        if failure is None:
            return answer
        if failure.how == "corrupt":
            return replace(answer, body=corrupted(answer.body))
        if failure.how == "body":
            body = answer.body if failure.body is None else failure.body
            return replace(answer, body=body, headers={**answer.headers, **failure.more})
        if failure.how == "short":
            return replace(answer, body=answer.body[: len(answer.body) // 2])
        return replace(answer, breaks=failure)

    def _route(self, request: Request) -> Answer:
        where = urlsplit(request.path)
        query = dict(parse_qsl(where.query))
        parts = [unquote(part) for part in where.path.split("/") if part]
        match parts:
            case ["api", "agent-harnesses"]:
                return as_json({"standardEnvVars": [], "harnesses": {}})
            case ["api", "settings", "webhooks", *rest]:
                self._check_token(request)
                return self.webhooks.answer(request.method, rest, request.body)
            case ["api", kind, *rest] if kind in KINDS:
                repo, rest = self._find(KINDS[kind], rest)
                return repo.answer(self.url + where.path, rest, query, self.page)
        kind = KINDS[parts.pop(0)] if parts and parts[0] in KINDS else "model"
        if "resolve" in parts:
            repo, rest = self._find(kind, parts)
            return repo.resolve(rest[1], "/".join(rest[2:]))
        raise Refusal(404, "Not found")

    def _find(self, kind: str, parts: list[str]) -> tuple[Repo, list[str]]:
        length = 1 if len(parts) < 2 or parts[1] in OF_A_REPO else 2
        name = "/".join(parts[:length])
        if name in self.denied:
            status, code = self.denied[name]
            raise Refusal(status, "Access denied", code)
        if (kind, name) not in self.repos:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return self.repos[kind, name], parts[length:]

    def _check_token(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or not token or self.token not in (None, token):
            raise Refusal(401, "Invalid credentials in Authorization header")


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: StubHub):
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that disconnected."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.close_connection = True  # Otherwise, a closed server still answers on kept connections.
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        assert isinstance(self.server, _Server)
        answer = self.server.hub.answer(Request(self.command, self.path, headers, body))
        if isinstance(answer, Failure):
            if answer.how == "hang":
                answer.hold()
            return
        sent = answer.body if self.command != "HEAD" else b""
        self.send_response(answer.status)
        if answer.breaks is not None and answer.breaks.how in ("drip", "endless") and self.command != "HEAD":
            self._go_on(answer)
            return
        for name, value in {"Content-Length": str(len(answer.body)), "Connection": "close", **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if answer.breaks is None:
            self.wfile.write(sent)
            return
        self.wfile.write(sent[: len(sent) // 2])
        self.wfile.flush()
        if answer.breaks.how == "stall":
            answer.breaks.hold()

    def _go_on(self, answer: Answer) -> None:
        """Send a slow or endless body until the client disconnects or the failure is released."""
        assert answer.breaks is not None
        is_endless = answer.breaks.how == "endless"
        length = {} if is_endless else {"Content-Length": str(len(answer.body))}
        for name, value in {"Connection": "close", **length, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        # Without a length header, the end of the connection ends the body.
        pieces = itertools.repeat(bytes(1 << 16)) if is_endless else (answer.body[i : i + 1] for i in range(1 << 30))
        for piece in pieces:
            if answer.breaks.released.wait(0 if is_endless else 0.02):
                return
            self.wfile.write(piece)
            self.wfile.flush()

    do_HEAD = do_POST = do_DELETE = do_PUT = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass
