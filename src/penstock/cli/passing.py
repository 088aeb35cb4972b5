"""A command that passes what follows its first argument on to the command that it runs."""

from typing import TYPE_CHECKING

from typer.core import TyperArgument, TyperCommand

if TYPE_CHECKING:
    from typer._click import Context  # pyright: ignore[reportPrivateImportUsage]


class PassingCommand(TyperCommand):
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
