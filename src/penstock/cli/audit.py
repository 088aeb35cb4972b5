"""The audit log: who did what, and the proof that nobody changed it since."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.errors import CONFLICT, NOT_FOUND, CliError
from penstock.cli.output import EXTRA, ID, NEEDED, NORMAL, Column, Format, notice
from penstock.cli.session import Session, command, group
from penstock.cli.text import Count
from penstock.wire.rest import AuditChain, AuditEntry, ChainedAudit
from penstock.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    from penstock.sdk.client import Client
    from penstock.wire.auditchain import Head

app = group("audit", "Who did what, and the proof that the log was not changed.")

COLUMNS: list[Column[AuditEntry]] = [
    Column("at", lambda entry: entry.at),
    Column("actor", lambda entry: entry.actor_id),
    Column("action", lambda entry: entry.action, rank=ID),
    Column("target", lambda entry: entry.target_id, rank=ID),
    Column("correlation", lambda entry: entry.correlation_id),
    Column("detail", lambda entry: json.dumps(entry.detail, ensure_ascii=False), rank=EXTRA),
]
CHAIN_COLUMNS: list[Column[AuditChain]] = [
    Column("chain", lambda chain: chain.chain, rank=ID),
    Column("rows", lambda chain: Count(chain.position)),
    Column("not yet linked", lambda chain: chain.unlinked),
    Column("linked at", lambda chain: chain.linked_at),
    Column("hash", lambda chain: chain.hash),
]
_LINE_BYTES_MAX: Final = 1 << 20

Limit = Annotated[int, typer.Option(min=1, help="How many at most.")]
Chain = Annotated[
    str | None, typer.Option("--chain", help="Only this chain: an organisation's id, or `platform`. Default: all.")
]


@command(app, "list", example="penstock audit list --limit 20 -o csv")
def list_(
    session: Session,
    action: Annotated[str | None, typer.Option(help="Only this action.")] = None,
    actor: Annotated[str | None, typer.Option(help="Only of this principal.")] = None,
    target: Annotated[str | None, typer.Option(help="Only on this object.")] = None,
    correlation: Annotated[str | None, typer.Option(help="Only of this request.")] = None,
    limit: Limit = 100,
) -> None:
    """Show who did what, newest first."""
    with session.client() as client:
        listed = client.audit.list(
            action=action, actor_id=actor, target_id=target, correlation_id=correlation, limit=limit
        )
        session.output.items(listed, COLUMNS)


@command(app, "chains", example="penstock audit chains -o json > anchor.json")
def chains(session: Session) -> None:
    """Show where each hash chain ends. Kept elsewhere, it lets `verify --anchor` prove that no end was cut off."""
    with session.client() as client:
        session.output.items(client.audit.chains(), CHAIN_COLUMNS)


@command(app, "export", example="penstock audit export --chain org_default --file audit.jsonl")
def export(
    session: Session,
    chain: Chain = None,
    file: Annotated[Path | None, typer.Option("--file", help="Write here instead of to standard output.")] = None,
) -> None:
    """Write the log as lines of JSON, links included; `verify --file` needs nothing else."""
    import msgspec

    with session.client() as client:
        lines = (
            msgspec.json.encode({"chain": name, "link": found})
            for name in _names(client, chain)
            for found in client.audit.links(name)
        )
        count = _write(lines, file)
    notice(f"exported {count} rows")


def _write(lines: Iterable[bytes], file: Path | None) -> int:
    count = 0
    try:
        out = file.open("wb") if file else sys.stdout.buffer
        for line in lines:
            out.write(line + b"\n")
            count += 1
        out.flush()
        if file:
            out.close()
    except OSError as error:
        if file is None:
            raise
        raise CliError(f"cannot write {file}: {error.strerror}", field="file") from error
    return count


@command(app, "verify", example="penstock audit verify --anchor anchor.json")
def verify(
    session: Session,
    chain: Chain = None,
    file: Annotated[Path | None, typer.Option("--file", help="Verify an export instead of asking the server.")] = None,
    anchor: Annotated[
        Path | None, typer.Option(help="The output of `chains -o json`, kept earlier: the chains must pass it.")
    ] = None,
) -> None:
    """Follow the chains from their beginning, on this machine; exit 5 where one does not hold."""
    from penstock.wire.auditchain import Broken
    from penstock.wire.auditchain import verify as follow

    heads = _read_anchor(anchor) if anchor else {}
    broken = False
    results: list[dict[str, object]] = []
    for name, links in _sources(session, chain, file):
        found = follow(links, heads.pop(name, None))
        why = found.why if isinstance(found, Broken) else ""
        broken |= bool(why)
        results.append({"chain": name, "holds": not why, "position": found.position, "why": why})
    for name in heads if chain is None else heads.keys() & {chain}:
        broken = True
        results.append({"chain": name, "holds": False, "position": 0, "why": "the whole chain is gone"})
    if (chain or file) and not broken and not any(result["position"] for result in results):
        message = "there is no such chain to verify, or it is empty"
        raise CliError(message, field="chain" if chain else "file", exit_code=NOT_FOUND)
    _show(session, results)
    if broken:
        raise typer.Exit(CONFLICT)


def _show(session: Session, results: list[dict[str, object]]) -> None:
    if session.output.format is Format.JSON:
        session.output.json({"items": results, "next_cursor": None})
        return
    titles, ranks = ("chain", "holds", "position", "why"), (ID, NEEDED, NORMAL, EXTRA)
    session.output.rows(titles, [[result[title] for title in titles] for result in results], ranks=ranks)


def _names(client: "Client", chain: str | None) -> list[str]:
    return [chain] if chain else [found.chain for found in client.audit.chains()]


def _sources(session: Session, chain: str | None, file: Path | None) -> Iterator[tuple[str, Iterable[ChainedAudit]]]:
    if file is not None:
        found = _read_export(file)
        yield from ((name, links) for name, links in found.items() if chain in (None, name))
        return
    with session.client() as client:
        for name in _names(client, chain):
            yield name, client.audit.links(name)


def _read_export(file: Path) -> dict[str, list[ChainedAudit]]:
    import msgspec

    class Line(msgspec.Struct):
        chain: str
        link: ChainedAudit

    found: dict[str, list[ChainedAudit]] = {}
    try:
        with file.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if len(text) > _LINE_BYTES_MAX:
                    raise CliError(f"{file}, line {number}: max {_LINE_BYTES_MAX} bytes", field="file")
                line = msgspec.json.decode(text, type=Line)
                found.setdefault(line.chain, []).append(line.link)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}", field="file") from error
    except UNREADABLE as error:
        raise CliError(f"{file} is not an export: {error}", field="file") from error
    return found


def _read_anchor(file: Path) -> "dict[str, Head]":
    import msgspec

    from penstock.wire.auditchain import Head

    try:
        chains = msgspec.convert(json.loads(file.read_bytes())["items"], list[AuditChain], strict=False)
        return {found.chain: Head(found.position, bytes.fromhex(found.hash)) for found in chains}
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}", field="anchor") from error
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise CliError(f"{file} is not the output of `penstock audit chains -o json`", field="anchor") from error
