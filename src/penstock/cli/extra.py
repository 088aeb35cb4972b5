"""Commands that need the server extra. Where it is not installed, they are listed and say how to install it."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.errors import CliError

if TYPE_CHECKING:
    from typer._click import Context  # pyright: ignore[reportPrivateImportUsage]

#: Without one of these the extra is not installed.
_MODULES: Final = ("aiohttp", "asyncpg", "litestar", "temporalio")
_INSTALL: Final = "pip install 'penstock-….whl[server,embedded]' (docs/guides/install.md)"


def installed() -> bool:
    """Whether this environment has the extra."""
    return all(find_spec(name) is not None for name in _MODULES)


def missing(command: str) -> CliError:
    """The error of a command that cannot run without the extra."""
    return CliError(f"`{command}` needs the servers, which are not installed here: {_INSTALL}", code="no_server")


def needs_server(name: str, load: Callable[[], typer.Typer]) -> Callable[[], typer.Typer]:
    """The group that `load` gives, or a substitute that has one command of this name."""
    return lambda: load() if installed() else _substitute(name)


class _MissingCommand(TyperCommand):
    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Refuse every argument list, that of the help included. Completion goes on."""
        if not ctx.resilient_parsing:
            raise missing(ctx.command_path)
        return super().parse_args(ctx, args)


class _MissingGroup(TyperGroup):
    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """As the command's."""
        if not ctx.resilient_parsing:
            raise missing(ctx.command_path)
        return super().parse_args(ctx, args)


def _substitute(name: str) -> typer.Typer:
    loaded = typer.Typer(name=name, cls=_MissingGroup, add_completion=False)
    loaded.callback()(_nothing)
    loaded.command(name, cls=_MissingCommand)(_nothing)
    return loaded


def _nothing() -> None:
    """Never run: the arguments are refused before."""
