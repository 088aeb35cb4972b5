"""Every pattern in the source, found by reading the source, with long input made for it: none takes quadratic time.

A pattern that is added is tried too. How it is used decides how it is tried: a whole match cannot begin in the middle.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Annotated, Any

import msgspec
import pytest

from costs import assert_linear

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
FUNCTIONS = {"compile", "match", "fullmatch", "search", "split", "sub", "findall", "finditer"}
ANCHORED = {"match", "fullmatch"}
SIZES = (1 << 10, 4 << 10, 16 << 10)
#: Patterns that are put together while the program runs, and from what.
BUILT = {"sdk/packing.py": "the ignore file of whoever packs, on their own machine"}


@dataclass(frozen=True)
class Found:
    """A pattern, where it stands, and the methods that it is used by."""

    place: str
    pattern: str | bytes
    flags: int
    uses: frozenset[str]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


SOURCES = {path.relative_to(SOURCE).as_posix(): _tree(path) for path in sorted(SOURCE.rglob("*.py"))}


def _uses(name: str, place: str) -> frozenset[str]:
    """The methods that are called on a pattern of this name: in its module, or anywhere if it is public."""
    modules = [SOURCES[place]] if name.startswith("_") else list(SOURCES.values())
    found = {
        node.attr
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and node.attr in FUNCTIONS
        and (getattr(node.value, "id", None) == name or getattr(node.value, "attr", None) == name)
    }
    return frozenset(found or FUNCTIONS)


def _assigned(module: ast.Module) -> dict[ast.AST, str]:
    named = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                named[node.value] = target.id
    return named


def _calls() -> Iterator[tuple[str, ast.Call, str | None]]:
    for place, module in SOURCES.items():
        named = _assigned(module)
        for node in ast.walk(module):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr not in FUNCTIONS:
                continue
            if getattr(called.value, "id", None) == "re":
                yield place, node, named.get(node)


def _patterns() -> Iterator[Found]:
    for place, call, name in _calls():
        pattern = _compiled(place, call, name)
        if pattern is not None:
            used = _uses(name, place) if name else frozenset({call.func.attr})  # type: ignore[attr-defined]
            yield Found(f"{place}:{call.lineno}", pattern.pattern, pattern.flags, used)


def _compiled(place: str, call: ast.Call, name: str | None) -> re.Pattern[Any] | None:
    """The pattern: the module's own if it has a name there, or what the call says."""
    if name is not None:
        module = importlib.import_module(
            "penstock." + place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        )
        if isinstance(found := getattr(module, name, None), re.Pattern):
            return found
    text = _value(call.args[0])
    return None if text is None else re.compile(text)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


FOUND = list(_patterns())


def _characters(items: Any) -> Iterator[str]:
    """One character for everything that a pattern can stand on."""
    for code, value in items:
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            yield chr(value) if code is codes.LITERAL else ("a" if value != ord("a") else "b")
        elif code is codes.ANY:
            yield "a"
        elif code is codes.IN:
            yield from list(_members(value))[:4]
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            yield from _characters(value[2])
        elif code is codes.SUBPATTERN:
            yield from _characters(value[3])
        elif code is codes.BRANCH:
            for branch in value[1]:
                yield from _characters(branch)


def _members(values: Any) -> Iterator[str]:
    kinds = {codes.CATEGORY_SPACE: " ", codes.CATEGORY_DIGIT: "7", codes.CATEGORY_WORD: "w"}
    if values[0][0] is codes.NEGATE:
        matcher = re.compile("[" + "".join(re.escape(each) for each in _members(values[1:])) + "]")
        yield from (each for each in "a 0-/:.@" if not matcher.match(each))
        return
    for code, value in values:
        if code is codes.LITERAL:
            yield chr(value)
        elif code is codes.RANGE:
            yield chr(value[0])
        elif code is codes.CATEGORY:
            yield kinds.get(value, "x")


def _pumps(pattern: str | bytes, flags: int) -> list[tuple[str, str, str]]:
    """(before, repeated, after): what the pattern consists of, over and over, and an end that fails it."""
    parsed = parser.parse(pattern, flags & ~re.DEBUG)
    characters = list(dict.fromkeys(each for each in _characters(parsed) if ord(each) < 0xD800))[:10]
    literal = "".join(chr(value) for code, value in parsed if code is codes.LITERAL)
    pairs = [first + second for first in characters[:4] for second in characters[:4] if first != second]
    pieces = dict.fromkeys(filter(None, [*characters, "".join(characters), literal, *pairs]))
    return [pump for piece in pieces for pump in (("", piece, ""), (literal, piece, "\x01"))]


def _texts(found: Found, size: int) -> Iterator[str | bytes]:
    for before, piece, after in _pumps(found.pattern, found.flags):
        text = before + piece * (size // len(piece)) + after
        yield text.encode("latin-1", "replace") if isinstance(found.pattern, bytes) else text


@pytest.mark.parametrize("found", FOUND, ids=[found.place for found in FOUND])
def test_long_input_takes_no_long_time(found: Found) -> None:
    pattern = re.compile(found.pattern, found.flags)
    nothing: Any = pattern.pattern[:0]

    def run(texts: list[Any]) -> None:
        for text in texts:
            if found.uses <= ANCHORED:
                pattern.fullmatch(text)
                pattern.match(text)
            else:
                pattern.sub(nothing, text)

    assert_linear(run, lambda size: list(_texts(found, size)), sizes=SIZES, bytes_per_byte_max=None)


def test_patterns_that_cannot_be_read_from_the_source_are_known() -> None:
    unread = {place for place, call, name in _calls() if _compiled(place, call, name) is None}
    assert unread == set(BUILT)


def test_a_bound_on_the_length_comes_before_the_pattern() -> None:
    """So patterns of messages see no more than the bound, and need no long input."""
    slow = msgspec.json.Decoder(Annotated[str, msgspec.Meta(max_length=64, pattern=r"^(a|a)*$")])
    with pytest.raises(msgspec.ValidationError, match="length <= 64"):
        slow.decode(b'"' + b"a" * 100_000 + b'b"')


def _bounds() -> Iterator[tuple[str, str, int | None]]:
    for place, module in SOURCES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Meta":
                given = {word.arg: word.value for word in node.keywords}
                if "pattern" in given:
                    bound = _value(given["max_length"]) if "max_length" in given else None
                    yield f"{place}:{node.lineno}", _value(given["pattern"]), bound


BOUNDS = list(_bounds())


@pytest.mark.parametrize(("place", "pattern", "bound"), BOUNDS, ids=[place for place, _, _ in BOUNDS])
def test_patterns_of_messages_take_no_long_time(place: str, pattern: str, bound: int | None) -> None:
    """Up to their bound, or of any length where they have none (or a large one)."""
    found = Found(place, pattern, 0, frozenset({"search"}))
    largest = 16 << 10 if bound is None else min(bound, 16 << 10)
    sizes = [max(1, largest // 16), max(1, largest // 4), max(1, largest)]

    def run(texts: list[Any]) -> None:
        for text in texts:
            re.search(pattern, text)

    assert_linear(run, lambda size: list(_texts(found, size)), sizes=sizes, bytes_per_byte_max=None)
