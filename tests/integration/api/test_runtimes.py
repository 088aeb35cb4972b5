"""Runtimes over the running api: put, read, refuse, delete; never another project's."""

from .conftest import Api, People

LOCK = f"tiny==1.0 --hash=sha256:{'a' * 64}\n"


async def test_a_runtime_is_its_projects_own(api: Api, people: People) -> None:
    mine, theirs = people.owner.key, people.stranger.key
    put = await api.call("PUT", "/runtimes/vision", key=mine, json={"lock": f"# mine\n{LOCK}"})
    assert put.status == 200
    assert (put.json["name"], put.json["packages"], put.json["version"], put.json["lock"]) == ("vision", 1, 1, LOCK)
    assert (await api.call("GET", "/runtimes/vision", key=mine)).json == put.json
    listed = (await api.call("GET", "/runtimes?limit=1", key=mine)).json
    assert listed["items"][0]["lock"] == ""
    for method in ("GET", "DELETE"):
        assert (await api.call(method, "/runtimes/vision", key=theirs)).status == 404
    body = {"sku": "g1.1", "runtime": "vision"}
    refused = await api.call("POST", "/allocations", key=theirs, json=body)
    assert (refused.status, refused.error["code"]) == (400, "compute.unknown_runtime")
    used = await api.call("POST", "/allocations", key=mine, json=body | {"wait_s": 60})
    assert (used.status, used.json["runtime"]) == (201, put.json["digest"])
    in_use = await api.call("DELETE", "/runtimes/vision", key=mine)
    assert (in_use.status, in_use.error["code"]) == (409, "compute.runtime_in_use")
    assert used.json["id"] in in_use.error["message"]


async def test_bad_input_names_its_field_and_changes_nothing(api: Api, people: People) -> None:
    key = people.owner.key
    for name, body, code, field in (
        ("bad", {"lock": "tiny==1.0"}, "compute.bad_lock", "lock"),
        ("bad", {"lock": "--index-url https://evil.example\n" + LOCK}, "compute.bad_lock", "lock"),
        ("bad", {"lock": "tiny==1.0 \0" + LOCK}, "invalid_request", "lock"),
        ("bad", {"lock": "#" * ((512 << 10) + 1)}, "invalid_request", "lock"),
        ("bad", {"lock": LOCK, "base": "Not An Image"}, "compute.bad_image", "base"),
        ("bad", {"lock": LOCK, "base": "python@sha256:1"}, "compute.bad_digest", "base"),
        ("bad", {}, "invalid_request", "lock"),
        ("bad", {"lock": LOCK, "extra": 1}, "invalid_request", "extra"),
        ("Bad_Name", {"lock": LOCK}, "invalid_request", "name"),
    ):
        answer = await api.call("PUT", f"/runtimes/{name}", key=key, json=body)
        assert (answer.status, answer.error["code"], answer.error.get("field")) == (400, code, field), answer.content
        assert (await api.call("GET", f"/runtimes/{name}", key=key)).status == 404


async def test_a_resolution_is_its_projects_own(api: Api, people: People) -> None:
    mine, theirs = people.owner.key, people.stranger.key
    asked = await api.call("POST", "/resolutions", key=mine, json={"requirements": "Tiny  # small\n"})
    assert (asked.status, asked.json["state"], asked.json["requirements"]) == (202, "queued", "tiny\n")
    path = f"/resolutions/{asked.json['id']}"
    assert (await api.call("GET", path, key=mine)).json["id"] == asked.json["id"]
    assert (await api.call("GET", path, key=theirs)).status == 404
    other = await api.call("POST", "/resolutions", key=theirs, json={"requirements": "tiny"})
    assert (other.status, other.json["id"] != asked.json["id"]) == (202, True)


async def test_bad_requirements_name_their_line(api: Api, people: People) -> None:
    key = people.owner.key
    for body, code, field, says in (
        ({"requirements": "tiny\n-r other.txt"}, "compute.bad_requirements", "requirements", "line 2"),
        ({"requirements": "tiny @ https://evil.example/x.whl"}, "compute.bad_requirements", "requirements", "line 1"),
        ({"requirements": "../x"}, "compute.bad_requirements", "requirements", "line 1"),
        ({"requirements": ""}, "compute.bad_requirements", "requirements", "no package"),
        ({"requirements": "a\0"}, "invalid_request", "requirements", ""),
        ({"requirements": "#" * ((64 << 10) + 1)}, "invalid_request", "requirements", ""),
        ({"requirements": ["tiny"]}, "invalid_request", "requirements", ""),
        ({"requirements": "tiny", "base": "Not An Image"}, "compute.bad_image", "base", ""),
        ({"requirements": "tiny", "upgrade": "yes"}, "invalid_request", "upgrade", ""),
        ({"requirements": "tiny", "extra": 1}, "invalid_request", "extra", ""),
        ({}, "invalid_request", "requirements", ""),
    ):
        answer = await api.call("POST", "/resolutions", key=key, json=body)
        assert (answer.status, answer.error["code"], answer.error.get("field")) == (400, code, field), answer.content
        assert says in answer.error["message"]


async def test_a_name_that_ends_in_its_digest_stays_what_it_is(api: Api, people: People) -> None:
    key = people.owner.key
    digest = (await api.call("PUT", "/runtimes/probe", key=key, json={"lock": LOCK})).json["digest"]
    name = f"/runtimes/app-{digest[:12]}"
    for _ in range(2):
        assert (await api.call("PUT", name, key=key, json={"lock": LOCK})).status == 200
    changed = await api.call("PUT", name, key=key, json={"lock": LOCK.replace("1.0", "2.0")})
    assert (changed.status, changed.error["code"]) == (409, "compute.runtime_named_by_digest")


async def test_a_runtime_that_a_version_of_a_function_names_is_not_deleted(api: Api, people: People) -> None:
    key = people.owner.key
    body = {"sku": "g1.1", "command": ["serve"], "workers_min": 0}
    assert (await api.call("PUT", "/runtimes/served", key=key, json={"lock": LOCK.replace("1.0", "3.0")})).status == 200
    for runtime in ({"runtime": "served"}, {}):
        deployed = await api.call("PUT", "/functions/serves", key=key, json=body | runtime)
        assert deployed.status == 200, deployed.content
        refused = await api.call("DELETE", "/runtimes/served", key=key)
        assert (refused.status, refused.error["code"]) == (409, "compute.runtime_in_use")
        assert "serves" in refused.error["message"], "a kept version may be gone back to"
    assert (await api.call("GET", "/runtimes/served", key=key)).status == 200
    assert (await api.call("DELETE", "/functions/serves", key=key)).status == 204
    assert (await api.call("DELETE", "/runtimes/served", key=key)).status == 204
