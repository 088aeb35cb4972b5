"""A lock is measured by the requirements that it was made for."""

import pytest

from penstock.compute import lockcheck
from penstock.compute.lockcheck import Unmet
from penstock.wire import locks, requirements

HASH = f"--hash=sha256:{'a' * 64}"


def _check(wanted: str, *pins: str, python: str = "3.11") -> None:
    lock = locks.normal("\n".join(f"{pin} {HASH}" for pin in pins))
    lockcheck.check(requirements.normal(wanted), lock, python)


@pytest.mark.parametrize(
    ("wanted", "pins"),
    [
        ("numpy", ["numpy==2.1.0", "other==1"]),
        ("Typing.Extensions", ["typing-extensions==4.0"]),
        ("uvicorn[standard]>=0.20", ["uvicorn[standard]==0.30", "httptools==0.6"]),
        ("tiny~=1.4", ["tiny==1.9.post1"]),
        ("tiny==1.*", ["tiny==1.2rc1"]),
        ("tiny===1.0", ["tiny==1.0"]),
        ("torch", ["torch==2.5+cu121"]),
        ("tiny ; python_version < '3.9'\nnumpy", ["numpy==2"]),
        ("tiny ; python_version >= '3.9'", ["tiny==1 ; python_version >= '3.9'"]),
        ("tiny ; platform_machine == 'x86_64'\nnumpy", ["numpy==2"]),
        ("tiny ; sys_platform == 'win32'\nnumpy", ["numpy==2"]),
    ],
)
def test_met(wanted: str, pins: list[str]) -> None:
    _check(wanted, *pins)


@pytest.mark.parametrize(
    ("wanted", "pins", "said"),
    [
        ("numpy", ["numpyy==2.1.0"], "numpy is missing"),
        ("numpy>=2", ["numpy==1.26"], "numpy is 1.26, which is not >=2"),
        ("numpy!=2.0", ["numpy==2.0"], "which is not"),
        ("numpy", ["numpy==2 ; python_version < '3'"], "marker leaves it out"),
        ("numpy", ["numpy==2 ; platform_machine == 's390x'"], "marker leaves it out"),
        ("numpy", ["numpy==2 ; nonsense =="], "marker leaves it out"),
        ("numpy ; sys_platform == 'linux'", ["other==1"], "numpy is missing"),
        ("numpy", ["numpy==2", "Numpy==1"], "twice"),
        ("a\nb\nc\nd\ne\nf\ng", ["z==1"], "and 2 more"),
    ],
)
def test_unmet(wanted: str, pins: list[str], said: str) -> None:
    with pytest.raises(Unmet, match=said):
        _check(wanted, *pins)


@pytest.mark.parametrize("python", ["", "2.7", "3", "3.11\n", "nonsense", "3.11.0.0"])
def test_a_version_of_python_that_is_none_is_refused(python: str) -> None:
    with pytest.raises(Unmet, match="Python"):
        _check("numpy", "numpy==2", python=python)
