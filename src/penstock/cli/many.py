"""The same for several things: each is tried, and the first failure is the command's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import typer

from penstock.cli.errors import CliError
from penstock.cli.failing import failure, tell
from penstock.cli.output import notice
from penstock.cli.session import Session

T = TypeVar("T")


@dataclass(slots=True)
class Done(Generic[T]):
    """What became of several things."""

    many: bool
    values: list[T] = field(default_factory=list[T])
    exit_code: int = 0

    def end(self) -> None:
        """End the command with the first failure's code, if there was one."""
        if self.exit_code:
            raise typer.Exit(self.exit_code)


def each(session: Session, texts: Sequence[str], act: Callable[[str], T]) -> Done[T]:
    """Act on each of them. What fails is told at once, where there are others; alone, it is the command's failure."""
    from penstock.sdk.errors import SdkError

    done = Done[T](many=len(texts) > 1)
    for text in dict.fromkeys(texts):
        try:
            done.values.append(act(text))
        except (CliError, SdkError) as error:
            if not done.many:
                raise
            code = tell(session, session.argv, failure(error, session))
            done.exit_code = done.exit_code or code
    return done


def say_each(session: Session, texts: Sequence[str], act: Callable[[str], str]) -> None:
    """Act on each of them, and print the words that each act gives."""
    each(session, texts, lambda text: notice(act(text))).end()
