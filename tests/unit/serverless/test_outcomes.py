"""Stored results as parts of documents."""

import json

import msgspec
import pytest

from penstock.serverless.service.outcomes import embedded


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        (b'{"a": [1, 2.5, "\xc3\xa4"]}', {"a": [1, 2.5, "ä"]}),
        (b"null", None),
        (b'"caf\xe9"', "caf\ufffd"),
        (b'["\xff", "\xc3"]', ["\ufffd", "\ufffd"]),
        (b'{"\xe2\x82": "\xed\xa0\x80"}', {"\ufffd": "\ufffd\ufffd\ufffd"}),
        (b'"open', '"open'),
        (b"", ""),
        (b"\x89PNG", "\ufffdPNG"),
        (b'{"a": 1} {"b": 2}', '{"a": 1} {"b": 2}'),
    ],
)
def test_a_document_stays_json_whatever_was_stored(kept: bytes, shown: object) -> None:
    document = msgspec.json.encode({"state": "succeeded", "body": embedded(kept)})
    assert json.loads(document) == {"state": "succeeded", "body": shown}


def test_a_sound_body_is_embedded_as_it_is() -> None:
    kept = b'{ "a" : 1.0,\n "b" : [ ] }'
    assert bytes(embedded(kept)) == kept
