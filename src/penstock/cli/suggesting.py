"""The nearest of what there is, for a name on the command line that nothing has."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import typer
    from typer._click import Parameter  # pyright: ignore[reportPrivateImportUsage]

#: How alike two names must be, from 0 to 1.
_LIKENESS_MIN: Final = 0.6
#: Ids resemble one another, and a wrong one is never meant.
_ID: Final = re.compile(r"[a-z]{3}[_-]\w{8,}")


def nearest(context: "typer.Context", message: str) -> str:
    """The name that was probably meant where `message` says that one is unknown; empty if none resembles it. The names
    that there are come from the completion of the argument."""
    from difflib import get_close_matches

    for parameter, texts in _given(context):
        suspects = [text for text in texts if not _ID.fullmatch(text) and (len(texts) == 1 or text in message)]
        known = [item.value for item in parameter.shell_complete(context, "")] if suspects else []
        names = [name for name in known if not _ID.fullmatch(name)]
        for text in suspects:
            if text not in names and (close := get_close_matches(text, names, 1, _LIKENESS_MIN)):
                return close[0]
    return ""


def _given(context: "typer.Context") -> "Iterator[tuple[Parameter, list[str]]]":
    """Arguments and options with their texts, those of the command itself before those of its groups."""
    at: Any = context
    while at is not None:
        for parameter in at.command.params:
            value = at.params.get(parameter.name)
            texts: list[Any] = (
                [value] if isinstance(value, str) else [*value] if isinstance(value, list | tuple) else []
            )
            if texts and all(isinstance(text, str) for text in texts):
                yield parameter, texts
        at = at.parent
