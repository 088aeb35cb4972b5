"""Envelopes for other domains' rows: bound to their place, opened by old keys, not to be mistaken for secrets."""

from pathlib import Path

import pytest

from penstock.secrets import keyring
from penstock.secrets.errors import Tampered
from penstock.secrets.keyring import Keyring
from penstock.secrets.vault import Vault


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    keyring.init(tmp_path)
    return Vault(Keyring(tmp_path))


def test_what_was_sealed_opens_in_its_place_only(vault: Vault, tmp_path: Path) -> None:
    key_id, sealed = vault.seal(project_id="prj_1", name="webhook whk_1 1", value=b"value")
    assert b"value" not in sealed
    keyring.rotate(tmp_path)
    assert vault.current_key_id() != key_id
    assert vault.unseal(project_id="prj_1", name="webhook whk_1 1", key_id=key_id, sealed=sealed) == b"value"
    for project_id, name in (("prj_2", "webhook whk_1 1"), ("prj_1", "webhook whk_2 1"), ("prj_1", "webhook whk_1 2")):
        with pytest.raises(Tampered):
            vault.unseal(project_id=project_id, name=name, key_id=key_id, sealed=sealed)


def test_a_changed_byte_is_noticed(vault: Vault) -> None:
    key_id, sealed = vault.seal(project_id="prj_1", name="webhook w 1", value=b"value")
    for position in (0, 30, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(Tampered):
            vault.unseal(project_id="prj_1", name="webhook w 1", key_id=key_id, sealed=bytes(changed))
