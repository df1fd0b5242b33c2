"""A local HTTP server that speaks the part of the Hub's API that downloading single files needs."""

import hashlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A model repository: commits {40 hex digits: {path: bytes}} and branches {name: commit}.

    private: only `token` sees it. gated: only `token` reads its files. cut: paths whose body ends half way.
    moves_on_read: (path, branch, commit), the branch is pushed to just after that file was read.
    """

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    private: bool = False
    gated: bool = False
    token: str = "hf_good"
    cut: set[str] = field(default_factory=set)
    moves_on_read: tuple[str, str, str] | None = None


class HubServer:
    """`with HubServer(repos) as hub:` serves them at `hub.url`; `hub.log` lists (method, path, status) of each request.

    A GET of /_mark/{text} logs ("MARK", text, 200); one of /_down closes the server for good.
    """

    def __init__(self, repos: dict[str, Repo]):
        self.repos, self.log = repos, []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Stop listening: new connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()

    def requests(self, mark: str) -> list[tuple[str, str, int]]:
        """Requests logged between a mark and the next one."""
        start = self.log.index(("MARK", mark, 200)) + 1
        rest = self.log[start:]
        return rest[: next((i for i, entry in enumerate(rest) if entry[0] == "MARK"), len(rest))]


def _handler(hub: HubServer):
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self._serve(body=False)

        def do_GET(self):
            self._serve(body=True)

        def log_message(self, *_):
            pass

        def _answer(self, status, content=b"", body=True, **headers):
            hub.log.append((self.command, unquote(urlsplit(self.path).path), status))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _fail(self, status, code, message, **headers):
            self._answer(
                status, message.encode(), self.command == "GET", X_Error_Code=code, X_Error_Message=message, **headers
            )

        def _serve(self, body):
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/_mark/"):
                hub.log.append(("MARK", path.removeprefix("/_mark/"), 200))
                self.send_response(200)
                return self.end_headers()
            if path == "/_down":
                hub.close()
                self.send_response(200)
                return self.end_headers()
            parts = path.strip("/").split("/")
            if len(parts) < 5 or parts[2] != "resolve":
                return self._fail(404, "RepoNotFound", "no such page")
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)

        def _file(self, name, revision, path, body):
            repo = hub.repos.get(name)
            authorized = repo is not None and self.headers.get("Authorization") == f"Bearer {repo.token}"
            if repo is None or (repo.private and not authorized):
                # As the Hub does: an outsider cannot tell a private repository from none.
                return self._fail(401 if repo is None or not self.headers.get("Authorization") else 404, "RepoNotFound",
                                  "Repository not found")  # fmt: skip
            if repo.gated and not authorized:
                status = 403 if self.headers.get("Authorization") else 401
                return self._fail(status, "GatedRepo", f"Access to model {name} is restricted.")
            commit = repo.branches.get(revision, revision)
            if commit not in repo.commits:
                return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            content = repo.commits[commit].get(path)
            if content is None:
                return self._fail(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
            etag = hashlib.sha256(content).hexdigest()
            headers = dict(ETag=f'"{etag}"', X_Repo_Commit=commit, Accept_Ranges="bytes")
            if body and path in repo.cut:
                self._answer(200, content, body=False, **headers)
                return self.wfile.write(content[: len(content) // 2])
            self._answer(200, content, body, **headers)
            if body and repo.moves_on_read and repo.moves_on_read[0] == path:
                repo.branches[repo.moves_on_read[1]] = repo.moves_on_read[2]

    return Handler
