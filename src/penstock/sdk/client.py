"""The two clients: the same resources, run by the blocking or by the asynchronous executor."""

from typing import TYPE_CHECKING, Final, Generic

from penstock.sdk.billing import Billing
from penstock.sdk.blocking import BlockingExecutor
from penstock.sdk.budgets import Budgets
from penstock.sdk.compute import Allocations, Egress, Skus, Stock
from penstock.sdk.feed import Audit, DeadLetters, Events
from penstock.sdk.fleet import Fleet, Nodes
from penstock.sdk.identity import Keys, Organisations, Projects, ServiceAccounts, Users
from penstock.sdk.login import IdentityProviders, Sessions
from penstock.sdk.payments import Payments
from penstock.sdk.protocol import Steps, call
from penstock.sdk.resources import Resource, X, operation
from penstock.sdk.runtimes import Runtimes
from penstock.sdk.secrets import Secrets
from penstock.sdk.serverless import FunctionDeadLetters, Functions, Invocations
from penstock.sdk.storage import Objects
from penstock.sdk.target import Key, Unsaid, target_of
from penstock.sdk.webhooks import Webhooks
from penstock.wire.rest import Whoami

if TYPE_CHECKING:
    from penstock.sdk.asynchronous import AsyncExecutor  # noqa: F401 - named in a base class below

TIMEOUT_S: Final = 30.0


class _Resources(Resource[X], Generic[X]):
    """Everything that the API offers."""

    def __init__(self, executor: X) -> None:
        super().__init__(executor)
        self.organisations = Organisations(executor)
        self.projects = Projects(executor)
        self.users = Users(executor)
        self.service_accounts = ServiceAccounts(executor)
        self.keys = Keys(executor)
        self.identity_providers = IdentityProviders(executor)
        self.sessions = Sessions(executor)
        self.nodes = Nodes(executor)
        self.fleet = Fleet(executor)
        self.skus = Skus(executor)
        self.stock = Stock(executor)
        self.allocations = Allocations(executor)
        self.runtimes = Runtimes(executor)
        self.functions = Functions(executor)
        self.invocations = Invocations(executor)
        self.function_dead_letters = FunctionDeadLetters(executor)
        self.egress = Egress(executor)
        self.secrets = Secrets(executor)
        self.objects = Objects(executor)
        self.payments = Payments(executor)
        self.billing = Billing(executor)
        self.budgets = Budgets(executor)
        self.webhooks = Webhooks(executor)
        self.events = Events(executor)
        self.audit = Audit(executor)
        self.dead_letters = DeadLetters(executor)

    @operation
    def whoami(self) -> Steps[Whoami]:
        """The caller as the server sees it."""
        return call("GET", "/whoami", Whoami)


class Client(_Resources[BlockingExecutor]):
    """A blocking client; it may be shared by threads.

    Without arguments it finds address, key and project as the command does: environment, profile, local instance.

    >>> with penstock.Client() as client:
    ...     allocation = client.allocations.create("g1.1")
    ...     client.allocations.wait(allocation.id)
    """

    def __init__(
        self,
        api_url: str | None = None,
        key: Key = Unsaid.UNSAID,
        *,
        project: str | None = None,
        gateway_url: str | None = None,
        timeout_s: float = TIMEOUT_S,
        allow_http: bool = False,
    ) -> None:
        target = target_of(api_url, key, project=project, gateway_url=gateway_url, allow_http=allow_http)
        super().__init__(BlockingExecutor(target, timeout_s=timeout_s))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client may be used again."""
        self.executor.close()


class AsyncClient(_Resources["AsyncExecutor"]):
    """The same as `Client`, to be awaited; it belongs to one event loop.

    >>> async with penstock.AsyncClient() as client:
    ...     async for allocation in client.allocations.list():
    ...         print(allocation.id)
    """

    def __init__(
        self,
        api_url: str | None = None,
        key: Key = Unsaid.UNSAID,
        *,
        project: str | None = None,
        gateway_url: str | None = None,
        timeout_s: float = TIMEOUT_S,
        allow_http: bool = False,
    ) -> None:
        # Here, because event loops and WebSockets take longer to import than a command of the CLI takes to run.
        from penstock.sdk.asynchronous import AsyncExecutor

        target = target_of(api_url, key, project=project, gateway_url=gateway_url, allow_http=allow_http)
        super().__init__(AsyncExecutor(target, timeout_s=timeout_s))

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.executor.close()
