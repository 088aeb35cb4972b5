"""Tables on terminals: ids are whole, lines fit, and without a terminal nothing is cut."""

import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import app as tree
from penstock.cli import output, tables
from penstock.cli.output import EXTRA, ID, NEEDED, NORMAL
from penstock.cli.text import cell
from penstock.processes import commands
from penstock.processes.up.folder import ProcessStatus
from scripted_api import ScriptedApi, json_answer

from .cases import CASES
from .conftest import Cli

PROSE = ("reason", "detail", "error", "memo", "description", "health_detail", "last_error", "waiting_for", "text")
LISTS = [
    (line, path, answer) for line, method, path, answer, _ in CASES if method == "GET" and "items" in (answer or {})
]
CUT_ID = re.compile(r"\b(?:[a-z]{3}_[0-9a-z]{0,25}|inv-[0-9a-f]{0,31})…")


def long(value: Any, field: str = "") -> Any:
    """An answer with ids and texts as long as real ones."""
    if isinstance(value, dict):
        return {name: long(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [long(each, field) for each in value]
    if not isinstance(value, str):
        return value
    if field == "id" and value.startswith("inv-"):
        return f"inv-{'0' * 32}"
    if found := re.fullmatch(r"([a-z]{3})_\w+", value):
        return f"{found[1]}_{'0' * 26}"
    return "because of this and that " * 8 if field in PROSE else value


class Terminal:
    """Standard output as a terminal of so many columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(output, "terminal_chars", lambda: columns)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("line", "path", "answer"), LISTS, ids=[each[0] for each in LISTS])
def test_every_list_fits_a_terminal_with_its_ids_whole(
    api: ScriptedApi,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    path: str,
    answer: Any,
    width: int,
) -> None:
    cli.logged_in(api)
    stretched = long(answer)
    api.on("GET", path, json_answer(stretched))
    Terminal(monkeypatch, width)
    assert tree.run(tree.app, line.split(), cli.environ()) == 0
    printed = shown(capsys)
    if line.startswith("fn logs"):
        return
    assert [row for row in printed if tables.width(row) > width] == []
    assert [row for row in printed if CUT_ID.search(row)] == []
    for item in stretched["items"] if printed and printed[0].split()[0] == "id" else []:
        assert item.get("id", "") in "\n".join(printed)


@pytest.mark.parametrize(("line", "path", "answer"), LISTS, ids=[each[0] for each in LISTS])
def test_without_a_terminal_nothing_is_cut(
    api: ScriptedApi, cli: Cli, capsys: pytest.CaptureFixture[str], line: str, path: str, answer: Any
) -> None:
    cli.logged_in(api)
    api.on("GET", path, json_answer(long(answer)))
    assert tree.run(tree.app, line.split(), cli.environ()) == 0
    said = capsys.readouterr()
    assert "…" not in said.out
    assert "too narrow" not in said.err


COLUMN = st.tuples(st.integers(1, 60), st.sampled_from([ID, NEEDED, NORMAL, EXTRA]), st.booleans())


@given(st.lists(COLUMN, min_size=1, max_size=12), st.integers(1, 200))
def test_only_ids_make_a_line_wider_than_the_terminal(columns: list[tuple[int, int, bool]], chars_max: int) -> None:
    natural = [chars for chars, _, _ in columns]
    ranks = [rank for _, rank, _ in columns]
    empty = [is_empty for _, _, is_empty in columns]
    widths = tables.fit(natural, ranks, chars_max, empty)
    ids = [at for at, rank in enumerate(ranks) if rank == ID] or [0]
    assert all(widths[at] == natural[at] for at in ids)
    assert all(widths[at] in (0, natural[at]) for at, rank in enumerate(ranks) if rank == NORMAL)
    assert all(chars <= natural[at] for at, chars in enumerate(widths))
    total = sum(chars + 3 for chars in widths if chars) - 3
    assert total <= chars_max or [at for at, chars in enumerate(widths) if chars] == ids


def test_what_is_empty_gives_way_first() -> None:
    assert tables.fit([10, 20, 20], [ID, NORMAL, NORMAL], 33, [False, True, False]) == [10, 0, 20]


@pytest.mark.parametrize("width", [80, 120])
def test_the_status_of_processes_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    Terminal(monkeypatch, width)
    processes = [
        ProcessStatus(
            name=name,
            pid=4_194_304,
            state="ready",
            restarts=0,
            since="2026-11-18T04:05:12.123456+00:00",
            metrics="http://127.0.0.1:45678/metrics",
        )
        for name in ("activator", "postgres")
    ]
    output.Output().items(processes, commands.PROCESS_COLUMNS)
    printed = shown(capsys)
    assert [row for row in printed if tables.width(row) > width] == []
    assert all("2026-11-18 04:05:12Z" in row for row in printed[1:])
    assert ("http://127.0.0.1:45678/metrics" in printed[1]) is (width == 120)
    assert not any("…" in row for row in printed)


@pytest.mark.parametrize(
    ("value", "shown", "bare"),
    [
        (0.1 + 0.2, "0.3", "0.3"),
        (300.0, "300", "300"),
        (1234.5, "1,234.5", "1234.5"),
        (1e-9, "0", "0"),
        (1e21, "1,000,000,000,000,000,000,000", "1000000000000000000000"),
    ],
)
def test_fractions_are_short(value: float, shown: str, bare: str) -> None:
    assert (cell(value), cell(value, bare=True)) == (shown, bare)
