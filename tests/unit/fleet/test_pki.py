"""The CA signs what it means to, whatever a request says; keys are private; nothing is made twice."""

import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.fleet import pki
from penstock.fleet.errors import BadRequest
from penstock.fleet.pki import Authority, TaskSigner
from penstock.kit.clock import utc_now
from penstock.wire.tasks import SignedTask

NODE = "nod_00000000000000000000000001"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki", ["gateway.example", "127.0.0.1"])
    return tmp_path / "pki"


def request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None) -> str:
    """A request that asks to be somebody else."""
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")]))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(pki.GATEWAY_URI)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    signed = builder.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def test_private_keys_are_readable_by_their_owner_only(folder: Path) -> None:
    keys = [*folder.glob("*.key"), *folder.glob("tasks/*.key")]
    assert len(keys) == 3
    assert {file.stat().st_mode & 0o777 for file in keys} == {0o600}


def test_a_second_init_changes_nothing_and_another_host_only_the_gateway(folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    pki.init(folder, ["127.0.0.1"])
    assert {file: file.read_bytes() for file in before} == before
    pki.init(folder, ["other.example"])
    changed = {file.name for file, data in before.items() if file.read_bytes() != data}
    assert changed == {"gateway.crt", "gateway.key"}


def test_a_node_gets_its_own_name_and_nothing_it_asked_for(folder: Path) -> None:
    issued = Authority.load(folder).sign_csr(request(), NODE)
    certificate = x509.load_pem_x509_certificate(issued.certificate_pem.encode())
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier(f"penstock://node/{NODE}")]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usages = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert certificate.subject.rfc4514_string() == f"CN={NODE}"
    lives = certificate.not_valid_after_utc - utc_now()
    assert timedelta(hours=23, minutes=59) < lives <= timedelta(hours=24)
    assert utc_now() - certificate.not_valid_before_utc >= timedelta(minutes=5)
    assert issued.serial == pki.serial_text(certificate.serial_number)
    assert issued.not_after == certificate.not_valid_after_utc


def tampered() -> str:
    raw = bytearray(x509.load_pem_x509_csr(request().encode()).public_bytes(serialization.Encoding.DER))
    raw[-3] ^= 1
    der = x509.load_der_x509_csr(bytes(raw))
    return der.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    "csr",
    [
        "",
        "rubbish",
        "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        "é\x00",
        "A" * 9000,
        request(rsa.generate_private_key(65537, 1024)),
        request(ec.generate_private_key(ec.SECP521R1())),
        tampered(),
    ],
    ids=["empty", "rubbish", "not-der", "not-ascii", "long", "weak-rsa", "other-curve", "bad-signature"],
)
def test_a_bad_request_is_refused_and_named(folder: Path, csr: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Authority.load(folder).sign_csr(csr, NODE)
    assert caught.value.field == "csr_pem"


def test_altered_tasks_and_unknown_keys_do_not_verify(folder: Path) -> None:
    keys = pki.task_keys(folder)
    task = TaskSigner.load(folder).sign(b"body")
    assert pki.verify(keys, task)
    assert not pki.verify(keys, SignedTask(body=b"bodY", key_id=task.key_id, signature=task.signature))
    assert not pki.verify(keys, SignedTask(body=b"body", key_id="other", signature=task.signature))
    forged = ed25519.Ed25519PrivateKey.generate().sign(b"body")
    assert not pki.verify(keys, SignedTask(body=b"body", key_id=task.key_id, signature=forged))


def test_the_newest_key_signs_and_the_older_still_verifies(folder: Path) -> None:
    old = TaskSigner.load(folder).sign(b"body")
    key_id = pki.make_task_key(folder)
    assert TaskSigner.load(folder).key_id == key_id != old.key_id
    assert pki.verify(pki.task_keys(folder), old)


def test_the_listener_takes_nobody_without_a_certificate(folder: Path) -> None:
    context = pki.server_context(folder)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.num_tickets == 0
