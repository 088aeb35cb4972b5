"""What comes from the queue for one worker, believed only with a MAC under the worker's key; and its reports."""

import hashlib
import hmac
from datetime import datetime
from typing import Final

import msgspec

from penstock.kit.clock import utc_now
from penstock.wire import subjects
from penstock.wire.serverless import (
    VERSION,
    CallAnswer,
    ControlMessage,
    MetricType,
    WorkerDispatchMessage,
    WorkerMetricMessage,
)
from penstock.wire.tasks import Serving
from penstock.wire.unreadable import UNREADABLE

_encode: Final = msgspec.json.Encoder().encode


class Unbelievable(Exception):
    """No MAC, or not one under this worker's key: somebody else wrote it."""


class Unsupported(Exception):
    """A version of the contract that this sidecar does not speak."""


class Malformed(Exception):
    """It has the MAC, and still cannot be read."""


class _Versioned(msgspec.Struct, frozen=True):
    version: str


_versioned: Final = msgspec.json.Decoder(_Versioned)
_dispatch: Final = msgspec.json.Decoder(WorkerDispatchMessage)
_control: Final = msgspec.json.Decoder(ControlMessage)
_answer: Final = msgspec.json.Decoder(CallAnswer)


class Letters:
    """One worker's messages: reads those to it, writes its reports."""

    def __init__(self, serving: Serving, mac_key: bytes) -> None:
        self._serving = serving
        self._key = mac_key
        self.worker = serving.worker
        self.dispatches = subjects.dispatch(serving.request, serving.worker)
        self.controls = subjects.control(serving.request, serving.worker)
        self.answers = subjects.call_answer(serving.request, serving.worker)
        self.calls = subjects.call(serving.request, serving.worker)
        self.results = subjects.result(serving.request)
        self.metrics = subjects.metrics(serving.request)
        self.outputs = subjects.output(serving.request)
        self.dead_letters = subjects.dead_letter("dispatch", serving.request)

    def dispatch(self, data: bytes, mac: str) -> WorkerDispatchMessage:
        """An attempt for this worker."""
        self._verify(self.dispatches, data, mac)
        try:
            if (version := _versioned.decode(data).version) != VERSION:
                raise Unsupported(f"version {version[:32]!r} is not understood")
            message = _dispatch.decode(data)
        except UNREADABLE as error:
            raise Malformed(str(error)) from None
        if message.workerName != self._serving.worker or message.projectID != self._serving.project_id:
            raise Malformed("it is for another worker")
        return message

    def control(self, data: bytes, mac: str) -> ControlMessage:
        """An order."""
        self._verify(self.controls, data, mac)
        try:
            return _control.decode(data)
        except UNREADABLE as error:
            raise Malformed(str(error)) from None

    def answer(self, data: bytes, mac: str) -> CallAnswer:
        """What became of a handler's call."""
        self._verify(self.answers, data, mac)
        try:
            return _answer.decode(data)
        except UNREADABLE as error:
            raise Malformed(str(error)) from None

    def metric(
        self,
        kind: MetricType,
        *,
        inflight: int,
        invocation_id: str = "",
        status: int = 0,
        error: str = "",
        attempts: list[tuple[str, int]] | None = None,
    ) -> bytes:
        """A report about this worker, with its proof."""
        now = utc_now()
        return _encode(
            WorkerMetricMessage(
                version=VERSION,
                serverlessRequestID=self._serving.function,
                workerName=self._serving.worker,
                workerNamespace=self._serving.project_id,
                eventType=kind,
                reportedAt=now,
                inflight=inflight,
                invocationID=invocation_id,
                statusCode=status,
                error=error,
                proof=self._proof(kind, now),
                projectID=self._serving.project_id,
                attempts=attempts or [],
            )
        )

    def _proof(self, kind: MetricType, at: datetime) -> str:
        text = f"{kind}\0{at.isoformat()}\0{self._serving.worker}"
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()

    def _verify(self, subject: str, data: bytes, mac: str) -> None:
        expected = "sha256=" + hmac.digest(self._key, subject.encode() + b"\0" + data, hashlib.sha256).hex()
        if not hmac.compare_digest(expected.encode(), mac.encode(errors="replace")):
            raise Unbelievable
