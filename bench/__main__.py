"""`python -m bench NAME…`: run the named measurements, or all."""

import asyncio
import importlib
import sys
from collections.abc import Sequence

import uvloop

NAMES = (
    "relay",
    "api",
    "tunnel",
    "allocate",
    "placement",
    "nodes",
    "handoff",
    "accrual",
    "ledger",
    "invoke",
    "coldstart",
    "cli",
)


async def _run(names: Sequence[str]) -> bool:
    good = True
    for name in names:
        print(f"# {name}", file=sys.stderr, flush=True)
        for figure in await importlib.import_module(f"bench.{name}").run():
            print(figure.line(), flush=True)
            good &= figure.holds
    return good


def main() -> None:
    """Exit 1 when a bar is missed, 2 for an unknown name."""
    names = NAMES if sys.argv[1:] in ([], ["all"]) else sys.argv[1:]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"unknown measurement {unknown[0]}; there are: {', '.join(NAMES)}", file=sys.stderr)
        raise SystemExit(2)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        good = runner.run(_run(names))
    raise SystemExit(0 if good else 1)


main()
