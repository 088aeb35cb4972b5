"""Answers of an api, as a scripted server gives them."""

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

MOMENT = "2026-01-01T00:00:00Z"
WHOAMI = {
    "principal_id": "usr_default",
    "principal_kind": "user",
    "display_name": "admin",
    "organisation_id": "org_default",
    "project_id": "prj_default",
    "role": "owner",
    "operator": True,
    "key_id": None,
    "session_id": None,
    "gateway_url": "http://gateway.example",
}


def page(items: list[Any]) -> dict[str, Any]:
    """The last page of a list."""
    return {"items": items, "next_cursor": None}


def allocation(state: str, allocation_id: str) -> dict[str, Any]:
    """An allocation in a state."""
    return {
        "id": allocation_id,
        "project_id": "prj_default",
        "name": None,
        "purpose": "interactive",
        "sku": "g1.1",
        "gpus": 1,
        "image": "python:3",
        "state": state,
        "reason": "",
        "labels": {},
        "ports": [8000],
        "node_id": None,
        "gpu_uuids": [],
        "simulated": True,
        "price_microusd_per_hour": 3_490_000,
        "created_at": MOMENT,
        "active_at": None,
        "ended_at": None,
        "deadline_at": None,
        "version": 1,
        "access_urls": {"8000": f"http://gateway.example/u/{allocation_id}/8000/"},
        "runtime": "",
        "timeline": [{"state": state, "at": MOMENT, "reason": "because"}],
    }


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody vouches for, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
