"""What access asks of others; filled in `processes/gateway.py`."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from aiohttp import web

from penstock.kit.caller import Caller
from penstock.kit.db import Reader

Cut: TypeAlias = Callable[[str], Awaitable[None]]


class UnitAddress(Protocol):
    """Where an allocation's unit runs."""

    @property
    def node_id(self) -> str | None:
        """Its node; none before it is placed."""
        ...

    @property
    def unit_id(self) -> str:
        """Its name on the node."""
        ...

    @property
    def state(self) -> str:
        """The allocation's state."""
        ...


class Units(Protocol):
    """Whoever keeps allocations."""

    async def find(self, conn: Reader, *, project_id: str, allocation_id: str) -> UnitAddress | None:
        """The unit of an allocation of this project; none when there is no such allocation."""
        ...


class Keys(Protocol):
    """Whoever knows callers."""

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """The caller, or Unauthenticated."""
        ...

    async def still_valid(self, caller: Caller) -> bool:
        """Whether the credential of a caller that was valid still is."""
        ...


class Nodes(Protocol):
    """Whoever issues the nodes' certificates."""

    async def admit(self, request: web.BaseRequest, cut: Cut) -> tuple[str, AbstractContextManager[None]]:
        """The id of the node behind the connection, or an error when it may not connect. While the context is entered,
        `cut` is called as soon as the certificate is no longer good."""
        ...

    def is_gateway(self, request: web.BaseRequest) -> bool:
        """Whether another gateway is at the other end."""
        ...
