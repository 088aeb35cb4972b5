"""Logging in with an identity provider: what is sent, what is refused, what is stored."""

import threading
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.cli import oidc
from penstock.cli.callback import listen
from penstock.cli.errors import CliError
from scripted_api import ScriptedApi, json_answer, text_answer

from .conftest import Cli
from .providers import OPENED, PROJECT, SECRET, browser, log_in, script

OTHER = PROJECT | {"id": f"prj_{'0' * 26}", "name": "other"}


def discovered(api: ScriptedApi) -> oidc.Provider:
    return oidc.discover(api.url, client_id="penstock", client_secret="", scopes=("openid",))


def form(api: ScriptedApi, path: str) -> dict[str, str]:
    body = next(seen.body for seen in api.seen if seen.path == path)
    return {name: values[0] for name, values in parse_qs(body.decode()).items()}


def test_a_browser_login_proves_that_it_began_here(cli: Cli, api: ScriptedApi) -> None:
    done = cli.run(*log_in(api), env={"BROWSER": browser()})
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    address = done.stderr.partition("go to: ")[2].partition("\n")[0]
    asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    sent = form(api, "/token")
    assert asked["code_challenge_method"] == "S256"
    assert asked["redirect_uri"] == sent["redirect_uri"]
    assert asked["redirect_uri"].startswith("http://127.0.0.1:")
    assert (sent["code"], sent["grant_type"]) == ("c0de", "authorization_code")
    assert len(sent["code_verifier"]) >= 43
    exchanged = next(seen for seen in api.seen if seen.path == "/api/v1/sessions")
    assert f'"nonce":"{asked["nonce"]}"'.encode() in exchanged.body
    assert "authorization" not in exchanged.headers
    assert cli.config.stat().st_mode & 0o777 == 0o600
    assert cli.source("project") == ("prj_default", "profile default")


def test_logging_out_ends_the_session_on_the_server(cli: Cli, api: ScriptedApi) -> None:
    assert cli.run(*log_in(api), env={"BROWSER": browser()}).returncode == 0
    api.on("DELETE", "/sessions/current", json_answer(None, 204))
    assert cli.run("logout").returncode == 0
    ended = next(seen for seen in api.seen if seen.method == "DELETE")
    assert ended.headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in cli.config.read_text()


def test_people_with_several_projects_are_told(cli: Cli, api: ScriptedApi) -> None:
    arguments = log_in(api)
    api.on("POST", "/sessions", json_answer(OPENED | {"projects": [PROJECT, OTHER]}, 201))
    done = cli.run(*arguments, env={"BROWSER": browser()})
    assert done.returncode == 0
    assert "choose one with -p" in done.stderr
    assert cli.source("project")[0] is None
    assert cli.run(*arguments, "-p", str(OTHER["id"]), env={"BROWSER": browser()}).returncode == 0
    assert cli.source("project")[0] == OTHER["id"]


def test_a_login_to_another_cloud_forgets_the_old_ones_gateway(cli: Cli, api: ScriptedApi) -> None:
    cli.write_config("[profiles.default]\napi_url = 'https://old.example'\ngateway_url = 'https://g.old.example'\n")
    assert cli.run(*log_in(api), env={"BROWSER": browser()}).returncode == 0
    assert cli.source("gateway_url")[0] != "https://g.old.example"
    assert "g.old.example" not in cli.config.read_text()


def test_one_of_several_providers_is_named(cli: Cli, api: ScriptedApi) -> None:
    script(api, names=("corp", "lab"))
    cli.fails(1, "login", "--api-url", api.url, says="there are: corp, lab; choose with --provider")
    cli.fails(1, "login", "--api-url", api.url, "--provider", "x", says="no identity provider 'x'")
    arguments = ("login", "--api-url", api.url, "--provider", "lab")
    assert cli.run(*arguments, env={"BROWSER": browser()}).returncode == 0


