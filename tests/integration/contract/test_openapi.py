"""The whole published contract, tried with generated requests against the running api: no 5xx, no answer that the
contract does not know. Seeds are derived from the operation, so a failure repeats; `make soak` tries many more."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from integration.api.conftest import Api

DOCUMENT: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "api" / "openapi.json").read_text())
#: It answers for ever; tests/integration/api/test_feed.py tries it.
ENDLESS = {"streamEvents"}
#: Paths with a server of their own are the gateway's.
OPERATIONS = sorted(
    (operation["operationId"], method, path)
    for path, methods in DOCUMENT["paths"].items()
    if "servers" not in methods
    for method, operation in methods.items()
    if operation["operationId"] not in ENDLESS
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
#: Headers of the connection itself: what is wrong with them is refused by the HTTP server, before there is a request.
FRAMING = {"content-length", "transfer-encoding", "connection", "host", "expect", "upgrade", "te"}
#: An outage that the answer admits is not a failure of the contract: generated identity providers do not exist.
EXPECTED_OUTAGES = {503}


def try_out(api: Api, method: str, path: str, examples: int, number: int) -> None:
    """Generated requests to one operation, good and bad ones."""
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    strategy = schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE)
    bad = schema[path][method].as_strategy(generation_mode=GenerationMode.NEGATIVE)
    headers = {"Authorization": f"Bearer {api.admin_key}"}

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy | bad)
    def run(case: Case) -> None:
        for name in [name for name in case.headers or {} if name.lower() in FRAMING]:
            del case.headers[name]
        response = case.call(base_url=f"http://127.0.0.1:{api.port}", headers=headers, timeout=30)
        if response.status_code not in EXPECTED_OUTAGES:
            case.validate_response(response, checks=CHECKS)

    run()


@pytest.mark.parametrize(("name", "method", "path"), OPERATIONS, ids=[name for name, _, _ in OPERATIONS])
async def test_every_answer_is_one_that_the_contract_knows(api: Api, name: str, method: str, path: str) -> None:
    await asyncio.to_thread(try_out, api, method, path, 15, sum(name.encode()))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "method", "path"), OPERATIONS, ids=[name for name, _, _ in OPERATIONS])
async def test_many_more(api: Api, name: str, method: str, path: str) -> None:
    await asyncio.to_thread(try_out, api, method, path, 500, sum(name.encode()))
