"""A zygote runs a program exactly as a new interpreter would: its output, its errors, its exit."""

import asyncio

from node_host import Host, text_of

_STREAMS = (
    "import sys; print([(s.name, s.mode, s.encoding, s.errors, type(s.buffer).__name__, s.line_buffering,"
    " s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.read())"
)
_PROCESS = (
    "import os, signal, sys; print([signal.getsignal(n) for n in (2, 13, 15, 17, 25)], os.listdir('/proc/self/fd'),"
    " os.getcwd(), os.umask(0), os.getsid(0) == os.getpid(), sys.executable, sys.orig_argv, sys.path, sys.prefix)"
)
_THREAD = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
_PROGRAMS = (
    ["-c", "import sys; print(__name__, sys.argv, sys.path[0], sorted(globals()), __builtins__, sys.flags)", "x"],
    ["-c", "def f():\n  1/0\nf()"],
    ["-c", "print('a"],
    ["-c", "import sys; sys.exit('bye')"],
    ["-c", "import atexit; atexit.register(print, 'atexit'); raise KeyboardInterrupt"],
    ["-c", _PROCESS],
    ["-c", _THREAD],
    ["-c", _STREAMS],
    ["-u", "-c", _STREAMS],
    ["-m", "json.tool", "--help"],
    ["-m", "timeit", "-n1", "-r1", "1/0"],
    ["-m", "no_such_module"],
    ["-m", "package", "y"],
    ["./script.py", "x", "-y"],
    ["sub/link.py"],
    ["-I", "script.py"],
    ["sub/failing.py"],
    ["nothing.py"],
    ["package"],
    ["-X", "utf8=0", "-c", "import sys; print(sys.flags.utf8_mode)"],
)
_FILES = """
mkdir sub package; ln -s ../script.py sub/link.py
cat > script.py <<'.'
import sys, os, __main__
print(__file__, sys.argv, sys.path[0], __spec__, type(__loader__), __main__.__name__, os.environ.get("HOME"))
.
echo 'import other; print(other.x); raise RuntimeError("no")' > sub/failing.py; echo 'x = 1' > sub/other.py
echo 'import sys; print("in", __name__, sys.argv)' > package/__main__.py
"""
#: With the same session, output and end as a unit's own command has.
_PLAIN = """
import subprocess, sys
done = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
code = done.returncode if done.returncode >= 0 else 128 - done.returncode
sys.stdout.write(f"{code}\\n{done.stdout}\\0{done.stderr}")
"""


async def _both(host: Host, program: list[str]) -> tuple[object, object]:
    """What a new interpreter and the zygote make of it."""
    unit_id = await host.stock()
    assert (await host.run(unit_id, "sh", "-c", _FILES)).code == 0
    plain = await host.run(unit_id, "python3", "-c", _PLAIN, "python3", *program)
    code, _, streams = plain.out.partition("\n")
    await host.hand_over(unit_id, "python3", *program)
    warm = await host.ended(unit_id)
    out, _, err = streams.partition("\0")
    return (int(code), out, err), (warm.exit_code, text_of(warm.lines, "stdout"), text_of(warm.lines, "stderr"))


async def test_programs_run_as_a_new_interpreter_would_run_them(host: Host) -> None:
    seen = [await _both(host, program) for program in _PROGRAMS]
    assert [warm for _, warm in seen] == [plain for plain, _ in seen]
    assert len({str(plain) for plain, _ in seen}) > len(_PROGRAMS) - 3


async def test_variables_that_steer_an_interpreter_steer_it(host: Host) -> None:
    code = "import sys, time; print('/x' in sys.path, time.tzname[0], flush=True); print(sys.stdout.write_through)"
    for env, expected in (
        ({"PYTHONPATH": "/x"}, "True UTC\nFalse\n"),
        ({"PYTHONUNBUFFERED": "1", "TZ": "ABC-3"}, "False ABC\nTrue\n"),
    ):
        unit_id = await host.stock()
        await host.hand_over(unit_id, "python3", "-c", code, env=env)
        assert text_of((await host.ended(unit_id)).lines, "stdout") == expected


async def test_a_port_of_a_handed_over_unit_is_reached(host: Host) -> None:
    unit_id = await host.stock()
    code = "import socket; s = socket.create_server(('', 7000)); print(1, flush=True); s.accept()[0].send(b'warm')"
    await host.hand_over(unit_id, "python3", "-c", code)
    await asyncio.wait_for(host.logs.take(), 20)
    with await host.units.connect_port(unit_id, 7000) as connected:
        assert await asyncio.get_running_loop().sock_recv(connected, 100) == b"warm"
    assert (await host.ended(unit_id)).exit_code == 0