def test_without_a_device_flow_the_address_is_pasted(cli: Cli, api: ScriptedApi) -> None:
    arguments = [*log_in(api), "--no-browser"]
    done = cli.run(*arguments, stdin="http://127.0.0.1:8765/callback?code=c&state=guessed\n")
    assert done.returncode == 3
    assert "state mismatch" in done.stderr
    assert "is not an address" in cli.run(*arguments, stdin="http://[\n").stderr
    cli.fails(1, *arguments, "--no-input", says="--no-input was given")


@pytest.mark.parametrize("answer", [{"error": "access_denied"}, {"code": ""}, {"iss": "https://evil.example"}])
def test_a_refusal_of_the_provider_ends_with_3(cli: Cli, api: ScriptedApi, answer: dict[str, str]) -> None:
    done = cli.run(*log_in(api), env={"BROWSER": browser(**answer)})
    assert (done.returncode, cli.config.exists()) == (3, False), done.stderr


def test_the_device_flow_obeys_the_provider(api: ScriptedApi) -> None:
    script(api, device=True)
    begun = {"device_code": "d", "user_code": "AB-CD", "verification_uri": "https://id/device", "interval": 2}
    api.on("POST", "//device", json_answer(begun))
    api.on(
        "POST",
        "//token",
        json_answer({"error": "authorization_pending"}, 400),
        json_answer({"error": "slow_down"}, 400),
        json_answer({"error": "authorization_pending"}, 400),
        json_answer({"id_token": "a.b.c"}),
    )
    naps: list[float] = []
    shown: list[tuple[str, str]] = []
    token = oidc.by_device(discovered(api), lambda *words: shown.append(words), sleep=naps.append)
    assert (token, naps, shown) == ("a.b.c", [2, 2, 7, 7], [("https://id/device", "AB-CD")])


@pytest.mark.parametrize(
    ("begun", "answer", "says"),
    [
        ({"expires_in": 300}, {"error": "expired_token"}, "nobody confirmed"),
        ({"expires_in": 4}, {"error": "authorization_pending"}, "nobody confirmed"),
        ({}, {"error": "access_denied", "error_description": "not you"}, "access_denied not you"),
        ({}, {}, "no id_token"),
    ],
)
def test_a_device_that_nobody_confirms_ends_with_3(
    api: ScriptedApi, begun: dict[str, Any], answer: dict[str, str], says: str
) -> None:
    script(api, device=True)
    usual = {"device_code": "d", "user_code": "AB-CD", "verification_uri": "https://id/device"}
    api.on("POST", "//device", json_answer(usual | begun))
    api.on("POST", "//token", json_answer(answer, 400 if answer else 200))
    with pytest.raises(CliError, match=says) as caught:
        oidc.by_device(discovered(api), lambda *_: None, sleep=lambda _: None)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (text_answer("<html>"), 2, "cannot use the identity provider"),
        (text_answer("moved", 302, Location="https://elsewhere.example"), 2, "it answered 302"),
        (json_answer(["list"]), 2, "not a JSON object"),
        (json_answer({"issuer": "https://other.example"}), 3, "another issuer"),
        (text_answer(" " * (oidc.BYTES_MAX + 1)), 2, "larger than"),
    ],
)
def test_a_provider_that_makes_no_sense_is_named(api: ScriptedApi, answer: Any, code: int, says: str) -> None:
    api.on("GET", "//.well-known/openid-configuration", answer)
    with pytest.raises(CliError, match=says) as caught:
        discovered(api)
    assert caught.value.exit_code == code


def test_nothing_is_sent_unencrypted_over_a_network() -> None:
    with pytest.raises(CliError, match="is not encrypted"):
        oidc.discover("http://id.example", client_id="c", client_secret="", scopes=())


def test_the_callback_takes_one_answer_at_its_path_only() -> None:
    pages: list[int] = []

    def visit(url: str) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url.replace("/callback", "/favicon.ico"), timeout=10)
        caught.value.close()
        with urllib.request.urlopen(url + "?code=c&state=s", timeout=10) as page:
            pages.append(page.status)
            assert b"close this page" in page.read()

    with listen() as callback:
        visitor = threading.Thread(target=visit, args=(callback.url,))
        visitor.start()
        assert callback.wait(10) == "code=c&state=s"
        visitor.join(10)
    assert pages == [200]
