"""A record some of whose values are for nobody's eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


class Discreet(msgspec.Struct, frozen=True):
    """Shows of itself what `shown` names and no more: not in a repr, not in a traceback's locals.

    A struct and no dataclass: that compiles its methods anew at each start.
    """

    shown: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({rows})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:  # type: ignore[override]
        for name in self.shown:
            yield name, getattr(self, name)
