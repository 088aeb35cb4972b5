"""Fetches a provider's public documents.

Providers are configured by operators, and often stand in a private network, so private addresses are allowed here as
they are not for addresses that tenants give. Everything else is bounded: https (plain http to this machine only), no
redirects, a time and a size.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from penstock.wire.unreadable import UNREADABLE

TIMEOUT_S: Final = 5.0
BYTES_MAX: Final = 256 << 10


def is_safe(url: str) -> bool:
    """Whether nobody on the way can change what comes from there."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or "@" in parts.netloc or not url.isprintable() or " " in url:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def fetch_json(url: str) -> Mapping[str, Any]:
    """The JSON object at the address; OSError or ValueError says why there is none."""
    if not is_safe(url):
        raise ValueError("the address must begin with https://")
    try:
        return msgspec.json.decode(await _read(url), type=dict[str, Any])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise OSError(f"cannot fetch {url}: {error or type(error).__name__}") from error
    except UNREADABLE as error:
        raise ValueError(f"{url} did not answer a JSON object") from error


async def _read(url: str) -> bytes:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise ValueError(f"{url} answered {answer.status}")
        body = bytearray()
        async for chunk in answer.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > BYTES_MAX:
                raise ValueError(f"{url} answered more than {BYTES_MAX} bytes")
        return bytes(body)
