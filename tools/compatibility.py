"""Whether a new OpenAPI document keeps every promise of an old one.

Breaking: an operation or a success status is gone; a request needs a field or parameter that it did not, or no longer
takes one that it did, or takes fewer types; an answer lost a field, or a field may now be absent or of another type.
"""

from typing import Any, Final

Schema = dict[str, Any]
METHODS: Final = ("get", "put", "post", "patch", "delete")
REQUEST: Final = "request"
RESPONSE: Final = "response"


def breaks(old: Schema, new: Schema) -> list[str]:
    """What the new document breaks, in words; nothing if all is kept."""
    found: list[str] = []
    for path, methods in old["paths"].items():
        for method in (name for name in METHODS if name in methods):
            where = f"{method.upper()} {path}"
            after = new["paths"].get(path, {}).get(method)
            if after is None:
                found.append(f"{where}: the operation is gone")
            else:
                found += _Comparison(old, new).operation(methods[method], after, where)
    return found


class _Comparison:
    """Walks two schemas side by side; each document resolves its own references."""

    def __init__(self, old: Schema, new: Schema) -> None:
        self._old = old
        self._new = new
        self._walked: set[tuple[str, str, str]] = set()

    def operation(self, old: Schema, new: Schema, where: str) -> list[str]:
        found = self._parameters(old, new, where)
        if "requestBody" in new:
            if "requestBody" not in old and new["requestBody"].get("required", False):
                found.append(f"{where}: a body is required now")
            elif "requestBody" in old:
                found += self._bodies(old["requestBody"], new["requestBody"], REQUEST, f"{where} body")
        elif "requestBody" in old:
            found.append(f"{where}: the body is gone")
        for status, answer in old["responses"].items():
            if status not in new["responses"]:
                found.append(f"{where}: status {status} is gone")
            else:
                found += self._bodies(answer, new["responses"][status], RESPONSE, f"{where} {status}")
        return found

    def _parameters(self, old: Schema, new: Schema, where: str) -> list[str]:
        before = {(each["in"], each["name"]): each for each in old.get("parameters", [])}
        after = {(each["in"], each["name"]): each for each in new.get("parameters", [])}
        found = [f"{where}: parameter {name} is gone" for place, name in before if (place, name) not in after]
        for key, parameter in after.items():
            needed_before = before.get(key, {}).get("required", False)
            if parameter.get("required", False) and not needed_before:
                found.append(f"{where}: parameter {key[1]} is required now")
            if key in before:
                found += self._schemas(before[key]["schema"], parameter["schema"], REQUEST, f"{where} ?{key[1]}")
        return found

    def _bodies(self, old: Schema, new: Schema, way: str, where: str) -> list[str]:
        found: list[str] = []
        for media, content in old.get("content", {}).items():
            if media not in new.get("content", {}):
                found.append(f"{where}: {media} is gone")
            else:
                found += self._schemas(content.get("schema", {}), new["content"][media].get("schema", {}), way, where)
        return found

    def _schemas(self, old: Schema, new: Schema, way: str, where: str) -> list[str]:
        names = (old.get("$ref", ""), new.get("$ref", ""), way)
        if names[0] and names in self._walked:
            return []
        self._walked.add(names)
        before, after = _alternatives(old, self._old), _alternatives(new, self._new)
        found = _types(before, after, way, where)
        one = [each for each in before if each.get("type") != "null"]
        other = [each for each in after if each.get("type") != "null"]
        if len(one) == len(other) == 1:
            found += self._inside(one[0], other[0], way, where)
        return found

    def _inside(self, old: Schema, new: Schema, way: str, where: str) -> list[str]:
        found = self._fields(old, new, way, where)
        for name in ("items", "additionalProperties"):
            if isinstance(old.get(name), dict) and isinstance(new.get(name), dict):
                found += self._schemas(old[name], new[name], way, f"{where}[]")
        return found

    def _fields(self, old: Schema, new: Schema, way: str, where: str) -> list[str]:
        before, after = old.get("properties", {}), new.get("properties", {})
        needed_before, needed_after = set(old.get("required", ())), set(new.get("required", ()))
        found = [f"{where}.{name}: the field is gone" for name in before if name not in after]
        if way == REQUEST:
            found += [f"{where}.{name}: the field is required now" for name in sorted(needed_after - needed_before)]
        else:
            lost = sorted((needed_before - needed_after) & set(after))
            found += [f"{where}.{name}: the field may be absent now" for name in lost]
        for name in before:
            if name in after:
                found += self._schemas(before[name], after[name], way, f"{where}.{name}")
        return found


def _alternatives(schema: Schema, document: Schema) -> list[Schema]:
    """What a value may be, each resolved; `null` is an alternative like any other."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    listed = schema.get("oneOf") or schema.get("anyOf")
    if listed:
        return [inner for each in listed for inner in _alternatives(each, document)]
    kinds = schema.get("type", "any")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]


def _types(before: list[Schema], after: list[Schema], way: str, where: str) -> list[str]:
    old, new = {_type(each) for each in before}, {_type(each) for each in after}
    broken = old - new if way == REQUEST else new - old
    return [f"{where}: the type changed from {sorted(old)} to {sorted(new)}"] if broken else []


def _type(schema: Schema) -> str:
    kind = schema.get("type", "any")
    return f"{kind}:{schema['format']}" if "format" in schema else kind
