"""A scripted identity provider, as the command line sees one; and a browser that only goes where it is sent back to."""

import sys
from typing import Any
from urllib.parse import urlencode

from scripted_api import ScriptedApi, json_answer

from .answers import MOMENT

SECRET = "pss_" + "A" * 43
PROJECT = {"id": "prj_default", "organisation_id": "org_default", "name": "default", "created_at": MOMENT}
OPENED: dict[str, Any] = {
    "session": {
        "id": f"ses_{'0' * 26}",
        "principal_id": "usr_default",
        "provider": "corp",
        "groups": [],
        "created_at": MOMENT,
        "expires_at": MOMENT,
        "revoked_at": None,
        "last_used_at": None,
    },
    "secret": SECRET,
    "display_name": "Ada",
    "operator": False,
    "projects": [PROJECT],
}


def script(api: ScriptedApi, *, device: bool = False, names: tuple[str, ...] = ("corp",)) -> None:
    """Make the scripted server an API with providers, and the provider behind them."""
    client = {"issuer": api.url, "client_id": "penstock", "client_secret": "", "scopes": ["openid"]}
    api.on("GET", "/login", json_answer({"providers": [{"name": name, **client} for name in names]}))
    document = {
        "issuer": api.url,
        "authorization_endpoint": f"{api.url}/auth",
        "token_endpoint": f"{api.url}/token",
    }
    if device:
        document["device_authorization_endpoint"] = f"{api.url}/device"
    api.on("GET", "//.well-known/openid-configuration", json_answer(document))
    api.on("POST", "//token", json_answer({"id_token": "a.b.c"}))
    api.on("POST", "/sessions", json_answer(OPENED, 201))


def log_in(api: ScriptedApi) -> list[str]:
    """The command line for it."""
    script(api)
    return ["login", "--api-url", api.url]


def browser(**answer: str) -> str:
    """For BROWSER: goes back at once with a code and the state that it was sent with, but for what is given."""
    program = (
        "import sys, urllib.parse as p, urllib.request as r;"
        "asked = dict(p.parse_qsl(p.urlsplit(sys.argv[1]).query));"
        "answer = dict(p.parse_qsl(bytes.fromhex(sys.argv[2]).decode(), keep_blank_values=True));"
        "back = p.urlencode(dict(code='c0de', state=asked['state']) | answer);"
        "r.urlopen(asked['redirect_uri'] + '?' + back).read()"
    )
    # In hexadecimal: the variable is split at colons.
    return f'{sys.executable} -c "{program}" %s "{urlencode(answer).encode().hex()}"'
