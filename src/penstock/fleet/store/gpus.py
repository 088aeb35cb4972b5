"""The rows of GPU quarantines and of what sensors last showed. A GPU here is a whole one, with all its shares."""

from collections.abc import Sequence
from typing import Any, Final

from penstock.fleet.model import ANSWERING, Cause, Quarantine, Reading
from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.ids import new_id
from penstock.wire.link import GpuReading

_COLUMNS: Final = (
    "q.id, q.node_id, q.gpu_uuid, q.cause, q.detail, q.release_reason, q.version, q.since, q.well_since,"
    " q.return_asked_at, q.probe_task_id, q.probe_detail"
)
_READING_COLUMNS: Final = (
    "at, temperature_c, power_w, utilization_percent, memory_used_bytes, ecc_corrected, ecc_uncorrected, faults"
)


def _quarantine(row: Row) -> Quarantine:
    values: dict[str, Any] = dict(row)
    values["cause"] = Cause(row["cause"])
    return Quarantine(**values)


async def wholes(conn: Reader, slots: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(node, GPU or share) → the whole GPU, for those that have a slot."""
    rows = await conn.fetch(
        "select s.node_id, s.gpu_uuid, s.whole_uuid from unnest($1::text[], $2::text[]) r(node_id, uuid)"
        " join fleet.slots s on s.node_id = r.node_id and s.gpu_uuid = r.uuid",
        [node_id for node_id, _ in slots],
        [uuid for _, uuid in slots],
    )
    return {(row["node_id"], row["gpu_uuid"]): row["whole_uuid"] for row in rows}


_OPEN: Final = f"""
insert into fleet.gpu_quarantines as q (id, node_id, gpu_uuid, cause, detail, release_reason)
select * from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[])
on conflict (node_id, gpu_uuid) where returned_at is null do update
   set cause = case when q.cause = 'operator' then q.cause else excluded.cause end,
       detail = case when excluded.cause = 'operator' then excluded.detail else q.detail end,
       release_reason = case when q.release_reason = '' then excluded.release_reason else q.release_reason end,
       version = q.version + 1
 where q.cause <> excluded.cause and (excluded.cause = 'operator' or q.release_reason = '')
    or excluded.cause = 'operator' and (q.detail <> excluded.detail
       or q.release_reason = '' and excluded.release_reason <> '')
returning {_COLUMNS}
"""  # noqa: S608


async def quarantine(
    tx: Tx, gpus: Sequence[tuple[str, str]], cause: Cause, details: Sequence[str], release_reasons: Sequence[str]
) -> list[Quarantine]:
    """Take these GPUs (node, whole GPU) out of service; those that this changes, with a fact for each.

    A failure does not end an operator's quarantine, it only makes what runs leave; an operator's takes over from a
    failure's.
    """
    rows = await tx.fetch(
        _OPEN,
        [new_id("gpq") for _ in gpus],
        [node_id for node_id, _ in gpus],
        [uuid for _, uuid in gpus],
        [cause.value] * len(gpus),
        list(details),
        list(release_reasons),
    )
    changed = [_quarantine(row) for row in rows]
    await _tell(tx, "fleet.gpu_quarantined", changed)
    return changed


async def mark_well(tx: Tx, node_ids: Sequence[str]) -> None:
    """Note since when the quarantined GPUs of these nodes are reported healthy, or that they are not."""
    await tx.execute(
        "update fleet.gpu_quarantines q set well_since = case when w.well then clock_timestamp() end from ("
        " select o.id, bool_and(s.gpu_healthy and s.present) as well from fleet.gpu_quarantines o"
        " join fleet.slots s on s.node_id = o.node_id and s.whole_uuid = o.gpu_uuid"
        " where o.node_id = any($1) and o.returned_at is null group by o.id) w"
        " where q.id = w.id and (q.well_since is not null) <> w.well",
        list(node_ids),
    )


async def lock(tx: Tx, node_id: str, gpu_uuid: str) -> Quarantine | None:
    """The GPU's open quarantine, held until the transaction ends."""
    row = await tx.fetchrow(
        f"select {_COLUMNS} from fleet.gpu_quarantines q"  # noqa: S608
        " where node_id = $1 and gpu_uuid = $2 and returned_at is null for update",
        node_id,
        gpu_uuid,
    )
    return _quarantine(row) if row else None


