"""An environment from a lock file, from the command line to the code that imports from it."""

from pathlib import Path

import pytest

from e2e.cloud import Cloud
from wheels import wheel

pytestmark = pytest.mark.timeout(300)

APP = """
import penstock

app = penstock.App("parcel")


@app.function(sku="g1.1", requirements="requirements.lock")
def version():
    import tiny

    return tiny.VERSION
"""


def test_code_runs_on_the_packages_of_a_lock(stack: Cloud, tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text(wheel(Path(stack.env["PENSTOCK_AGENT_PACKAGE_FIND_LINKS"])))
    stack.ok("runtime", "put", "vision", "--lock", str(lock))
    assert "tiny==1.0" in stack.ok("runtime", "show", "vision")
    made = stack.json("alloc", "create", "--sku", "g1.1", "--runtime", "vision", "--wait", timeout_s=120)
    try:
        assert made["runtime"] == stack.json("runtime", "show", "vision")["digest"]
        code = "import tiny; print(tiny.VERSION)"
        assert stack.ok("alloc", "exec", made["id"], "--", "python", "-c", code) == "1.0\n"
        refused = stack.run("runtime", "delete", "vision")
        assert refused.returncode == 5
        assert made["id"] in refused.stderr
    finally:
        stack.ok("alloc", "release", made["id"], "--wait", timeout_s=90)
    lock.write_text("tiny==1.0 --hash=sha256:" + "0" * 64 + "\n")
    stack.ok("runtime", "put", "vision", "--lock", str(lock))
    failed = stack.run("alloc", "create", "--sku", "g1.1", "--runtime", "vision", "--wait", timeout_s=120)
    assert failed.returncode == 1
    assert "the runtime was not built" in failed.stderr
    assert "hash" in failed.stderr.lower()
    stack.ok("runtime", "delete", "vision")
    assert "vision" not in stack.ok("runtime", "list")


def test_a_function_has_the_packages_of_its_requirements(stack: Cloud, tmp_path: Path) -> None:
    lock = wheel(Path(stack.env["PENSTOCK_AGENT_PACKAGE_FIND_LINKS"]))
    (tmp_path / "requirements.lock").write_text(lock)
    (tmp_path / "parcel.py").write_text(APP)
    [made] = stack.json("fn", "deploy", str(tmp_path / "parcel.py"), timeout_s=120)["items"]
    assert made["definition"]["runtime"].startswith("parcel-")
    assert stack.json("fn", "invoke", "parcel-version", timeout_s=120) == "1.0"
    stack.ok("fn", "delete", "parcel-version")
