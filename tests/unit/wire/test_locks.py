"""What a lock may say."""

import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import assert_linear
from penstock.wire import locks
from penstock.wire.locks import BadLock

A, B = "a" * 64, "b" * 64


def test_a_lock_of_an_installer_is_read_whole() -> None:
    text = f"""\
# This file was made by a tool.
numpy==2.1.0 ; python_full_version >= '3.10' and (sys_platform == 'linux' or platform_machine != 'x86_64') \\
    --hash=sha256:{B} \\
    --hash=sha256:{A}
    # via
    #   -r requirements.in
Uvicorn[standard, extra]==0.30.1+local.1 --hash=sha256:{A}   # why not
\r
epoch==1!2.0.post1 \\
    --hash=sha256:{A} --hash=sha256:{A}"""
    assert locks.normal(text) == (
        "numpy==2.1.0 ; python_full_version >= '3.10' and (sys_platform == 'linux' or platform_machine != 'x86_64')"
        f" --hash=sha256:{A} --hash=sha256:{B}\n"
        f"Uvicorn[standard,extra]==0.30.1+local.1 --hash=sha256:{A}\n"
        f"epoch==1!2.0.post1 --hash=sha256:{A}\n"
    )
    assert locks.packages(locks.normal(text)) == 3


def test_comments_and_breaks_change_no_digest() -> None:
    plain = f"a==1 --hash=sha256:{A} --hash=sha256:{B}"
    broken = f"# x\na == 1 \\\n  --hash=sha256:{B} \\\n\t--hash=sha256:{A}\n\n"
    assert locks.normal(plain) == locks.normal(broken)
    lock = locks.normal(plain)
    assert locks.digest("python:3", lock) == hashlib.sha256(f"python:3\n{lock}".encode()).hexdigest()
    assert locks.digest("python:4", lock) != locks.digest("python:3", lock)
    assert locks.is_digest(locks.digest("python:3", lock))
    assert not locks.is_digest("../" + A[3:])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no package"),
        ("# only a comment\n", "names no package"),
        ("a==1", "line 1: 'a==1' has no --hash"),
        (f"a==1 --hash=sha256:{A}\nb==2", "line 2: 'b==2' has no --hash"),
        (f"a==1 --hash=md5:{A[:32]}", "only --hash=sha256"),
        (f"a==1 --hash=sha256:{A[:-1]}", "with 64 digits"),
        (f"a==1 --hash=sha256:{A.upper()}", "with 64 digits"),
        (f"a>=1 --hash=sha256:{A}", "must be name==version"),
        (f"a===1 --hash=sha256:{A}", "must be name==version"),
        (f"a==1.* --hash=sha256:{A}", "must be name==version"),
        (f"a --hash=sha256:{A}", "must be name==version"),
        (f"a @ https://evil.example/a.whl --hash=sha256:{A}", "no URL"),
        (f"https://evil.example/a-1-py3-none-any.whl --hash=sha256:{A}", "no URL"),
        (f"git+https://evil.example/a@main#egg=a==1 --hash=sha256:{A}", "no URL"),
        (f"./a==1 --hash=sha256:{A}", "path"),
        (f"/tmp/a.whl --hash=sha256:{A}", "path"),
        (f"a==${{SECRET}} --hash=sha256:{A}", "must be name==version"),
        (f"a==1 --hash=sha256:{A} --index-url=https://evil.example", "only --hash"),
        (f"a==1 --hash=sha256:{A} --config-settings=x", "only --hash"),
        (f"a==1 ; x == '${{S}}' --hash=sha256:{A}", "marker"),
        (f"a==1 ; --hash=sha256:{A}", "marker"),
        *(
            (f"{option}\na==1 --hash=sha256:{A}", "options such as")
            for option in (
                "-r other.txt",
                "-c other.txt",
                "-e .",
                "--editable .",
                "--index-url https://evil.example",
                "--extra-index-url=https://evil.example",
                "--find-links /tmp",
                "--no-binary :all:",
                "--trusted-host evil.example",
                "--pre",
            )
        ),
        ("a==1 \\\n  --hash=sha256:" + A + " \\\n--index-url https://evil.example", "only --hash"),
        ("#" * (locks.LOCK_BYTES_MAX + 1), "more than 524288 bytes"),
    ],
)
def test_anything_else_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BadLock) as refused:
        locks.normal(text)
    assert problem in str(refused.value)


def test_what_no_task_could_carry_is_refused() -> None:
    hashes = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(5000)]
    with pytest.raises(BadLock, match="163840 bytes when compressed"):
        locks.normal("a==1 " + " ".join(f"--hash=sha256:{each}" for each in hashes))


def test_a_packed_lock_is_the_same_and_only_the_normal_form_is_taken() -> None:
    lock = locks.normal(f"a==1 --hash=sha256:{A}")
    assert locks.unpack(locks.pack(lock)) == lock
    bomb = zlib.compress(b"#" * (64 << 20))
    for packed in (b"", b"x", locks.pack(lock)[:-5], locks.pack("# c\n" + lock), locks.pack("-e ."), bomb):
        with pytest.raises(BadLock):
            locks.unpack(packed)


_PIECES = st.sampled_from(
    [
        "a",
        "==",
        "1",
        " ",
        "\n",
        "\\\n",
        "#",
        ";",
        "--hash=sha256:",
        A,
        "-r x",
        "@",
        "https://e",
        "[x]",
        "'",
        "\u2028",
        "\t",
    ]
)


@given(st.one_of(st.text(max_size=200), st.lists(_PIECES, max_size=30).map("".join)))
def test_whatever_comes_is_a_lock_or_refused(text: str) -> None:
    try:
        lock = locks.normal(text)
    except BadLock:
        return
    assert locks.normal(lock) == lock
    assert locks.unpack(locks.pack(lock)) == lock
    for line in lock.splitlines():
        assert "==" in line
        assert "--hash=sha256:" in line
        assert not any(sign in line for sign in ("@", "/", "\\", "$", "#"))


def test_a_long_line_takes_no_long_time() -> None:
    for text in ("a" * 500_000, "[" * 500_000, "a==1 ;" + " (" * 250_000, " --" * 170_000, "\\\n" * 250_000):
        with pytest.raises(BadLock):
            locks.normal(text)


SHAPES = {
    "spaces": " ",
    "spaces in a line": "a ",
    "line breaks": "\n",
    "continued lines": "\\\n",
    "continued comments": " #\\\n",
    "options": " --",
    "hashes": f" --hash=sha256:{A}",
    "packages": f"a==1 --hash=sha256:{A}\n",
    "brackets": "[",
    "extras": "[a,",
    "marker": "a==1;",
    "equal signs": "=",
    "comments": "# ",
    "carriage returns": "\r",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("before", ["", "a==1", "a==1 ; "], ids=["alone", "after a package", "in a marker"])
def test_a_lock_costs_what_its_size_says(shape: str, before: str) -> None:
    assert_linear(
        locks.normal, lambda size: before + SHAPES[shape] * (size // len(SHAPES[shape])) + "x", refusals=(BadLock,)
    )
