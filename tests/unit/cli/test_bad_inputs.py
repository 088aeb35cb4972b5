"""The rows of the list of bad inputs for the command line, by the real command against a real server."""

import csv
import os
import pty
import signal
import socket
import ssl
import subprocess
import tempfile
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import scripted_api
from bad_inputs import Checks, rows
from penstock.cli import profiles
from penstock.cli.callback import listen
from penstock.cli.errors import CliError
from penstock.cli.oidc import PATIENCE_S
from penstock.cli.profiles import Profile
from penstock.kit.ids import new_id
from scripted_api import ScriptedApi, error_answer, json_answer, text_answer

from .answers import WHOAMI, allocation, page, self_signed
from .conftest import KEY, Cli
from .providers import browser, log_in

ROWS = rows("cli_config")
CHECKS = Checks()
row = CHECKS.row


@pytest.mark.parametrize("row_id", ROWS)
def test_bad_input_ends_as_listed(row_id: str, cli: Cli, api: ScriptedApi) -> None:
    CHECKS[row_id](cli, api)


def test_every_row_has_a_check() -> None:
    assert set(CHECKS) == set(ROWS)


@row("cli_config-01")
def config_absent(cli: Cli, api: ScriptedApi) -> None:
    cli.fails(3, "whoami", says="run `penstock login`")


@row("cli_config-02")
def config_empty(cli: Cli, api: ScriptedApi) -> None:
    cli.write_config("", mode=0o644)
    assert cli.source("profile") == (None, "not set")
    cli.logged_in(api)
    api.on("GET", "/whoami", json_answer(WHOAMI))
    assert cli.run("whoami").returncode == 0


@row("cli_config-03")
def config_is_a_directory(cli: Cli, api: ScriptedApi) -> None:
    cli.config.mkdir(parents=True)
    cli.fails(1, "whoami", says=f"{cli.config} is a directory")


