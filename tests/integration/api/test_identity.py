"""Organisations, projects, members, service accounts and keys, through the running api."""

import asyncio
import time

import asyncpg

from penstock.kit.ids import new_id
from waiting import attempts

from .conftest import Api, People, made, person


async def user(api: Api, subject: str) -> str:
    made_user = await made(api, "/users", {"issuer": "https://i", "subject": subject, "display_name": subject})
    return made_user["id"]


async def user_key(api: Api, project_id: str, user_id: str, role: str) -> str:
    """A key of a user, written directly: people log in through an identity provider to make their own."""
    secret = "psk_" + user_id[-26:] + project_id[-17:]
    conn = await asyncpg.connect(api.database_url)
    await conn.execute(
        "insert into identity.keys (id, digest, hint, name, role, principal_id, project_id)"
        " values ($1, sha256($2::bytea), 'hint', 'k', $3, $4, $5)",
        "key_" + user_id[-26:-6] + project_id[-6:],
        secret.encode(),
        role,
        user_id,
        project_id,
    )
    await conn.close()
    return secret


async def test_whoami_of_the_local_administrator(api: Api) -> None:
    who = (await api.call("GET", "/whoami")).json
    assert who["operator"]
    assert (who["role"], who["project_id"], who["organisation_id"]) == ("owner", "prj_default", "org_default")


async def test_a_project_keeps_an_owner(api: Api) -> None:
    project = await made(api, "/projects", {"name": "owned"})
    members = f"/projects/{project['id']}/members"
    me = (await api.call("GET", "/whoami")).json["principal_id"]
    for attempt in (
        await api.call("DELETE", f"{members}/{me}"),
        await api.call("PUT", f"{members}/{me}", json={"role": "admin"}),
    ):
        assert attempt.status == 409
        assert attempt.error["code"] == "identity.last_owner"
    other = await user(api, "second owner")
    assert (await api.call("PUT", f"{members}/{other}", json={"role": "owner"})).status == 200
    assert (await api.call("DELETE", f"{members}/{me}")).status == 204
    listed = (await api.call("GET", members)).json["items"]
    assert [(member["principal_id"], member["role"]) for member in listed] == [(other, "owner")]


async def test_two_owners_leaving_at_once_leave_one_behind(api: Api) -> None:
    project = await made(api, "/projects", {"name": "contested"})
    members = f"/projects/{project['id']}/members"
    others = [await user(api, f"owner {number}") for number in range(2)]
    for other in others:
        assert (await api.call("PUT", f"{members}/{other}", json={"role": "owner"})).status == 200
    me = (await api.call("GET", "/whoami")).json["principal_id"]
    answers = await asyncio.gather(*(api.call("DELETE", f"{members}/{each}") for each in (me, *others)))
    assert sorted(answer.status for answer in answers) == [204, 204, 409]


async def test_nobody_gives_or_takes_more_than_they_have(api: Api, people: People) -> None:
    home = people.owner.project_id
    newcomer = await user(api, "newcomer")
    path = f"/projects/{home}/members/{newcomer}"
    answer = await api.call("PUT", path, key=people.admin.key, json={"role": "viewer"})
    assert answer.status == 404, "a person outside the organisation is unknown to its admins"
    assert (await api.call("PUT", path, json={"role": "owner"})).status == 200
    answer = await api.call("PUT", path, key=people.admin.key, json={"role": "viewer"})
    assert (answer.status, answer.error["code"]) == (403, "identity.scope_exceeds_caller")
    answer = await api.call("DELETE", path, key=people.admin.key)
    assert answer.status == 403
    answer = await api.call("POST", "/service-accounts", key=people.admin.key, json={"name": "s", "role": "owner"})
    assert answer.status == 403
    answer = await api.call("PUT", path, key=people.owner.key, json={"role": "emperor"})
    assert (answer.status, answer.error["field"]) == (400, "role")
    assert (await api.call("DELETE", path, key=people.owner.key)).status == 204


async def test_a_key_of_a_service_account_stays_within_its_role(api: Api, people: People) -> None:
    viewer = await api.call("POST", "/service-accounts", key=people.owner.key, json={"name": "s", "role": "viewer"})
    body = {"name": "k", "role": "developer", "service_account_id": viewer.json["id"]}
    answer = await api.call("POST", "/keys", key=people.owner.key, json=body)
    assert (answer.status, answer.error["code"]) == (403, "identity.scope_exceeds_caller")
    answer = await api.call("POST", "/keys", key=people.stranger.key, json={**body, "role": "viewer"})
    assert answer.status == 404


