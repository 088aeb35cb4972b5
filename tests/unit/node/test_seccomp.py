"""The filter, run by a small interpreter of its instructions."""

import struct

import pytest

from penstock.node import seccomp

_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_X86, _ARM = 0xC000003E, 0xC00000B7


def _run(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    value, at = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            value = struct.unpack_from("=I", data, operand)[0]
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
        at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "expected"),
    [
        ("x86_64", _X86, 0, _ALLOW),
        ("x86_64", _X86, 59, _ALLOW),
        ("x86_64", _X86, 165, _EPERM),
        ("x86_64", _X86, 272, _EPERM),
        ("x86_64", _X86, 425, _EPERM),
        ("x86_64", _X86, 435, _ENOSYS),
        ("x86_64", _X86, 0x40000000 | 59, _KILL),
        ("x86_64", 0x40000003, 11, _KILL),
        ("x86_64", _ARM, 0, _KILL),
        ("aarch64", _ARM, 221, _ALLOW),
        ("aarch64", _ARM, 40, _EPERM),
        ("aarch64", _ARM, 97, _EPERM),
        ("aarch64", _ARM, 435, _ENOSYS),
        ("aarch64", _X86, 0, _KILL),
    ],
)
def test_calls(machine: str, architecture: int, number: int, expected: int) -> None:
    assert _run(seccomp.program(machine), number, architecture) == expected


@pytest.mark.parametrize(("machine", "architecture", "clone"), [("x86_64", _X86, 56), ("aarch64", _ARM, 220)])
def test_only_a_clone_without_namespaces_passes(machine: str, architecture: int, clone: int) -> None:
    program = seccomp.program(machine)
    assert _run(program, clone, architecture, 0x003D0F00) == _ALLOW
    assert _run(program, clone, architecture, 17) == _ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert _run(program, clone, architecture, flag | 17) == _EPERM


@pytest.mark.parametrize(("machine", "architecture", "ioctl"), [("x86_64", _X86, 16), ("aarch64", _ARM, 29)])
def test_nobody_types_into_a_terminal_for_another(machine: str, architecture: int, ioctl: int) -> None:
    program = seccomp.program(machine)
    assert _run(program, ioctl, architecture, 0, 0x5412) == _EPERM
    assert _run(program, ioctl, architecture, 0, 0x541C) == _EPERM
    assert _run(program, ioctl, architecture, 0, 0x5413) == _ALLOW


def test_an_unknown_architecture_has_no_filter() -> None:
    assert seccomp.program("riscv64") == b""
