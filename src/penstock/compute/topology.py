"""Which of a node's free slots an allocation gets: those that are near one another and leave the most of use behind.

Pure. `choose` prefers one NVLink domain, then one NUMA node, then the group with the least room to spare. Shares are
packed: onto the fullest GPU that still fits them all, otherwise onto as few GPUs as possible.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.compute.model import Claim
from penstock.wire.tasks import GpuKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat(Claim):
    """A free slot and where it is on its node."""

    numa_node: int
    nvlink_domain: str


def choose(free: Sequence[Seat], count: int) -> Sequence[Seat]:
    """So many of these slots of one node, all of one kind; fewer when they do not fit.

    Equal ones are taken in random order, so that racers seldom choose the same.
    """
    seats = random.sample(free, len(free))
    if seats and seats[0].kind != GpuKind.WHOLE:
        return _pack(seats, count)
    return _near(seats, count)


def _pack(seats: Sequence[Seat], count: int) -> Sequence[Seat]:
    room = Counter(seat.whole_uuid for seat in seats)

    def rank(seat: Seat) -> Any:
        fits = room[seat.whole_uuid] >= count
        return not fits, room[seat.whole_uuid] if fits else -room[seat.whole_uuid], seat.whole_uuid

    ranked = sorted(seats, key=rank)[:count]
    # A unit talks to the service of one GPU only.
    if ranked and ranked[0].kind == GpuKind.MPS:
        return [seat for seat in ranked if seat.whole_uuid == ranked[0].whole_uuid]
    return ranked


def _near(seats: Sequence[Seat], count: int) -> Sequence[Seat]:
    """By the smallest group that holds them all: a NUMA node within an NVLink domain, a domain, a NUMA node."""
    domains = Counter(map(_domain, seats))
    cells = Counter((_domain(seat), seat.numa_node) for seat in seats)
    nodes = Counter(seat.numa_node for seat in seats)

    def rank(seat: Seat) -> Any:
        domain, node = _domain(seat), seat.numa_node
        cell = cells[domain, node]
        if cell >= count:
            return 0, cell, domain, node
        if domains[domain] >= count:
            # Across NUMA nodes, but most of them on one.
            return 1, domains[domain], domain, -cell, node
        if nodes[node] >= count:
            return 2, nodes[node], node, -domains[domain], domain
        return 3, -domains[domain], domain, -cell, node

    return sorted(seats, key=rank)[:count]


def _domain(seat: Seat) -> str:
    """A GPU without NVLink is a domain of its own."""
    return seat.nvlink_domain or seat.slot_id
