"""The system calls that a unit may not make, as a classic BPF program for `bwrap --seccomp`.

Assembled here because no wheel brings libseccomp. Everything is allowed but the list: calls that make namespaces,
mount, trace, load code into the kernel, reach keyrings, or have a long record of privilege escalations. Another
architecture's calls (32-bit, x32) kill the process, since their numbers mean something else.
"""

import platform
import struct
from dataclasses import dataclass
from typing import Final

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000
_EPERM, _ENOSYS = 1, 38
_X32_BIT: Final = 0x40000000
#: CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and TIME.
_CLONE_NEW_ANY: Final = 0x7E020080
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


@dataclass(frozen=True)
class Architecture:
    """Numbers of one architecture."""

    audit: int
    clone: int
    ioctl: int
    denied: tuple[int, ...]
    x32: bool


#: Calls with the same number everywhere since Linux 5.0: io_uring, open_tree … fsmount, fspick, pidfd_getfd,
#: mount_setattr, and newer ones of the mount family.
_COMMON: Final = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 457, 458, 467)

_X86_64: Final = Architecture(
    audit=0xC000003E,
    clone=56,
    ioctl=16,
    x32=True,
    # ptrace, syslog, mount, umount2, pivot_root, chroot, swapon/off, reboot, sethostname, setdomainname, iopl, ioperm,
    # init_module, delete_module, acct, settimeofday, adjtimex, clock_settime, clock_adjtime, quotactl, nfsservctl,
    # kexec_load, kexec_file_load, add_key, request_key, keyctl, mbind/migrate/move pages, unshare, perf_event_open,
    # fanotify_init, name_to/open_by_handle_at, setns, process_vm_readv/writev, kcmp, finit_module, bpf, userfaultfd,
    # modify_ldt, uselib, _sysctl, lookup_dcookie, vhangup, personality is left to programs.
    denied=(
        *(101, 103, 165, 166, 155, 161, 167, 168, 169, 170, 171, 172, 173, 175, 176, 163, 164, 159, 227, 305),
        *(179, 180, 246, 320, 248, 249, 250, 256, 279, 272, 298, 300, 303, 304, 308, 310, 311, 312, 313, 321),
        *(323, 154, 134, 156, 212, 153, 174, 177, 178, 443),
        *_COMMON,
    ),
)

_AARCH64: Final = Architecture(
    audit=0xC00000B7,
    clone=220,
    ioctl=29,
    x32=False,
    denied=(
        *(117, 116, 40, 39, 41, 51, 224, 225, 142, 161, 162, 105, 106, 89, 170, 171, 112, 266, 60, 42, 104, 294),
        *(217, 218, 219, 238, 239, 97, 241, 262, 264, 265, 268, 270, 271, 272, 273, 280, 282, 18, 58, 443),
        *_COMMON,
    ),
)
_CLONE3: Final = 435


def program(machine: str = "") -> bytes:
    """The filter for this machine; empty when its architecture is not known here."""
    match machine or platform.machine():
        case "x86_64" | "AMD64":
            return assemble(_X86_64)
        case "aarch64" | "arm64":
            return assemble(_AARCH64)
        case _:
            return b""


def assemble(architecture: Architecture) -> bytes:
    """Instructions in order; every refusal returns at once, so no jump is longer than a few steps."""
    code = [
        _load(_ARCHITECTURE_AT),
        _instruction(_JUMP_EQUAL, architecture.audit, 1, 0),
        _return(_KILL),
        _load(_NUMBER_AT),
    ]
    if architecture.x32:
        code += [_instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _return(_KILL)]
    for number in dict.fromkeys(architecture.denied):
        code += [_instruction(_JUMP_EQUAL, number, 0, 1), _return(_ERRNO | _EPERM)]
    # glibc falls back to clone, whose flags can be seen here; clone3's are behind a pointer.
    code += [_instruction(_JUMP_EQUAL, _CLONE3, 0, 1), _return(_ERRNO | _ENOSYS)]
    code += [
        _instruction(_JUMP_EQUAL, architecture.clone, 0, 4),
        _load(_ARGUMENTS_AT),
        _instruction(_JUMP_ANY_BIT, _CLONE_NEW_ANY, 0, 1),
        _return(_ERRNO | _EPERM),
        _return(_ALLOW),
    ]
    code += [
        _instruction(_JUMP_EQUAL, architecture.ioctl, 0, 4),
        _load(_ARGUMENTS_AT + 8),
        _instruction(_JUMP_EQUAL, _TIOCSTI, 1, 0),
        _instruction(_JUMP_EQUAL, _TIOCLINUX, 0, 1),
        _return(_ERRNO | _EPERM),
    ]
    return b"".join([*code, _return(_ALLOW)])


def _instruction(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset, 0, 0)


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value, 0, 0)
