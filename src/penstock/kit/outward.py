"""Requests to addresses that tenants give: nothing of ours can be reached through them.

Only https on two ports, with the certificate verified. The name is looked up once, every address that comes back must
be public and not this host's own, and that very address is connected to. Redirects are not followed, the whole exchange
has a time, and no more than a little of the answer is read. Each request has a connection of its own.
"""

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from penstock.kit.addresses import Resolve, is_elsewhere, look_up
from penstock.kit.dialling import connector
from penstock.wire.egress import Address, address_of, is_host

URL_CHARS_MAX: Final = 2048
PORTS: Final = (443, 8443)
TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 64 << 10
#: Slow name servers of some hold a thread each; the others need to find one free.
_LOOKUPS_MAX: Final = 32
_ADDRESSES_MAX: Final = 4
_CONNECT_S: Final = 4.0
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")


class Failure(StrEnum):
    """Why a request came to nothing."""

    URL = "url"
    ADDRESS_NOT_PUBLIC = "address_not_public"
    DNS = "dns"
    CONNECT = "connect"
    TLS = "tls"
    TIMEOUT = "timeout"
    REDIRECT = "redirect"
    STATUS = "status"
    PROTOCOL = "protocol"


class Undelivered(Exception):
    """The other side did not take it. `why` is for whoever gave the address."""

    def __init__(self, failure: Failure, why: str, *, status: int | None = None) -> None:
        super().__init__(why)
        self.failure = failure
        self.why = why
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """An address, taken apart."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """As a Host header has it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if self.port == 443 else f"{shown}:{self.port}"

    def at(self, address: Address) -> URL:
        """The same, reached at this very address."""
        shown = f"[{address}]" if address.version == 6 else str(address)
        return URL(f"https://{shown}:{self.port}{self.path}", encoded=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the other side said. `body` is the beginning of it."""

    status: int
    body: bytes


class Outward:
    """Sends to strangers. What may be connected to, how names are looked up and whom TLS trusts can be played."""

    def __init__(
        self,
        *,
        resolve: Resolve | None = None,
        permitted: Callable[[Address], bool] = is_elsewhere,
        tls: ssl.SSLContext | None = None,
        ports: Sequence[int] = PORTS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUPS_MAX, thread_name_prefix="outward")
        self._resolve = resolve or partial(look_up, self._threads)
        self._permitted = permitted
        self._tls = tls or ssl.create_default_context()
        self._ports = ports
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, url: str) -> None:
        """Pass if a request to it may be tried now; nothing is connected to."""
        target = self._parse(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._addresses(target)
        except TimeoutError as error:
            raise Undelivered(Failure.DNS, f"{target.host} cannot be looked up") from error

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """The answer of whoever is there, if it is a success; else Undelivered."""
        target = self._parse(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._try_each(target, await self._addresses(target), body, headers)
        except TimeoutError as error:
            raise Undelivered(Failure.TIMEOUT, f"no complete answer within {self._timeout_s:g} s") from error

    def _parse(self, url: str) -> Target:
        if not 1 <= len(url) <= URL_CHARS_MAX or not _PRINTABLE.fullmatch(url):
            raise Undelivered(Failure.URL, f"must have 1 to {URL_CHARS_MAX} characters of printable ASCII")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise Undelivered(Failure.URL, "cannot be read") from error
        # Before the scheme: who tries http://169.254.169.254 should not be told to try https.
        if (literal := address_of(host)) is not None and not self._permitted(literal):
            raise _not_public()
        if parts.scheme != "https":
            raise Undelivered(Failure.URL, "must begin with https://: only https is allowed")
        if "@" in parts.netloc or parts.fragment or not is_host(host):
            raise Undelivered(Failure.URL, "must be https://host/path, without a user, a password or a fragment")
        port = 443 if port is None else port
        if port not in self._ports:
            raise Undelivered(Failure.URL, f"port {port} is not allowed: {' and '.join(map(str, self._ports))} are")
        query = f"?{parts.query}" if parts.query else ""
        return Target(host, port, f"{parts.path or '/'}{query}")

    async def _addresses(self, target: Target) -> Sequence[Address]:
        """Looked up once; if one of them is not public, none is used."""
        literal = address_of(target.host)
        try:
            found = [literal] if literal else await self._resolve(target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise Undelivered(Failure.DNS, f"{target.host} cannot be looked up") from error
        if not found or not all(map(self._permitted, found)):
            raise _not_public()
        return list(dict.fromkeys(found))[:_ADDRESSES_MAX]

    async def _try_each(
        self, target: Target, addresses: Sequence[Address], body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        """At the first address that can be connected to."""
        *others, last = addresses
        for address in others:
            try:
                return await self._send(target, address, body, headers)
            except Undelivered as error:
                if error.failure is not Failure.CONNECT:
                    raise
        return await self._send(target, last, body, headers)

    async def _send(self, target: Target, address: Address, body: bytes, headers: Mapping[str, str]) -> Answer:
        try:
            return await self._exchange(target, address, body, headers)
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise Undelivered(Failure.TLS, f"the connection is not secure: {_reason(error)}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Undelivered(Failure.CONNECT, f"{target.authority} cannot be connected to") from error
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Undelivered(Failure.PROTOCOL, "the connection broke, or what came back is not HTTP") from error

    async def _exchange(self, target: Target, address: Address, body: bytes, headers: Mapping[str, str]) -> Answer:
        # The time of the whole is kept outside; redirects, cookies, proxies and compression are all off.
        async with (
            aiohttp.ClientSession(
                connector=connector(force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            ) as session,
            session.post(
                target.at(address),
                data=body,
                headers={**headers, "Host": target.authority, "Accept-Encoding": "identity"},
                allow_redirects=False,
                ssl=self._tls,
                server_hostname=target.host,
            ) as response,
        ):
            return await _read(response)


async def _read(response: aiohttp.ClientResponse) -> Answer:
    if 300 <= response.status < 400:
        raise Undelivered(
            Failure.REDIRECT, f"answered {response.status}: redirects are not followed", status=response.status
        )
    if not 200 <= response.status < 300:
        raise Undelivered(Failure.STATUS, f"answered {response.status}", status=response.status)
    body = bytearray()
    while len(body) < ANSWER_BYTES_MAX and (chunk := await response.content.read(ANSWER_BYTES_MAX - len(body))):
        body += chunk
    response.close()
    return Answer(response.status, bytes(body))


def _not_public() -> Undelivered:
    return Undelivered(Failure.ADDRESS_NOT_PUBLIC, "its address is not public")


def _reason(error: Exception) -> str:
    """What the certificate lacks, without the library's own words around it."""
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    return str(getattr(inner, "verify_message", "") or getattr(inner, "reason", "") or "TLS failed")[:200]
