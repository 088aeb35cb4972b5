"""Keeps typer from importing pydantic where nothing needs checking.

Typer checks every value with pydantic, whose import takes longer than most commands run. Text stays text, and a
default is right already; only numbers and choices that someone typed go the long way.
"""

from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click import Context, Parameter  # pyright: ignore[reportPrivateImportUsage]

_TEXT: Final = (str, list[str])


class QuickCommand(TyperCommand):
    """A command with quick parameters."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """As typer has them, made quick."""
        return _quick(super().get_params(ctx))


class PassingCommand(QuickCommand):
    """A command that runs another one: its own options stand around its first argument, what follows is passed on."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """As typer does, with the options after the first argument moved before it."""
        words = self._after_options(ctx, args)
        before = args[: len(args) - len(words)]
        if not words or before[-1:] == ["--"]:
            return super().parse_args(ctx, args)
        passed = self._after_options(ctx, words[1:])
        between = words[1 : len(words) - len(passed)]
        own = between[:-1] if between[-1:] == ["--"] else between
        return super().parse_args(ctx, [*before, *own, words[0], *(["--", *passed] if passed else [])])

    def _after_options(self, ctx: "Context", args: list[str]) -> list[str]:
        """Everything from the first word that is no option's."""
        found, _, _ = self.make_parser(ctx).parse_args([*args])
        values = [found.get(str(argument.name)) for argument in self.params if isinstance(argument, TyperArgument)]
        return [word for value in values for word in ([value] if isinstance(value, str) else value or ())]


class QuickGroup(TyperGroup):
    """A group with quick parameters."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """As typer has them, made quick."""
        return _quick(super().get_params(ctx))


def _quick(parameters: "list[Parameter]") -> "list[Parameter]":
    for parameter in parameters:
        if isinstance(parameter, TyperOption | TyperArgument) and "process_value" not in vars(parameter):
            _shorten(parameter)
    return parameters


def _shorten(parameter: TyperOption | TyperArgument) -> None:
    check = parameter.process_value

    def process_value(ctx: "Context", value: Any) -> Any:
        optional = value is None and not parameter.required
        settled = value is not None and value is parameter.default
        text = parameter.type_descriptor.annotation in _TEXT and isinstance(value, str | list | tuple) and value
        if not (optional or settled or text):
            return check(ctx, value)
        return parameter.callback(ctx, parameter, value) if parameter.callback else value

    parameter.process_value = process_value
