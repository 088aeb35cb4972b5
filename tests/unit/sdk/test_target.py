import pytest

from penstock.sdk.client import Client
from penstock.sdk.errors import InvalidArgument
from penstock.sdk.target import Target, base_url


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("https://cloud.example/", "https://cloud.example"),
        ("https://cloud.example/api/v1", "https://cloud.example"),
        ("https://cloud.example/api/v1/", "https://cloud.example"),
        ("https://cloud.example//gpu//", "https://cloud.example/gpu"),
        ("HTTP://Cloud.Example:8080", "http://cloud.example:8080"),
        ("http://[::1]:8080/", "http://[::1]:8080"),
    ],
)
def test_addresses_have_one_form(given: str, normal: str) -> None:
    assert base_url(given, name="api_url") == normal


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "cloud.example",
        "ftp://cloud.example",
        "http://",
        "http://cloud.example\n",
        "http://cloud.example\nHost: evil",
        "http://cloud example",
        "http://user:secret@cloud.example",
        "http://cloud.example/?a=b",
        "http://cloud.example/#x",
        "http://cloud.example:port",
        "http://cloud.example:99999",
        "http://[::1",
        "http://cloud.example/\u00e9",
        "http://" + "a" * 3000,
    ],
)
def test_other_addresses_are_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        base_url(bad, name="api_url")
    assert caught.value.field == "api_url"


@pytest.mark.parametrize("key", ["", "psk_a b", "psk_a\r\nX: y", "psk_\u00e9"])
def test_a_key_that_cannot_stand_in_a_header_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument):
        Target.of("http://127.0.0.1", key)


def test_a_client_never_shows_its_key() -> None:
    client = Client("http://127.0.0.1", "psk_secret", project="prj_default")
    assert "psk_secret" not in repr(client) + repr(vars(client)) + repr(client.executor.target)


def test_a_malformed_project_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Client("http://127.0.0.1", "psk_secret", project="../prj")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://127.8.9.1", "http://[::1]", "http://localhost", "https://cloud.example"]
)
def test_a_key_goes_to_this_machine_and_over_https(url: str) -> None:
    assert Target.of(url, "psk_x", gateway_url=url).gateway_url == url


@pytest.mark.parametrize(
    "host",
    [
        "cloud.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.evil.example",
        "127.1",
        "0x7f.1",
        "[::2]",
    ],
)
def test_a_key_goes_nowhere_else_over_http(host: str) -> None:
    for options in ({"api_url": f"http://{host}"}, {"api_url": "https://a", "gateway_url": f"http://{host}"}):
        with pytest.raises(InvalidArgument, match="is not encrypted"):
            Client(key="psk_x", **options)
        assert Client(key="psk_x", allow_http=True, **options)
        assert Client(key=None, **options)
