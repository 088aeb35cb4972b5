"""One run of the command line: its global options, what they resolve to, and how commands are declared.

Global options may stand before or after the command: every group and command takes them, and the later one wins.
"""

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec

import typer
from typer.core import TyperCommand

from penstock.cli import completing
from penstock.cli.errors import AUTH, MEANINGS, CliError
from penstock.cli.lazy import Entry, lazy_group
from penstock.cli.output import Format, Output
from penstock.cli.passing import PassingCommand
from penstock.cli.resolve import Flags, Resolved, Value, resolve

if TYPE_CHECKING:
    from penstock.sdk.client import Client

P = ParamSpec("P")

_SWITCHES: Final = frozenset({"no_heading", "no_input", "insecure_http"})
HELP: Final = {"help_option_names": ["-h", "--help"]}
_ALLOW_HTTP: Final = "PENSTOCK_ALLOW_HTTP"


def _options(*, hidden: bool) -> dict[str, Any]:
    """The global options as parameters. Below the root they are taken but not shown again."""
    return {
        "output": Annotated[Format | None, typer.Option("-o", "--output", help="How to print.", hidden=hidden)],
        "no_heading": Annotated[
            bool, typer.Option("--no-heading", help="Print no headings in tables and CSV.", hidden=hidden)
        ],
        "project": Annotated[
            str | None,
            typer.Option(
                "-p",
                "--project",
                help="Act in this project: its name or id.",
                hidden=hidden,
                autocompletion=completing.projects,
            ),
        ],
        "profile": Annotated[
            str | None,
            typer.Option(
                "--profile",
                help="Use this profile of the configuration file.",
                hidden=hidden,
                autocompletion=completing.profiles,
            ),
        ],
        "api_url": Annotated[str | None, typer.Option("--api-url", help="The API's address.", hidden=hidden)],
        "no_input": Annotated[bool, typer.Option("--no-input", help="Never ask; fail instead.", hidden=hidden)],
        "data": Annotated[
            str | None,
            typer.Option("--data", metavar="DIR", help="The local instance's data folder.", hidden=hidden),
        ],
        "insecure_http": Annotated[
            bool,
            typer.Option("--insecure-http", help="Send the key also over plain http to other machines.", hidden=hidden),
        ],
    }


@dataclass(slots=True)
class Session:
    """What a command works with."""

    environ: Mapping[str, str]
    output: Output = field(default_factory=Output)
    flags: Flags = field(default_factory=Flags)
    no_input: bool = False
    insecure_http: bool = False
    argv: Sequence[str] = ()
    context: typer.Context | None = None

    def take(
        self,
        *,
        output: Format | None,
        no_heading: bool,
        project: str | None,
        profile: str | None,
        api_url: str | None,
        no_input: bool,
        data: str | None,
        insecure_http: bool,
    ) -> None:
        """Options given at one place of the command line."""
        if output:
            self.output = replace(self.output, format=output)
        if no_heading:
            self.output = replace(self.output, heading=False)
        self.no_input |= no_input
        self.insecure_http |= insecure_http
        given = {"project": project, "profile": profile, "api_url": api_url, "data": data}
        self.flags = replace(self.flags, **{name: value for name, value in given.items() if value})

    def resolved(self) -> Resolved:
        """Where every value comes from."""
        return resolve(self.flags, self.environ)

    def client(self) -> "Client":
        """A client for the server that the options lead to."""
        from penstock.sdk.client import Client

        return Client(**self.target())

    def target(self, *, timeout_s: float | None = None, in_project: bool = True) -> dict[str, Any]:
        """What a client is made from: address, key, project and gateway, or a CliError that says what to do."""
        resolved = self.resolved()
        if resolved.api_url is None or resolved.key is None:
            raise _not_logged_in(resolved)
        given: dict[str, Any] = {
            "api_url": resolved.api_url.text,
            "key": resolved.key.text,
            "gateway_url": resolved.gateway_url.text if resolved.gateway_url else None,
            "allow_http": self.allow_http or resolved.is_local,
            **({} if timeout_s is None else {"timeout_s": timeout_s}),
        }
        return given | {"project": self._project(resolved.project, given) if in_project else None}

    @property
    def allow_http(self) -> bool:
        """Whether the key may go over plain HTTP to other machines."""
        return self.insecure_http or self.environ.get(_ALLOW_HTTP) == "1"

    def _project(self, project: Value | None, given: Mapping[str, Any]) -> str | None:
        """The project's id, which may be given by its name."""
        if project is None or project.text.startswith("prj_"):
            return project.text if project else None
        from penstock.cli import names
        from penstock.sdk.client import Client

        with Client(**given) as client:
            return names.project(client, project.text)

    def line(self, *words: str) -> str:
        """A command line for the person to type, in the same place as this one."""
        flags = {"--profile": self.flags.profile, "-p": self.flags.project, "--api-url": self.flags.api_url}
        flags["--data"] = self.flags.data
        given = [word for name, value in flags.items() if value for word in (name, value)]
        given += ["--insecure-http"] if self.insecure_http else []
        return shlex.join(["penstock", *given, *words])

    def need_input(self, what: str) -> None:
        """Fail where a question would have to be asked and may not."""
        if self.no_input:
            raise CliError(f"{what} is needed and --no-input was given", code="no_input")


