"""People log in with a real OpenID provider: tokens, sessions, groups, and what ends them."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import oidc_provider
from oidc_browser import visit
from oidc_provider import SCOPES, Oidc
from penstock.cli import oidc as client
from penstock.cli.errors import CliError
from penstock.identity.authenticator import Authenticator
from penstock.identity.errors import ProviderUnavailable, TokenExpired
from penstock.kit import db

from .conftest import Answer, Api, made

BROWSER = Path(oidc_provider.__file__).with_name("oidc_browser.py")


@pytest.fixture(scope="module")
async def provider(api: Api, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Oidc]:
    """The provider, known to the cloud as `corp`; those of other tests are gone."""
    for other in (await api.call("GET", "/identity-providers")).json["items"]:
        assert (await api.call("DELETE", f"/identity-providers/{other['name']}")).status == 204
    async with oidc_provider.run(tmp_path_factory.mktemp("oidc") / "log") as running:
        body = {"issuer": running.issuer, "client_id": "penstock", "audiences": ["penstock-api"], "scopes": SCOPES}
        answer = await api.call("PUT", "/identity-providers/corp", json=body)
        assert answer.status == 200, answer.content
        yield running
        assert (await api.call("DELETE", "/identity-providers/corp")).status == 204


async def project(api: Api, name: str, **more: Any) -> str:
    return (await made(api, "/projects", {"name": f"{name}-{os.urandom(4).hex()}", **more}))["id"]


async def map_group(api: Api, group: str, **where: Any) -> str:
    return (await made(api, "/identity-providers/corp/mappings", {"group": group, **where}))["id"]


async def session(api: Api, provider: Oidc, person: str) -> dict[str, Any]:
    token, nonce = await provider.log_in(person)
    return await made(api, "/sessions", {"token": token, "nonce": nonce})


async def whoami(api: Api, credential: str, project_id: str | None = None) -> Answer:
    return await api.call(
        "GET", "/whoami", key=credential, headers={"Penstock-Project": project_id} if project_id else None
    )


async def test_a_group_gives_its_role_in_its_project_and_nothing_else(api: Api, provider: Oidc) -> None:
    mine, other = await project(api, "mine"), await project(api, "other")
    await map_group(api, "devs", role="developer", project_id=mine)
    await provider.groups("ada", "devs", "unmapped")
    token, _ = await provider.log_in("ada")

    me = (await whoami(api, token)).json
    assert (me["project_id"], me["role"], me["operator"], me["key_id"]) == (mine, "developer", False, None)
    assert me["display_name"] == "Person ada"
    strange = await whoami(api, token, other)
    assert (strange.status, strange.error["code"]) == (404, "not_found")
    unknown = await whoami(api, token, f"prj_{'0' * 26}")
    assert (unknown.status, unknown.error["message"]) == (404, f"no project prj_{'0' * 26}")
    assert strange.error["message"] == f"no project {other}"
    members = (await api.call("GET", f"/projects/{mine}/members")).json["items"]
    assert me["principal_id"] not in {member["principal_id"] for member in members}


async def test_without_a_mapped_group_a_person_may_do_nothing(api: Api, provider: Oidc) -> None:
    await provider.groups("eve", "admin", "operators", "owner")
    opened = await session(api, provider, "eve")
    assert (opened["projects"], opened["operator"]) == ([], False)
    answer = await whoami(api, opened["secret"])
    assert (answer.status, answer.error["code"]) == (403, "identity.no_role")
    for path in ("/nodes", "/users", "/identity-providers", "/projects", "/sessions"):
        assert (await api.call("GET", path, key=opened["secret"])).status == 403
        asked = await api.call("GET", path, key=opened["secret"], headers={"Penstock-Project": "prj_default"})
        assert asked.status == 404


async def test_the_most_powerful_configured_role_counts(api: Api, provider: Oidc) -> None:
    organisation = await made(api, "/organisations", {"name": "several"})
    where = await project(api, "several", organisation_id=organisation["id"])
    await map_group(api, "lookers", role="viewer", organisation_id=organisation["id"])
    admins = await map_group(api, "builders", role="admin", project_id=where)
    await map_group(api, "payers", role="billing", project_id=where)
    await provider.groups("bob", "lookers", "builders", "payers")
    opened = await session(api, provider, "bob")
    assert [it["id"] for it in opened["projects"]] == [where]
    assert (await whoami(api, opened["secret"])).json["role"] == "admin"
    assert (await api.call("DELETE", f"/identity-providers/corp/mappings/{admins}")).status == 204
    await until(lambda: role_is(api, opened["secret"], "viewer"))


async def role_is(api: Api, credential: str, role: str) -> bool:
    return (await whoami(api, credential)).json["role"] == role


async def until(condition: Any, *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_groups_and_memberships_by_hand_stay_apart(api: Api, provider: Oidc) -> None:
    where = await project(api, "apart")
    await map_group(api, "crew", role="developer", project_id=where)
    await provider.groups("cy", "crew")
    me = (await whoami(api, (await provider.log_in("cy"))[0])).json
    path = f"/projects/{where}/members/{me['principal_id']}"
    assert (await api.call("PUT", path, json={"role": "viewer"})).status == 200
    assert await role_is(api, (await provider.log_in("cy"))[0], "developer")
    await provider.groups("cy")
    assert await role_is(api, (await provider.log_in("cy"))[0], "viewer")
    assert (await api.call("DELETE", path)).status == 204
    answer = await whoami(api, (await provider.log_in("cy"))[0])
    assert (answer.status, answer.error["code"]) == (403, "identity.no_role")


async def test_people_with_several_projects_choose(api: Api, provider: Oidc) -> None:
    first, second = sorted([await project(api, "first"), await project(api, "second")])
    for where in (first, second):
        await map_group(api, "both", role="viewer", project_id=where)
    await provider.groups("dan", "both")
    token, _ = await provider.log_in("dan")
    answer = await whoami(api, token)
    assert (answer.status, answer.error["code"]) == (400, "identity.project_required")
    assert first in answer.error["message"]
    assert second in answer.error["message"]
    assert (await whoami(api, token, second)).json["project_id"] == second
    listed = await api.call("GET", "/projects", key=token, headers={"Penstock-Project": first})
    assert [it["id"] for it in listed.json["items"]] == [first, second]


async def test_only_an_explicit_mapping_makes_operators(api: Api, provider: Oidc) -> None:
    await map_group(api, "owners-of-all", role="owner", organisation_id="org_default")
    await provider.groups("fay", "owners-of-all")
    token, _ = await provider.log_in("fay")
    at_home = {"Penstock-Project": "prj_default"}
    assert (await whoami(api, token, "prj_default")).json["operator"] is False
    assert (await api.call("GET", "/nodes", key=token, headers=at_home)).status == 403
    denied = await api.call(
        "POST",
        "/identity-providers/corp/mappings",
        key=token,
        json={"group": "owners-of-all", "operator": True},
        headers=at_home,
    )
    assert denied.status == 403
    await map_group(api, "sre", operator=True)
    await provider.groups("fay", "sre")
    token, _ = await provider.log_in("fay")
    assert (await whoami(api, token)).json["operator"] is True
    assert (await api.call("GET", "/nodes", key=token)).status == 200


async def test_access_tokens_are_taken_for_the_configured_audience(api: Api, provider: Oidc) -> None:
    where = await project(api, "access")
    await map_group(api, "robots", role="viewer", project_id=where)
    await provider.groups("gil", "robots")

    def access_token() -> str:
        ours = provider.client()
        attempt = client.Attempt(redirect_uri="http://127.0.0.1:9/callback")
        code = attempt.code(provider.answer("gil", attempt, ours), ours)
        form = client._form(
            ours,
            grant_type="authorization_code",
            code=code,
            redirect_uri=attempt.redirect_uri,
            code_verifier=attempt.verifier,
        )
        return client._send(ours.token_endpoint, form)["access_token"]

    token = await asyncio.to_thread(access_token)
    assert (await whoami(api, token)).json["project_id"] == where
    refused = await api.call("POST", "/sessions", key="", json={"token": token})
    assert (refused.status, "ID token" in refused.error["message"]) == (401, True)


async def test_tokens_of_others_are_refused(api: Api, provider: Oidc) -> None:
    token, _ = await provider.log_in("ada", client_id="other")
    answer = await whoami(api, token)
    assert (answer.status, answer.error["message"]) == (401, "the token was made for another audience")
    async with oidc_provider.run_signer() as foreign:
        answer = await whoami(api, foreign.token())
    assert (answer.status, answer.error["message"]) == (401, "the token's issuer is not known here")
    async with oidc_provider.run_signer() as forger:
        answer = await whoami(api, forger.token(iss=provider.issuer))
    assert (answer.status, answer.error["message"]) == (401, "the token's key is not one of its issuer's")


async def test_a_token_counts_until_a_minute_after_its_end(api: Api, provider: Oidc) -> None:
    async with db.connect(api.database_url, lambda *_: None) as database:
        token, _ = await provider.log_in("ada")
        for ahead_s, passes in ((600 + 58, True), (600 + 61, False)):
            late = Authenticator(database, clock=lambda ahead_s=ahead_s: time.time() + ahead_s)
            if passes:
                await late.tokens.check(token)
            else:
                with pytest.raises(TokenExpired, match="token expired"):
                    await late.tokens.check(token)


async def test_a_provider_that_is_away_is_503_and_never_500(api: Api) -> None:
    async with oidc_provider.run_signer() as signer:
        token = signer.token()
        body = {"issuer": signer.issuer, "client_id": "penstock"}
        assert (await api.call("PUT", "/identity-providers/away", json=body)).status == 200
    answer = await whoami(api, token)
    assert (answer.status, answer.error["code"]) == (503, ProviderUnavailable.code)
    assert int(answer.headers["retry-after"]) > 0
    assert (await api.call("POST", "/sessions", key="", json={"token": token})).status == 503
    assert (await api.call("DELETE", "/identity-providers/away")).status == 204


async def test_a_session_is_got_once_per_token_and_by_its_nonce(api: Api, provider: Oidc) -> None:
    token, nonce = await provider.log_in("ada")
    for wrong in ({"token": token}, {"token": token, "nonce": "another"}):
        assert (await api.call("POST", "/sessions", key="", json=wrong)).status == 401
    body, once = {"token": token, "nonce": nonce}, {"Idempotency-Key": os.urandom(8).hex()}
    first = await api.call("POST", "/sessions", key="", json=body, headers=once)
    again = await api.call("POST", "/sessions", key="", json=body, headers=once)
    assert first.status == again.status == 201
    assert first.content == again.content
    replayed = await api.call("POST", "/sessions", key="", json=body)
    assert (replayed.status, replayed.error["code"]) == (401, "token_used")
    me = (await whoami(api, first.json["secret"])).json
    assert me["session_id"] == first.json["session"]["id"]
    listed = (await api.call("GET", "/sessions", key=first.json["secret"])).json["items"]
    assert first.json["secret"] not in str(listed)
    assert me["session_id"] in {it["id"] for it in listed}


async def test_a_revoked_session_is_out_and_its_stream_ends_within_5_s(api: Api, provider: Oidc) -> None:
    opened = await session(api, provider, "ada")
    headers = {"Authorization": f"Bearer {opened['secret']}"}
    url = f"http://127.0.0.1:{api.port}/api/v1/events/stream"
    async with api.session.get(url, headers=headers) as stream:
        assert stream.status == 200
        await stream.content.readline()
        revoked = await api.call("DELETE", f"/sessions/{opened['session']['id']}", key=opened["secret"])
        assert revoked.status == 204
        async with asyncio.timeout(5):
            await stream.content.read()
    answer = await whoami(api, opened["secret"])
    assert (answer.status, answer.error["code"]) == (401, "unauthenticated")


async def test_a_stream_ends_when_the_group_loses_its_role(api: Api, provider: Oidc) -> None:
    where = await project(api, "losing")
    mapping = await map_group(api, "losers", role="viewer", project_id=where)
    await provider.groups("hal", "losers")
    token, _ = await provider.log_in("hal")
    url = f"http://127.0.0.1:{api.port}/api/v1/events/stream"
    async with api.session.get(url, headers={"Authorization": f"Bearer {token}"}) as stream:
        await stream.content.readline()
        await api.call("DELETE", f"/identity-providers/corp/mappings/{mapping}")
        async with asyncio.timeout(5):
            await stream.content.read()


async def test_sessions_of_others_look_absent_except_to_operators(api: Api, provider: Oidc) -> None:
    opened = await session(api, provider, "ada")
    where = f"/sessions/{opened['session']['id']}"
    other = await session(api, provider, "fay")
    fays = {"Penstock-Project": "prj_default"}
    await provider.groups("ivy", "devs")
    stranger = await session(api, provider, "ivy")
    assert (await api.call("DELETE", where, key=stranger["secret"])).status == 404
    theirs = f"/sessions?principal_id={opened['session']['principal_id']}"
    assert (await api.call("GET", theirs, key=stranger["secret"])).status == 403
    assert (await api.call("GET", theirs, key=other["secret"], headers=fays)).status == 200
    assert (await api.call("DELETE", where, key=other["secret"], headers=fays)).status == 204
    await until(lambda: is_out(api, opened["secret"]))


async def is_out(api: Api, credential: str) -> bool:
    return (await whoami(api, credential)).status == 401


async def test_a_disabled_person_is_out_with_every_credential(api: Api, provider: Oidc) -> None:
    await provider.groups("jan", "devs")
    opened, (token, _) = await session(api, provider, "jan"), await provider.log_in("jan")
    assert (await whoami(api, token)).status == 200
    user = f"/users/{opened['session']['principal_id']}"
    assert (await api.call("POST", f"{user}/disable")).json["disabled_at"]
    await until(lambda: is_out(api, opened["secret"]))
    await until(lambda: is_out(api, token))
    fresh, nonce = await provider.log_in("jan")
    assert (await api.call("POST", "/sessions", key="", json={"token": fresh, "nonce": nonce})).status == 401
    assert (await api.call("POST", f"{user}/enable")).json["disabled_at"] is None
    assert await is_out(api, opened["secret"])
    assert (await whoami(api, fresh)).status == 200


async def test_a_disabled_provider_shuts_its_people_out(api: Api, provider: Oidc) -> None:
    opened, (token, _) = await session(api, provider, "ada"), await provider.log_in("ada")
    body = {"issuer": provider.issuer, "client_id": "penstock", "audiences": ["penstock-api"], "scopes": SCOPES}
    off = await api.call("PUT", "/identity-providers/corp", json=body | {"enabled": False})
    assert off.json["enabled"] is False
    await until(lambda: is_out(api, opened["secret"]))
    await until(lambda: is_out(api, token))
    assert (await api.call("GET", "/login", key="")).json == {"providers": []}
    moved = await api.call("PUT", "/identity-providers/corp", json=body | {"issuer": "https://elsewhere.example"})
    assert (moved.status, moved.error["code"]) == (409, "identity.issuer_fixed")
    assert (await api.call("PUT", "/identity-providers/corp", json=body)).status == 200
    assert (await whoami(api, opened["secret"])).status == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"role": "viewer"}, "project_id"),
        ({"role": "viewer", "project_id": "prj_default", "operator": True}, "project_id"),
        ({"role": "viewer", "project_id": "prj_default", "organisation_id": "org_default"}, "project_id"),
        ({"operator": True, "role": "owner"}, "role"),
        ({"project_id": "prj_default"}, "role"),
        ({"project_id": "prj_default", "role": "king"}, "role"),
        ({"project_id": "x", "role": "viewer"}, "project_id"),
    ],
)
async def test_a_mapping_says_exactly_one_thing(api: Api, provider: Oidc, body: dict[str, Any], field: str) -> None:
    answer = await api.call("POST", "/identity-providers/corp/mappings", json={"group": "g", **body})
    assert (answer.status, answer.error["field"]) == (400, field)


async def test_a_group_has_one_role_in_one_place(api: Api, provider: Oidc) -> None:
    where = await project(api, "once")
    await map_group(api, "once", role="viewer", project_id=where)
    body = {"group": "once", "role": "owner", "project_id": where}
    answer = await api.call("POST", "/identity-providers/corp/mappings", json=body)
    assert (answer.status, answer.error["code"]) == (409, "identity.mapping_exists")


async def test_pkce_and_the_code_are_the_providers_to_check(provider: Oidc) -> None:
    def play() -> None:
        ours = provider.client()
        attempt = client.Attempt(redirect_uri="http://127.0.0.1:9/callback")
        query = provider.answer("ada", attempt, ours)
        code = attempt.code(query, ours)
        stolen = client.Attempt(redirect_uri=attempt.redirect_uri)
        with pytest.raises(CliError, match="state mismatch"):
            stolen.code(query, ours)
        with pytest.raises(CliError, match="invalid_grant"):
            client.redeem(ours, stolen, code)
        attempt = client.Attempt(redirect_uri=attempt.redirect_uri)
        code = attempt.code(provider.answer("ada", attempt, ours), ours)
        assert client.redeem(ours, attempt, code)
        with pytest.raises(CliError, match="invalid_grant"):
            client.redeem(ours, attempt, code)
        with pytest.raises(CliError, match="access_denied"):
            attempt.code(provider.answer("nobody", attempt, ours), ours)

    await asyncio.to_thread(play)


async def test_the_device_flow_waits_for_the_person(api: Api, provider: Oidc) -> None:
    shown: list[str] = []
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            visit(shown[0], "ada")

    token = await asyncio.to_thread(
        client.by_device, provider.client(), lambda address, _: shown.append(address), sleep=nap
    )
    assert naps == [5.0, 5.0]
    opened = await made(api, "/sessions", {"token": token})
    assert (await whoami(api, opened["secret"])).status == 200


async def run_cli(folder: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "penstock.command", *arguments),
        env={"HOME": str(folder), "PATH": os.environ["PATH"], **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert b"Traceback" not in errors, errors.decode()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_login_and_logout_with_a_browser(api: Api, provider: Oidc, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{api.port}"
    browser = {"BROWSER": f"{sys.executable} {BROWSER} %s", "OIDC_PERSON": "ada"}
    await provider.groups("ada", "devs")
    code, _, said = await run_cli(tmp_path, "login", "--api-url", address, **browser)
    assert code == 0, said
    assert "you are Person ada" in said
    config = tmp_path / ".config" / "penstock" / "config.toml"
    assert config.stat().st_mode & 0o777 == 0o600
    secret = config.read_text().partition('key = "')[2].partition('"')[0]
    assert secret.startswith("pss_")
    code, shown, _ = await run_cli(tmp_path, "whoami", "-o", "csv")
    assert code == 0
    assert "Person ada" in shown
    code, _, said = await run_cli(tmp_path, "logout")
    assert code == 0, said
    assert secret not in config.read_text()
    await until(lambda: is_out(api, secret))
    code, _, said = await run_cli(tmp_path, "login", "--api-url", address, **(browser | {"OIDC_PERSON": "nobody"}))
    assert code == 3
    assert "access_denied" in said


async def test_a_rotated_key_is_found_and_the_old_one_is_out(api: Api, provider: Oidc) -> None:
    """Last: the api process looks for unknown keys at most every ten seconds, and tests before this made it look."""
    async with db.connect(api.database_url, lambda *_: None) as database:
        authenticator = Authenticator(database)
        old, _ = await provider.log_in("fay")
        await authenticator.tokens.check(old)
        await provider.rotate()
        new, _ = await provider.log_in("fay")
        await authenticator.tokens.check(new)
        with pytest.raises(Exception, match="key is not one of its issuer's"):
            await authenticator.tokens.check(old)
