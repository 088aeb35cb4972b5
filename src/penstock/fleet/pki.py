"""The fleet's keys: one CA, the gateways' certificate, and the keys that sign tasks.

Everything lives in one folder; private keys are readable by their owner only. A node's certificate names the node by a
URI that the CA writes itself: whatever subject or names a request asks for are ignored.

    ca.crt ca.key   gateway.crt gateway.key   tasks/<key_id>.key tasks/<key_id>.pub

The task key with the newest id that has a private part signs; all public parts are given to nodes, so that a new key
is known (its .pub alone) before it is used.
"""

import base64
import fcntl
import ipaddress
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.fleet.errors import BadRequest
from penstock.kit.clock import utc_now
from penstock.kit.errors import Unavailable
from penstock.kit.ids import new_id
from penstock.wire.tasks import SignedTask

NODE_URI: Final = "penstock://node/"
GATEWAY_URI: Final = "penstock://gateway"
_CA_LIVES: Final = timedelta(days=3650)
_GATEWAY_LIVES: Final = timedelta(days=365)
_GATEWAY_RENEWS_BEFORE: Final = timedelta(days=60)
#: A host's clock may be ten minutes behind and still reach a gateway whose certificate is new.
_BACKDATED: Final = timedelta(minutes=15)
_CSR_CHARACTERS_MAX: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate that the CA signed."""

    certificate_pem: str
    serial: str
    not_after: datetime


def init(folder: Path, gateway_hosts: Sequence[str]) -> None:
    """Make what is missing; what is there stays, except a gateway certificate that runs out or names other hosts."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(folder / ".lock"):
        if not (folder / "ca.crt").exists():
            _make_ca(folder)
        if not _gateway_fits(folder / "gateway.crt", gateway_hosts):
            _make_gateway(folder, gateway_hosts)
        if not list((folder / "tasks").glob("*.key")):
            make_task_key(folder)


def make_task_key(folder: Path) -> str:
    """A further key for signing tasks, which is used from now on; returns its id."""
    key_id, key = new_id("tkk"), ed25519.Ed25519PrivateKey.generate()
    _write(folder / "tasks" / f"{key_id}.pub", base64.b64encode(key.public_key().public_bytes_raw()), mode=0o644)
    _write_key(folder / "tasks" / f"{key_id}.key", key)
    return key_id


