"""Shell completion."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.errors import CliError
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


ShellName = Annotated[Shell | None, typer.Argument(help="Your shell; by default that of $SHELL.")]


@command(app, "show", example="penstock completion show bash >> ~/.bashrc")
def show(session: Session, shell: ShellName = None) -> None:
    """Print the completion script."""
    from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

    name = _chosen(shell, session.environ).value
    session.output.line(get_completion_script(prog_name="penstock", complete_var=VARIABLE, shell=name))


@command(app, "install", example="penstock completion install zsh")
def install(session: Session, shell: ShellName = None) -> None:
    """Install completion for your shell."""
    from typer.completion import install  # pyright: ignore[reportPrivateImportUsage]

    name, path = install(shell=_chosen(shell, session.environ).value, prog_name="penstock", complete_var=VARIABLE)
    notice(f"{name} completion is in {path}; it works in new terminals")


def _chosen(shell: Shell | None, environ: Mapping[str, str]) -> Shell:
    if shell is not None:
        return shell
    name = environ.get("SHELL", "").rpartition("/")[2]
    if name not in {*Shell}:
        raise CliError(f"name your shell: {', '.join(Shell)} ($SHELL names none of them)", field="shell")
    return Shell(name)


def complete(tree: "Command", session: Session, environ: Mapping[str, str]) -> int:
    """Answer a shell that asks what may come next."""
    from typer.completion import get_completion_inspect_parameters, shell_complete

    # Makes the shells known, which typer else does for options that this command line does not have.
    get_completion_inspect_parameters()
    code = shell_complete(tree, {"obj": session}, "penstock", VARIABLE, environ[VARIABLE])
    sys.stdout.flush()
    return code
