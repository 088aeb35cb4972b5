"""Envelopes for values that other domains keep in rows of their own, such as what webhooks are signed with."""

from dataclasses import dataclass
from typing import Final

from penstock.secrets import model
from penstock.secrets.keyring import Keyring
from penstock.secrets.model import KEY_BYTES, Envelope, Place

#: A nonce, the key and its tag: what stands before the value.
_WRAPPED_BYTES: Final = 12 + KEY_BYTES + 16


@dataclass(frozen=True, slots=True)
class Vault:
    """Seals and opens under the same master keys as secrets. A secret's name has no space: one of these must have."""

    keyring: Keyring

    def current_key_id(self) -> str:
        """The master key that is used now."""
        return self.keyring.current().id

    def seal(self, *, project_id: str, name: str, value: bytes) -> tuple[str, bytes]:
        """The id of the master key, and the value that only it opens."""
        envelope = model.seal(_place(project_id, name), value, self.keyring.current())
        return envelope.key_id, envelope.wrapped_key + envelope.sealed

    def unseal(self, *, project_id: str, name: str, key_id: str, sealed: bytes) -> bytes:
        """The value, or Tampered."""
        envelope = Envelope(sealed=sealed[_WRAPPED_BYTES:], wrapped_key=sealed[:_WRAPPED_BYTES], key_id=key_id)
        return model.unseal(_place(project_id, name), envelope, self.keyring.key(key_id))


def _place(project_id: str, name: str) -> Place:
    assert " " in name
    return Place(project_id=project_id, name=name, version=0)
