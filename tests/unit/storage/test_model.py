"""Keys, ranges and content types."""

import pytest

from penstock.storage.errors import BadKey
from penstock.storage.model import CONTENT_TYPE_DEFAULT, check_key, check_prefix, content_type, parse_range


@pytest.mark.parametrize(
    "key", ["a", "a/b/c.txt", "..a", "a..b", "...", "ä/語/😀", "a b", "k" * 1024, "%2e%2e", "a\\b"]
)
def test_a_key_is_any_path_in_words(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "k" * 1025,
        "/a",
        "a/",
        "a//b",
        "/",
        ".",
        "..",
        "a/../b",
        "a/.",
        "../a",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\x85b",
        "a\u202eb",
        "a\ud800",
        "a\U0010ffff",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(BadKey) as caught:
        check_key(key)
    assert caught.value.field == "key"


def test_a_prefix_may_end_anywhere() -> None:
    for prefix in ("", "a", "a/", "a/b"):
        assert check_prefix(prefix) == prefix
    for prefix in ("\n", "p" * 1025):
        with pytest.raises(BadKey):
            check_prefix(prefix)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=2-4", (2, 5)),
        ("bytes=2-", (2, 10)),
        ("bytes=2-99", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=-0", (10, 10)),
        ("bytes=10-", (10, 10)),
        ("bytes=11-", (10, 10)),
        ("bytes=99-100", (10, 10)),
        ("bytes=5-2", None),
        ("bytes=0-1,3-4", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("items=0-1", None),
        ("bytes=" + "9" * 30 + "-", None),
        ("bytes=٣-", None),
    ],
)
def test_ranges_are_within_the_object_or_ignored(text: str, part: tuple[int, int] | None) -> None:
    assert parse_range(text, 10) == part


def test_nothing_of_an_empty_object_can_be_asked_for() -> None:
    assert parse_range("bytes=0-", 0) == (0, 0)


@pytest.mark.parametrize("text", ["text/plain", "text/html; charset=utf-8", "application/vnd.x+json"])
def test_content_types_are_kept(text: str) -> None:
    assert content_type(text) == text


def test_what_is_no_content_type_is_none() -> None:
    assert content_type("") == CONTENT_TYPE_DEFAULT
    for text in ("text", "text/", "a/b\r\nx: y", "a/b; " + "x" * 99, "é/x"):
        assert content_type(text) is None