async def test_developers_do_not_revoke_others_keys(api: Api, people: People) -> None:
    answer = await api.call("DELETE", f"/keys/{people.viewer.key_id}", key=people.developer.key)
    assert answer.status == 403
    own = await api.call("POST", "/keys", key=people.developer.key, json={"name": "own", "role": "developer"})
    path = f"/keys/{own.json['key']['id']}"
    assert (await api.call("DELETE", path, key=people.developer.key)).status == 204
    assert (await api.call("DELETE", path, key=people.developer.key)).status == 204
    assert (await api.call("GET", path, key=people.developer.key)).json["revoked_at"] is not None


async def test_a_revoked_key_stops_within_seconds(api: Api, people: People) -> None:
    doomed = await person(api, people.owner.project_id, "viewer")
    assert (await api.call("GET", "/whoami", key=doomed.key)).status == 200
    assert (await api.call("DELETE", f"/keys/{doomed.key_id}", key=people.owner.key)).status == 204
    started = time.monotonic()
    while (await api.call("GET", "/whoami", key=doomed.key)).status != 401:
        assert time.monotonic() - started < 5
        await asyncio.sleep(0.02)


async def test_an_expired_key_stops_and_its_secret_is_never_kept(api: Api, people: People) -> None:
    body = {"name": "short", "role": "viewer", "expires_in_s": 60}
    created = (await api.call("POST", "/keys", key=people.owner.key, json=body)).json
    assert created["key"]["hint"] == created["secret"][-4:]
    conn = await asyncpg.connect(api.database_url)
    row = await conn.fetchrow("select digest, name from identity.keys where id = $1", created["key"]["id"])
    assert created["secret"] not in str(row)
    await conn.execute("update identity.keys set expires_at = now() where id = $1", created["key"]["id"])
    await conn.close()
    assert (await api.call("GET", "/whoami", key=created["secret"])).status == 401


async def test_a_key_does_not_outlive_the_key_it_was_made_with(api: Api, people: People) -> None:
    body = {"name": "short", "role": "owner", "expires_in_s": 600}
    parent = (await api.call("POST", "/keys", key=people.owner.key, json=body)).json
    longer = await api.call("POST", "/keys", key=parent["secret"], json={**body, "expires_in_s": 3600})
    assert (longer.status, longer.error["code"]) == (403, "identity.scope_exceeds_caller")
    assert longer.error["field"] == "expires_in_s"
    shorter = await api.call("POST", "/keys", key=parent["secret"], json={**body, "expires_in_s": 60})
    assert shorter.json["key"]["expires_at"] < parent["key"]["expires_at"]
    silent = await api.call("POST", "/keys", key=parent["secret"], json={"name": "child", "role": "viewer"})
    assert silent.json["key"]["expires_at"] == parent["key"]["expires_at"]


async def test_a_quota_is_for_a_project_that_exists(api: Api, people: People) -> None:
    known, unknown = f"/projects/{people.owner.project_id}/quota", f"/projects/{new_id('prj')}/quota"
    assert (await api.call("PUT", known, json={"gpus_max": 3})).json["gpus_max"] == 3
    assert (await api.call("PUT", unknown, json={"gpus_max": 3})).status == 404
    assert (await api.call("GET", unknown)).status == 404


async def test_a_deleted_service_accounts_keys_are_out(api: Api, people: People) -> None:
    account = await api.call("POST", "/service-accounts", key=people.owner.key, json={"name": "s", "role": "viewer"})
    body = {"name": "k", "role": "viewer", "service_account_id": account.json["id"]}
    secret = (await api.call("POST", "/keys", key=people.owner.key, json=body)).json["secret"]
    assert (await api.call("GET", "/whoami", key=secret)).status == 200
    path = f"/service-accounts/{account.json['id']}"
    assert (await api.call("DELETE", path, key=people.owner.key)).status == 204
    assert (await api.call("GET", path, key=people.owner.key)).status == 404
    async for _ in attempts():
        if (await api.call("GET", "/whoami", key=secret)).status == 401:
            break
    assert (await api.call("GET", "/whoami", key=secret)).status == 401


