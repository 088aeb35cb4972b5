"""Who this node is: its key, its certificate and what it trusts, in its data folder.

`node.pem` (key and certificate together, mode 0600) and `identity.json` are each replaced as a whole, so a crash leaves
either the old identity or the new one. The key is made here and never leaves the host. `ca.pem` is there for the
sidecar.
"""

import asyncio
import base64
import hashlib
import os
import ssl
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID
from yarl import URL

from penstock.kit.clock import utc_now
from penstock.kit.errors import PenstockError, Unauthenticated, Unavailable
from penstock.node.errors import Unlinked
from penstock.wire.rest import Enrolled, EnrolRequest, RenewRequest
from penstock.wire.unreadable import UNREADABLE

GATEWAY_URI: Final = "penstock://gateway"
_REQUEST_TIMEOUT_S: Final = 15.0
_ANSWER_BYTES_MAX: Final = 1 << 20


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    link_url: str
    ca_pem: str
    task_keys: dict[str, str]
    #: For the sidecar.
    gateway_url: str = ""
    nats_url: str = ""
    #: Of the token that this identity came from, so that the same one is not tried twice.
    token_digest: str = ""


class Identity:
    """The node's identity as it is on disk; renewal replaces it while others hold this object."""

    def __init__(self, folder: Path, known: _Known, pem: bytes) -> None:
        self._folder = folder
        self._install(known, pem)

    def _install(self, known: _Known, pem: bytes) -> None:
        self._known = known
        self._certificate = x509.load_pem_x509_certificate(pem)
        self._task_keys = {
            key_id: Ed25519PublicKey.from_public_bytes(base64.b64decode(raw)) for key_id, raw in known.task_keys.items()
        }
        self._tls: ssl.SSLContext | None = None

    @property
    def node_id(self) -> str:
        """The node's id, as in its certificate."""
        return self._known.node_id

    def came_from(self, token: str) -> bool:
        """Whether it was this token that made this identity."""
        return self._known.token_digest == _digest(token)

    def move(self, link_url: str) -> None:
        """Dial this address instead of the one told at enrolment."""
        self._known = msgspec.structs.replace(self._known, link_url=link_url)

    @property
    def gateway_url(self) -> str:
        """Where the sidecar finds payloads; empty if nobody said."""
        return self._known.gateway_url

    @property
    def nats_url(self) -> str:
        """Where the sidecar finds NATS; empty if nobody said."""
        return self._known.nats_url

    @property
    def authority(self) -> Path:
        """The CA's certificate, in a file of its own."""
        return self._folder / "ca.pem"

    @property
    def task_keys(self) -> dict[str, Ed25519PublicKey]:
        """Whose signatures on tasks this node believes."""
        return self._task_keys

    @property
    def serial(self) -> int:
        """The current certificate's serial number."""
        return self._certificate.serial_number

    @property
    def expires_at(self) -> datetime:
        """When the certificate ends."""
        return self._certificate.not_valid_after_utc

    @property
    def renew_at(self) -> datetime:
        """Two thirds into the certificate's life."""
        life = self.expires_at - self._certificate.not_valid_before_utc
        return self._certificate.not_valid_before_utc + life * 2 / 3

    def socket_url(self, path: str) -> str:
        """The WebSocket at `path` of the gateway's mTLS listener."""
        return str(self._url("wss") / path.lstrip("/"))

    def url(self, path: str) -> URL:
        """What is at `path` of the gateway's mTLS listener."""
        return self._url("https") / path.lstrip("/")

    def _url(self, scheme: str) -> URL:
        url = URL(self._known.link_url)
        return url.with_scheme(scheme).with_port(url.port)

    def tls(self) -> ssl.SSLContext:
        """A client context with this certificate that trusts only gateways of the enrolled CA. Host names are not
        checked: gateways are known by their URI."""
        if self._tls is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.sslobject_class = _ToGateway
            context.check_hostname = False
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata=self._known.ca_pem)
            context.load_cert_chain(self._folder / "node.pem")
            self._tls = context
        return self._tls

    async def renew(self, session: aiohttp.ClientSession) -> None:
        """Ask for a new certificate over the current one, with a fresh key."""
        key, csr = _new_key(self.node_id)
        async with session.post(
            self._url("https") / "renew",
            data=msgspec.json.encode(RenewRequest(csr_pem=csr)),
            headers={"Content-Type": "application/json"},
            ssl=self.tls(),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            enrolled = await _decode(response)
        if enrolled.node_id != self.node_id:
            raise Unlinked("identity_mismatch", f"the gateway renewed {enrolled.node_id} for {self.node_id}")
        known, pem = _from_enrolled(enrolled, key, self._known.token_digest)
        # The address in use is known to work; the one in the answer may not be reachable from here.
        known = msgspec.structs.replace(known, link_url=self._known.link_url)
        await asyncio.to_thread(_save, self._folder, known, pem)
        self._install(known, pem)


def check_gateway(certificate: Any) -> None:
    """The peer must present a certificate for a gateway, not for another node of the same CA."""
    names = (certificate or {}).get("subjectAltName", ())
    if ("URI", GATEWAY_URI) not in names:
        raise Unlinked("not_a_gateway", "the other side's certificate is not a gateway's")


class _ToGateway(ssl.SSLObject):
    """Ends the handshake with whoever is no gateway, before a byte is sent."""

    def do_handshake(self) -> None:
        """Shake hands, then look whose hand it was."""
        super().do_handshake()
        try:
            check_gateway(self.getpeercert())
        except Unlinked as error:
            raise ssl.SSLCertVerificationError(error.detail) from error


def load(folder: Path) -> Identity | None:
    """The identity kept in `folder`, if there is one."""
    try:
        known = msgspec.json.decode((folder / "identity.json").read_bytes(), type=_Known)
        return Identity(folder, known, (folder / "node.pem").read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, *UNREADABLE) as error:
        raise Unavailable(f"the node's identity in {folder} is damaged: {error}") from error


async def enrol(folder: Path, *, api_url: str, token: str, node_name: str) -> Identity:
    """Become the node of this name with a single-use token."""
    key, csr = _new_key(node_name)
    body = msgspec.json.encode(EnrolRequest(token=token, node_name=node_name, csr_pem=csr))
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)) as session,
        session.post(
            f"{api_url.rstrip('/')}/api/v1/enrolments",
            data=body,
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        ) as response,
    ):
        enrolled = await _decode(response)
    known, pem = _from_enrolled(enrolled, key, _digest(token))
    await asyncio.to_thread(_save, folder, known, pem)
    return Identity(folder, known, pem)