@row("cli_config-04")
def config_unreadable(cli: Cli, api: ScriptedApi) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text("[profiles.default]\nkey = 'psk_x'\n")
        path.chmod(0o000)
        if os.geteuid() != 0:
            cli.fails(1, "whoami", env={"PENSTOCK_CONFIG_FILE": str(path)}, says=f"no permission to read {path}")
            return
        # The superuser can read everything; ask as somebody else.
        Path(folder).chmod(0o755)
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            try:
                profiles.read(path)
            except CliError as error:
                os._exit(0 if error.message == f"no permission to read {path}" and error.exit_code == 1 else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@row("cli_config-05")
def config_readable_by_others(cli: Cli, api: ScriptedApi) -> None:
    text = "[profiles.default]\napi_url = 'https://cloud.example'\nkey = 'psk_x'\n"
    for mode in (0o644, 0o640, 0o604, 0o620):
        cli.write_config(text, mode=mode)
        cli.fails(1, "whoami", says=f"chmod 600 {cli.config}")
    cli.write_config(text)
    assert cli.source("key")[1] == "profile default"


@row("cli_config-08")
def config_too_large(cli: Cli, api: ScriptedApi) -> None:
    cli.write_config("")
    with cli.config.open("r+b") as file:
        file.truncate(100 << 20)
    cli.fails(1, "whoami", says="too large")


@row("cli_config-13")
def address_with_newline(cli: Cli, api: ScriptedApi) -> None:
    bad = "http://cloud.example\nHost: evil"
    cli.fails(1, "whoami", "--api-url", bad, says="api_url must be a URL without")
    cli.fails(1, "whoami", env={"PENSTOCK_API_URL": bad}, says="(environment PENSTOCK_API_URL)")
    cli.write_config('[profiles.default]\napi_url = "http://cloud.example\\nHost: evil"\n')
    cli.fails(1, "whoami", says="(profile default)")


@row("cli_config-14")
def address_with_slash_and_path(cli: Cli, api: ScriptedApi) -> None:
    for given in ("https://cloud.example/", "https://cloud.example/api/v1/", "HTTPS://Cloud.Example//api/v1"):
        assert cli.source("api_url", "--api-url", given)[0] == "https://cloud.example"
    assert cli.source("api_url", "--api-url", "https://x.example/gpu/")[0] == "https://x.example/gpu"
    cli.logged_in(api)
    api.on("GET", "/whoami", json_answer(WHOAMI))
    assert cli.run("whoami", env={"PENSTOCK_API_URL": api.url + "/api/v1/"}).returncode == 0


@row("cli_config-15")
def variable_empty(cli: Cli, api: ScriptedApi) -> None:
    cli.write_config(f"[profiles.default]\napi_url = '{api.url}'\nkey = '{KEY}'\n")
    api.on("GET", "/whoami", json_answer(WHOAMI))
    names = ("API_URL", "API_KEY", "PROJECT", "PROFILE", "GATEWAY_URL", "CONFIG_FILE", "DATA")
    assert cli.run("whoami", env={f"PENSTOCK_{name}": "" for name in names}).returncode == 0
    assert "empty means unset" in cli.run("config", "show", "--help").stdout


@row("cli_config-16")
def flag_beats_variable(cli: Cli, api: ScriptedApi) -> None:
    cli.env |= {"PENSTOCK_API_URL": "https://env.example", "PENSTOCK_PROJECT": "prj_default"}
    flags = ("--api-url", "https://flag.example", "-p", "prj_" + "0" * 26)
    assert cli.source("api_url") == ("https://env.example", "environment PENSTOCK_API_URL")
    assert cli.source("api_url", *flags) == ("https://flag.example", "flag --api-url")
    assert cli.source("project", *flags) == ("prj_" + "0" * 26, "flag --project")


@row("cli_config-17")
def profile_missing(cli: Cli, api: ScriptedApi) -> None:
    cli.write_config("[profiles.prod]\napi_url = 'https://a.example'\n[profiles.lab]\napi_url = 'https://b.example'\n")
    cli.fails(1, "whoami", "--profile", "nope", says="no profile 'nope'; there are: prod, lab")
    cli.fails(1, "whoami", env={"PENSTOCK_PROFILE": "nope"}, says="prod, lab")


@row("cli_config-20")
def malformed_allocation(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    cli.fails(1, "alloc", "show", "alc_1", says="allocation_id must look like alc_")
    for arguments in (["release", "../x"], ["release", ""], ["update", "prj_default", "--name", "x"]):
        cli.fails(1, "alloc", *arguments, says="is neither an id (alc_…) nor a name of an allocation")
    cli.fails(1, "alloc", "exec", "alc_1", "--", "true", says="allocation must look like alc_")
    assert api.seen == []


@row("cli_config-21")
def allocation_of_another_tenant(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    for arguments in (["show"], ["release"]):
        cli.fails(4, "alloc", *arguments, new_id("alc"), says="; see `penstock alloc list --all` (code=not_found")


@row("cli_config-22")
def expired_token(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    api.on("GET", "/whoami", error_answer(401, "unauthenticated", "the API key has expired"))
    cli.fails(3, "whoami", says="the API key has expired; login again")


@row("cli_config-24")
def server_fails(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    api.on("GET", "/whoami", error_answer(500, "internal", "something went wrong"))
    cli.fails(2, "whoami", says="correlation_id=cor_test")
    assert '"correlation_id": "cor_test"' in cli.run("whoami", "-o", "json").stderr


@row("cli_config-25")
def server_speaks_html(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    api.on("GET", "/whoami", text_answer("<html><body>" + "x" * 1000, 200))
    error = cli.fails(2, "whoami", says="is not JSON: '<html><body>xxx")
    assert "x" * 81 not in error
    api.on("GET", "/whoami", text_answer("<html>\x1b[31mbad gateway", 502))
    assert "\x1b" not in cli.fails(2, "whoami", says="is not JSON")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 20))


@row("cli_config-26")
def server_never_ends(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    api.on("GET", "/whoami", endless)
    cli.fails(2, "whoami", says="the answer is larger than 64 MB")


@row("cli_config-27")
def server_redirects(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    with scripted_api.serve() as other:
        api.on("GET", "/whoami", text_answer("", 307, Location=f"{other.url}/api/v1/whoami"))
        cli.fails(2, "whoami", says=f"redirects to {other.url}")
        assert other.seen == []


@row("cli_config-28")
def certificate_invalid(cli: Cli, api: ScriptedApi) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(cli.home))
    with scripted_api.serve(context) as secure:
        error = cli.fails(2, "whoami", "--api-url", secure.url, env={"PENSTOCK_API_KEY": KEY}, says="is not valid")
        assert "insecure" not in error
        assert secure.url.removeprefix("https://") in error
        assert secure.seen == []


@row("cli_config-29")
def nobody_answers(cli: Cli, api: ScriptedApi) -> None:
    cli.env["PENSTOCK_API_KEY"] = KEY
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    cli.fails(2, "whoami", "--api-url", f"http://{address}", says=f"cannot connect to {address}")
    done = cli.run("whoami", "--api-url", "https://no-such-host.invalid")
    assert done.returncode == 2
    assert "cannot find the host no-such-host.invalid" in done.stderr


def terminal(cli: Cli, *arguments: str) -> "tuple[subprocess.Popen[bytes], int, list[Any]]":
    """The command on a terminal of its own, as its session's leader."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    child = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *cli.command(*arguments)],
        env={**cli.environ(), "TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    return child, master, before


def read_until(master: int, mark: bytes, within_s: float = 20) -> bytes:
    found = b""
    os.set_blocking(master, False)
    ends_at = time.monotonic() + within_s
    while mark not in found:
        assert time.monotonic() < ends_at, found
        try:
            found += os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            break
    return found


@row("cli_config-31")
def interrupted_twice(cli: Cli, api: ScriptedApi) -> None:
    wanted = new_id("alc")
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("provisioning", wanted), 201))
    api.on("GET", f"/allocations/{wanted}", json_answer(allocation("provisioning", wanted)))
    child, master, before = terminal(cli, "alloc", "create", "--sku", "g1.1", "--wait")
    try:
        assert b"\x1b[?25l" in read_until(master, b"provisioning"), "the spinner hides the cursor"
        os.write(master, b"\x03\x03")
        rest = read_until(master, b"\x1b[?25h")
        assert b"\x1b[?25h" in rest, "the cursor is back"
        assert b"Traceback" not in rest + read_until(master, b"\x00no such mark", within_s=20)
        assert child.wait(20) == 130
        assert termios.tcgetattr(master)[:4] == before[:4]
    finally:
        os.close(master)


@row("cli_config-32")
def reader_leaves(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    api.on("GET", "/allocations", json_answer(page([allocation("active", new_id("alc")) for _ in range(2000)])))
    for arguments in (["alloc", "list"], ["alloc", "list", "-o", "json"], ["alloc", "list", "-o", "csv"], ["--help"]):
        child = subprocess.Popen(
            cli.command(*arguments), env=cli.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.wait(30) == 141, arguments
        assert child.stderr.read() == b""
        child.stderr.close()


@row("cli_config-33")
def output_is_no_terminal(cli: Cli, api: ScriptedApi) -> None:
    wanted = new_id("alc")
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("requested", wanted), 201))
    states = ("requested", "provisioning", "active")
    api.on("GET", f"/allocations/{wanted}", *(json_answer(allocation(state, wanted)) for state in states))
    done = cli.run("alloc", "create", "--sku", "g1.1", "--wait", env={"TERM": "xterm", "COLORTERM": "truecolor"})
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.splitlines() == [f"{wanted} {state}" for state in states]


@row("cli_config-34")
def names_that_steer_terminals(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    evil = allocation("active", new_id("alc")) | {"name": "\x1b]0;owned\x07\x9b2J", "reason": "[red]x[/red]"}
    api.on("GET", "/allocations", json_answer(page([evil])))
    for output in ("table", "csv", "json"):
        done = cli.run("alloc", "list", "-o", output)
        assert not {"\x1b", "\x07", "\x9b"} & set(done.stdout)
        assert "\\x1b]0;owned" in done.stdout or "\\u001b]0;owned" in done.stdout
    assert "[red]x[/red]" in cli.run("alloc", "list").stdout
    api.on("GET", "/whoami", error_answer(400, "invalid_request", "bad \x1b[31m name"))
    assert "\x1b" not in cli.fails(1, "whoami", says="bad \\x1b[31m name")


@row("cli_config-35")
def cells_that_are_formulas(cli: Cli, api: ScriptedApi) -> None:
    cli.logged_in(api)
    names = ["=1+1", "+1", "-1", "@SUM(A1)", 'plain, "quoted"']
    items = [allocation("active", new_id("alc")) | {"name": name} for name in names]
    api.on("GET", "/allocations", json_answer(page(items)))
    rows = list(csv.DictReader(cli.run("alloc", "list", "-o", "csv").stdout.splitlines()))
    assert [found["name"] for found in rows] == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", 'plain, "quoted"']
    assert cli.run("alloc", "list", "-o", "csv", "--no-heading").stdout.count("\n") == len(names)


@row("cli_config-36")
def callback_port_busy(cli: Cli, api: ScriptedApi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cli.run(*log_in(api), "--callback-port", port, env={"BROWSER": browser()})
    assert done.returncode == 0, done.stderr
    assert f"port {port} is taken; using another" in done.stderr
    assert cli.source("key") == ("pss_AAAA…", "profile default")


@row("cli_config-37")
def callback_state_mismatch(cli: Cli, api: ScriptedApi) -> None:
    done = cli.run(*log_in(api), env={"BROWSER": browser(state="another")})
    assert (done.returncode, cli.config.exists()) == (3, False)
    assert "state mismatch" in done.stderr
    assert not [seen for seen in api.seen if seen.path == "/token"]


@row("cli_config-38")
def callback_never_comes(cli: Cli, api: ScriptedApi) -> None:
    assert PATIENCE_S == 300
    with listen() as callback, pytest.raises(CliError, match="nobody came back") as caught:
        callback.wait(0.05)
    assert caught.value.exit_code == 3


@row("cli_config-39")
def two_logins_at_once(cli: Cli, api: ScriptedApi) -> None:
    names = [f"p{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        for name in names:
            pool.submit(profiles.change, cli.config, lambda now, name=name: now.with_profile(name, Profile(key="k")))
    assert set(profiles.read(cli.config).profiles) == set(names)


@row("cli_config-40")
def no_home(cli: Cli, api: ScriptedApi) -> None:
    cli.fails(1, "whoami", env={"HOME": ""}, says="HOME")
    cli.fails(1, "logout", env={"HOME": ""}, says="HOME")
    api.on("GET", "/whoami", json_answer(WHOAMI))
    # `/proc` is a place where nobody can write, not even the superuser.
    for home in ("/proc", "/dev/null"):
        done = cli.run("login", "--api-url", api.url, "--key-stdin", env={"HOME": home}, stdin=KEY)
        assert done.returncode == 1
        assert "cannot write" in done.stderr
        assert "HOME" in done.stderr


def test_interrupting_a_command_that_runs_kills_it(cli: Cli, api: ScriptedApi) -> None:
    closed: list[int | None] = []

    async def hold(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        await ws.receive()
        await ws.send_bytes(b"\x01started\n")
        async for _ in ws:
            pass
        closed.append(ws.close_code)
        return ws

    wanted = new_id("alc")
    cli.logged_in(api)
    api.on("GET", f"//ws/exec/{wanted}", hold)
    child = subprocess.Popen(
        cli.command("alloc", "exec", wanted, "--", "sleep", "1000"),
        env=cli.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"started\n"
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=20)
    assert (child.returncode, error) == (130, b"")
    assert len(closed) == 1, "the server saw the connection end"
