"""The authorities that a unit trusts are the host's: a real TLS server with a certificate of a CA that only the agent's
own bundle has, asked by the programs that people use."""

import asyncio
import datetime
import ipaddress
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from node_host import Host, tenant_folder

_SERVER = """
import http.server, ssl
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"001e# service=git-upload-pack\\n0000" if "git" in self.path else b"trusted"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/home/unit/server.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
_URL = "https://localhost:8443/"
_PYTHON = f"import urllib.request; print(urllib.request.urlopen('{_URL}').read())"


def _certificate(
    name: str, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=name == "authority", path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _make(folder: Path) -> tuple[Path, bytes]:
    """A bundle reached by links, as on many hosts, and a server's key and certificate."""
    signer, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("authority", _name("authority"), signer, signer)
    (folder / "real.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "link.crt").symlink_to("real.crt")
    (folder / "bundle.crt").symlink_to(folder / "link.crt")
    server = _certificate("server", authority.subject, signer, key)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return folder / "bundle.crt", key.private_bytes(*form) + server.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
async def unit(node_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[tuple[Host, str]]:
    """A unit with a TLS server in it, of an agent that trusts one authority more."""
    bundle, pem = _make(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    host = Host.open(node_folder, tenant_folder())
    stock = await host.stock()
    await host.run(stock, "sh", "-c", "cat > ~/server.pem", stdin=pem)
    await host.hand_over(stock, "python3", "-c", _SERVER)
    yield host, stock
    await host.units.stop_all(0)
    await host.close()


async def _until_it_listens(host: Host, unit_id: str) -> None:
    async with asyncio.timeout(30):
        while (await host.python(unit_id, "import socket; socket.create_connection(('localhost', 8443))")).code:
            await asyncio.sleep(0.1)


async def test_programs_in_a_unit_trust_what_the_host_trusts(unit: tuple[Host, str]) -> None:
    host, unit_id = unit
    await _until_it_listens(host, unit_id)
    ran = await host.python(unit_id, _PYTHON)
    assert "b'trusted'" in ran.out
    asked = {
        "curl": ("curl", "-sS", _URL),
        "openssl": ("sh", "-c", "openssl s_client -verify_return_error -connect localhost:8443 </dev/null"),
        "git": ("git", "ls-remote", f"{_URL}repository.git"),
    }
    for program, argv in asked.items():
        if shutil.which(program) in (f"/usr/bin/{program}", f"/bin/{program}"):
            ran = await host.run(unit_id, *argv)
            trusted = "certificate" not in ran.out if program == "git" else ran.code == 0
            assert trusted, f"{program}: {ran.out}"


async def test_the_bundle_has_all_its_names_and_cannot_be_changed(unit: tuple[Host, str]) -> None:
    host, unit_id = unit
    for name in ("ssl/certs/ca-certificates.crt", "ssl/cert.pem", "pki/tls/certs/ca-bundle.crt", "pki/tls/cert.pem"):
        ran = await host.run(unit_id, "sh", "-c", f"head -c 27 /etc/{name}; echo x >> /etc/{name} || echo refused")
        assert ran.out.startswith("-----BEGIN CERTIFICATE-----"), name
        assert ran.out.endswith("refused\n"), name
