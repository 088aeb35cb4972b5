"""What is refused before any route, and who is believed about addresses."""

import ipaddress

import pytest

from penstock.kit import clients, edge

HOST = (b"host", b"localhost:8080")


@pytest.mark.parametrize("host", [b"localhost", b"127.0.0.1:80", b"[::1]:8080", b"a-b.example"])
def test_ordinary_hosts_pass(host: bytes) -> None:
    assert edge.rejection(edge.read_head([(b"host", host)])) is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"")],
        [(b"host", b"example.com/abc?x=")],
        [(b"host", b"a@b")],
        [(b"host", b"a:123456")],
        [HOST, HOST],
        [HOST, (b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
        [HOST, (b"transfer-encoding", b"chunked")],
        [HOST, (b"content-length", b"1"), (b"content-length", b"2")],
        [HOST, (b"content-length", b"-1")],
        [HOST, (b"content-length", b"1" * 30)],
    ],
)
def test_ambiguous_requests_are_refused_and_closed(headers: list[tuple[bytes, bytes]]) -> None:
    refused = edge.rejection(edge.read_head(headers))
    assert refused is not None
    assert refused.status == 400
    assert refused.close


def test_a_body_announced_too_large_is_refused_at_once() -> None:
    refused = edge.rejection(edge.read_head([HOST, (b"content-length", b"1048577")]))
    assert refused is not None
    assert refused.status == 413
    assert edge.rejection(edge.read_head([HOST, (b"content-length", b"1048576")])) is None


async def test_a_body_that_grows_too_large_is_refused() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * 70_000, "more_body": True}

    with pytest.raises(edge.Rejected) as caught:
        await edge.read_body(receive)  # type: ignore[arg-type]
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("203.0.113.9", b"10.0.0.1", "203.0.113.9"),
        ("10.0.0.5", None, "10.0.0.5"),
        ("10.0.0.5", b"198.51.100.7", "198.51.100.7"),
        ("10.0.0.5", b"1.2.3.4, 198.51.100.7, 10.0.0.6", "198.51.100.7"),
        ("10.0.0.5", b"10.0.0.9, 10.0.0.6", "10.0.0.9"),
        ("nonsense", b"1.2.3.4", "nonsense"),
    ],
)
def test_only_trusted_proxies_speak_for_others(peer: str, forwarded: bytes | None, expected: str) -> None:
    trusted = [ipaddress.ip_network("10.0.0.0/8")]
    assert clients.client_address(peer, forwarded, trusted) == expected


def test_addresses_in_several_lines_are_one_list() -> None:
    lines = [(b"x-forwarded-for", b"1.2.3.4"), (b"x-forwarded-for", b"198.51.100.7"), (b"x-forwarded-for", b"10.0.0.6")]
    head = edge.read_head([HOST, *lines])
    trusted = [ipaddress.ip_network("10.0.0.0/8")]
    assert clients.client_address("10.0.0.5", head.forwarded_for, trusted) == "198.51.100.7"


@pytest.mark.parametrize("given", [b"x" * 65, b"a b", b"a\n", b"\xc3\xa9", b""])
def test_strange_correlation_ids_are_not_taken_over(given: bytes) -> None:
    assert edge.read_head([HOST, (b"x-correlation-id", given)]).correlation_id == ""


def test_a_public_route_takes_small_bodies_only() -> None:
    head = edge.read_head([(b"host", b"x"), (b"content-length", b"65537")])
    with pytest.raises(edge.Rejected) as refused:
        head.limit_body(64 << 10)
    assert (refused.value.status, refused.value.message) == (413, "body: max 65536 bytes")
    edge.read_head([(b"host", b"x"), (b"content-length", b"65536")]).limit_body(64 << 10)
