"""What init is told of a tenant: never more or less than was meant."""

import pytest

from penstock.node.errors import Failed, Refused
from penstock.node.tenant import Tenant, configure, content, tenant
from penstock.wire.tasks import SecretRef, UnitHandoff

_LIMITS = {"processes": 1, "files": 2, "file_bytes": 3, "address_space": 4}


def _configure(who: Tenant) -> bytes:
    return configure(who, isolated=True, secrets_folder="/s", limits=_LIMITS, zygote=["/z", "json"])


def test_a_configuration_cannot_be_split_by_its_content() -> None:
    made = _configure(Tenant(["a", ""], {"K": "v=w"}, {"key": b"a\0b"}))
    text = b"\0".join((b"1", b"/s", b"1", b"2", b"3", b"4", b"2", b"/z", b"json", b"2", b"a", b"", b"1", b"key", b"3"))
    assert made == b"%08d%08d" % (len(text) + 6, 3) + text + b"\0K=v=w" + b"a\0b"
    for bad in (Tenant(["a\0b"]), Tenant(["a"], {"K": "x\0y"}), Tenant(["a"], {"K": "x" * (2 << 20)})):
        with pytest.raises(Refused):
            _configure(bad)


def test_a_secret_is_a_file_and_if_wanted_a_variable() -> None:
    refs = [SecretRef(name="key", version=1, env="KEY"), SecretRef(name="raw", version=1)]
    request = UnitHandoff(unit_id="alc_x", allocation_id="alc_y", env={"A": "1"}, command=["c"], secrets=refs)
    made = tenant(request, {"key": b"\xffx", "raw": b"\0", "other": b"not asked for"}, isolated=True)
    assert made.secrets == {"key": b"\xffx", "raw": b"\0"}
    assert made.env == {"A": "1", "KEY": "\udcffx"}
    assert b"KEY=\xffx" in content(made)
    assert "xff" not in repr(Tenant(secrets=made.secrets))


def test_a_secret_without_a_value_fails_and_too_many_bytes_are_refused() -> None:
    request = UnitHandoff(unit_id="alc_x", allocation_id="alc_y", secrets=[SecretRef(name="key", version=1)])
    with pytest.raises(Failed) as failed:
        tenant(request, {}, isolated=True)
    assert failed.value.code == "secrets_unavailable"
    with pytest.raises(Refused) as refused:
        tenant(request, {"key": bytes(3 << 20)}, isolated=True)
    assert refused.value.code == "too_large"


def test_a_variable_cannot_hold_a_secret_with_a_zero_byte() -> None:
    refs = [SecretRef(name="key", version=1, env="KEY")]
    request = UnitHandoff(unit_id="alc_x", allocation_id="alc_y", secrets=refs)
    with pytest.raises(Refused):
        content(tenant(request, {"key": b"a\0b"}, isolated=True))


def test_the_way_out_is_named_only_where_there_is_one() -> None:
    with_rules = UnitHandoff(unit_id="u", allocation_id="a", egress=["pypi.org"], env={"HTTP_PROXY": "mine"})
    found = tenant(with_rules, {}, isolated=True).env
    assert (found["HTTP_PROXY"], found["https_proxy"]) == ("mine", "http://127.0.0.1:3128")
    assert "PENSTOCK_EGRESS" in found
    assert tenant(with_rules, {}, isolated=False).env == {"HTTP_PROXY": "mine"}
    assert tenant(UnitHandoff(unit_id="u", allocation_id="a"), {}, isolated=True).env == {}
