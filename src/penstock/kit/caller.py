"""Who makes a request and what they may do; made by the edge, checked by use cases."""

from dataclasses import dataclass

from penstock.kit.audit import Actor
from penstock.kit.errors import Denied


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How a person came in without a key: by a session, or by a provider's token that ends at `expires` (seconds since
    the epoch). The groups are those that it carries."""

    id: str
    provider: str
    groups: tuple[str, ...]
    expires: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated principal acting in one project. `actions` is what role and key allow together;
    `operators_only` is what no role allows."""

    principal_id: str
    principal_kind: str
    display_name: str
    organisation_id: str
    project_id: str
    role: str
    actions: frozenset[str]
    operator: bool = False
    operators_only: frozenset[str] = frozenset()
    key_id: str | None = None
    login: Login | None = None

    @property
    def actor(self) -> Actor:
        """The same, for the audit log."""
        return Actor(
            id=self.principal_id,
            kind=self.principal_kind,
            organisation_id=self.organisation_id,
            project_id=self.project_id,
        )

    def require(self, action: str, *, denial: type[Denied] = Denied) -> None:
        """Pass, or a denial naming what is missing."""
        if action in self.actions:
            return
        if action in self.operators_only and not self.operator:
            raise denial(f"operators only: no role in an organisation allows {action}", action=action)
        raise denial(f"your role ({self.role}) does not allow {action}", action=action)
