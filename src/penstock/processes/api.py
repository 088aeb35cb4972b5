"""The api: control plane REST, live events. Composition root.

Any number of replicas may run. With `workers` > 1 the process forks that many on one port before anything starts.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from litestar import Litestar, Router, get
from msgspec import Meta

from penstock.access import contract as access_contract
from penstock.billing import budgetroutes, paymentroutes, paypage
from penstock.billing import routes as billing_routes
from penstock.billing.model import Terms
from penstock.billing.providers import settings as payment_settings
from penstock.billing.providers.port import Provider
from penstock.billing.providers.settings import PaymentSettings
from penstock.billing.service import checkpoints
from penstock.billing.service.funds import Funds
from penstock.compute import routes as compute_routes
from penstock.compute.claims import Claims
from penstock.compute.model import Limits
from penstock.compute.occupancy import Occupancy
from penstock.fleet import routes as fleet_routes
from penstock.fleet.enrolment import Addresses, Enrolment
from penstock.fleet.model import Config
from penstock.fleet.pki import TaskSigner
from penstock.fleet.tasks import Tasks
from penstock.flows import evidence, operations
from penstock.flows.evidence import Collector
from penstock.flows.handoffs import Handoffs
from penstock.flows.objects import ObjectBytes
from penstock.flows.templates import Templates
from penstock.identity import loginroutes
from penstock.identity import routes as identity_routes
from penstock.identity.authenticator import TOUCH_EVERY_S, Authenticator
from penstock.identity.directory import Directory
from penstock.kit import bus, db, feedroutes, http, openapi, process, serving, settings
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.edge import Edge, LargeBodies, Uploads
from penstock.kit.exchanges import CHECK_EVERY_S, Exchanges
from penstock.kit.feed import Feed
from penstock.kit.outward import Outward
from penstock.kit.serving import Listen, Workers
from penstock.notices import routes as notices_routes
from penstock.notices.model import Patience
from penstock.notices.service import Webhooks
from penstock.secrets import routes as secrets_routes
from penstock.secrets.keyring import Keyring
from penstock.secrets.service import Secrets
from penstock.secrets.vault import Vault
from penstock.serverless import contract as serverless_contract
from penstock.serverless import queries, schemas
from penstock.serverless import routes as serverless_routes
from penstock.serverless.following import Followers
from penstock.serverless.model import Limits as FunctionLimits
from penstock.serverless.occupancy import Occupancy as FunctionOccupancy
from penstock.serverless.schemas import Urls
from penstock.serverless.service.callbacks import Signing
from penstock.serverless.service.cancel import Cancel
from penstock.serverless.service.functions import Functions
from penstock.serverless.service.invocations import Again, Results
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.telling import Teller
from penstock.storage import blobs
from penstock.storage import routes as storage_routes
from penstock.storage.model import Limits as StorageLimits
from penstock.storage.service import Objects

#: The version of the contract, not of the program.
VERSION: Final = "1.0.0"
_DESCRIPTION: Final = (
    "Rent GPUs, watch them, release them. Send an API key as `Authorization: Bearer psk_…`, a session's token (`pss_…`)"
    " or an identity provider's JWT; operators, owners and people with several projects choose one with the header"
    " `Penstock-Project`. Every create takes an `Idempotency-Key`. Lists are paged by cursor."
    " Every failure has the same envelope (`ErrorBody`)."
)


class Settings(PaymentSettings, frozen=True, kw_only=True):
    """What the api needs to know."""

    database_url: str
    nats_url: str
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8080
    tls_cert: str = ""
    tls_key: str = ""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    database_connections_max: Annotated[int, Meta(ge=2, le=200)] = 20
    pki_dir: str
    secrets_dir: str
    objects_url: str
    objects_endpoint: str = ""
    objects_region: str = ""
    objects_access_key_id: str = ""
    objects_secret_access_key: str = ""
    object_bytes_max: Annotated[int, Meta(ge=1, le=5 << 40)] = 5 << 30
    project_object_bytes_max: Annotated[int, Meta(ge=0, le=1 << 60)] = 100 << 30
    gateway_url: str = "http://127.0.0.1:8081"
    link_url: str = "wss://127.0.0.1:8443"
    #: Where sidecars of nodes reach NATS; told to nodes that join.
    nodes_nats_url: str = ""
    #: A node has so long to hand a stock unit over.
    handoff_s: Annotated[float, Meta(gt=0, le=3600)] = 30
    #: A create needs funds for so long, for itself and all that runs.
    funds_minimum_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 600
    gpus_max_default: Annotated[int, Meta(ge=0, le=1_000_000)] = 64
    #: Invocations of a project that wait at a time; more are refused with 429.
    waiting_max_per_project: Annotated[int, Meta(ge=1, le=100_000_000)] = 200_000
    trusted_proxies: str | list[str] = ""
    allowed_origins: str | list[str] = ""
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9100

    @property
    def objects(self) -> blobs.Access:
        """Where objects are kept."""
        return blobs.Access(
            url=self.objects_url,
            endpoint=self.objects_endpoint,
            region=self.objects_region,
            access_key_id=self.objects_access_key_id,
            secret_access_key=self.objects_secret_access_key,
        )

    @property
    def listen(self) -> Listen:
        """Where to listen."""
        return Listen(host=self.host, port=self.port, tls_cert=self.tls_cert, tls_key=self.tls_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the routes are made of."""

    database: Database
    authenticator: Authenticator
    live: Feed
    enrolment: Enrolment
    secrets: Secrets
    objects: Objects
    handoffs: Handoffs
    webhooks: Webhooks
    payments: Provider | None
    functions: serverless_routes.Parts
    bus: Bus


