"""HTTP/1.1 as a client speaks it, without any I/O: the bytes of a request, and what received bytes mean.

Both executors use it and only move the bytes. One object belongs to one connection. What breaks the protocol is
`h11.RemoteProtocolError`, a closed connection an `OSError`.
"""

from typing import Final

import h11

from penstock.sdk.errors import BadAnswer, InvalidArgument
from penstock.sdk.protocol import ANSWER_BYTES_MAX, Answer, Request
from penstock.sdk.target import Target
from penstock.sdk.transfers import Source

_HEAD_BYTES_MAX: Final = 64 << 10
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})


class Http1:
    """The protocol's state on one connection, request after request."""

    def __init__(self, target: Target) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
        self._headers = {"Host": target.split.netloc, **target.headers()}
        self._path = target.split.path
        self._answer: Answer | None = None

    def begin(self, request: Request) -> bytes:
        """The head of a request, and its body unless that is a `Source`."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self._answer = None
        head = h11.Request(
            method=request.method,
            target=self._path + request.path,
            headers=[*(self._headers | _length(request) | dict(request.headers)).items()],
        )
        sent = self._send(head)
        if isinstance(request.body, Source):
            return sent
        return sent + (self._send(h11.Data(data=request.body)) if request.body else b"") + self.end()

    def more(self, chunk: bytes) -> bytes:
        """A piece of the body."""
        return self._send(h11.Data(data=chunk))

    def end(self) -> bytes:
        """The end of the body."""
        return self._send(h11.EndOfMessage())

    def feed(self, data: bytes) -> None:
        """Take received bytes; none mean that the server closed the connection."""
        if not data and self._http.their_state is h11.SEND_RESPONSE:
            raise ConnectionResetError("the connection was closed without an answer")
        self._http.receive_data(data)

    def head(self) -> Answer | None:
        """The answer's status and headers; none while more must be received."""
        while self._answer is None:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                names = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                self._answer = Answer(status=event.status_code, headers=names, body=b"")
        return self._answer

    def body(self) -> bytes | None:
        """The next piece of the answer's body, empty at its end; none while more must be received."""
        event = self._http.next_event()
        if event is h11.NEED_DATA:
            return None
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    @property
    def reusable(self) -> bool:
        """Whether the exchange is complete and the connection stays open for another."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    def _send(self, event: h11.Event) -> bytes:
        try:
            return self._http.send(event) or b""
        except h11.LocalProtocolError as error:
            raise InvalidArgument(f"it cannot be sent over HTTP: {error}") from error


class Body:
    """An answer's body, held in memory up to its limit."""

    def __init__(self, head: Answer) -> None:
        self._head = head
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        """Keep a piece."""
        self._size += len(chunk)
        if self._size > ANSWER_BYTES_MAX:
            raise BadAnswer(f"the answer is larger than {ANSWER_BYTES_MAX >> 20} MB", status=self._head.status)
        self._chunks.append(chunk)

    def answer(self) -> Answer:
        """The answer with its whole body."""
        return Answer(status=self._head.status, headers=self._head.headers, body=b"".join(self._chunks))


def _length(request: Request) -> dict[str, str]:
    if isinstance(request.body, Source):
        return {"Transfer-Encoding": "chunked"} if request.body.size is None else {}
    if request.body or request.method in _WITH_BODY:
        return {"Content-Length": str(len(request.body or b""))}
    return {}
