"""The committed documents, as a program that reads them would."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.kit import reference
from penstock.wire import subjects

_API = Path(__file__).parents[3] / "docs" / "api"
OPENAPI: dict[str, Any] = json.loads((_API / "openapi.json").read_text())
ASYNCAPI: dict[str, Any] = json.loads((_API / "asyncapi.json").read_text())
MOMENTS = ("_at", "At", "_since", "_until", "_start", "since")
#: Words that are no set of ours: a framework's status code, free text beside a state.
NO_STATES = {"status", "statusCode", "status_code", "state_reason"}


def kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]


def fields(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for owner, schema in document["components"]["schemas"].items():
        for name, field in schema.get("properties", {}).items():
            yield owner, name, field


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_moment_is_a_date_time() -> None:
    moments = [
        (owner, name, kinds(field))
        for document in (OPENAPI, ASYNCAPI)
        for owner, name, field in fields(document)
        if name.endswith(MOMENTS) and kinds(field)[0].get("type") == "string"
    ]
    assert len(moments) > 80
    assert [each for each in moments if each[2][0].get("format") != "date-time"] == []


def test_every_state_is_an_enum() -> None:
    states = [
        (owner, name, kinds(field)[0])
        for owner, name, field in fields(OPENAPI)
        if "state" in name and name not in NO_STATES
    ]
    assert len(states) > 12
    assert [(owner, name) for owner, name, kind in states if "enum" not in kind and "$ref" not in kind] == []


def test_a_parameter_is_never_null() -> None:
    found = [
        parameter
        for path in OPENAPI["paths"].values()
        for operation in path.values()
        if isinstance(operation, dict)
        for parameter in operation.get("parameters", ())
    ]
    assert len(found) > 100
    assert [each["name"] for each in found if {"type": "null"} in each["schema"].get("oneOf", [])] == []


def test_the_gateways_routes_name_their_own_server() -> None:
    for path in ("/f/{function}", "/u/{allocation_id}/{port}/{path}", "/ws/exec/{allocation_id}"):
        assert OPENAPI["paths"][path]["servers"][0]["url"] == "http://127.0.0.1:8081"


def test_every_subject_of_functions_has_a_channel() -> None:
    addresses = {channel["address"] for channel in ASYNCAPI["channels"].values()}
    patterns = [
        value
        for value in vars(subjects).values()
        if isinstance(value, str) and value.startswith("runtime.serverless.") and value.endswith("*")
    ]
    assert len(patterns) == 9
    for pattern in patterns:
        kind = pattern.split(".")[2]
        assert [each for each in addresses if each.startswith(f"runtime.serverless.{kind}.{{")], pattern
    assert set(ASYNCAPI["servers"]) == {"control", "workers"}


def test_all_references_of_the_messages_resolve() -> None:
    found = list(references(ASYNCAPI))
    assert len(found) > 100
    for target in found:
        value: Any = ASYNCAPI
        for step in target.removeprefix("#/").split("/"):
            value = value[step]


def test_the_page_shows_every_operation_and_loads_nothing() -> None:
    page = reference.page(OPENAPI)
    for path in OPENAPI["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                assert f'id="{operation["operationId"]}"' in page
    assert "<script" not in page
    assert "src=" not in page
    assert "url(" not in page
    assert page.count('href="') == page.count('href="#') + page.count('href="/api/openapi.json"')


def test_the_page_escapes_what_it_shows() -> None:
    hostile = "<script>alert(1)</script>"
    operation = {
        "operationId": hostile,
        "tags": [hostile],
        "summary": hostile,
        "description": f"`{hostile}`",
        "parameters": [{"name": hostile, "in": "query", "schema": {"enum": [hostile]}, "description": hostile}],
        "responses": {hostile: {"description": hostile, "content": {hostile: {"schema": {"type": hostile}}}}},
    }
    document = {
        "info": {"title": hostile, "description": hostile},
        "paths": {hostile: {"get": operation}},
        "components": {"schemas": {hostile: {"properties": {hostile: {"default": hostile}}, "description": hostile}}},
    }
    assert "<script" not in reference.page(document)
