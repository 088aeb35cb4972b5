"""Arguments and results on their way: JSON where JSON keeps them exactly, otherwise pickled.

A call of the SDK is `{"args": […], "kwargs": {…}, "accept": "pickle"}`, for a class with `"method"`; pickled, the
same object as a JSON string in base64 under the content type `PICKLE`. Whatever else is sent is a plain payload.
Pickles are opened only by the tenant's own code, here and in the unit: whoever may call a function may already run
code in it.
"""

import base64
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

JSON = "application/json"
PICKLE = "application/vnd.penstock.pickle"
BINARY = "application/octet-stream"
#: A larger exception is told by its text alone.
EXCEPTION_BYTES_MAX = 48 << 10
#: JSON readers keep integers of 64 bits; larger ones may come back as floats.
_INTEGER_MAX = 1 << 63
_KEYS = frozenset({"args", "kwargs", "method", "accept"})
_PICKLED = "__penstock_pickle__"


class Payload:
    """What is sent: a JSON text and what it stands for."""

    __slots__ = ("content_type", "text")

    def __init__(self, content_type: str, text: bytes) -> None:
        self.content_type = content_type
        self.text = text


class Call:
    """The arguments of one call. `sdk`: the caller can open pickles."""

    __slots__ = ("args", "kwargs", "method", "sdk")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str, *, sdk: bool) -> None:
        self.args = args
        self.kwargs = kwargs
        self.method = method
        self.sdk = sdk


def exact(value: Any) -> bool:
    """Whether JSON brings back the same value of the same types."""
    try:
        return _exact(value)
    except RecursionError:
        return False


def _exact(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return value.isascii() or _is_text(value)
    if kind is int:
        return -_INTEGER_MAX <= value < _INTEGER_MAX
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(_exact, value))
    if kind is dict:
        return all(type(key) is str and _exact(key) for key in value) and all(map(_exact, value.values()))
    return value is None or kind is bool


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def dumps(value: Any) -> bytes:
    """JSON in UTF-8, without spaces; ValueError or TypeError where there is none."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def encode_call(args: "tuple[Any, ...]", kwargs: "dict[str, Any]", method: str = "") -> Payload:
    """A call for the wire."""
    body: dict[str, Any] = {"args": list(args), "kwargs": kwargs, "accept": "pickle"}
    if method:
        body["method"] = method
    if exact(body):
        return Payload(JSON, dumps(body))
    return Payload(PICKLE, dumps(_pickled((args, kwargs, method))))


def decode_call(content_type: str, payload: Any, module: str = "", methods: "Sequence[str]" = ()) -> "Call | None":
    """The call in a payload; None when it is a plain one. `module` is where classes of the caller's main program are.
    A payload that names one of `methods` may leave out the arguments that there are none of."""
    if content_type == PICKLE and isinstance(payload, str):
        args, kwargs, method = _unpickled(payload, {"__main__": module} if module else {})
        return Call(tuple(args), dict(kwargs), str(method), sdk=True)
    if not isinstance(payload, dict):
        return None
    body = cast("dict[str, Any]", payload)
    named_method = body.get("method") in methods
    args, kwargs = body.get("args", [] if named_method else None), body.get("kwargs", {} if named_method else None)
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not body.keys() <= _KEYS:
        return None
    positional, named = cast("list[Any]", args), cast("dict[str, Any]", kwargs)
    return Call(tuple(positional), named, str(body.get("method", "")), sdk=body.get("accept") == "pickle")


def encode_result(value: Any, *, sdk: bool) -> "tuple[str, bytes, str]":
    """Content type, JSON text and encoding of a result; TypeError names what cannot be sent to a plain caller."""
    if sdk:
        return (JSON, dumps(value), "") if exact(value) else (PICKLE, dumps(_pickled(value)), "base64")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return BINARY, dumps(base64.b64encode(value).decode()), "base64"
    return JSON, _plain(value), ""


def encode_chunk(value: Any, *, sdk: bool) -> bytes:
    """The JSON text of one piece of a stream."""
    if sdk and not exact(value):
        return dumps({_PICKLED: _pickled(value)})
    return _plain(value)


def _plain(value: Any) -> bytes:
    try:
        return dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the result, of type {type(value).__name__}, is not JSON: {error}") from None


def decode_chunk(value: Any, module: str = "") -> Any:
    """A piece of a stream as the handler had it."""
    if isinstance(value, dict) and cast("dict[str, Any]", value).keys() == {_PICKLED}:
        return _unpickled(str(value[_PICKLED]), _aliases(module))
    return value


def decode_result(content_type: str, body: Any, encoding: str = "", module: str = "") -> Any:
    """A result as the handler had it. `body` is the JSON value, or the raw bytes that a pickle or binary answer is."""
    if content_type == PICKLE:
        return loads(body, _aliases(module)) if isinstance(body, bytes) else _unpickled(str(body), _aliases(module))
    if encoding == "base64" and isinstance(body, str):
        return base64.b64decode(body)
    return body


def encode_exception(error: BaseException) -> "str | None":
    """The exception itself, if it can travel."""
    try:
        text = _pickled(error)
    except Exception:  # noqa: BLE001 - a tenant's own class may fail in any way; its text is told all the same
        return None
    return text if len(text) <= EXCEPTION_BYTES_MAX else None


def decode_exception(text: str, module: str = "") -> "BaseException | None":
    """The exception, if its class is here and it is one."""
    try:
        error = _unpickled(text, _aliases(module))
    except Exception:  # noqa: BLE001 - the class may be missing here or fail in any way
        return None
    return error if isinstance(error, BaseException) else None


def _pickled(value: Any) -> str:
    import pickle

    return base64.b64encode(pickle.dumps(value, protocol=4)).decode()


def _unpickled(text: str, aliases: "dict[str, str]") -> Any:
    return loads(base64.b64decode(text), aliases)


def loads(data: bytes, aliases: "dict[str, str]") -> Any:
    """Open a pickle; classes of a module in `aliases` are looked up in the other one."""
    import pickle

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(aliases.get(module, module), name)

    return Reader(io.BytesIO(data)).load()


def _aliases(module: str) -> "dict[str, str]":
    """A function's file that runs as the main program has its classes there."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    stem = os.path.splitext(os.path.basename(file))[0]  # noqa: PTH119, PTH122 - pathlib is slow to import
    return {module: "__main__"} if stem and stem == module.rpartition(".")[2] else {}
