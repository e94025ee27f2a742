"""Serves a live study to browsers of this machine: the page, its parts, and news.

    GET /              the page
    GET /part/<name>   one part, as HTML
    GET /events        server-sent events: `version`, whenever something has changed

Nothing can be written through it. It listens on loopback only, and answers only requests that are addressed to it by
that name, so that no page from elsewhere can read it by way of a name that leads to 127.0.0.1.
"""

from __future__ import annotations

import sys
import threading
import uuid
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from metakernelbench.errors import StoreError
from metakernelbench.report.live import LiveStudy

HOST = "127.0.0.1"
_LOOK_S = 1.0
"""How often the store is looked at while somebody is listening."""
_SIGN_OF_LIFE_S = 15.0
"""How often a listener is told that the connection stands."""


class Server(ThreadingHTTPServer):
    """The server of one live study. Use it as a context, which closes it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, live: LiveStudy, port: int) -> None:
        """Raises `OSError` where the port cannot be had."""
        self.live = live
        self.listeners = threading.Semaphore(0)
        self.closing = threading.Event()
        self.name = uuid.uuid4().hex[:8]
        """Tells a browser that connects again that this is another server."""
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        super().__init__((HOST, port), _Handler)  # closes itself where the port cannot be had
        self._watcher.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def _watch(self) -> None:
        """Look at the store again and again, as long as somebody listens. A store that cannot be read gets time."""
        while not self.closing.wait(_LOOK_S):
            if not self.listeners.acquire(blocking=False):
                continue
            self.listeners.release()
            try:
                self.live.look()
            except StoreError:
                continue

    def server_close(self) -> None:
        self.closing.set()
        self.live.wake()
        super().server_close()
        if self._watcher.is_alive():
            self._watcher.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error; anything else is ours and shows."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "mkb"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self._names():
            return self._answer("This server answers only under its own name.", status=HTTPStatus.FORBIDDEN)
        try:
            return self._page(unquote(urlsplit(self.path).path))
        except StoreError as error:
            return self._answer(f"{error.message}\n", status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _page(self, path: str) -> None:
        if path == "/":
            self.server.live.look(closely=True)
            return self._answer(self.server.live.shell(), kind="text/html")
        if path == "/events":
            return self._events()
        if path.startswith("/part/"):
            return self._part(path.removeprefix("/part/"))
        return self._answer("There is no such page.", status=HTTPStatus.NOT_FOUND)

    def _names(self) -> set[str]:
        port = self.server.server_address[1]
        return {f"{HOST}:{port}", f"localhost:{port}"}

    def _part(self, name: str) -> None:
        try:
            text = self.server.live.part(name)
        except KeyError:
            return self._answer("There is no such part.", status=HTTPStatus.NOT_FOUND)
        return self._answer(text, kind="application/json" if name == "search" else "text/html")

    def _answer(self, text: str, *, kind: str = "text/plain", status: HTTPStatus = HTTPStatus.OK) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self._guard()
        self.end_headers()
        self.wfile.write(data)

    def _guard(self) -> None:
        """What keeps other pages from reading or framing this one, and browsers from keeping or guessing."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Referrer-Policy", "no-referrer")

    def _events(self) -> None:
        """The version now, and then again whenever it changes, until the listener or the server goes."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self._guard()
        self.end_headers()
        self.close_connection = True
        self.server.listeners.release()
        try:
            version = -1
            while not self.server.closing.is_set():
                now = self.server.live.wait(version, _SIGN_OF_LIFE_S)
                line = ":\n\n" if now == version else f"event: version\ndata: {self.server.name}-{now}\n\n"
                version = now
                self.wfile.write(line.encode())
                self.wfile.flush()
        finally:
            self.server.listeners.acquire()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for a request."""
