"""A parser of outside input for tests: what it likes, what it may raise, and what a long input is made of."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from costs import assert_linear

SIZES = (1 << 10, 4 << 10, 16 << 10)


@dataclass(frozen=True)
class Parser:
    """What reads, the errors that it may raise, an input that it likes, and what a long input is made of."""

    parse: Callable[[Any], object]
    refusals: tuple[type[Exception], ...]
    sample: str | bytes
    pieces: str
    #: Memory for each byte of input.
    bytes_per_byte_max: int = 64

    def typed(self, text: str) -> str | bytes:
        """The text as this parser takes it."""
        return text.encode("latin-1", "replace") if isinstance(self.sample, bytes) else text

    def long(self, start: str | bytes, piece: str) -> Callable[[int], Any]:
        """An input of any size that begins so and goes on with the piece."""
        return lambda size: start + self.typed(piece) * (size // len(piece))  # type: ignore[operator]

    def assert_linear(self) -> None:
        """Long inputs of each piece, after nothing, the sample and half of it, cost what their size says."""
        nothing = self.sample[:0]
        for piece in [*dict.fromkeys(self.pieces), self.pieces]:
            for start in (nothing, self.sample, self.sample[: len(self.sample) // 2]):
                assert_linear(
                    self.parse,
                    self.long(start, piece),
                    refusals=self.refusals,
                    sizes=SIZES,
                    bytes_per_byte_max=self.bytes_per_byte_max,
                )

    def assert_typed(self, data: st.DataObject) -> None:
        """The sample with some of it replaced by noise is read or refused."""
        strange = (
            st.text(st.characters(codec=None), max_size=40) if isinstance(self.sample, str) else st.binary(max_size=40)
        )
        pieces = st.lists(st.sampled_from(self.pieces), max_size=20).map(lambda all_: self.typed("".join(all_)))
        noise = data.draw(st.one_of(strange, pieces))
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(self.sample))] * 2)))
        with suppress(*self.refusals):
            self.parse(self.sample[:begin] + noise + self.sample[end:])
