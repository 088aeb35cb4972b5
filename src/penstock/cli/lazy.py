"""Commands that are imported when they are used: `penstock --help` needs their names and a line each, no more."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name at the root, shown in the help under `panel`. `inside` takes the command of this name out of the group
    that is loaded."""

    help: str
    load: Callable[[], typer.Typer]
    inside: bool = False
    hidden: bool = False
    panel: str = "Commands"


def module(name: str, attribute: str = "app") -> Callable[[], typer.Typer]:
    """Loads a group from a module."""
    return lambda: cast("typer.Typer", getattr(importlib.import_module(name), attribute))


def lazy_group(entries: Mapping[str, Entry]) -> type[TyperGroup]:
    """The class of a group that has these entries. The mapping is read when it is needed, so it may still grow."""

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: "Context") -> list[str]:  # noqa: ARG002
            return list(entries)

        def get_command(self, ctx: "Context", cmd_name: str) -> "Command | None":  # noqa: ARG002
            if cmd_name not in self.commands and (entry := entries.get(cmd_name)):
                self.commands[cmd_name] = _load(cmd_name, entry)
            return self.commands.get(cmd_name)

        def resolve_command(self, ctx: "Context", args: list[str]) -> Any:
            if args and args[0] not in entries:
                # Suggestions come from what is loaded.
                for name in entries:
                    self.get_command(ctx, name)
            return super().resolve_command(ctx, args)

        def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:  # noqa: ARG002
            for panel, shown in _panels(entries).items():
                with formatter.section(panel):
                    formatter.write_dl(shown)

    return LazyGroup


def _panels(entries: Mapping[str, Entry]) -> dict[str, list[tuple[str, str]]]:
    """Names and help of the entries that are shown, by panel."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, entry in entries.items():
        if not entry.hidden:
            panels.setdefault(entry.panel, []).append((name, entry.help))
    return panels


def _load(name: str, entry: Entry) -> "Command":
    group = typer.main.get_group(entry.load())
    command = group.commands[name] if entry.inside else group
    command.hidden = entry.hidden
    return command
