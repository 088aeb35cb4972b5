"""The API's reference as a page, made from its OpenAPI document. Pure; no scripts, and nothing is loaded."""

import re
from collections.abc import Iterator
from html import escape
from typing import Any, Final

Schema = dict[str, Any]

#: Goes with the page: even a mistake here could run nothing.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_CODE: Final = re.compile(r"`([^`]{1,500})`")
_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --quiet: #778; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; display: grid; grid-template-columns: 17rem 1fr; }
nav { position: sticky; top: 0; height: 100vh; overflow: auto; padding: 1rem; border-right: 1px solid var(--line);
  box-sizing: border-box; font-size: .85rem; }
nav a { display: block; text-decoration: none; color: inherit; padding: .1rem 0; overflow-wrap: anywhere; }
nav a:hover, nav a:focus { text-decoration: underline; }
main { padding: 1rem 2rem 4rem; max-width: 60rem; min-width: 0; }
h1 { margin-top: 0; }
h2 { margin-top: 3rem; text-transform: capitalize; border-bottom: 2px solid var(--line); }
article { border: 1px solid var(--line); border-radius: .4rem; padding: .75rem 1rem; margin: 1rem 0; }
h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; }
code { font: .9em ui-monospace, monospace; background: var(--soft); padding: 0 .2em; border-radius: .2em; }
b.method { display: inline-block; min-width: 4rem; text-transform: uppercase; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--quiet); font-weight: 600; font-size: .8rem; }
.quiet { color: var(--quiet); }
@media (max-width: 50rem) { body { display: block; } nav { position: static; height: auto; } main { padding: 1rem; } }
"""


def page(document: Schema) -> str:
    """The whole reference: operations by tag, then the schemas that they name."""
    groups = _by_tag(document)
    schemas: dict[str, Schema] = document["components"]["schemas"]
    info = document["info"]
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>",
            *_navigation(groups, schemas),
            f"<main><h1>{escape(info['title'])} API</h1><p>{_prose(info['description'])}</p>",
            '<p>The same as a document for programs: <a href="/api/openapi.json">openapi.json</a>.</p>',
            *(part for tag, found in groups.items() for part in _group(tag, found)),
            "<h2>Schemas</h2>",
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
            "</main></body></html>",
        ]
    )


def _by_tag(document: Schema) -> dict[str, list[tuple[str, str, Schema]]]:
    groups: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, item in document["paths"].items():
        for method in (name for name in _METHODS if name in item):
            operation: Schema = item[method]
            groups.setdefault(operation.get("tags", ["other"])[0], []).append((method, path, operation))
    return dict(sorted(groups.items()))


def _navigation(groups: dict[str, list[tuple[str, str, Schema]]], schemas: dict[str, Schema]) -> Iterator[str]:
    yield "<nav>"
    for tag, found in groups.items():
        yield f"<p><b>{escape(tag)}</b></p>"
        for _, _, operation in found:
            yield f'<a href="#{escape(operation["operationId"])}">{escape(operation.get("summary", ""))}</a>'
    yield "<p><b>schemas</b></p>"
    yield from (f'<a href="#schema-{escape(name)}">{escape(name)}</a>' for name in sorted(schemas))
    yield "</nav>"


def _group(tag: str, found: list[tuple[str, str, Schema]]) -> Iterator[str]:
    yield f"<h2>{escape(tag)}</h2>"
    for method, path, operation in found:
        yield f'<article id="{escape(operation["operationId"])}"><h3><b class="method">{method}</b> '
        yield f"<code>{escape(path)}</code></h3><p>{_prose(operation.get('description', ''))}</p>"
        yield from _parameters(operation)
        yield from _bodies(operation)
        yield "</article>"


def _parameters(operation: Schema) -> Iterator[str]:
    rows = [
        (each["name"], each["in"], _type(each["schema"]), each.get("required", False), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    if rows:
        yield "<table><tr><th>parameter</th><th>in</th><th>type</th><th></th></tr>"
        for name, place, kind, required, text in rows:
            needed = " (required)" if required else ""
            yield f"<tr><td><code>{escape(name)}</code></td><td>{place}{needed}</td><td>{kind}</td>"
            yield f"<td>{_prose(text)}</td></tr>"
        yield "</table>"


def _bodies(operation: Schema) -> Iterator[str]:
    bodies = [("body", operation["requestBody"])] if "requestBody" in operation else []
    bodies += [(status, answer) for status, answer in operation["responses"].items()]
    yield "<table><tr><th>body or status</th><th>type</th><th></th></tr>"
    for name, body in bodies:
        kinds = ", ".join(_media(media, each) for media, each in body.get("content", {}).items())
        text = _prose(body.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code></td><td>{kinds}</td><td>{text}</td></tr>"
    yield "</table>"


def _media(media: str, content: Schema) -> str:
    kind = _type(content.get("schema", {}))
    return kind if media == "application/json" else f"{escape(media)} {kind}"


def _schema(name: str, schema: Schema) -> str:
    required = frozenset(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{_type(kind)}</td>"
        f"<td>{'required' if field in required else _default(kind)}</td></tr>"
        for field, kind in schema.get("properties", {}).items()
    )
    table = f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>" if rows else ""
    text = _prose(schema.get("description", ""))
    return f'<article id="schema-{escape(name)}"><h3>{escape(name)}</h3><p>{text}</p>{table}</article>'


def _default(schema: Schema) -> str:
    return f"default <code>{escape(str(schema['default']))}</code>" if "default" in schema else ""


def _type(schema: Schema) -> str:
    """A schema's type in words, with its limits; a named one is a link."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(_type(each) for each in alternatives)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}{_limits(schema)}"
    kind = escape(str(schema.get("format") or schema.get("type") or "anything"))
    return f"{kind}{_limits(schema)}"


_LIMITS: Final = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}


def _limits(schema: Schema) -> str:
    said = [text.format(schema[name]) for name, text in _LIMITS.items() if name in schema]
    return f' <span class="quiet">({escape(", ".join(said))})</span>' if said else ""


def _prose(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))
