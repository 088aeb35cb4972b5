"""Every pattern in the source, found by reading the source, with long input made for it: none takes quadratic time.

A pattern that is added is tried too. How it is used decides how it is tried: a whole match cannot begin in the middle.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Found:
    """A pattern, where it stands, and the methods that it is used by."""

    place: str
    pattern: str | bytes
    flags: int
    uses: frozenset[str]


@dataclass(frozen=True)
class Call:
    """A call of a function of `re`: its first argument if it is a literal, and the name that the result gets."""

    line: int
    function: str
    text: Any
    name: str | None


@dataclass(frozen=True)
class Bound:
    """A pattern of a field of messages, and how long the field may be."""

    place: str
    pattern: str
    length_max: int | None


@dataclass
class Source:
    """All that matters of a module. Its tree is not kept: it would slow every collection of garbage down."""

    calls: list[Call] = field(default_factory=list)
    #: (name, method): methods of patterns that are called on this name.
    uses: set[tuple[str | None, str]] = field(default_factory=set)
    bounds: list[Bound] = field(default_factory=list)


def _read(place: str, text: str) -> Source:
    source, named = Source(), {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                named[value] = name
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                named[value] = name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=function)) if function in FUNCTIONS:
                source.calls.append(Call(node.lineno, function, _value(node.args[0]), named.get(node)))
            case ast.Call(func=ast.Name(id="Meta") | ast.Attribute(attr="Meta")):
                given = {word.arg: _value(word.value) for word in node.keywords}
                if "pattern" in given:
                    source.bounds.append(Bound(f"{place}:{node.lineno}", given["pattern"], given.get("max_length")))
            case ast.Attribute(value=value, attr=method) if method in FUNCTIONS:
                source.uses.add((getattr(value, "id", getattr(value, "attr", None)), method))
            case _:
                pass
    return source


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


SOURCES = {
    place.relative_to(SOURCE).as_posix(): _read(place.relative_to(SOURCE).as_posix(), place.read_text())
    for place in sorted(SOURCE.rglob("*.py"))
}


def _uses(name: str, place: str) -> frozenset[str]:
    """The methods that are called on a pattern of this name: in its module, or anywhere if it is public. All of its
    module's where it is used by another name."""
    sources = [SOURCES[place]] if name.startswith("_") else list(SOURCES.values())
    found = {method for source in sources for used, method in source.uses if used == name}
    return frozenset(found or {method for used, method in SOURCES[place].uses if used != "re"} or FUNCTIONS)


def _patterns() -> Iterator[Found]:
    for place, source in SOURCES.items():
        for call in source.calls:
            pattern = _compiled(place, call)
            if pattern is not None:
                used = _uses(call.name, place) if call.name else frozenset({call.function})
                yield Found(f"{place}:{call.line}", pattern.pattern, pattern.flags, used)


def _compiled(place: str, call: Call) -> re.Pattern[Any] | None:
    """The pattern: the module's own if it has a name there, or what the call says."""
    if call.name is not None:
        module = importlib.import_module(
            "penstock." + place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        )
        if isinstance(found := getattr(module, call.name, None), re.Pattern):
            return found
    return None if call.text is None else re.compile(call.text)


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


def test_every_pattern_can_be_read_from_the_source() -> None:
    assert not [
        f"{place}:{call.line}"
        for place, source in SOURCES.items()
        for call in source.calls
        if _compiled(place, call) is None
    ]


def test_a_bound_on_the_length_comes_before_the_pattern() -> None:
    """So patterns of messages see no more than the bound, and need no long input."""
    slow = msgspec.json.Decoder(Annotated[str, msgspec.Meta(max_length=64, pattern=r"^(a|a)*$")])
    with pytest.raises(msgspec.ValidationError, match="length <= 64"):
        slow.decode(b'"' + b"a" * 100_000 + b'b"')


BOUNDS = [bound for source in SOURCES.values() for bound in source.bounds]


@pytest.mark.parametrize("bound", BOUNDS, ids=[bound.place for bound in BOUNDS])
def test_patterns_of_messages_take_no_long_time(bound: Bound) -> None:
    """Up to their bound, or of any length where they have none (or a large one)."""
    found = Found(bound.place, bound.pattern, 0, frozenset({"search"}))
    largest = min(bound.length_max or SIZES[-1], SIZES[-1])
    sizes = [max(1, largest // 16), max(1, largest // 4), max(1, largest)]

    def run(texts: list[Any]) -> None:
        for text in texts:
            re.search(bound.pattern, text)

    assert_linear(run, lambda size: list(_texts(found, size)), sizes=sizes, bytes_per_byte_max=None)
