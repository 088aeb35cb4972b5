"""Which credentials count where."""

import base64
from typing import Any

import pytest

from penstock.access.credentials import Credential, for_command, for_port
from penstock.access.errors import BrowserRefused

PREFIX = "/u/alc_b/8000"
OWN_PAGE = f"https://gateway.example{PREFIX}/page?x=1"
OTHER_PAGES = (
    "",
    "https://gateway.example/",
    "https://gateway.example/u/alc_a/8000/",
    "https://gateway.example/u/alc_b/80001/",
    "https://gateway.example/u/alc_b/8000",
    "https://gateway.example/?/u/alc_b/8000/",
    "https://[/u/alc_a/8000/",
    "nonsense",
)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


KEY = {"Authorization": basic("anybody:psk_x")}
BEARER = {"Authorization": "Bearer psk_x", "Penstock-Project": "prj_other"}
ACCEPTED = Credential("Bearer psk_x", None)


def asked(headers: dict[str, str], *, upgrade: bool = False) -> Credential:
    return for_port(headers, PREFIX, upgrade=upgrade)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Bearer psk_x", "Bearer psk_x"),
        (basic("anybody:psk_x"), "Bearer psk_x"),
        (basic(":psk:x"), "Bearer psk:x"),
        (basic("no colon"), "Bearer "),
        ("basic " + basic("a:b").split()[1], "Bearer b"),
        ("Basic %%%", None),
        ("Basic " + base64.b64encode(b"\xff:\xff").decode(), None),
    ],
)
def test_password_of_basic_authentication_is_the_key(header: str, expected: str | None) -> None:
    assert asked({"Authorization": header}).authorization == expected


def test_no_credential_is_none() -> None:
    assert asked({}) == for_command({}) == Credential(None, None)


@pytest.mark.parametrize("site", ["none", "same-origin", "same-site", "cross-site"])
@pytest.mark.parametrize("upgrade", [False, True])
def test_bearer_counts_wherever_it_comes_from(site: str, upgrade: bool) -> None:
    headers = BEARER | {"Sec-Fetch-Site": site, "Origin": "https://gateway.example"}
    assert asked(headers, upgrade=upgrade) == for_command(headers) == Credential("Bearer psk_x", "prj_other")


@pytest.mark.parametrize(
    "headers", [{}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin", "Referer": OWN_PAGE}]
)
def test_browsers_key_counts_for_its_owner_and_the_units_own_pages(headers: dict[str, str]) -> None:
    assert asked(KEY | headers) == ACCEPTED


@pytest.mark.parametrize("referer", OTHER_PAGES)
def test_browsers_key_does_not_count_for_another_units_pages(referer: str) -> None:
    with pytest.raises(BrowserRefused, match="open the address directly"):
        asked(KEY | {"Sec-Fetch-Site": "same-origin", "Referer": referer})


@pytest.mark.parametrize("site", ["same-site", "cross-site", "", "anything"])
def test_browsers_key_does_not_count_for_other_sites(site: str) -> None:
    with pytest.raises(BrowserRefused):
        asked(KEY | {"Sec-Fetch-Site": site, "Referer": OWN_PAGE})


@pytest.mark.parametrize("more", [{}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "cross-site"}])
def test_browsers_key_opens_no_websocket(more: dict[str, Any]) -> None:
    with pytest.raises(BrowserRefused, match="WebSocket"):
        asked(KEY | {"Origin": "https://gateway.example"} | more, upgrade=True)


def test_basic_of_a_program_opens_a_websocket() -> None:
    assert asked(KEY, upgrade=True) == ACCEPTED


def test_project_cannot_be_chosen_with_a_browsers_key() -> None:
    assert asked(KEY | {"Penstock-Project": "prj_other"}).project is None


def test_browsers_key_runs_no_commands() -> None:
    for more in ({}, {"Sec-Fetch-Site": "none"}):
        with pytest.raises(BrowserRefused, match="Bearer"):
            for_command(KEY | more)
