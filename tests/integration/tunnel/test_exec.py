"""Commands in a unit over `/ws/exec/<allocation>`."""

import asyncio
import json
import os
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType

from integration.tunnel.stage import World, error_of
from penstock.identity.model import Role


def url(world: World) -> str:
    return f"{world.gateways[0].url}/ws/exec/{world.allocation_id}"


async def last_words(socket: aiohttp.ClientWebSocketResponse) -> tuple[dict[int, bytes], dict[str, Any], int | None]:
    """All output, the last note, and the close code."""
    output: dict[int, bytes] = {}
    note: dict[str, Any] = {}
    while True:
        message = await socket.receive(timeout=30)
        if message.type is WSMsgType.BINARY:
            output[message.data[0]] = output.get(message.data[0], b"") + message.data[1:]
        elif message.type is WSMsgType.TEXT:
            note = json.loads(message.data)
        else:
            return output, note, socket.close_code


async def run(world: World, http: aiohttp.ClientSession, *argv: str, stdin: bytes = b"", **more: Any) -> Any:
    async with http.ws_connect(url(world), headers=world.headers) as socket:
        await socket.send_json({"argv": argv, **more})
        if stdin:
            await socket.send_bytes(b"\0" + stdin)
        await socket.send_json({"type": "eof"})
        return await last_words(socket)


