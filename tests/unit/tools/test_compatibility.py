"""The checker of published operations, on planted breaks."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[3] / "tools" / "compatibility.py"
_spec = importlib.util.spec_from_file_location("compatibility", _FILE)
assert _spec is not None
assert _spec.loader is not None
compatibility = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compatibility)

THING = {
    "type": "object",
    "required": ["id", "size"],
    "properties": {
        "id": {"type": "string"},
        "size": {"type": "integer"},
        "note": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
    },
}
PUBLISHED: dict[str, Any] = {
    "paths": {
        "/things": {
            "post": {
                "parameters": [
                    {"name": "dry", "in": "query", "required": False, "schema": {"type": "boolean"}},
                ],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ThingCreate"}}},
                },
                "responses": {
                    "201": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}}
                },
            }
        }
    },
    "components": {
        "schemas": {
            "Thing": THING,
            "ThingCreate": {
                "type": "object",
                "required": ["size"],
                "properties": {"size": {"type": "integer"}, "note": {"type": "string"}},
            },
            "Part": {
                "type": "object",
                "required": ["whole"],
                "properties": {"whole": {"$ref": "#/components/schemas/Thing"}},
            },
        }
    },
}


def operation(document: dict[str, Any]) -> dict[str, Any]:
    return document["paths"]["/things"]["post"]


def schema(document: dict[str, Any], name: str) -> dict[str, Any]:
    return document["components"]["schemas"][name]


def remove_operation(document: dict[str, Any]) -> None:
    del document["paths"]["/things"]["post"]


def require_request_field(document: dict[str, Any]) -> None:
    schema(document, "ThingCreate")["required"].append("note")


def add_required_request_field(document: dict[str, Any]) -> None:
    schema(document, "ThingCreate")["properties"]["colour"] = {"type": "string"}
    schema(document, "ThingCreate")["required"].append("colour")


def remove_request_field(document: dict[str, Any]) -> None:
    del schema(document, "ThingCreate")["properties"]["note"]


def narrow_request_type(document: dict[str, Any]) -> None:
    schema(document, "ThingCreate")["properties"]["size"] = {"type": "string"}


def require_parameter(document: dict[str, Any]) -> None:
    operation(document)["parameters"][0]["required"] = True


def add_required_parameter(document: dict[str, Any]) -> None:
    operation(document)["parameters"].append(
        {"name": "x", "in": "query", "required": True, "schema": {"type": "string"}}
    )


def remove_parameter(document: dict[str, Any]) -> None:
    operation(document)["parameters"].clear()


def remove_response_field(document: dict[str, Any]) -> None:
    del schema(document, "Thing")["properties"]["size"]


def change_response_type(document: dict[str, Any]) -> None:
    schema(document, "Thing")["properties"]["size"] = {"type": "string"}


def let_response_field_be_null(document: dict[str, Any]) -> None:
    schema(document, "Thing")["properties"]["id"] = {"oneOf": [{"type": "string"}, {"type": "null"}]}


def let_response_field_be_absent(document: dict[str, Any]) -> None:
    schema(document, "Thing")["required"].remove("size")


def break_nested_response(document: dict[str, Any]) -> None:
    schema(document, "Part")["properties"]["whole"] = {"type": "string"}


def change_status(document: dict[str, Any]) -> None:
    operation(document)["responses"]["200"] = operation(document)["responses"].pop("201")


@pytest.mark.parametrize(
    "plant",
    [
        remove_operation,
        require_request_field,
        add_required_request_field,
        remove_request_field,
        narrow_request_type,
        require_parameter,
        add_required_parameter,
        remove_parameter,
        remove_response_field,
        change_response_type,
        let_response_field_be_null,
        let_response_field_be_absent,
        break_nested_response,
        change_status,
    ],
)
def test_planted_break_is_found(plant: Callable[[dict[str, Any]], None]) -> None:
    changed = copy.deepcopy(PUBLISHED)
    plant(changed)
    assert compatibility.breaks(PUBLISHED, changed)


def add_operation(document: dict[str, Any]) -> None:
    document["paths"]["/others"] = {"get": {"responses": {}}}


def add_optional_request_field(document: dict[str, Any]) -> None:
    schema(document, "ThingCreate")["properties"]["colour"] = {"type": "string"}


def add_response_field(document: dict[str, Any]) -> None:
    schema(document, "Thing")["properties"]["colour"] = {"type": "string"}
    schema(document, "Thing")["required"].append("colour")


def accept_null_in_request(document: dict[str, Any]) -> None:
    schema(document, "ThingCreate")["properties"]["note"] = {"type": ["string", "null"]}


def add_optional_parameter(document: dict[str, Any]) -> None:
    operation(document)["parameters"].append({"name": "x", "in": "query", "schema": {"type": "string"}})


def rename_component(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    schemas["Renamed"] = schemas.pop("ThingCreate")
    operation(document)["requestBody"]["content"]["application/json"]["schema"]["$ref"] = "#/components/schemas/Renamed"


@pytest.mark.parametrize(
    "change",
    [
        add_operation,
        add_optional_request_field,
        add_response_field,
        accept_null_in_request,
        add_optional_parameter,
        rename_component,
    ],
)
def test_harmless_change_passes(change: Callable[[dict[str, Any]], None]) -> None:
    changed = copy.deepcopy(PUBLISHED)
    change(changed)
    assert compatibility.breaks(PUBLISHED, changed) == []