def _not_logged_in(resolved: Resolved) -> CliError:
    if resolved.config_file is None:
        return CliError(
            "no key: the configuration file cannot be found without HOME; set HOME, or PENSTOCK_API_URL and "
            "PENSTOCK_API_KEY",
            code="no_home",
            field="HOME",
        )
    where = f" for {resolved.api_url.text}" if resolved.api_url else ""
    return CliError(
        f"no key{where}: is the local cloud running? `penstock up` starts it; for another cloud run `penstock login` "
        "or set PENSTOCK_API_KEY",
        code="not_logged_in",
        exit_code=AUTH,
    )


def group(name: str, help: str) -> typer.Typer:  # noqa: A002 - as typer calls it
    """A group of commands."""
    app = typer.Typer(name=name, help=help, rich_markup_mode=None, add_completion=False, context_settings=HELP)
    app.callback(invoke_without_command=True)(_with_options(_nothing, hidden=True))
    return app


def root(help: str, entries: Mapping[str, Entry]) -> typer.Typer:  # noqa: A002
    """The whole command, with the global options shown."""
    app = typer.Typer(
        name="penstock",
        help=help,
        epilog=_exit_codes(),
        cls=lazy_group(entries),
        rich_markup_mode=None,
        add_completion=False,
        context_settings=HELP,
    )
    app.callback(invoke_without_command=True)(_with_options(_root, hidden=False))
    return app


def _exit_codes() -> str:
    return "\n".join(["\b", "Exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items())])


def _nothing(_: Session) -> None:
    """A group itself does nothing."""


def _root(
    session: Session, *, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """The whole command by itself."""
    if version:
        from importlib import metadata

        session.output.line(f"penstock {metadata.version('penstock')}")
        raise typer.Exit


def command(
    app: typer.Typer, name: str, *, example: str, hidden: bool = False, passes_on: bool = False
) -> Callable[[Callable[Concatenate[Session, P], None]], Callable[Concatenate[Session, P], None]]:
    """Declare a command. `passes_on` leaves what follows its first argument and options to the command that it runs."""

    def declare(function: Callable[Concatenate[Session, P], None]) -> Callable[Concatenate[Session, P], None]:
        # A group's own help shows the example of its first command.
        if not isinstance(app.info.epilog, str):
            app.info.epilog = f"\b\nExample:\n  {example}"
        app.command(
            name,
            cls=PassingCommand if passes_on else TyperCommand,
            epilog=f"\b\nExample:\n  {example}\n\nEvery command also takes the options of `penstock --help`.",
            hidden=hidden,
            context_settings={**HELP, "allow_interspersed_args": not passes_on},
        )(_with_options(function, hidden=True))
        return function

    return declare


def _with_options(function: Callable[Concatenate[Session, P], None], *, hidden: bool) -> Callable[..., None]:
    """The function as typer sees it: its own parameters and the global options, without the session."""
    options = _options(hidden=hidden)

    @functools.wraps(function)
    def run(context: typer.Context, **given: Any) -> None:
        session: Session = context.obj
        session.context = context
        session.take(**{name: given.pop(name) for name in options})
        function(session, **given)  # pyright: ignore[reportCallIssue]
        if function in (_nothing, _root) and context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(function).parameters.values())[1:]
    parameters = [
        inspect.Parameter("context", keyword, annotation=typer.Context),
        *(parameter.replace(kind=keyword) for parameter in own),
        *(
            inspect.Parameter(name, keyword, annotation=option, default=False if name in _SWITCHES else None)
            for name, option in options.items()
        ),
    ]
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
