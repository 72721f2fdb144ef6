"""Rewrites text that arrives in pieces: joined, the result is that of the whole text, wherever it was cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

# What is undecided is looked at again when it has grown by this part: a long wait stays linear in its length.
GROWTH = 8


class Stage(Protocol):
    """A step through which text goes."""

    def feed(self, text: str) -> str:
        """Take the next piece, and return what is decided."""

    def finish(self) -> str:
        """The rest, now that nothing follows."""


class Line:
    """Stages, one behind the other."""

    def __init__(self, *stages: Stage) -> None:
        self._stages = stages

    def feed(self, text: str) -> str:
        for stage in self._stages:
            if text:
                text = stage.feed(text)
        return text

    def finish(self) -> str:
        text = ""
        for stage in self._stages:
            text = (stage.feed(text) if text else "") + stage.finish()
        return text


class Flow:
    """A substitution."""

    def __init__(
        self,
        pattern: re.Pattern[str],
        replace: Callable[[re.Match[str]], str | None],
        undecided: Callable[[str], int],
    ) -> None:
        """`undecided` says from where on a text may be, or become, a match that what follows still changes.

        A replacement may be None until `finished`: what replaces the match is not known yet.
        """
        self._pattern = pattern
        self._replace = replace
        self._undecided = undecided
        self._rest = ""
        self._before = ""
        self._again = 0
        self.finished = False
        """Nothing follows."""

    def feed(self, text: str) -> str:
        self._rest += text
        if len(self._rest) < self._again:
            return ""
        shown = self._take(self._undecided(self._rest))
        self._again = len(self._rest) + len(self._rest) // GROWTH + 1
        return shown

    def finish(self) -> str:
        self.finished = True
        return self._take(len(self._rest))

    def _take(self, end: int) -> str:
        # With the character before it, for a pattern that looks back.
        text = self._before + self._rest
        start, end = len(self._before), len(self._before) + end
        shown: list[str] = []
        at = start
        for match in self._pattern.finditer(text, start):
            new = self._replace(match) if match.end() <= end else None
            if new is None:
                end = min(end, match.start())
                break
            shown += text[at : match.start()], new
            at = match.end()
        shown.append(text[at:end])
        self._rest = text[end:]
        self._before = text[end - 1 : end]
        return "".join(shown)


def by(text: str) -> Callable[[re.Match[str]], str]:
    """A replacement that is always the same."""
    return lambda match: text
