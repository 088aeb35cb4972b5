"""Verifying an export of the audit log: what holds, and what must not pass for it."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from penstock.wire.auditchain import GENESIS, link
from penstock.wire.rest import AuditEntry, ChainedAudit

from .conftest import Cli

ENTRY = AuditEntry(
    id="aud_1",
    at=datetime(2026, 1, 1, tzinfo=UTC),
    actor_id="usr_default",
    actor_kind="user",
    action="keys.create",
    target_id="key_1",
    organisation_id="org_one",
    project_id=None,
    correlation_id="cor",
    detail={},
)
HASH = link(GENESIS, ENTRY).hex()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """One chain of one row."""
    file = tmp_path / "audit.jsonl"
    found = ChainedAudit(position=1, audit_id=ENTRY.id, hash=HASH, entry=ENTRY)
    file.write_bytes(msgspec.json.encode({"chain": "org_one", "link": found}) + b"\n")
    return file


@pytest.fixture
def anchor(tmp_path: Path) -> Path:
    """That chain and another were seen once."""
    file = tmp_path / "anchor.json"
    seen = [
        {"chain": name, "position": 1, "hash": HASH, "linked_at": None, "unlinked": 0}
        for name in ("org_one", "org_two")
    ]
    file.write_bytes(msgspec.json.encode({"items": seen}))
    return file


def test_a_named_chain_holds_up_to_its_anchor(cli: Cli, export: Path, anchor: Path) -> None:
    done = cli.run("audit", "verify", "--file", str(export), "--anchor", str(anchor), "--chain", "org_one")
    assert done.returncode == 0, done.stderr


def test_a_named_chain_that_only_the_anchor_knows_is_gone(cli: Cli, export: Path, anchor: Path) -> None:
    done = cli.run("audit", "verify", "--file", str(export), "--anchor", str(anchor), "--chain", "org_two")
    assert (done.returncode, "the whole chain is gone" in done.stdout) == (5, True)


def test_nothing_to_verify_is_no_proof(cli: Cli, export: Path) -> None:
    cli.fails(4, "audit", "verify", "--file", str(export), "--chain", "org_typo", says="no such chain")
    export.write_bytes(b"")
    cli.fails(4, "audit", "verify", "--file", str(export), says="no such chain")