async def open_of(conn: Reader, node_ids: Sequence[str]) -> dict[tuple[str, str], Quarantine]:
    """The open quarantines of these nodes, by (node, whole GPU)."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from fleet.gpu_quarantines q where node_id = any($1) and returned_at is null",  # noqa: S608
        list(node_ids),
    )
    return {(row["node_id"], row["gpu_uuid"]): _quarantine(row) for row in rows}


async def to_leave(conn: Reader) -> dict[str, str]:
    """Slot → why what runs there has to leave."""
    rows = await conn.fetch(
        "select s.id, q.release_reason from fleet.gpu_quarantines q"
        " join fleet.slots s on s.node_id = q.node_id and s.whole_uuid = q.gpu_uuid"
        " where q.returned_at is null and q.release_reason <> '' order by s.id"
    )
    return {row["id"]: row["release_reason"] for row in rows}


async def ask_return(tx: Tx, quarantine_id: str) -> None:
    """An operator wants it back; what the last probe found is forgotten."""
    await tx.execute(
        "update fleet.gpu_quarantines set return_asked_at = clock_timestamp(), probe_detail = '' where id = $1",
        quarantine_id,
    )


async def due(tx: Tx, *, settle_s: float, limit: int) -> list[Quarantine]:
    """Those to be probed, or that are being probed, on nodes that answer; for this transaction alone."""
    rows = await tx.fetch(
        f"select {_COLUMNS} from fleet.gpu_quarantines q join fleet.nodes n on n.id = q.node_id"  # noqa: S608
        " where q.returned_at is null and n.state = any($1)"
        " and (q.probe_task_id is not null or q.return_asked_at is not null"
        "   or q.cause = 'failed' and q.well_since <= clock_timestamp() - make_interval(secs => $2))"
        " order by q.since limit $3 for update of q skip locked",
        [state.value for state in ANSWERING],
        settle_s,
        limit,
    )
    return [_quarantine(row) for row in rows]


async def note_probe(tx: Tx, quarantine_id: str, task_id: str) -> None:
    """The node was asked."""
    await tx.execute(
        "update fleet.gpu_quarantines set probe_task_id = $2, probe_asked_at = clock_timestamp() where id = $1",
        quarantine_id,
        task_id,
    )


async def probed_for(conn: Reader, quarantine_id: str) -> float:
    """Seconds since the node was asked."""
    return await conn.fetchval(
        "select extract(epoch from clock_timestamp() - probe_asked_at)::float8 from fleet.gpu_quarantines"
        " where id = $1",
        quarantine_id,
    )


async def note_failure(tx: Tx, quarantine_id: str, detail: str) -> None:
    """The probe did not pass: the time to settle begins anew."""
    await tx.execute(
        "update fleet.gpu_quarantines set probe_task_id = null, return_asked_at = null, probe_detail = $2,"
        " well_since = case when well_since is not null then clock_timestamp() end where id = $1",
        quarantine_id,
        detail,
    )


async def end(tx: Tx, quarantine_id: str) -> Quarantine:
    """The GPU is proved to work."""
    row = await tx.fetchrow(
        "update fleet.gpu_quarantines q set returned_at = clock_timestamp(), version = version + 1"  # noqa: S608
        f" where id = $1 returning {_COLUMNS}",
        quarantine_id,
    )
    assert row is not None
    ended = _quarantine(row)
    await _tell(tx, "fleet.gpu_returned", [ended])
    return ended


async def count_open(conn: Reader) -> dict[str, int]:
    """How many GPUs are in quarantine, by cause."""
    rows = await conn.fetch(
        "select cause, count(*) as count from fleet.gpu_quarantines where returned_at is null group by cause"
    )
    return {row["cause"]: row["count"] for row in rows}


async def _tell(tx: Tx, fact: str, changed: Sequence[Quarantine]) -> None:
    if changed:
        await outbox.append(
            tx,
            *(
                outbox.Event(
                    type=fact,
                    aggregate_id=one.id,
                    version=one.version,
                    organisation_id=None,
                    project_id=None,
                    payload={
                        "node_id": one.node_id,
                        "gpu_uuid": one.gpu_uuid,
                        "cause": one.cause.value,
                        "detail": one.detail,
                    },
                )
                for one in changed
            ),
        )


_STORE: Final = """
insert into fleet.gpu_readings (node_id, gpu_uuid, at, temperature_c, power_w, utilization_percent, memory_used_bytes,
    ecc_corrected, ecc_uncorrected, faults)
select r.node_id, r.gpu_uuid, clock_timestamp(), r.temperature_c, r.power_w, r.utilization_percent,
       r.memory_used_bytes, r.ecc_corrected, r.ecc_uncorrected, r.faults
  from unnest($1::text[], $2::text[], $3::text[], $4::int[], $5::real[], $6::int[], $7::bigint[], $8::bigint[],
              $9::bigint[], $10::int[])
       r(node_id, link_id, gpu_uuid, temperature_c, power_w, utilization_percent, memory_used_bytes, ecc_corrected,
         ecc_uncorrected, faults)
  join fleet.links l on l.node_id = r.node_id and l.link_id = r.link_id
on conflict (node_id, gpu_uuid) do update
   set at = excluded.at, temperature_c = excluded.temperature_c, power_w = excluded.power_w,
       utilization_percent = excluded.utilization_percent, memory_used_bytes = excluded.memory_used_bytes,
       ecc_corrected = excluded.ecc_corrected, ecc_uncorrected = excluded.ecc_uncorrected, faults = excluded.faults
"""


async def store_readings(conn: Reader, readings: Sequence[tuple[str, str, GpuReading]]) -> None:
    """(node, link, reading) of many nodes at once; only those of current links count."""
    await conn.execute(
        _STORE,
        [node_id for node_id, _, __ in readings],
        [link_id for _, link_id, __ in readings],
        [reading.uuid for _, __, reading in readings],
        [reading.temperature_c for _, __, reading in readings],
        [reading.power_w for _, __, reading in readings],
        [reading.utilization_percent for _, __, reading in readings],
        [reading.memory_used_bytes for _, __, reading in readings],
        [reading.ecc_corrected for _, __, reading in readings],
        [reading.ecc_uncorrected for _, __, reading in readings],
        [reading.faults for _, __, reading in readings],
    )


async def readings_of(conn: Reader, node_ids: Sequence[str]) -> dict[tuple[str, str], Reading]:
    """The newest readings of these nodes, by (node, whole GPU)."""
    rows = await conn.fetch(
        f"select node_id, gpu_uuid, {_READING_COLUMNS} from fleet.gpu_readings where node_id = any($1)",  # noqa: S608
        list(node_ids),
    )
    return {(row["node_id"], row["gpu_uuid"]): _reading(row) for row in rows}


def _reading(row: Row) -> Reading:
    values: dict[str, Any] = dict(row)
    del values["node_id"], values["gpu_uuid"]
    return Reading(**values)


async def delete_old(tx: Tx, *, older_than_s: float) -> None:
    """Forget the readings of GPUs that are gone."""
    await tx.execute(
        "delete from fleet.gpu_readings where at < clock_timestamp() - make_interval(secs => $1)", older_than_s
    )
