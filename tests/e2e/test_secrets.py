"""A secret from the command line to the unit that reads it, and nowhere else; an object there and back."""

import os
from pathlib import Path

from e2e.cloud import Cloud

CANARY = "canary-e2e-6b1f-value"


def test_a_unit_reads_its_secret_as_a_file_and_as_a_variable_and_nothing_else_has_it(stack: Cloud) -> None:
    stack.ok("secret", "set", "e2e-token", "--from-stdin", stdin=CANARY)
    made = stack.json(
        *("alloc", "create", "--sku", "g1.1", "--secret", "e2e-token=TOKEN", "--wait", "--timeout", "120"),
        timeout_s=150,
    )
    try:
        code = (
            "import os; print(open('/run/secrets/e2e-token').read(), os.stat('/run/secrets/e2e-token').st_mode & 0o77)"
        )
        assert stack.ok("alloc", "exec", "-n", made["id"], "--", "python3", "-c", code) == f"{CANARY} 0\n"
        shown = "import os; print(os.environ.get('TOKEN'))"
        assert stack.ok("alloc", "exec", "-n", made["id"], "--", "python3", "-c", shown) == f"{CANARY}\n"
    finally:
        stack.ok("alloc", "release", made["id"], "--wait", timeout_s=120)
    listed = stack.ok("secret", "list") + stack.ok("secret", "show", "e2e-token", "-o", "json")
    assert CANARY not in listed
    found = [path for path in stack.data.rglob("*") if path.is_file() and _holds(path, CANARY.encode())]
    assert found == []
    stack.ok("secret", "delete", "e2e-token")


def test_an_object_is_there_and_back(stack: Cloud, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "in").write_bytes(content)
    stack.ok("object", "put", str(tmp_path / "in"), "e2e/data.bin")
    stack.ok("object", "get", "e2e/data.bin", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == content
    assert [item["key"] for item in stack.json("object", "list", "e2e/")["items"]] == ["e2e/data.bin"]
    stack.ok("object", "delete", "e2e/data.bin")
    assert stack.run("object", "get", "e2e/data.bin", "-").returncode == 4


def _holds(path: Path, value: bytes) -> bool:
    try:
        return value in path.read_bytes()
    except OSError:
        return False
