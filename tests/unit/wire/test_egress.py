"""Rules of egress: what they let through, and that no way of writing an address leads to a private one."""

import ipaddress
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.egress import BadRule, is_host, is_public, parse


@pytest.mark.parametrize(
    ("rule", "host", "port", "allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("PyPI.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, False),
        ("pypi.org", "evil-pypi.org", 443, False),
        ("pypi.org", "a.pypi.org", 443, False),
        ("*.example.com", "a.b.example.com", 443, True),
        ("*.example.com", "example.com", 443, False),
        ("*.example.com", "badexample.com", 443, False),
        ("host:80,8000-8002", "host", 8001, True),
        ("host:80,8000-8002", "host", 8003, False),
        ("host:*", "host", 1, True),
        ("*", "anything.at.all", 443, True),
        ("*:80", "anything", 443, False),
        ("8.8.8.0/24:53", "8.8.8.8", 53, True),
        ("8.8.8.0/24:53", "8.8.9.8", 53, False),
        ("8.8.8.8", "dns.google", 443, False),
        ("[2606:4700::/32]:443", "2606:4700::1", 443, True),
        ("2606:4700::1", "2606:4700::1", 443, True),
    ],
)
def test_a_rule_covers_what_it_names(rule: str, host: str, port: int, allowed: bool) -> None:
    assert parse(rule).allows(host, port) is allowed


@pytest.mark.parametrize(
    ("rule", "meant"),
    [
        ("http://foo", "foo:80"),
        ("https://pypi.org/simple", "pypi.org"),
        ("https://pypi.org:8443", "pypi.org:8443"),
        ("https://me@pypi.org?x", "pypi.org"),
        ("://", "a host"),
    ],
)
def test_a_url_is_told_from_a_host(rule: str, meant: str) -> None:
    with pytest.raises(BadRule) as refused:
        parse(rule)
    assert f"a host name or a pattern is expected, not a URL; did you mean {meant}?" in str(refused.value)


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "a b",
        "http://x",
        "*.*",
        "x:0",
        "x:99999",
        "x:9-1",
        "x:a",
        "10.0.0.0/8",
        "127.0.0.1",
        "169.254.169.254",
        "::1",
    ]
    + ["0.0.0.0/0", "8.8.8.8/24", "[::1", "a" * 301, "*foo.com", "1.2.3", "fd00::/8", "192.168.1.1:80", "100.64.0.1"],
)
def test_a_bad_rule_is_refused(rule: str) -> None:
    with pytest.raises(BadRule):
        parse(rule)


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    with suppress(BadRule):
        parse(text)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.1.1", "0.0.0.0", "224.0.0.1"]
    + ["255.255.255.255", "::", "::1", "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"]
    + ["2002:a00:1::", "2001:0:1::", "198.18.0.1", "192.0.2.1", "203.0.113.9"]
    + ["fec0::1", "3fff::1", "::127.0.0.1", "168.63.129.16", "::ffff:168.63.129.16"],
)
def test_no_special_address_is_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("text", ["", "a\0.example.com", "a\n", "2606:4700::1%.example.com", "a..b", "a\\b", "a" * 300])
def test_what_a_resolver_may_read_otherwise_is_no_host(text: str) -> None:
    assert not is_host(text)


@pytest.mark.parametrize("text", ["pypi.org", "_dmarc.example.com", "localhost", "8.8.8.8", "2606:4700::1"])
def test_names_and_addresses_are_hosts(text: str) -> None:
    assert is_host(text)
