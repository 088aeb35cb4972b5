"""Waits on this machine for the browser to come back from the identity provider.

The listener is reachable from this machine only, on a port that nobody can know before, takes one answer, and is gone
when that came or the time is over.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final, cast
from urllib.parse import urlsplit

from penstock.cli.oidc import PATIENCE_S, failed
from penstock.cli.output import notice

PATH: Final = "/callback"
_REQUEST_S: Final = 5.0
_PAGE: Final = (
    "<!doctype html><meta charset=utf-8><title>Penstock</title>"
    "<body style='font: 1.1em sans-serif; margin: 4em'><h1>{title}</h1><p>{text}</p>"
)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path != PATH:
            self._answer(404, "Nothing here", "This address only waits for a login.")
            return
        cast("_Listener", self.server).query = parts.query
        self._answer(200, "Back to the terminal", "The command line has your answer. You can close this page.")

    def _answer(self, status: int, title: str, text: str) -> None:
        body = _PAGE.format(title=title, text=text).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (as the base class has it)
        """Nothing: the query holds the code."""


class _Listener(HTTPServer):
    query: str | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor that breaks off is not our failure."""


class Callback:
    """An open listener."""

    def __init__(self, server: _Listener) -> None:
        self._server = server
        self.url = f"http://127.0.0.1:{server.server_address[1]}{PATH}"

    def wait(self, patience_s: float = PATIENCE_S) -> str:
        """The query of the one answer, or a CliError when none came in time."""
        deadline = time.monotonic() + patience_s
        while self._server.query is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise failed(f"nobody came back from the browser within {patience_s:g} s; nothing was stored")
            self._server.timeout = remaining_s
            self._server.handle_request()
        return self._server.query


@contextmanager
def listen(port: int = 0) -> Iterator[Callback]:
    """Listen on this port, or on a free one if it is taken or none is asked for."""
    try:
        server = _Listener(("127.0.0.1", port), _Handler)
    except OSError:
        notice(f"port {port} is taken; using another")
        server = _Listener(("127.0.0.1", 0), _Handler)
    with server:
        yield Callback(server)
