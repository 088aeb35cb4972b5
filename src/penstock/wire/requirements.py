"""Requirements: packages by name, as people write them, before they are resolved to a lock. Pure.

Each line is a name with optional extras, versions and a marker. Nothing in it may lead an installer elsewhere: no URL,
no path, no option. `normal` reads requirements and writes them in their one normal form, so that a comment, the order
or a blank changes nothing. Work is linear in the text.
"""

import re
from typing import Final

REQUIREMENTS_BYTES_MAX: Final = 64 << 10
LINES_MAX: Final = 500
_LINE_CHARS_MAX: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_EXTRAS: Final = re.compile(r"\[[A-Za-z0-9._, -]{0,255}\]")
_VERSION: Final = re.compile(r"(?:===|==|~=|!=|<=|>=|<|>)[A-Za-z0-9.!+_*-]{1,127}")
_MARKER: Final = re.compile(r"[A-Za-z0-9_.,'\"<>=!~() +*-]{1,1000}")


class BadRequirements(ValueError):
    """Not requirements; the text names the line and says why."""


def normal(text: str) -> str:
    """The same requirements, sorted, one to a line and without comments; BadRequirements when they are none."""
    if len(text.encode(errors="replace")) > REQUIREMENTS_BYTES_MAX:
        raise BadRequirements(f"it has more than {REQUIREMENTS_BYTES_MAX} bytes")
    lines = text.replace("\r\n", "\n").split("\n")
    if len(lines) > LINES_MAX:
        raise BadRequirements(f"it has more than {LINES_MAX} lines")
    found = {_requirement(number, content) for number, line in enumerate(lines, 1) if (content := _content(line))}
    if not found:
        raise BadRequirements("it names no package")
    return "\n".join(sorted(found)) + "\n"


def _content(line: str) -> str:
    """The line without its comment, which begins at the line's start or after a blank."""
    text = line.strip()
    if text.startswith("#"):
        return ""
    at = min((place for place in (text.find(" #"), text.find("\t#")) if place >= 0), default=len(text))
    return text[:at].strip()


def _requirement(number: int, line: str) -> str:
    if len(line) > _LINE_CHARS_MAX:
        raise BadRequirements(f"line {number}: it has more than {_LINE_CHARS_MAX} characters")
    if line.startswith("-"):
        raise BadRequirements(f"line {number}: options such as {_excerpt(line)} are not allowed; name packages only")
    what, semicolon, marker = line.partition(";")
    name = _NAME.match(what)
    if name is None or "@" in what or "/" in what or "\\" in what:
        raise BadRequirements(f"line {number}: {_excerpt(line)} is no package's name; no URL, no path")
    extras, versions = _extras(what[name.end() :].strip())
    checked = _versions(versions)
    if checked is None:
        raise BadRequirements(f"line {number}: {_excerpt(line)} must be name, name>=1.0 or name[extra]==1.0")
    if semicolon and not _MARKER.fullmatch(marker.strip()):
        raise BadRequirements(f"line {number}: the marker of {_excerpt(what)} is malformed")
    written = f"{name[0].lower()}{extras}{checked}"
    return f"{written} ; {' '.join(marker.split())}" if semicolon else written


def _extras(rest: str) -> tuple[str, str]:
    found = _EXTRAS.match(rest)
    return (found[0].replace(" ", ""), rest[found.end() :].strip()) if found else ("", rest)


def _versions(text: str) -> str | None:
    """The version specifiers without blanks; none when they are malformed."""
    if not text:
        return ""
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    parts = ["".join(part.split()) for part in inner.split(",")]
    return ",".join(sorted(parts)) if all(_VERSION.fullmatch(part) for part in parts) else None


def _excerpt(text: str) -> str:
    return repr(text.strip()[:60])
