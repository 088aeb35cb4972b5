"""Requirements by name: what is taken, what is refused with its line, and that both are quick."""

import contextlib
import time

import pytest

from penstock.wire import requirements
from penstock.wire.requirements import BadRequirements, normal


def test_they_have_one_normal_form() -> None:
    first = "# what we need\nNumPy >= 2.0, <3  # arrays\r\n\n  requests[socks, security] == 2.*\n"
    text = f"{first}tomli; python_version < '3.11'\n"
    assert normal(text) == "numpy<3,>=2.0\nrequests[socks,security]==2.*\ntomli ; python_version < '3.11'\n"
    assert normal(normal(text)) == normal(text)
    assert normal("b\na\n") == normal("a\nb # twice\nb\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-r other.txt", "options such as '-r other.txt' are not allowed"),
        ("--index-url https://evil.example", "options such as"),
        ("-e .", "options such as"),
        ("https://evil.example/x.whl", "no URL, no path"),
        ("numpy @ https://evil.example/x.whl", "no URL, no path"),
        ("git+https://evil.example/x", "no URL, no path"),
        ("./local", "no URL, no path"),
        ("/etc/passwd", "no URL, no path"),
        ("..\\x", "no URL, no path"),
        ("numpy 2.0", "must be name, name>=1.0"),
        ("numpy ==", "must be name, name>=1.0"),
        ("numpy==1.0 --hash=sha256:00", "must be name, name>=1.0"),
        ("numpy; import os\x00", "marker"),
        ("numpy;", "marker"),
        ("\x00", "no URL, no path"),
        ("ünïcode", "no URL, no path"),
        ("numpy[", "must be name, name>=1.0"),
        ("a" * 2000, "more than 1000 characters"),
    ],
)
def test_anything_else_is_refused_with_its_line(line: str, says: str) -> None:
    with pytest.raises(BadRequirements, match="line 2: ") as refused:
        normal(f"first\n{line}\n")
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing\n"])
def test_none_is_refused(text: str) -> None:
    with pytest.raises(BadRequirements, match="no package"):
        normal(text)


@pytest.mark.parametrize(
    "piece", [" ", "#", " #", "\\\n", "[", "a[", "a==", ",", ";", "a;(", "-", "a,", "\n", "a\n", "ü"]
)
def test_long_adversarial_text_is_quick(piece: str) -> None:
    text = "a" + piece * (requirements.REQUIREMENTS_BYTES_MAX // len(piece.encode()) - 1)
    before = time.process_time()
    with contextlib.suppress(BadRequirements):
        normal(text)
    assert time.process_time() - before < 0.5
