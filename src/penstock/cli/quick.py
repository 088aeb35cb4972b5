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