def usable(identity: Identity | None) -> bool:
    """Whether the certificate can still be presented; judged by the wall clock, for want of a server's."""
    return identity is not None and utc_now() < identity.expires_at


async def _decode(response: aiohttp.ClientResponse) -> Enrolled:
    body = await response.content.read(_ANSWER_BYTES_MAX)
    if response.status not in (200, 201):
        refused = response.status < 500
        failure: type[PenstockError] = Unauthenticated if refused else Unavailable
        raise failure(f"enrolment answered {response.status}: {body[:500].decode(errors='replace')}")
    return msgspec.json.decode(body, type=Enrolled)


def _new_key(common_name: str) -> tuple[bytes, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, csr.public_bytes(serialization.Encoding.PEM).decode()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _from_enrolled(enrolled: Enrolled, key: bytes, token_digest: str) -> tuple[_Known, bytes]:
    known = _Known(
        node_id=enrolled.node_id,
        link_url=enrolled.link_url,
        gateway_url=enrolled.gateway_url,
        nats_url=enrolled.nats_url,
        ca_pem=enrolled.ca_pem,
        task_keys=enrolled.task_keys,
        token_digest=token_digest,
    )
    return known, key + enrolled.certificate_pem.encode()


def _save(folder: Path, known: _Known, pem: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _replace(folder / "ca.pem", known.ca_pem.encode())
    _replace(folder / "node.pem", pem)
    _replace(folder / "identity.json", msgspec.json.encode(known))


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
