"""The committed contracts: docs/api and docs/diagrams, made from the code.

python tools/contract.py write     make them anew
python tools/contract.py check     fail when they differ from the code, or break what was published
python tools/contract.py publish   freeze the current operations; from now on they may not break
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import asyncapi
from compatibility import breaks

from penstock.billing import model as billing
from penstock.billing import paymentmodel as payments
from penstock.compute import model as compute
from penstock.fleet import model as fleet
from penstock.kit import openapi
from penstock.notices import model as notices
from penstock.processes import api
from penstock.serverless import model as serverless
from penstock.serverless import routes as serverless_routes

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "docs" / "api" / "published.json"


def rest_document() -> dict[str, Any]:
    """OpenAPI of all routes. Building them opens nothing, so no part needs to exist."""
    nothing = cast("Any", None)
    parts = api.Parts(
        database=nothing,
        authenticator=nothing,
        live=nothing,
        enrolment=nothing,
        secrets=nothing,
        objects=nothing,
        handoffs=nothing,
        webhooks=nothing,
        payments=None,
        functions=serverless_routes.Parts(**dict.fromkeys(serverless_routes.Parts.__dataclass_fields__, nothing)),
        bus=nothing,
    )
    settings = api.Settings(database_url="", nats_url="", pki_dir="", secrets_dir="", objects_url="")
    return openapi.document(api.compose(parts, settings), api.gateway_paths(settings))


def diagram(title: str, moves: Mapping[tuple[Any, Any], Any], initial: Any, final: Iterable[Any]) -> str:
    """A state machine's table as a picture."""
    lines = [f"    [*] --> {initial}"]
    lines += [f"    {source} --> {target}: {event}" for (source, event), target in moves.items()]
    lines += [f"    {state} --> [*]" for state in sorted(final)]
    drawn = "\n".join(lines)
    return f"# {title}\n\nMade from the code by `make contract`.\n\n```mermaid\nstateDiagram-v2\n{drawn}\n```\n"


def generated() -> dict[Path, str]:
    """File → what it should hold."""
    docs = ROOT / "docs"
    return {
        docs / "api" / "openapi.json": _dump(rest_document()),
        docs / "api" / "asyncapi.json": _dump(asyncapi.document(api.VERSION)),
        docs / "diagrams" / "allocation.md": diagram(
            "The life of an allocation", compute.MOVES, compute.INITIAL, compute.FINAL
        ),
        docs / "diagrams" / "balance.md": diagram("The life of a balance", billing.MOVES, billing.INITIAL, ()),
        docs / "diagrams" / "payment.md": diagram(
            "The life of a payment", payments.PAYMENT_MOVES, payments.PAYMENT_INITIAL, payments.PAYMENT_FINAL
        ),
        docs / "diagrams" / "refund.md": diagram(
            "The life of a refund", payments.REFUND_MOVES, payments.REFUND_INITIAL, payments.REFUND_FINAL
        ),
        docs / "diagrams" / "node.md": diagram("The life of a node", fleet.MOVES, fleet.NodeState.PENDING, fleet.FINAL),
        docs / "diagrams" / "invocation.md": diagram(*serverless.diagram_parts()),
        docs / "diagrams" / "webhook.md": diagram(
            "The life of a webhook", notices.MOVES, notices.WebhookState.ACTIVE, notices.FINAL
        ),
    }


def _dump(document: object) -> str:
    return json.dumps(openapi.sort(document), indent=2, ensure_ascii=False) + "\n"


def write() -> int:
    """Make the files anew."""
    for file, text in generated().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return 0


def check() -> int:
    """Say what differs and what breaks."""
    stale = [
        file.relative_to(ROOT)
        for file, text in generated().items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file in stale:
        print(f"{file} differs from the code: run `make contract`", file=sys.stderr)
    broken = breaks(json.loads(PUBLISHED.read_text(encoding="utf-8")), rest_document())
    for problem in broken:
        print(f"a published operation breaks: {problem}", file=sys.stderr)
    return 1 if stale or broken else 0


def publish() -> int:
    """Promise today's operations; refused when that would break an earlier promise."""
    document = rest_document()
    broken = breaks(json.loads(PUBLISHED.read_text(encoding="utf-8")), document) if PUBLISHED.exists() else []
    for problem in broken:
        print(f"a published operation breaks: {problem}", file=sys.stderr)
    if not broken:
        PUBLISHED.write_text(_dump(document), encoding="utf-8")
    return 1 if broken else 0


def main(arguments: list[str]) -> int:
    """Run one command."""
    commands = {"write": write, "check": check, "publish": publish}
    if len(arguments) != 1 or arguments[0] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    return commands[arguments[0]]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
