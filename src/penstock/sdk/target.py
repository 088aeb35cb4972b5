"""Where a client's requests go and as whom. The key is never shown by `repr`."""

import importlib
import ipaddress
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit

from penstock.kit import ids
from penstock.sdk.errors import InvalidArgument

_KEY: Final = re.compile(r"[\x21-\x7e]{1,4096}")
_UNPRINTABLE: Final = re.compile(r"[^\x21-\x7e]")
_URL_CHARS_MAX: Final = 2048
_API_SUFFIX: Final = "/api/v1"


class Unsaid(Enum):
    """The mark of an argument that was not given, where none has a meaning."""

    UNSAID = 0


#: None is no key at all: only public calls succeed then.
Key: TypeAlias = str | Literal[Unsaid.UNSAID] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the caller's credential for it."""

    api_url: str
    key: str | None = field(repr=False)
    project: str | None = None
    gateway_url: str | None = None
    #: Whether the key may go over plain HTTP to other machines.
    allow_http: bool = False

    @classmethod
    def of(
        cls,
        api_url: str,
        key: str | None,
        *,
        project: str | None = None,
        gateway_url: str | None = None,
        allow_http: bool = False,
    ) -> "Target":
        """Check everything that goes into a request line or a header. Without a key only public calls succeed."""
        if project is not None and not ids.is_id("prj", project):
            raise InvalidArgument("project must look like prj_ followed by 26 letters and digits", field="project")
        made = cls(
            api_url=base_url(api_url, name="api_url"),
            key=None if key is None else check_key(key),
            project=project,
            allow_http=allow_http,
        )
        made.check_way(made.api_url, name="api_url")
        return made.with_gateway(gateway_url) if gateway_url else made

    def with_gateway(self, gateway_url: str) -> "Target":
        """The same with the gateway's address, which the key goes to as well."""
        url = base_url(gateway_url, name="gateway_url")
        self.check_way(url, name="gateway_url")
        return replace(self, gateway_url=url)

    def check_way(self, url: str, *, name: str) -> None:
        """Refuse to send a key to another machine without encryption, unless that is allowed."""
        if self.key is not None and not self.allow_http and not is_private(url):
            raise InvalidArgument(
                f"{name} {url} is not encrypted: others on the way could read the key; use https, or allow it with "
                "--insecure-http, PENSTOCK_ALLOW_HTTP=1 or Client(allow_http=True)",
                field=name,
            )

    @property
    def split(self) -> SplitResult:
        """The parts of the API's address."""
        return urlsplit(self.api_url)

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        headers = {"User-Agent": "penstock", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers | {"Penstock-Project": self.project} if self.project else headers


def target_of(
    api_url: str | None, key: Key, *, project: str | None, gateway_url: str | None, allow_http: bool
) -> Target:
    """The target of a client's arguments. Address and key that were not given are found as the command finds them."""
    if api_url is not None and key is not Unsaid.UNSAID:
        return Target.of(api_url, key, project=project, gateway_url=gateway_url, allow_http=allow_http)
    # By name: the command line, which knows where to look, stands above the SDK.
    found: Target = importlib.import_module("penstock.program").target(api_url, key if isinstance(key, str) else None)
    return Target.of(
        found.api_url,
        None if key is None else found.key,
        project=project or found.project,
        gateway_url=gateway_url or found.gateway_url,
        allow_http=allow_http or found.allow_http,
    )


def is_private(url: str) -> bool:
    """Whether nobody can read along: encrypted, or on this machine by its address."""
    return urlsplit(url).scheme == "https" or is_loopback(url)


def is_loopback(url: str) -> bool:
    """Whether only this machine reaches the address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_key(key: str) -> str:
    """The key, if it can stand in a header."""
    if not _KEY.fullmatch(key):
        raise InvalidArgument("the key must be 1 to 4096 printable ASCII characters without spaces", field="key")
    return key


def base_url(text: str, *, name: str) -> str:
    """The address in its one form: scheme and host in lower case, no trailing slash, no `/api/v1`."""
    if not text or len(text) > _URL_CHARS_MAX or _UNPRINTABLE.search(text):
        raise InvalidArgument(f"{name} must be a URL without spaces, line breaks or control characters", field=name)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"{name} is not a valid URL: {error}", field=name) from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidArgument(f"{name} must start with http:// or https:// and name a host", field=name)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidArgument(f"{name} must not contain a user, a query or a fragment", field=name)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = re.sub(r"/+", "/", parts.path).rstrip("/").removesuffix(_API_SUFFIX)
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "") + path
