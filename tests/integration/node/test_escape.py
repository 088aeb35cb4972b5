"""Probes from inside a unit: nothing of the host, of the platform or of another unit is reached."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node_host import Host, text_of

#: Where every unit finds the authorities; the same path on any host.
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_SECRET = "the-host-has-a-secret"


@pytest.fixture
async def units(host: Host) -> AsyncIterator[tuple[Host, str, str]]:
    """Two units, the second from stock; it listens, holds a file, and runs for as long as the test."""
    first, second = await asyncio.gather(host.start(), host.stock())
    await host.hand_over(second)
    await host.run(second, "sh", "-c", f"echo {_SECRET} > /home/unit/secret; echo {_SECRET} > /tmp/secret")
    return host, first, second


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


async def test_no_file_of_the_host_is_seen(units: tuple[Host, str, str]) -> None:
    host, unit_id, other = units
    secret = host.folder / "secret"
    secret.write_text(_SECRET)
    paths = [
        secret,
        host.folder / "journal.db",
        host.folder / "units" / other / "home" / "secret",
        Path(__file__),
        Path("/etc/shadow"),
        Path("/etc/machine-id"),
        Path.home() / ".bashrc",
        Path("/proc/1/root") / secret.relative_to("/"),
        Path("/proc/self/root") / secret.relative_to("/"),
        Path("/sys/kernel"),
        Path("/var/lib"),
        Path("/mnt/units"),
        Path("/oldroot"),
    ]
    for path in paths:
        ran = await host.run(unit_id, "cat", str(path))
        assert ran.code != 0, path
        assert _SECRET not in ran.out
    found = await host.run(unit_id, "sh", "-c", f"grep -rl {_SECRET} /home /tmp /etc /run /var /dev/shm 2>/dev/null")
    assert found.out == ""


async def test_no_process_of_the_host_or_of_another_unit_is_seen(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    ran = await host.run(unit_id, "sh", "-c", "echo /proc/[0-9]*")
    numbers = sorted(int(part.rsplit("/", 1)[1]) for part in ran.out.split())
    assert numbers[0] == 1
    assert len(numbers) <= 3
    ran = await host.python(unit_id, f"import os; os.kill({os.getpid()}, 0)")
    assert "ProcessLookupError" in ran.out


async def test_the_hosts_environment_and_arguments_are_not_inside(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    ran = await host.run(unit_id, "sh", "-c", "env; cat /proc/*/environ")
    lines = {line for line in ran.out.replace("\0", "\n").splitlines() if "=" in line} - {f"SSL_CERT_FILE={_BUNDLE}"}
    names = {line.split("=")[0] for line in lines}
    allowed = {"PATH", "HOME", "USER", "LANG", "PWD", "OLDPWD", "SHLVL", "_"}
    assert {name for name in names if not name.startswith("PENSTOCK_")} <= allowed


@pytest.mark.parametrize("bind", ["127.0.0.1", "own", "0.0.0.0", "abstract"])
async def test_no_port_of_the_host_is_reached(units: tuple[Host, str, str], bind: str) -> None:
    host, unit_id, _ = units
    reached: list[object] = []
    if bind == "abstract":
        name = f"\0penstock-{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
        target, family = repr(name), "socket.AF_UNIX"
    else:
        address = _own_address() if bind == "own" else bind
        listener = socket.socket()
        listener.bind((address, 0))
        target = repr(("127.0.0.1" if bind == "0.0.0.0" else address, listener.getsockname()[1]))
        family = "socket.AF_INET"
    with listener:
        listener.listen()
        listener.setblocking(False)
        code = f"import socket; s=socket.socket({family}); s.settimeout(2); s.connect({target})"
        ran = await host.python(unit_id, code)
        assert ran.code == 1
        assert "Error" in ran.out
        with pytest.raises(BlockingIOError):
            reached.append(listener.accept())


async def test_no_address_outside_is_reached(units: tuple[Host, str, str]) -> None:
    host, unit_id, other = units
    assert (await host.run(other, "sh", "-c", "true")).code == 0
    for address in ("169.254.169.254", "8.8.8.8", "10.0.0.1", "fd00:ec2::254"):
        family = "AF_INET6" if ":" in address else "AF_INET"
        code = (
            f"import socket; s=socket.socket(socket.{family}); s.settimeout(2)\n"
            f"try: s.connect(({address!r}, 80)); print('reached')\nexcept OSError as e: print(e.errno)"
        )
        ran = await host.python(unit_id, code)
        assert ran.out.strip() in ("101", "99"), (address, ran.out)


async def test_another_units_port_is_not_reached(units: tuple[Host, str, str]) -> None:
    host, unit_id, other = units
    code = "import socket; s=socket.create_server(('0.0.0.0', 8000)); s.settimeout(3); s.accept()"
    server = asyncio.create_task(host.python(other, code))
    for _ in range(100):
        listening = await host.run(other, "sh", "-c", "grep -c ':1F40 ' /proc/net/tcp")
        if listening.out.strip() != "0":
            break
    ran = await host.python(unit_id, "import socket; socket.create_connection(('127.0.0.1', 8000), 2)")
    assert "ConnectionRefusedError" in ran.out
    assert (await server).code == 1


_CALLS = {
    "unshare": "c.unshare(0x10000000)",
    "unshare_net": "c.unshare(0x40000000)",
    "setns": "c.setns(os.open('/proc/self/ns/net', 0), 0)",
    "mount": "c.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "umount": "c.umount2(b'/tmp', 2)",
    "remount": "c.mount(None, b'/usr', None, 32 | 4096, None)",
    "chroot": "c.chroot(b'/tmp')",
    "pivot_root": "c.syscall(155, b'/', b'/tmp')",
    "ptrace": "c.ptrace(16, 1, None, None)",
    "process_vm_readv": "c.process_vm_readv(1, None, 0, None, 0, 0)",
    "keyctl": "c.syscall(250, 0, -3, 1)",
    "add_key": "c.syscall(248, b'user', b'a', b'b', 1, -3)",
    "bpf": "c.syscall(321, 0, None, 0)",
    "perf_event_open": "c.syscall(298, None, 0, -1, -1, 0)",
    "io_uring_setup": "c.syscall(425, 1, None)",
    "userfaultfd": "c.syscall(323, 0)",
    "open_by_handle_at": "c.open_by_handle_at(3, None, 0)",
    "init_module": "c.syscall(175, None, 0, b'')",
    "kexec": "c.syscall(246, 0, 0, None, 0)",
    "reboot": "c.reboot(0x1234567)",
    "settimeofday": "c.syscall(164, b'0' * 16, None)",
    "swapon": "c.swapon(b'/tmp/x', 0)",
    "sethostname": "c.sethostname(b'x', 1)",
    "open_tree": "c.syscall(428, -100, b'/', 1)",
    "pidfd_getfd": "c.syscall(438, 3, 0, 0)",
    "tiocsti": "c.ioctl(0, 0x5412, b'x')",
    "clone_user": "c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "setuid": "c.setuid(0)",
    "setgroups": "c.setgroups(0, None)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are this architecture's")
async def test_no_dangerous_call_passes(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    lines = ["import ctypes, os", "c = ctypes.CDLL(None, use_errno=True)"]
    for name, call in _CALLS.items():
        lines += [
            "ctypes.set_errno(0)",
            f"r = {call}",
            f"print({name!r}, r, ctypes.get_errno(), flush=True)" if name != "clone_user" else "",
            "os._exit(0) if r == 0 else None" if name == "clone_user" else "",
            f"print({name!r}, r, ctypes.get_errno(), flush=True)" if name == "clone_user" else "",
        ]
    lines += ["r = c.syscall(435, None, 0)", "print('clone3', r, ctypes.get_errno())"]
    ran = await host.python(unit_id, "\n".join(lines))
    seen = {line.split()[0]: (int(line.split()[1]), int(line.split()[2])) for line in ran.out.splitlines()}
    assert set(seen) == {*_CALLS, "clone3"}
    assert seen.pop("clone3") == (-1, 38)
    assert seen.pop("setuid") in ((-1, 1), (-1, 22))
    assert {name: result for name, result in seen.items() if result != (-1, 1)} == {}


async def test_another_architectures_calls_kill(units: tuple[Host, str, str]) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("only this architecture has a second one")
    host, unit_id, _ = units
    ran = await host.python(unit_id, "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)")
    assert (ran.code, ran.exit_class) == (128 + 31, "killed")


async def test_there_are_no_capabilities_and_no_way_to_gain_some(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    ran = await host.run(unit_id, "cat", "/proc/self/status", "/proc/1/status")
    caps = [line.split()[1] for line in ran.out.splitlines() if line.startswith("Cap")]
    assert len(caps) == 10
    assert set(caps) == {"0" * 16}
    assert ran.out.count("NoNewPrivs:\t1") == 2
    assert ran.out.count("Seccomp:\t2") == 2
    assert (await host.run(unit_id, "id", "-u")).out == "1000\n"


async def test_the_system_cannot_be_changed(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    for path in ("/usr/x", "/etc/x", "/etc/passwd", "/bin/x", "/x", "/dev/x", "/run/x", "/run/penstock/x", "/proc/x"):
        ran = await host.run(unit_id, "sh", "-c", f"echo x > {path}")
        assert ran.code != 0, path
    ran = await host.run(unit_id, "sh", "-c", "echo 1 > /proc/sys/kernel/panic; echo b > /proc/sysrq-trigger")
    assert ran.code != 0
    ran = await host.run(unit_id, "sh", "-c", "touch $(dirname $(command -v python3))/x")
    assert ran.code != 0
    assert (await host.run(unit_id, "sh", "-c", "mknod /tmp/d b 254 0 || mknod /tmp/d c 1 1")).code != 0


async def test_descriptors_of_the_agent_are_not_inside(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    ran = await host.run(unit_id, "sh", "-c", "ls -l /proc/1/fd /proc/$$/fd")
    targets = [line.split(" -> ")[1] for line in ran.out.splitlines() if " -> " in line]
    foreign = [t for t in targets if not t.startswith(("pipe:", "socket:", "/dev/null", "/proc/", "anon_inode"))]
    assert foreign == []
    assert sum(target.startswith("socket:") for target in targets) <= 2


async def test_what_a_unit_writes_is_not_roots(units: tuple[Host, str, str]) -> None:
    host, unit_id, _ = units
    assert (await host.run(unit_id, "sh", "-c", "echo x > /home/unit/made; cp /bin/sh /home/unit/sh")).code == 0
    await host.run(unit_id, "chmod", "4755", "/home/unit/sh")
    home = host.folder / "units" / unit_id / "home"
    owners = {path.stat().st_uid for path in home.iterdir()}
    assert owners == ({os.geteuid()} if os.geteuid() else {host.units._units[unit_id].record.uid})
    assert 0 not in owners
    init_pid = host.units._units[unit_id].record.init_pid
    assert {Path(f"/proc/{init_pid}").stat().st_uid} == owners


_CONFINED = """
import ctypes, os, re
status = open('/proc/self/status').read()
assert re.findall(r'Cap...:\\t(\\w+)', status) == ['0' * 16] * 5
assert 'NoNewPrivs:\\t1' in status and 'Seccomp:\\t2' in status
c = ctypes.CDLL(None, use_errno=True)
assert (c.unshare(0x10000000), ctypes.get_errno()) == (-1, 1)
assert os.getuid() == 1000 and sorted(os.listdir('/proc/self/fd'))[:3] == ['0', '1', '2']
assert len(os.listdir('/proc/self/fd')) == 4, os.listdir('/proc/self/fd')
names = {name for name in os.environ if not name.startswith('PENSTOCK_')}
assert os.environ.get('SSL_CERT_FILE', 'BUNDLE') == 'BUNDLE'
assert names <= {'PATH', 'HOME', 'USER', 'LANG', 'SSL_CERT_FILE'}, names
pattern, found = re.compile(PATTERN.encode()), []
for line in open('/proc/self/maps'):
    first, last = (int(part, 16) for part in line.split()[0].split('-'))
    if ' r' in line and '[v' not in line:
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(first)
            found += pattern.findall(memory.read(last - first))
assert not found, found
print('confined')
"""


async def test_what_a_zygote_becomes_is_confined_and_knows_nothing_of_the_agent(host: Host) -> None:
    """Its memory is searched for the agent's folder, written so that the search does not find itself."""
    unit_id = await host.stock()
    folder = host.folder.name
    pattern = f"{folder[:-1]}[{folder[-1]}]"
    await host.hand_over(
        unit_id, "python3", "-c", _CONFINED.replace("PATTERN", repr(pattern)).replace("BUNDLE", _BUNDLE)
    )
    ended = await host.ended(unit_id)
    assert text_of(ended.lines, "stdout") + text_of(ended.lines, "stderr") == "confined\n"
