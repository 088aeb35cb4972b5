"""Which headers pass."""

import pytest

from penstock.access.headers import Forwarded, request_head, response_head, simple_head

FORWARDED = Forwarded("1.2.3.4", "https", "gw.example", "/u/alc_1/80", "cor_1")

SIMPLE = {
    "plain": (b"HTTP/1.1 200 OK\r\nContent-Length: 5", 5),
    "no reason": (b"HTTP/1.1 404 \r\nContent-Length: 0", 0),
    "any case and spaces": (b"HTTP/1.1 200 OK\r\ncontent-LENGTH: \t7 \r\nX: y", 7),
    "keep-alive": (b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive\r\nKeep-Alive: timeout=5\r\nContent-Length: 1", 1),
}


@pytest.mark.parametrize(("head", "length"), SIMPLE.values(), ids=SIMPLE.keys())
def test_usual_heads_are_simple(head: bytes, length: int) -> None:
    found = simple_head(head)
    assert found is not None
    assert found.length == length
    assert b"eep-" not in found.lines
    assert b"onnection" not in found.lines


NOT_SIMPLE = {
    "no length": b"HTTP/1.1 200 OK",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5",
    "two different lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\ncontent-length: 6",
    "list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5",
    "signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +5",
    "empty length": b"HTTP/1.1 200 OK\r\nContent-Length: ",
    "huge length": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 19,
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked",
    "chunked and length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\ntransfer-encoding: chunked",
    "closing": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close",
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 5",
    "notice": b"HTTP/1.1 100 Continue\r\nContent-Length: 5",
    "switch": b"HTTP/1.1 101 Switching\r\nContent-Length: 5",
    "no content": b"HTTP/1.1 204 No\r\nContent-Length: 5",
    "not modified": b"HTTP/1.1 304 No\r\nContent-Length: 5",
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 5",
    "space before colon": b"HTTP/1.1 200 OK\r\nContent-Length : 5",
    "bare line feed": b"HTTP/1.1 200 OK\r\nX: a\nContent-Length: 5\r\nContent-Length: 6",
    "bare return": b"HTTP/1.1 200 OK\r\nX: a\rContent-Length: 5\r\nContent-Length: 6",
    "zero byte": b"HTTP/1.1 200 OK\r\nX: \0\r\nContent-Length: 5",
    "no name": b"HTTP/1.1 200 OK\r\n: a\r\nContent-Length: 5",
    "cookie": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nset-cookie: a=b",
    "redirect": b"HTTP/1.1 302 OK\r\nContent-Length: 5\r\nLocation: /",
    "for the whole origin": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nClear-Site-Data: *",
    "ours": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nPenstock-Anything: 1",
    "not HTTP": b"SSH-2.0-OpenSSH",
    "status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 5",
}


@pytest.mark.parametrize("head", NOT_SIMPLE.values(), ids=NOT_SIMPLE.keys())
def test_all_others_are_left_to_the_parser(head: bytes) -> None:
    assert simple_head(head) is None


def test_request_head_has_no_credential_of_ours() -> None:
    headers = [
        (b"Host", b"gw.example"),
        (b"AUTHORIZATION", b"Bearer psk_secret"),
        (b"Proxy-Authorization", b"Basic psk_secret"),
        (b"Penstock-Project", b"prj_1"),
        (b"Cookie", b"a=1; Penstock_session=psk_secret; b=2"),
        (b"Cookie", b"__Secure-penstock=psk_secret"),
        (b"Connection", b"close, X-Hop, Content-Length"),
        (b"X-Hop", b"1"),
        (b"Content-Length", b"3"),
        (b"X-Forwarded-For", b"6.6.6.6"),
        (b"Expect", b"100-continue"),
    ]
    head = request_head("POST", "/x?y", headers, FORWARDED, upgrade=False).decode()
    lines = head.split("\r\n")
    assert lines[0] == "POST /x?y HTTP/1.1"
    assert "psk_secret" not in head
    assert "6.6.6.6" not in head
    assert "X-Hop" not in head
    assert "Expect" not in head
    assert "Content-Length: 3" in lines
    assert "Cookie: a=1; b=2" in lines
    assert head.count("Cookie") == 1
    assert "X-Forwarded-For: 1.2.3.4" in lines
    assert "X-Forwarded-Prefix: /u/alc_1/80" in lines
    assert head.endswith("\r\n\r\n")


def test_chunked_bodies_stay_chunked_and_upgrades_are_asked_for() -> None:
    head = request_head("GET", "/", [(b"Transfer-Encoding", b"chunked"), (b"TE", b"trailers")], FORWARDED, upgrade=True)
    assert head.count(b"Transfer-Encoding: chunked") == 1
    assert b"TE:" not in head
    assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n" in head


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"/login", b"/u/alc_1/80/login"),
        (b"/u/alc_1/80/login", b"/u/alc_1/80/login"),
        (b"https://gw.example/login", b"/u/alc_1/80/login"),
        (b"https://other.example/login", b"https://other.example/login"),
        (b"//other.example/login", b"//other.example/login"),
        (b"relative", b"relative"),
    ],
)
def test_redirects_stay_within_the_unit(given: bytes, expected: bytes) -> None:
    head = response_head(302, b"Found", [(b"location", given)], FORWARDED, b"")
    assert b"Location: %b\r\n" % expected in head


def test_cookies_are_scoped_and_ours_cannot_be_set() -> None:
    headers = [
        (b"Set-Cookie", b"a=1; Path=/; Domain=gw.example; Secure"),
        (b"Set-Cookie", b"penstock_session=forged"),
        (b"Set-Cookie", b"b=2"),
    ]
    head = response_head(200, b"OK", headers, FORWARDED, b"")
    assert b"Set-Cookie: a=1; Secure; Path=/u/alc_1/80/\r\n" in head
    assert b"Set-Cookie: b=2; Path=/u/alc_1/80/\r\n" in head
    assert b"forged" not in head