def compose(parts: Parts, settings: Settings) -> Litestar:
    """All routes as one application."""
    database = parts.database
    limits = Limits(gpus_max_default=settings.gpus_max_default)
    domains = [
        identity_routes.router(database, (Occupancy(), FunctionOccupancy()), gateway_url=settings.gateway_url),
        loginroutes.router(database, parts.authenticator),
        fleet_routes.router(parts.enrolment, Claims(), database),
        compute_routes.router(
            Funds(Terms(funds_minimum_s=settings.funds_minimum_s)),
            parts.secrets,
            parts.handoffs,
            Directory(),
            FunctionOccupancy(),
            database,
            limits=limits,
            gateway_url=settings.gateway_url,
        ),
        secrets_routes.router(parts.secrets, database),
        storage_routes.router(parts.objects),
        billing_routes.router(Directory(), database),
        budgetroutes.router(Directory(), database),
        paymentroutes.router(database, parts.payments, settings.return_urls, settings.payment_terms),
        notices_routes.router(parts.webhooks, database),
        serverless_routes.router(parts.functions),
        feedroutes.router(database, parts.live),
        evidence.router(Collector(database, parts.bus)),
        operations.router(database),
    ]
    elsewhere = gateway_paths(settings)
    public = [*_probes(database), *paypage.routes(database, parts.payments), openapi.page(elsewhere)]
    return http.application(
        [Router(path="/api/v1", route_handlers=domains), *public],
        parts.authenticator,
        openapi=openapi.config(title="Penstock", version=VERSION, description=_DESCRIPTION, elsewhere=elsewhere),
        allowed_origins=texts(settings.allowed_origins),
    )


def gateway_paths(settings: Settings) -> openapi.Paths:
    """The gateway's public paths, which the API's document has too."""
    return {**access_contract.paths(settings.gateway_url), **serverless_contract.paths(settings.gateway_url)}


def _probes(database: Database) -> list[Any]:
    @get("/healthz", opt={"public": True}, include_in_schema=False)
    async def healthz() -> dict[str, bool]:
        """The process lives."""
        return {"ok": True}

    @get("/readyz", opt={"public": True}, include_in_schema=False)
    async def readyz() -> dict[str, bool]:
        """It can answer: the database does."""
        async with database.read() as conn:
            return {"ok": await conn.fetchval("select true")}

    return [healthz, readyz]


def texts(value: str | list[str]) -> list[str]:
    """A list, or its members separated by commas as environments have them."""
    if isinstance(value, list):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


