"""A hub on loopback for tests: a data set at one commit, over HTTP, that counts what is asked and can fail."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

NAME = "some/set"
COMMIT = "0123456789abcdef" * 2 + "01234567"


class LoopbackHub:
    def __init__(self, files: Mapping[str, bytes], configs: list[dict[str, Any]] | None = None) -> None:
        self.files = dict(files)
        self.configs = configs
        self.commit = COMMIT
        self.listed_sizes: dict[str, int] = {}
        self.failures: Counter[str] = Counter()
        self.unlisted = 0
        self.status = 500
        self.fetched: list[str] = []
        self.tokens: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.url = ""

    def answer(self, path: str) -> bytes | None:
        if path in (f"/api/datasets/{NAME}", f"/api/datasets/{NAME}/revision/{COMMIT}"):
            card = {} if self.configs is None else {"configs": self.configs}
            return json.dumps({"id": NAME, "sha": self.commit, "cardData": card, "tags": []}).encode()
        if path == f"/api/datasets/{NAME}/tree/{COMMIT}":
            sizes = {name: self.listed_sizes.get(name, len(held)) for name, held in self.files.items()}
            entries = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()]
            return json.dumps([{"type": "directory", "path": "data", "oid": "1" * 40}, *entries]).encode()
        return None


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            self._answer(is_head=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, is_head: bool) -> None:
            if "Authorization" in self.headers:
                hub.tokens.append(self.headers["Authorization"])
            path = unquote(urlsplit(self.path).path)
            name = path.removeprefix(f"/datasets/{NAME}/resolve/{COMMIT}/")
            found = hub.files.get(name) if name != path else hub.answer(path)
            if name == path and hub.unlisted > 0:
                hub.unlisted -= 1
                return self._send(503, b"", is_head)
            if found is None:
                return self._send(404, b"", is_head)
            if name == path or is_head:
                return self._send(200, found, is_head)
            if name in hub.gates:
                hub.gates[name].wait(30)
            if hub.failures[name] > 0:
                hub.failures[name] -= 1
                return self._send(hub.status, b"", is_head)
            hub.fetched.append(name)
            return self._send(200, found, is_head)

        def _send(self, status: int, body: bytes, is_head: bool) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"%040x"' % (hash(body) & 0xFFFFFFFF))
            self.send_header("X-Repo-Commit", hub.commit)
            self.end_headers()
            if not is_head:
                self.wfile.write(body)

    return Handler


@contextmanager
def serving(hub: LoopbackHub, home: Path) -> Iterator[LoopbackHub]:
    """Serves the hub, to which the hub's library goes meanwhile, with its caches below `home`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HOME", str(home))
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setenv("HF_TOKEN", "hf_secret")
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
