"""How a host becomes a node, stays one, and comes back: tokens that work once, and certificates of a day.

Only a token's digest is kept. Using it, issuing the certificate and moving the node are one transaction, so that of any
number of racers exactly one gets a certificate, and a refused request leaves the token as it was.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.fleet import pki
from penstock.fleet.errors import IllegalMove, NameTaken, TokenRefused, TooMany
from penstock.fleet.model import Config, Node, NodeEvent, NodeState
from penstock.fleet.pki import Authority, Issued
from penstock.fleet.store import certificates
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.store.certificates import TokenRow
from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Tx
from penstock.kit.errors import Invalid, missing
from penstock.wire import subjects
from penstock.wire.rest import Enrolled, EnrolmentToken

ENROL: Final = "enrol"
RECOVER: Final = "recover"
#: Where `penstock node join` looks for its token: arguments are seen by every user of a host.
TOKEN_VARIABLE: Final = "PENSTOCK_AGENT_ENROLMENT_TOKEN"  # noqa: S105 (a name)
#: Renewals do not revoke what they replace; this many may be good at once.
CERTIFICATES_MAX: Final = 64


class Bucket:
    """At most `burst` at once and `per_s` in the long run, for this process."""

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._level = float(burst)
        self._at = clock()

    def take(self) -> None:
        """Pass, or TooMany."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now
        if self._level < 1:
            raise TooMany(f"max {self._per_s:g} refused enrolments a second", retry_after_s=1)
        self._level -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """What a new node is told: where the api is (for the command shown), where its link goes, and where its sidecar
    finds gateway and NATS."""

    api_url: str
    link_url: str
    gateway_url: str = ""
    nats_url: str = ""

    def __post_init__(self) -> None:
        if urlsplit(self.nats_url).username is not None:
            raise Invalid("the address carries credentials, which every node would be told", field="nodes_nats_url")


class Enrolment:
    """Tokens, enrolment, recovery and renewal, with the keys of one PKI folder."""

    def __init__(self, folder: Path, addresses: Addresses, config: Config) -> None:
        self._folder = folder
        self._authority = Authority.load(folder)
        self._addresses = addresses
        self._config = config
        self._refusals = Bucket(per_s=20, burst=200)

    async def create_token(self, tx: Tx, caller: Caller, *, node_name: str, gpus_approved: int) -> EnrolmentToken:
        """Register the name and give out its token; asked again before it was used, the older token stops working."""
        caller.require("nodes.write")
        node = await node_rows.lock_named(tx, node_name)
        if node is None:
            node = await node_rows.insert(tx, name=node_name, gpus_approved=gpus_approved)
        elif node.state is not NodeState.PENDING:
            raise NameTaken(f"there is a node with the name {node_name}; recover or retire it", field="node_name")
        await node_rows.set_approved(tx, node.id, gpus_approved)
        detail = {"node_name": node_name, "gpus_approved": gpus_approved}
        await audit.record(tx, caller.actor, "nodes.create_enrolment_token", node.id, detail=detail)
        return await self._token(tx, node, ENROL)

    async def create_recovery_token(self, tx: Tx, caller: Caller, node_id: str) -> EnrolmentToken:
        """A token with which a host gets this node's identity anew; its use revokes the certificates before it."""
        caller.require("nodes.write")
        node = await node_rows.lock(tx, node_id)
        if node is None:
            raise missing("node", node_id)
        if node.state in (NodeState.PENDING, NodeState.RETIRED):
            raise IllegalMove(f"a node that is {node.state} cannot be recovered", node_id=node_id)
        await audit.record(tx, caller.actor, "nodes.create_recovery_token", node.id)
        return await self._token(tx, node, RECOVER)

    async def _token(self, tx: Tx, node: Node, kind: str) -> EnrolmentToken:
        token = f"ent_{secrets.token_urlsafe(32)}"
        expires_at = await certificates.insert_token(
            tx, digest=_digest(token), node_id=node.id, kind=kind, lives_s=self._config.token_s
        )
        return EnrolmentToken(
            token=token,
            node_id=node.id,
            node_name=node.name,
            kind=kind,
            expires_at=expires_at,
            command=f"{TOKEN_VARIABLE}={token} penstock node join --api {self._addresses.api_url} --name {node.name}",
        )

    async def enrol(self, tx: Tx, *, token: str, node_name: str, csr_pem: str) -> Enrolled:
        """Exchange a token and a request for the node's certificate."""
        try:
            row = _usable(await certificates.find_token(tx, _digest(token)), node_name)
        except TokenRefused:
            # Only guesses are counted: they must not keep out a host whose token is good.
            self._refusals.take()
            raise
        issued = self._authority.sign_csr(csr_pem, row.node_id, lives_s=self._config.certificate_s)
        # Whoever changes a node's tokens locks the node first.
        node = await node_rows.lock(tx, row.node_id)
        assert node is not None
        if not await certificates.use_token(tx, row.id):
            raise TokenRefused("the token is used, expired or unknown")
        revoked: list[str] = []
        if row.kind == RECOVER:
            revoked = await certificates.revoke_all(tx, node.id)
            tx.hint(subjects.REVOKED, node.id.encode())
        await node_rows.move(tx, node, NodeEvent.RECOVER if row.kind == RECOVER else NodeEvent.ENROL, "")
        await certificates.insert(tx, serial=issued.serial, node_id=node.id, not_after=issued.not_after)
        detail = {"kind": row.kind, "serial": issued.serial, "revoked": revoked}
        await audit.record(tx, _as_node(node.id), "nodes.enrol", node.id, detail=detail)
        return self._enrolled(node.id, issued)

    async def renew(self, tx: Tx, node_id: str, csr_pem: str) -> Enrolled:
        """A new certificate for a node that has just shown a good one."""
        issued = self._authority.sign_csr(csr_pem, node_id, lives_s=self._config.certificate_s)
        node = await node_rows.lock(tx, node_id)
        valid = await certificates.count_valid(tx, node_id)
        if node is None or not valid:
            raise TokenRefused("the node's certificates were revoked")
        if valid >= CERTIFICATES_MAX:
            raise TooMany(f"max {CERTIFICATES_MAX} certificates of a node at once", retry_after_s=60)
        await certificates.insert(tx, serial=issued.serial, node_id=node_id, not_after=issued.not_after)
        await audit.record(tx, _as_node(node_id), "nodes.renew", node_id, detail={"serial": issued.serial})
        return self._enrolled(node_id, issued)

    def _enrolled(self, node_id: str, issued: Issued) -> Enrolled:
        return Enrolled(
            node_id=node_id,
            certificate_pem=issued.certificate_pem,
            ca_pem=self._authority.pem,
            task_keys=pki.task_keys(self._folder),
            link_url=self._addresses.link_url,
            gateway_url=self._addresses.gateway_url,
            nats_url=self._addresses.nats_url,
        )


def _usable(row: TokenRow | None, node_name: str) -> TokenRow:
    if row is None:
        raise TokenRefused("the token is used, expired or unknown")
    if row.expired:
        raise TokenRefused("the token has expired; ask for a new one")
    if row.node_name != node_name:
        raise TokenRefused("the token is for a node of another name", field="node_name")
    return row


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _as_node(node_id: str) -> Actor:
    return Actor(id=node_id, kind="node")
