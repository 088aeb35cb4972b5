"""An HTTP server in the standard library alone: 64 KB for a GET, an echo for a POST. It runs in a unit or beside it."""

import asyncio
import sys

BODY = b"x" * 65536


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await _head(reader):
        length = next((int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length:")), 0)
        body = await reader.readexactly(length) if length else BODY
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await writer.drain()
    writer.close()


async def _head(reader: asyncio.StreamReader) -> list[bytes]:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return []


async def _main(port: int) -> None:
    async with await asyncio.start_server(_serve, "127.0.0.1", port, limit=1 << 20) as server:
        await server.serve_forever()


asyncio.run(_main(int(sys.argv[1])))
