"""What a reader is shown of a draft: SourceIds for aliases, no foreign link, nothing of the system prompt.

One text for those who read along and for those who wait: joined, the pieces are what `show` returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from rag.cite import Marks, Resolved, extract
from rag.exchange import Passage
from rag.flow import Line
from rag.release import Release
from rag.withhold import Withhold


class Showing:
    """A draft on its way to the reader."""

    def __init__(self, sources: Mapping[str, Passage], *, system: str, question: str, nonce: str | None = None) -> None:
        """`sources` are those of the prompt by their aliases, `system` is what the model was told of itself, `nonce`
        that of the prompt, where it has one.
        """
        passages = tuple(sources.values())
        self._marks = Marks(sources, nonce=nonce)
        self._line = Line(
            self._marks,
            Release(passages, lambda: self._marks.cited),
            Withhold(system, quotable=[question, *(passage.text for passage in passages)]),
            _Trim(),
        )

    def feed(self, piece: str) -> str:
        """Take the next piece, and return what can be shown by now."""
        return self._line.feed(piece)

    def finish(self) -> str:
        """The rest, once the draft is whole."""
        return self._line.finish()

    def resolved(self, shown: str) -> Resolved:
        """What is known of the draft, of which so much has been shown."""
        # What is withheld may have had a mark inside.
        said = set(extract(shown))
        cited = tuple(passage for passage in self._marks.cited if passage.source_id in said)
        return Resolved(text=shown, cited=cited, refused=self._marks.refused)


def show(
    text: str, sources: Mapping[str, Passage], *, system: str, question: str, nonce: str | None = None
) -> Resolved:
    """All that is shown of a draft."""
    showing = Showing(sources, system=system, question=question, nonce=nonce)
    return showing.resolved(showing.feed(text) + showing.finish())


class _Trim:
    """No space at the ends."""

    def __init__(self) -> None:
        self._begun = False
        self._space: list[str] = []

    def feed(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._space.append(text)
            return ""
        self._begun = True
        shown = "".join((*self._space, kept))
        self._space = [text[len(kept) :]]
        return shown

    def finish(self) -> str:
        return ""
