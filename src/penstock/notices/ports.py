"""What notices asks of other domains; filled in `processes/`."""

from typing import Protocol


class Vault(Protocol):
    """Keeps what must not be readable in the database. `name` says what it is and is bound to it."""

    def current_key_id(self) -> str:
        """The master key that is used now."""
        ...

    def seal(self, *, project_id: str, name: str, value: bytes) -> tuple[str, bytes]:
        """The id of the master key, and the value that only it opens."""
        ...

    def unseal(self, *, project_id: str, name: str, key_id: str, sealed: bytes) -> bytes:
        """The value."""
        ...
