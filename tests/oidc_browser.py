"""A browser for tests: follows redirects, keeps cookies, fills in forms. As a script: `oidc_browser.py URL` logs in as
`$OIDC_PERSON`."""

import os
import sys
import urllib.request
from html.parser import HTMLParser
from http.cookiejar import CookieJar
from urllib.parse import urlencode, urljoin, urlsplit

_PAGES_MAX = 12


class _Form(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self.action = given.get("action") or ""
        if tag == "input" and (name := given.get("name")):
            self.fields[name] = given.get("value") or ""


class _StopAt(urllib.request.HTTPRedirectHandler):
    def __init__(self, prefix: str | None) -> None:
        self.prefix = prefix
        self.reached = ""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if self.prefix and newurl.startswith(self.prefix):
            self.reached = newurl
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def visit(url: str, person: str, *, stop_at: str | None = None) -> str:
    """Log in there as this person; the last page, or the address where a redirect begins with `stop_at`."""
    stop = _StopAt(stop_at)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()), stop)
    data: bytes | None = None
    for _ in range(_PAGES_MAX):
        try:
            with opener.open(urllib.request.Request(url, data=data), timeout=20) as response:
                page, url = response.read().decode(), response.url
        except urllib.error.HTTPError as error:
            with error:
                if stop.reached:
                    return stop.reached
                raise
        form = _Form()
        form.feed(page)
        if form.action is None:
            return page
        if "login" in form.fields:
            form.fields["login"] = person
        url, data = urljoin(url, form.action), urlencode(form.fields).encode()
    raise AssertionError(f"still a form after {_PAGES_MAX} pages: {urlsplit(url).path}")


if __name__ == "__main__":
    visit(sys.argv[1], os.environ["OIDC_PERSON"])