async def test_output_error_and_exit_code_come_back(world: World, http: aiohttp.ClientSession) -> None:
    output, note, code = await run(world, http, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert output == {1: b"out\n", 2: b"err\n"}
    assert note == {"type": "exit", "code": 7, "class": "exited"}
    assert code == 1000


async def test_input_environment_and_folder_arrive(world: World, http: aiohttp.ClientSession) -> None:
    output, note, _ = await run(
        world, http, "sh", "-c", 'cat; echo "$GREETING"; pwd', stdin=b"typed\n", env={"GREETING": "hi"}, cwd="/"
    )
    assert output[1] == b"typed\nhi\n/\n"
    assert note["code"] == 0


async def test_killed_command_says_so(world: World, http: aiohttp.ClientSession) -> None:
    _, note, _ = await run(world, http, "sh", "-c", "kill -9 $$")
    assert note == {"type": "exit", "code": 137, "class": "killed"}


async def test_much_output_and_input_pass_whole(world: World, http: aiohttp.ClientSession) -> None:
    size = 20 << 20
    script = (
        "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data); sys.stderr.write(str(len(data)))"
    )
    async with http.ws_connect(url(world), headers=world.headers, max_msg_size=0) as socket:
        await socket.send_json({"argv": [sys.executable, "-c", script]})

        async def feed() -> None:
            for _ in range(size // 500_000):
                await socket.send_bytes(b"\0" + b"y" * 500_000)
            await socket.send_json({"type": "eof"})

        feeding = asyncio.create_task(feed())
        output, note, _ = await last_words(socket)
        await feeding
    expected = size // 500_000 * 500_000
    assert (len(output[1]), output[2], note["code"]) == (expected, str(expected).encode(), 0)


async def test_client_that_leaves_kills_the_command(world: World, http: aiohttp.ClientSession) -> None:
    async with http.ws_connect(url(world), headers=world.headers) as socket:
        await socket.send_json({"argv": ["sh", "-c", "echo up; sleep 60"]})
        assert (await socket.receive_bytes()) == b"\1up\n"
    execution = world.units.executions[0]
    assert await asyncio.wait_for(execution.child.wait(), 30) == -9


async def test_command_that_leaves_a_process_behind_still_ends(world: World, http: aiohttp.ClientSession) -> None:
    output, note, _ = await run(world, http, "sh", "-c", "sleep 5 & echo $!")
    assert note["code"] == 0
    left = int(output[1])
    os.kill(left, 0)
    os.kill(left, 9)


async def test_slow_reader_slows_the_command(world: World, http: aiohttp.ClientSession, tmp_path: Any) -> None:
    progress = tmp_path / "progress"
    script = (
        "import sys, os; n = 0\n"
        f"file = os.open({str(progress)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "while True:\n"
        "    sys.stdout.buffer.write(b'x' * 65536); n += 65536\n"
        "    os.pwrite(file, b'%012d' % n, 0)\n"
    )
    async with http.ws_connect(url(world), headers=world.headers) as socket:
        await socket.send_json({"argv": [sys.executable, "-c", script]})
        seen = ""
        while not seen or progress.read_text() != seen:
            seen = progress.read_text() if progress.exists() else ""
            await asyncio.sleep(0.3)
        assert 0 < int(seen) < 16 << 20


async def test_every_command_is_audited(world: World, http: aiohttp.ClientSession) -> None:
    await run(world, http, "echo", "hello there")
    async with world.database.read() as conn:
        rows = await conn.fetch(
            "select actor_id, target_id, project_id, detail from kit.audit where action like '%exec'"
        )
    assert len(rows) == 1
    assert (rows[0]["target_id"], rows[0]["project_id"]) == (world.allocation_id, "prj_default")
    assert rows[0]["detail"]["argv"] == "echo hello there"


BAD_COMMANDS: dict[str, tuple[Any, str]] = {
    "no argv": ({}, "argv"),
    "empty argv": ({"argv": []}, "argv"),
    "empty program": ({"argv": [""]}, "argv"),
    "argv of numbers": ({"argv": [1]}, "argv[0]"),
    "zero byte": ({"argv": ["a\0b"]}, "argv[0]"),
    "bad name": ({"argv": ["a"], "env": {"A-B": "1"}}, "env"),
    "reserved name": ({"argv": ["a"], "env": {"LD_PRELOAD": "x"}}, "argv"),
    "relative folder": ({"argv": ["a"], "cwd": "tmp"}, "cwd"),
    "unknown field": ({"argv": ["a"], "shell": True}, "shell"),
    "not an object": (["a"], "$"),
    "much": ({"argv": ["a" * (100 << 10)] * 3}, "argv"),
}


@pytest.mark.parametrize(("command", "where"), BAD_COMMANDS.values(), ids=BAD_COMMANDS.keys())
async def test_bad_commands_are_refused_naming_the_field(
    world: World, http: aiohttp.ClientSession, command: Any, where: str
) -> None:
    async with http.ws_connect(url(world), headers=world.headers) as socket:
        await socket.send_json(command)
        _, note, code = await last_words(socket)
    assert (note["type"], note["field"], code) == ("error", where, 4400)
    assert not world.units.executions


async def test_frames_that_are_not_as_agreed_are_refused(world: World, http: aiohttp.ClientSession) -> None:
    for bad in (b"\1out", b"", '{"type": "resize"}', "nonsense", "[]"):
        async with http.ws_connect(url(world), headers=world.headers) as socket:
            await socket.send_json({"argv": ["sleep", "60"]})
            await (socket.send_str(bad) if isinstance(bad, str) else socket.send_bytes(bad))
            _, note, code = await last_words(socket)
        assert (note["type"], code) == ("error", 4400)
    for first in ("nonsense", b"\0x"):
        async with http.ws_connect(url(world), headers=world.headers) as socket:
            await (socket.send_str(first) if isinstance(first, str) else socket.send_bytes(first))
            assert (await last_words(socket))[2] == 4400


async def test_too_large_a_message_closes_with_1009(world: World, http: aiohttp.ClientSession) -> None:
    async with http.ws_connect(url(world), headers=world.headers) as socket:
        await socket.send_json({"argv": ["cat"]})
        await socket.send_bytes(b"\0" + b"x" * (2 << 20))
        assert (await last_words(socket))[2] == 1009


async def test_who_may_not_gets_the_close_code_of_the_reason(world: World, http: aiohttp.ClientSession) -> None:
    _, viewer = await world.new_key(Role.VIEWER)
    base = world.gateways[0].url
    stranger = "alc_00000000000000000000000000"
    cases = [
        ({}, world.allocation_id, "unauthenticated", 4401),
        ({"Authorization": "Bearer psk_nonsense"}, world.allocation_id, "unauthenticated", 4401),
        ({"Authorization": f"Bearer {viewer}"}, world.allocation_id, "permission_denied", 4403),
        (world.headers, stranger, "not_found", 4404),
        (world.headers, "..%2Fadmin", "not_found", 4404),
    ]
    for headers, allocation_id, reason, close_code in cases:
        async with http.ws_connect(f"{base}/ws/exec/{allocation_id}", headers=headers) as socket:
            _, note, code = await last_words(socket)
            assert (note["type"], note["code"], code) == ("error", reason, close_code)
    await world.set_state("releasing")
    async with http.ws_connect(url(world), headers=world.headers) as socket:
        _, note, code = await last_words(socket)
        assert (note["code"], code) == ("access.not_active", 4409)


async def test_bad_handshakes_are_refused_in_the_envelope(world: World, http: aiohttp.ClientSession) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    cases = [
        ({}, 426),
        (upgrade | {"Sec-WebSocket-Version": "12"}, 426),
        (upgrade | {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "short"}, 400),
    ]
    for headers, status in cases:
        async with http.get(url(world), headers=world.headers | headers) as answer:
            assert answer.status == status
            error_of(await answer.json())
            if status == 426:
                assert answer.headers["Sec-WebSocket-Version"] == "13"
