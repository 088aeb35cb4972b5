"""Those who call functions while everything breaks: they ask again with the same id until they have an answer."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from e2e.cloud import Cloud
from penstock import AsyncClient
from penstock.sdk.errors import ApiError, SdkError

WORK = "storm-work"
POISON = "storm-poison"
_FINAL = {"succeeded", "failed", "expired", "cancelled", "dead_lettered"}
_PATIENCE_S = 150
_ANSWER_S = 12
#: What may come of a question while processes come and go.
_AGAIN = {429, 502, 503, 504}


@dataclass
class Asked:
    """One invocation, and what its caller was told."""

    function: str
    payload: dict[str, Any]
    acknowledged: bool = False
    #: State, status and body, of each answer with the end.
    ends: list[tuple[str, int, Any]] = field(default_factory=list[tuple[str, int, Any]])


class Callers:
    """Any number of them, through the api and the gateway."""

    def __init__(self, cloud: Cloud, client: AsyncClient, http: aiohttp.ClientSession, dice: random.Random) -> None:
        self._gateway = cloud.gateway
        self._key = cloud.key
        self._client = client
        self._http = http
        self._dice = dice
        self.asked: dict[str, Asked] = {}
        self.refused: list[str] = []

    async def call(self, stop: asyncio.Event, at_least: int, pause_s: float) -> None:
        """One call after the other, until told to stop and so many were made by all."""
        while not stop.is_set() or len(self.asked) < at_least:
            await self._dice.choice((self.sync, self.sync, self._asynchronous, self._map))()
            await asyncio.sleep(self._dice.uniform(0, pause_s))

    def _payload(self) -> dict[str, Any]:
        do = self._dice.choices(("quick", "nap", "flaky", "fail"), (12, 5, 2, 1))[0]
        longest = {"nap": 2.0, "flaky": 1.0, "fail": 0.4}.get(do, 0)
        return {"do": do, "seconds": round(self._dice.uniform(0.2, longest), 2) if longest else 0}

    def _new(self, function: str, payload: dict[str, Any], invocation_id: str = "") -> str:
        invocation_id = invocation_id or f"inv-{self._dice.getrandbits(96):024x}"
        self.asked[invocation_id] = Asked(function, payload)
        return invocation_id

    async def sync(self, function: str = WORK, payload: dict[str, Any] | None = None) -> None:
        """Ask the gateway and wait for the end."""
        payload = self._payload() if payload is None else payload
        invocation_id = self._new(function, payload)
        asked = self.asked[invocation_id]
        deadline = time.monotonic() + _PATIENCE_S
        while not asked.ends:
            assert time.monotonic() < deadline, f"{invocation_id} got no answer"
            try:
                await self._ask(invocation_id, asked)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.2)

    async def _ask(self, invocation_id: str, asked: Asked) -> None:
        async with self._http.post(
            f"{self._gateway}/f/{asked.function}",
            json=asked.payload,
            headers={"Authorization": f"Bearer {self._key}", "Penstock-Invocation-Id": invocation_id},
            timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
        ) as answer:
            state = answer.headers.get("Penstock-State", "")
            if state in _FINAL:
                asked.ends.append((state, answer.status, await answer.json()))
            elif answer.status != 202 and answer.status not in _AGAIN:
                self.refused.append(f"{invocation_id}: {answer.status} {await answer.text()}")
            asked.acknowledged = asked.acknowledged or answer.status == 202 or bool(asked.ends)
        if not asked.ends:
            await asyncio.sleep(0.2)

    async def _asynchronous(self) -> None:
        payload = self._payload()
        invocation_id = self._new(WORK, payload)
        encoded = json.dumps(payload).encode()
        await self._until_accepted(lambda: self._client.functions.invoke(WORK, encoded, invocation=invocation_id))
        self.asked[invocation_id].acknowledged = True

    async def _map(self) -> None:
        batch = f"map-{self._dice.getrandbits(96):024x}"
        payloads = [self._payload() for _ in range(self._dice.randint(2, 8))]
        for index, payload in enumerate(payloads):
            self._new(WORK, payload, f"{batch}-{index}")
        made = await self._until_accepted(lambda: self._client.functions.map(WORK, payloads, batch=batch))
        assert made.invocations == [f"{batch}-{index}" for index in range(len(payloads))]
        for invocation_id in made.invocations:
            self.asked[invocation_id].acknowledged = True

    async def _until_accepted(self, ask: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await ask()
            except SdkError as error:
                if isinstance(error, ApiError) and error.status not in _AGAIN:
                    self.refused.append(repr(error))
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