def _make_ca(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Penstock CA {new_id('pki')}")])
    builder = _builder(name, name, key.public_key(), key.public_key(), utc_now() + _CA_LIVES)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / "ca.key", key)
    _write(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def _make_gateway(folder: Path, hosts: Sequence[str]) -> None:
    authority = Authority.load(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [*map(_general_name, hosts), x509.UniformResourceIdentifier(GATEWAY_URI)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issued = authority.issue(key.public_key(), "gateway", names, usages, utc_now() + _GATEWAY_LIVES)
    _write_key(folder / "gateway.key", key)
    _write(folder / "gateway.crt", issued.certificate_pem.encode(), mode=0o644)


def _gateway_fits(file: Path, hosts: Sequence[str]) -> bool:
    if not file.exists():
        return False
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    named = set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    enough = certificate.not_valid_after_utc - utc_now() > _GATEWAY_RENEWS_BEFORE
    return enough and set(map(_general_name, hosts)) <= named


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class Authority:
    """The CA, for whoever issues certificates: the api for enrolment, gateways for renewal."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.pem: Final = certificate.public_bytes(serialization.Encoding.PEM).decode()

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """The CA of this folder."""
        key = serialization.load_pem_private_key(_read(folder / "ca.key"), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(x509.load_pem_x509_certificate(_read(folder / "ca.crt")), key)

    def sign_csr(self, csr_pem: str, node_id: str, *, lives_s: float = 24 * 3600) -> Issued:
        """A client certificate for this node and the request's key, whatever else the request says."""
        request = read_csr(csr_pem)
        names = [x509.UniformResourceIdentifier(NODE_URI + node_id)]
        not_after = utc_now() + timedelta(seconds=lives_s)
        return self.issue(request.public_key(), node_id, names, [ExtendedKeyUsageOID.CLIENT_AUTH], not_after)

    def issue(
        self,
        key: CertificatePublicKeyTypes,
        name: str,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        not_after: datetime,
    ) -> Issued:
        """A certificate for exactly this."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        not_after = not_after.astimezone(UTC).replace(microsecond=0)
        builder = _builder(subject, self._certificate.subject, key, self._key.public_key(), not_after)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        return Issued(certificate_pem=pem, serial=serial_text(certificate.serial_number), not_after=not_after)


def serial_text(number: int) -> str:
    """A serial as it is stored: upper-case hexadecimal in whole bytes, as Python's ssl module shows it."""
    digits = f"{number:X}"
    return digits if len(digits) % 2 == 0 else f"0{digits}"


def read_csr(csr_pem: str) -> x509.CertificateSigningRequest:
    """The request, if its sender holds the key and the key is one that we accept."""
    if len(csr_pem) > _CSR_CHARACTERS_MAX:
        raise BadRequest(f"csr_pem: max {_CSR_CHARACTERS_MAX} characters", field="csr_pem")
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        key = request.public_key()
        accepted = _accepted(key) and request.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise BadRequest("csr_pem: not a certificate signing request in PEM", field="csr_pem") from error
    if not accepted:
        raise BadRequest(
            "csr_pem: its signature or its key is not accepted (P-256, P-384, Ed25519 or RSA of 2048 to 4096 bits)",
            field="csr_pem",
        )
    return request


def _accepted(key: object) -> bool:
    if isinstance(key, rsa.RSAPublicKey):
        return 2048 <= key.key_size <= 4096
    if isinstance(key, ec.EllipticCurvePublicKey):
        return key.curve.name in ("secp256r1", "secp384r1")
    return isinstance(key, ed25519.Ed25519PublicKey)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: CertificatePublicKeyTypes,
    issuer_key: ec.EllipticCurvePublicKey,
    not_after: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_now() - _BACKDATED)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


class TaskSigner:
    """Signs the exact bytes of tasks."""

    def __init__(self, key_id: str, key: ed25519.Ed25519PrivateKey) -> None:
        self.key_id = key_id
        self._key = key

    @classmethod
    def load(cls, folder: Path) -> "TaskSigner":
        """The newest signing key of this folder."""
        files = sorted((folder / "tasks").glob("*.key"))
        if not files:
            raise Unavailable(f"there is no key for signing tasks in {folder / 'tasks'}")
        key = serialization.load_pem_private_key(_read(files[-1]), None)
        assert isinstance(key, ed25519.Ed25519PrivateKey)
        return cls(files[-1].stem, key)

    def sign(self, body: bytes) -> SignedTask:
        """The bytes with their signature."""
        return SignedTask(body=body, key_id=self.key_id, signature=self._key.sign(body))


def task_keys(folder: Path) -> dict[str, str]:
    """Key id → base64 of the raw public key, for all keys that nodes accept."""
    return {file.stem: file.read_text().strip() for file in sorted((folder / "tasks").glob("*.pub"))}


def verify(keys: Mapping[str, str], task: SignedTask) -> bool:
    """Whether one of the keys signed these bytes."""
    raw = keys.get(task.key_id)
    if raw is None:
        return False
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(base64.b64decode(raw)).verify(task.signature, task.body)
    except InvalidSignature:
        return False
    return True


def server_context(folder: Path) -> ssl.SSLContext:
    """For the link listener: TLS 1.3, and nobody without a certificate of our CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "gateway.crt", folder / "gateway.key")
    context.load_verify_locations(folder / "ca.crt")
    # A resumed session would skip the check of the certificate.
    context.num_tickets = 0
    return context


def peer_context(folder: Path) -> ssl.SSLContext:
    """For a gateway that dials another gateway."""
    return client_context(folder / "ca.crt", folder / "gateway.crt", folder / "gateway.key")


def client_context(ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """For whoever dials a link listener with a certificate of its own."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Unavailable(f"cannot read {file}: {error.strerror}") from error


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(file, pem, mode=0o600)


def _write(file: Path, data: bytes, *, mode: int) -> None:
    """All of it or nothing, and never readable by others for a moment."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as output:
        output.write(data)
        output.flush()
        os.fsync(output.fileno())
    draft.replace(file)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