async def test_a_project_with_something_in_it_is_not_deleted(api: Api) -> None:
    project = await made(api, "/projects", {"name": "busy"})
    there = {"Penstock-Project": project["id"]}
    allocation = await made(api, "/allocations", {"sku": "g1.1", "wait_s": 600}, **there)
    answer = await api.call("DELETE", f"/projects/{project['id']}")
    assert (answer.status, answer.error["code"]) == (409, "identity.project_occupied")
    assert (await api.call("GET", f"/projects/{project['id']}")).status == 200
    assert allocation["project_id"] == project["id"]
    planned = await made(api, "/projects", {"name": "nothing runs yet"})
    there = {"Penstock-Project": planned["id"]}
    assert (await api.call("PUT", "/functions/later", json={"sku": "g1.1"}, headers=there)).status == 200
    refused = await api.call("DELETE", f"/projects/{planned['id']}")
    assert (refused.status, "still has functions" in refused.error["message"]) == (409, True)
    await api.call("DELETE", "/functions/later", headers=there)
    assert (await api.call("DELETE", f"/projects/{planned['id']}")).status == 204


async def test_a_deleted_project_refuses_everything(api: Api) -> None:
    project = await made(api, "/projects", {"name": "short lived"})
    inside = await person(api, project["id"], "owner")
    assert (await api.call("DELETE", f"/projects/{project['id']}", key=inside.key)).status == 204
    assert (await api.call("GET", f"/projects/{project['id']}")).status == 404
    # Who was just let in may be remembered for a moment.
    there = {"Penstock-Project": project["id"]}
    statuses: list[int] = []
    async for _ in attempts():
        asked = (api.call("GET", "/whoami", headers=there), api.call("GET", "/whoami", key=inside.key))
        statuses = [answer.status for answer in await asyncio.gather(*asked)]
        if statuses == [404, 401]:
            break
    assert statuses == [404, 401]
    again = await made(api, "/projects", {"name": "short lived"})
    assert again["id"] != project["id"]


async def test_the_default_project_stays(api: Api) -> None:
    assert (await api.call("DELETE", "/projects/prj_default")).status == 409


async def test_names_of_projects_are_unique_in_their_organisation(api: Api) -> None:
    await made(api, "/projects", {"name": "unique"})
    answer = await api.call("POST", "/projects", json={"name": "unique"})
    assert (answer.status, answer.error["code"]) == (409, "identity.name_taken")


async def test_owners_create_projects_and_move_to_them(api: Api, people: People) -> None:
    organisation = await made(api, "/organisations", {"name": "movers"})
    first = await made(api, "/projects", {"name": "first", "organisation_id": organisation["id"]})
    mover = await user(api, "mover")
    path = f"/projects/{first['id']}/members/{mover}"
    assert (await api.call("PUT", path, json={"role": "owner"})).status == 200
    key = await user_key(api, first["id"], mover, "owner")
    second = (await api.call("POST", "/projects", key=key, json={"name": "second"})).json
    assert second["organisation_id"] == organisation["id"]
    listed = (await api.call("GET", "/projects", key=key)).json["items"]
    assert [project["id"] for project in listed] == [first["id"], second["id"]]
    moved = await api.call("GET", "/whoami", key=key, headers={"Penstock-Project": second["id"]})
    assert (moved.json["project_id"], moved.json["role"]) == (second["id"], "owner")
    answer = await api.call("POST", "/projects", key=key, json={"name": "x", "organisation_id": "org_default"})
    assert answer.status == 403


async def test_lists_are_paged_without_gaps_or_repeats(api: Api, people: People) -> None:
    for number in range(5):
        body = {"name": f"page {number}", "role": "viewer"}
        assert (await api.call("POST", "/service-accounts", key=people.sister.key, json=body)).status == 201
    everything = (await api.call("GET", "/service-accounts?limit=200", key=people.sister.key)).json["items"]
    paged: list[str] = []
    cursor = ""
    while True:
        page = (await api.call("GET", f"/service-accounts?limit=2{cursor}", key=people.sister.key)).json
        paged += [account["id"] for account in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert paged == [account["id"] for account in everything]


async def test_routes_that_are_not_there_answer_in_the_envelope(api: Api) -> None:
    assert (await api.call("GET", "/nothing")).error["code"] == "not_found"
    assert (await api.call("DELETE", "/whoami")).error["code"] == "method_not_allowed"
    answer = await api.call("POST", "/projects", headers={"Content-Type": "text/plain"})
    assert answer.status == 400
    answer = await api.call("POST", "/projects", body=b'{"name":"x"}', headers={"Content-Type": "text/plain"})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    async with api.session.get(f"http://127.0.0.1:{api.port}/api/nothing") as response:
        assert response.status == 404
        assert "error" in await response.json()
