"""Values of access: what a caller was allowed to reach."""

from dataclasses import dataclass

from penstock.kit.caller import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """This caller may reach this unit, as of a moment ago."""

    caller: Caller
    allocation_id: str
    node_id: str
    unit_id: str