async def body(stack: AsyncExitStack, settings: Settings, workers: Workers) -> None:
    """Serve until cancelled."""
    nats_bus = await stack.enter_async_context(bus.connect(settings.nats_url, name="api"))
    database = await stack.enter_async_context(
        db.connect(settings.database_url, nats_bus.hint, connections_max=settings.database_connections_max, name="api")
    )
    await checkpoints.arrive(database)
    authenticator = Authenticator(database)
    live = Feed(database, authenticator.still_valid)
    await authenticator.watch(nats_bus)
    await live.watch(nats_bus)
    addresses = Addresses(
        api_url=settings.api_url,
        link_url=settings.link_url,
        gateway_url=settings.gateway_url,
        nats_url=settings.nodes_nats_url,
    )
    enrolment = Enrolment(Path(settings.pki_dir), addresses, Config())
    keyring = Keyring(Path(settings.secrets_dir))
    secrets, objects = Secrets(keyring), _objects(database, settings)
    outward = Outward()
    stack.callback(outward.close)
    functions = _functions(database, nats_bus, authenticator, Templates(secrets, objects), outward, keyring, settings)
    await functions.invoker.start()
    await functions.followers.watch(nats_bus)
    parts = Parts(
        database=database,
        authenticator=authenticator,
        live=live,
        enrolment=enrolment,
        secrets=secrets,
        objects=objects,
        handoffs=Handoffs(Tasks(TaskSigner.load(Path(settings.pki_dir))), settings.handoff_s),
        webhooks=Webhooks(outward, Vault(keyring), Patience()),
        payments=_payments(stack, settings),
        functions=functions,
        bus=nats_bus,
    )
    uploads = Uploads(prefix=storage_routes.PREFIX, bytes_max=settings.object_bytes_max)
    large = LargeBodies(path=queries.PAYLOADS, bytes_max=queries.BODY_BYTES_MAX)
    exchanges = Exchanges(authenticator.still_valid)
    proxies = texts(settings.trusted_proxies)
    app = Edge(compose(parts, settings), exchanges, trusted_proxies=proxies, uploads=uploads, large=large)
    process.settle_memory()
    process.allow_many_files()
    if workers.first:
        await process.serve_ops(stack, settings.ops_port)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.every(TOUCH_EVERY_S, authenticator.touch, name="touch_keys"))
        tasks.create_task(process.every(CHECK_EVERY_S, exchanges.recheck, name="exchanges_recheck"))
        tasks.create_task(serving.watch(workers))
        tasks.create_task(serving.serve(app, settings.listen, stopping=lambda: _stop(live, functions.followers)))


def _payments(stack: AsyncExitStack, settings: Settings) -> Provider | None:
    provider = payment_settings.make(settings)
    if provider is not None:
        stack.push_async_callback(provider.close)
    return provider


def _stop(live: Feed, followers: Followers) -> None:
    live.close()
    followers.close()


def _functions(
    database: Database,
    nats_bus: Bus,
    authenticator: Authenticator,
    templates: Templates,
    outward: Outward,
    keyring: Keyring,
    settings: Settings,
) -> serverless_routes.Parts:
    """What the routes of functions are made of."""
    urls = Urls(api_url=settings.api_url, gateway_url=settings.gateway_url)
    bytes_ = ObjectBytes(templates.objects)
    invoker = Invoker(
        database,
        nats_bus,
        bytes_,
        FunctionLimits(waiting_max_per_project=settings.waiting_max_per_project),
        still_valid=authenticator.still_valid,
    )
    return serverless_routes.Parts(
        db=database,
        functions=Functions(templates, outward),
        invoker=invoker,
        cancel=Cancel(database, Teller(nats_bus, Keys(database))),
        results=Results(database, bytes_),
        again=Again(database, invoker, bytes_),
        followers=Followers(database, authenticator.still_valid, lambda shown: schemas.invocation(shown, urls)),
        signing=Signing(Vault(keyring)),
        urls=urls,
    )


def _objects(database: Database, settings: Settings) -> Objects:
    limits = StorageLimits(
        object_bytes_max=settings.object_bytes_max, project_bytes_max=settings.project_object_bytes_max
    )
    return Objects(database, blobs.connect(settings.objects), limits)


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "api", os.environ)
    serving.check(loaded.listen)
    workers = serving.fork_workers(loaded.workers)
    process.main(
        "api",
        lambda stack: body(stack, loaded, workers),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )
