"""Shell completion."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.output import notice
from penstock.cli.session import Session, command, group

if TYPE_CHECKING:
    from typer._click import Command  # pyright: ignore[reportPrivateImportUsage]

VARIABLE: Final = "_PENSTOCK_COMPLETE"

app = group("completion", "Complete commands and options with the tab key.")


class Shell(StrEnum):
    """Shells that can complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


ShellName = Annotated[Shell, typer.Argument(help="Your shell.")]


@command(app, "show", example="penstock completion show bash >> ~/.bashrc")
def show(session: Session, shell: ShellName) -> None:
    """Print the completion script."""
    from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

    session.output.line(get_completion_script(prog_name="penstock", complete_var=VARIABLE, shell=shell.value))


@command(app, "install", example="penstock completion install zsh")
def install(_: Session, shell: ShellName) -> None:
    """Install completion for your shell."""
    from typer.completion import install  # pyright: ignore[reportPrivateImportUsage]

    name, path = install(shell=shell.value, prog_name="penstock", complete_var=VARIABLE)
    notice(f"{name} completion is in {path}; it works in new terminals")


def complete(tree: "Command", session: Session, environ: Mapping[str, str]) -> int:
    """Answer a shell that asks what may come next."""
    from typer.completion import get_completion_inspect_parameters, shell_complete

    # Makes the shells known, which typer else does for options that this command line does not have.
    get_completion_inspect_parameters()
    code = shell_complete(tree, {"obj": session}, "penstock", VARIABLE, environ[VARIABLE])
    sys.stdout.flush()
    return code
