"""A parsed document to chunks that an embedding model can take in whole.

Spec 002, "Chunking Strategy", by source type: project specifications and decisions stay whole when they
fit, a README is split at `##`, everything else by headings, then paragraphs, lines, sentences, words and,
for one giant token, characters. Three decisions beyond it:

Size follows the embedding model. Spec 002's 512 tokens are the ceiling; below it the model's own input
limit rules, because text beyond it is silently ignored (DESIGN.md, section 6: nDCG .474 → .441).

Small sections under one heading are packed together, and packing starts anew with every section that is
too large to be packed. So a change in one section leaves the chunks, hashes and embeddings of others alone.

Overlap is 10 %, as spec 002 asks, but only where running prose had to be cut within a paragraph. Between
whole paragraphs it gained nothing when measured (DESIGN.md, section 6), costs a tenth more rows, and shows
readers the same text twice; across headings and pages it would put text into the wrong section.

Those are the `rules`, which is how documents are cut unless RAG_CHUNKING says otherwise. The strategies of
spec 003 are there beside them, for whoever compares or comes from a system that has them: `fixed` windows that
overlap, whole sentences (`sentence`), and `semantic` cuts where neighbouring sentences mean different things.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Literal, get_args

from rag.parse import Block, Kind, ParsedDocument

# Spec 002, "Chunk size", counted over the embedded text.
CEILING_TOKENS = 512
# 224 of MiniLM's 256: DESIGN.md, section 6, found about 220 best. The rest is headroom in which a
# paragraph, a table or a code block stays whole.
TARGET_SHARE = 7 / 8
# Spec 002, "Overlap".
OVERLAP_SHARE = 0.1
# Title and heading path may take a quarter of the limit; beyond that they are shortened, never the text.
PREFIX_SHARE = 0.25
# A chunk's tsvector must stay below 1 MiB.
MAX_CHUNK_BYTES = 32 * 1024
# A WordPiece tokenizer counts any word above 100 characters as one [UNK], so that a megabyte of base64
# would pass as a single token and later overflow the prompt. English has 4.5 bytes a token, padded tables
# up to 10. With 512 tokens this also keeps every chunk below 8 KiB.
MAX_BYTES_PER_TOKEN = 16
# Below this, a title, one word of four pieces and special tokens do not fit together.
MIN_LIMIT_TOKENS = 16
# No more than this goes to the tokenizer at once: it keeps offsets for every token it returns.
MAX_COUNTED_CHARACTERS = 32_768

# Spec 003's three, and ours after spec 002.
Strategy = Literal["rules", "fixed", "sentence", "semantic"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# As unlike as this many standard deviations below the mean of the document: where Hearst's TextTiling
# (Computational Linguistics 23, 1997) puts its borders.
BORDER_DEVIATIONS = 1.0
# What is smaller than this part of a chunk is no subject of its own.
CRUMB_SHARE = 1 / 8

# Spec 002: "Whole file (usually <1k tokens)".
WHOLE_SOURCE_TYPES = frozenset({"project_spec", "adr", "decision"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`text` is exactly `body[start:end]`; `embedded_text` is what the embedding model reads.

    `section` is the heading path that all of the chunk is under: None before the first heading, or when
    it spans sections that have no heading in common. `token_count` is of `text` alone. `hash` is the
    SHA-256 of `embedded_text`, so that renaming a heading embeds what is below it anew.
    """

    index: int
    text: str
    start: int
    end: int
    section: str | None
    page_number: int | None
    embedded_text: str
    token_count: int
    hash: str


def split(
    document: ParsedDocument,
    *,
    limit_tokens: int,
    count: Callable[[str], int],
    strategy: Strategy = "rules",
    kinship: Sequence[float] = (),
) -> list[Chunk]:
    """Split a document into chunks, in the order of its text.

    `limit_tokens` is the embedding model's input limit, and `count` counts as that model does: both with
    its special tokens, or both without. `count(embedded_text) <= limit_tokens` holds for every chunk, and
    every character of the body that is no white space is in at least one chunk. `count` sees the text
    about three times. For `semantic`, `kinship` says how near each of `units` is to the next one, larger is
    nearer. Raises ValueError when the limit is below `MIN_LIMIT_TOKENS`.
    """
    splitter = _splitter(document, limit_tokens, count)
    if strategy == "fixed":
        return splitter.windows()
    if strategy == "sentence":
        return splitter.sentences()
    if strategy == "semantic":
        return splitter.subjects(kinship)
    return splitter.chunks()


def units(document: ParsedDocument, *, limit_tokens: int, count: Callable[[str], int]) -> list[str]:
    """What `semantic` never cuts, in order: sentences, headings, tables and code, each within the limit."""
    splitter = _splitter(document, limit_tokens, count)
    return [document.body[unit.start : unit.end] for unit in splitter.units()]


def _splitter(document: ParsedDocument, limit_tokens: int, count: Callable[[str], int]) -> _Splitter:
    if limit_tokens < MIN_LIMIT_TOKENS:
        raise ValueError(f"limit_tokens must be at least {MIN_LIMIT_TOKENS}, not {limit_tokens}")
    return _Splitter(document, limit_tokens, count)


@dataclass(slots=True, kw_only=True)
class _Piece:
    """What is never cut again: a block, or a part of a block that was too large."""

    start: int
    end: int
    tokens: int
    gap_tokens: int
    """Of the white space in front, which counts when the piece before is in the same chunk."""
    path: tuple[str, ...]
    page_number: int | None
    overlap_start: int
    """Before `start` where the cut in front of this piece was within running prose."""
    is_heading: bool = False
    leads_in: bool = False
    """Says little without what follows: a heading, or a paragraph that ends in a colon."""
    trails: bool = False
    """Says nothing by itself: rules and closing fences such as `---` and `///`."""


@dataclass(slots=True, kw_only=True)
class _Section:
    path: tuple[str, ...]
    level: int
    own: list[_Piece] = field(default_factory=list)
    children: list[_Section] = field(default_factory=list)

    def pieces(self) -> list[_Piece]:
        return [*self.own, *(piece for child in self.children for piece in child.pieces())]


def _tokens(pieces: Sequence[_Piece]) -> int:
    return sum(piece.tokens + piece.gap_tokens for piece in pieces) - (pieces[0].gap_tokens if pieces else 0)


def _only_headings(pieces: Iterable[_Piece]) -> bool:
    return all(piece.is_heading for piece in pieces)


def _common_path(parts: Sequence[_Piece] | Sequence[Block]) -> tuple[str, ...]:
    """Return the headings that all text is under; a heading without text of its own does not narrow it."""
    paths = [part.path for part in parts if not part.is_heading] or [part.path for part in parts]
    first, last = min(paths), max(paths)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


class _Splitter:
    def __init__(self, document: ParsedDocument, limit_tokens: int, count: Callable[[str], int]) -> None:
        self._document = document
        self._body = document.body
        self._limit = limit_tokens
        self._count = count
        self._special_tokens = count("")
        self._gaps: dict[str, int] = {}
        self._prefixes: dict[tuple[str, ...], tuple[str, int]] = {}
        self._chunks: list[Chunk] = []

    def chunks(self) -> list[Chunk]:
        if self._document.source_type in WHOLE_SOURCE_TYPES and self._add_whole():
            return self._chunks
        for page in self._pages():
            groups, headings = self._pack(page, [])
            if headings and groups and _tokens([*groups[-1], *headings]) <= self._hard(groups[-1][0].path):
                groups[-1] += headings
            elif headings:
                groups.append(headings)
            for group in groups:
                self._add(group)
        return self._chunks

    # --- the strategies of spec 003 --------------------------------------------------------------

    def windows(self) -> list[Chunk]:
        """`fixed`: windows of one size that overlap, whatever the text says; only pages end one."""
        for blocks in self._by_page():
            at, end = blocks[0].start, blocks[-1].end
            before: _Piece | None = None
            place = 0
            while at < end:
                while blocks[place].end <= at:
                    place += 1
                target = self._target(blocks[place].path)
                overlap_tokens = int(target * OVERLAP_SHARE)
                stop = self._window_end(at, end, max(1, target - overlap_tokens))
                last = place
                while last + 1 < len(blocks) and blocks[last + 1].start < stop:
                    last += 1
                start = (self._overlap_by_words(before, overlap_tokens) if before else 0) or at
                text_end = at + len(self._body[at:stop].rstrip())
                piece = _Piece(
                    start=at,
                    end=text_end,
                    tokens=self._weigh(self._body[at:text_end]),
                    gap_tokens=0,
                    path=_common_path(blocks[place : last + 1]),
                    page_number=blocks[place].page_number,
                    overlap_start=start,
                )
                self._add([piece])
                before = piece
                at = self._next_start(stop, end)
        return self._chunks

    def sentences(self) -> list[Chunk]:
        """`sentence`: whole sentences up to the target size; the last of them once more in the next chunk."""
        group: list[_Piece] = []
        for unit in self.units():
            target = self._target(_common_path([*group[:1], unit]))
            apart = group and group[0].page_number != unit.page_number
            if group and (apart or _tokens([*group, unit]) + self._overlap_tokens(group) > target):
                moving = [group.pop()] if len(group) > 1 and group[-1].is_heading and not apart else []
                self._add(group)
                following = [*moving, unit]
                if not apart:
                    overlap_start = self._overlap_by_sentences(group, int(target * OVERLAP_SHARE))
                    following[0] = replace(following[0], overlap_start=overlap_start or following[0].start)
                group = following
            else:
                group.append(unit)
        if group:
            self._add(group)
        return self._chunks

    def subjects(self, kinship: Sequence[float]) -> list[Chunk]:
        """`semantic`: cut where a sentence is less like the next one than is usual in this document."""
        pieces = self.units()
        if len(kinship) != len(pieces) - 1:
            raise ValueError(f"{len(pieces)} units have {len(pieces) - 1} neighbours, not {len(kinship)}")
        usual = fmean(kinship) - BORDER_DEVIATIONS * pstdev(kinship) if kinship else 0.0
        groups: list[tuple[int, int]] = []  # first and last unit of each, the last one excluded
        first = 0
        for place in range(1, len(pieces) + 1):
            if place < len(pieces):
                before, after = pieces[place - 1], pieces[place]
                apart = before.page_number != after.page_number or (after.is_heading and not before.is_heading)
                if not apart and (kinship[place - 1] >= usual or before.is_heading):
                    continue
            groups += self._halved(pieces, kinship, first, place)
            first = place
        for first, last in self._without_crumbs(pieces, kinship, groups):
            self._add(pieces[first:last])
        return self._chunks

    def units(self) -> list[_Piece]:
        """Sentences, and blocks that have none; cut only where one is larger than a chunk."""
        pieces: list[_Piece] = []
        end = 0
        for block in self._document.blocks:
            starts = [block.start]
            if block.kind in ("text", "list"):
                starts += self._sentence_starts(block.start, block.end)
            for start, stop in zip(starts, [*starts[1:], block.end], strict=True):
                for part_start, part_end, _ in self._cut(start, stop, block.kind, True, self._target(block.path)):
                    trimmed = part_start + len(self._body[part_start:part_end].rstrip())
                    if trimmed == part_start:
                        continue
                    pieces.append(
                        _Piece(
                            start=part_start,
                            end=trimmed,
                            tokens=self._weigh(self._body[part_start:trimmed]),
                            gap_tokens=self._weigh_gap(end, part_start),
                            path=block.path,
                            page_number=block.page_number,
                            overlap_start=part_start,
                            is_heading=block.is_heading,
                        )
                    )
                    end = trimmed
        return pieces

    def _by_page(self) -> list[list[Block]]:
        pages: list[list[Block]] = []
        for block in self._document.blocks:
            if not pages or pages[-1][0].page_number != block.page_number:
                pages.append([])
            pages[-1].append(block)
        return pages

    def _window_end(self, at: int, end: int, budget: int) -> int:
        """Return where `budget` tokens from `at` end, at a word if one ends in the last quarter."""
        length = min(end - at, MAX_COUNTED_CHARACTERS, 4 * budget)
        for _ in range(2):  # the first guess is of English; the second is of this text
            tokens = self._weigh(self._body[at : at + length])
            length = min(end - at, MAX_COUNTED_CHARACTERS, max(1, length * budget // tokens))
        while length > 1 and (tokens := self._weigh(self._body[at : at + length])) > budget:
            length = max(1, min(length - 1, length * budget // tokens))
        stop = at + length
        if stop == end or self._body[stop].isspace():
            return stop
        for border in range(stop, at + length * 3 // 4, -1):
            if self._body[border - 1].isspace():
                return border
        return self._character_border(at, stop)

    def _overlap_by_words(self, before: _Piece, overlap_tokens: int) -> int:
        """Return where the last `overlap_tokens` of a window begin, at a word; 0 for none."""
        characters = (before.end - before.start) * overlap_tokens // before.tokens
        word = _WORD_START.search(self._body, max(before.start, before.end - characters - 1), before.end)
        return word.end() if word else 0

    def _overlap_tokens(self, group: list[_Piece]) -> int:
        first = group[0]
        return self._weigh(self._body[first.overlap_start : first.start]) if first.overlap_start < first.start else 0

    def _overlap_by_sentences(self, group: list[_Piece], overlap_tokens: int) -> int:
        """Return where the last sentences begin that have at most so many tokens together; 0 for none."""
        start, size = 0, 0
        for piece in reversed(group[1:]):
            size += piece.tokens + piece.gap_tokens
            if size > overlap_tokens or piece.is_heading:
                break
            start = piece.start
        return start

    def _halved(
        self, pieces: Sequence[_Piece], kinship: Sequence[float], first: int, last: int
    ) -> list[tuple[int, int]]:
        """Cut what is larger than a chunk where its neighbours are least alike, away from both ends."""
        target = self._target(_common_path(pieces[first:last]))
        groups: list[tuple[int, int]] = []
        waiting = [(first, last)]
        while waiting:
            first, last = waiting.pop()
            total = _tokens(pieces[first:last])
            if last - first == 1 or total <= target:
                groups.append((first, last))
                continue
            inner: list[int] = []
            size = 0
            for place in range(first + 1, last):
                size += pieces[place - 1].tokens
                if total / 4 <= size <= total * 3 / 4 and not pieces[place - 1].is_heading:
                    inner.append(place)
            candidates = inner or [max(first + 1, (first + last) // 2)]
            border = min(candidates, key=lambda place: kinship[place - 1])
            waiting += [(border, last), (first, border)]
        return groups

    def _without_crumbs(
        self, pieces: Sequence[_Piece], kinship: Sequence[float], groups: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Join a small group to the neighbour that it is more like, if the two fit into a chunk."""
        kept: list[tuple[int, int]] = []
        for first, last in groups:
            if kept:
                start, end = kept[-1]
                both = pieces[start:last]
                sizes = (_tokens(pieces[start:end]), _tokens(pieces[first:last]))
                target = self._target(_common_path(both))
                nearer_to_next = last < len(pieces) and kinship[last - 1] > kinship[first - 1]
                crumb = min(sizes) < target * CRUMB_SHARE and not (sizes[1] < sizes[0] and nearer_to_next)
                if (
                    crumb
                    and _tokens(both) <= target
                    and both[0].page_number == both[-1].page_number
                    and not pieces[first].is_heading
                ):
                    kept[-1] = (start, last)
                    continue
            kept.append((first, last))
        return kept

    # --- measuring -------------------------------------------------------------------------------

    def _weigh(self, text: str) -> int:
        counted = self._count(text) - self._special_tokens
        return max(1, counted, math.ceil(len(text.encode()) / MAX_BYTES_PER_TOKEN))

    def _weigh_gap(self, start: int, end: int) -> int:
        gap = self._body[start:end]
        if len(gap) > 8:  # such are rarely alike, and worth no memory
            return self._weigh(gap)
        if gap not in self._gaps:
            self._gaps[gap] = max(0, self._count(gap) - self._special_tokens)
        return self._gaps[gap]

    def _room(self, path: tuple[str, ...], share: float) -> int:
        total = int(min(CEILING_TOKENS, self._limit) * share)
        return max(1, total - self._special_tokens - self._prefix(path)[1])

    def _hard(self, path: tuple[str, ...]) -> int:
        """Tokens of text that fit below the title and this heading path."""
        return self._room(path, 1.0)

    def _target(self, path: tuple[str, ...]) -> int:
        return self._room(path, TARGET_SHARE)

    def _prefix(self, path: tuple[str, ...]) -> tuple[str, int]:
        """Return the lines in front of an embedded text, and their tokens."""
        if path not in self._prefixes:
            title = self._document.title
            headings = path[1:] if path[:1] == (title,) else path
            budget = int(self._limit * PREFIX_SHARE)
            prefix = "\n".join(line for line in (title, " > ".join(headings)) if line)
            if self._weigh(prefix) >= budget:
                # The innermost heading says most about the text below it, then the title.
                ends = (self._shorten(line, budget // 2 - 1) for line in (title, *headings[-1:]))
                prefix = "\n".join(line for line in ends if line)
            self._prefixes[path] = (prefix, self._weigh(prefix + "\n\n") if prefix else 0)
        return self._prefixes[path]

    def _shorten(self, line: str, budget: int) -> str:
        while line and (tokens := self._weigh(line)) > budget:
            line = line[: min(len(line) - 1, len(line) * budget // tokens)].rstrip()
        return line

    # --- from blocks to pieces -------------------------------------------------------------------

    def _pages(self) -> list[_Section]:
        """Return one tree of sections for every page; what has no pages is one tree."""
        roots: list[_Section] = []
        branch: list[_Section] = []
        page_number: int | None = None
        end = 0
        lead = 0  # tokens of the headings directly above, which share a chunk with what follows
        for block in self._document.blocks:
            if not branch or block.page_number != page_number:
                page_number = block.page_number
                branch = [_Section(path=(), level=0)]
                roots.append(branch[0])
                lead = 0
            if block.is_heading:
                while len(branch) > 1 and len(branch[-1].path) >= len(block.path):
                    branch.pop()
                section = _Section(path=block.path, level=block.level)
                branch[-1].children.append(section)
                branch.append(section)
            pieces = self._pieces(block, end, lead)
            branch[-1].own += pieces
            lead = lead + _tokens(pieces) if pieces and _only_headings(pieces) else 0
            end = block.end
        return roots

    def _pieces(self, block: Block, previous_end: int, lead: int) -> list[_Piece]:
        hard = self._hard(block.path)
        lead = lead if lead <= hard // 2 else 0
        if block.end - block.start <= MAX_COUNTED_CHARACTERS:
            text = self._body[block.start : block.end]
            tokens = self._weigh(text)
            if tokens <= hard - lead:
                prose = block.kind in ("text", "list")
                return [
                    _Piece(
                        start=block.start,
                        end=block.end,
                        tokens=tokens,
                        gap_tokens=self._weigh_gap(previous_end, block.start),
                        path=block.path,
                        page_number=block.page_number,
                        overlap_start=block.start,
                        is_heading=block.is_heading,
                        leads_in=block.is_heading or (prose and text.endswith((":", "："))),
                        trails=prose and not any(character.isalnum() for character in text),
                    )
                ]
        running = self._is_running_prose(block)
        overlap_tokens = int(self._target(block.path) * OVERLAP_SHARE) if running else 0
        budget = max(1, self._target(block.path) - overlap_tokens - lead)
        pieces: list[_Piece] = []
        for start, end, continues in self._cut(block.start, block.end, block.kind, running, budget):
            overlap_start = self._overlap(pieces[-1], overlap_tokens) if continues and pieces else start
            pieces.append(
                _Piece(
                    start=start,
                    end=end,
                    tokens=self._weigh(self._body[start:end]),
                    gap_tokens=self._weigh_gap(previous_end, start),
                    path=block.path,
                    page_number=block.page_number,
                    overlap_start=overlap_start,
                )
            )
            previous_end = end
        return pieces

    def _is_running_prose(self, block: Block) -> bool:
        """Tell paragraphs, whose line ends mean nothing, from logs, lists and poems.

        Where lines are wrapped, many start with a lower-case letter.
        """
        if block.kind not in ("text", "list", "heading"):
            return False
        sample = self._body[block.start : min(block.end, block.start + MAX_COUNTED_CHARACTERS)]
        starts = [line.lstrip()[:1] for line in sample.split("\n")[1:]]
        return not starts or sum(start.islower() for start in starts) >= 0.3 * len(starts)

    def _cut(
        self, start: int, end: int, kind: Kind, running: bool, budget: int, continues: bool = False
    ) -> list[tuple[int, int, bool]]:
        """Cut a span into parts of at most `budget` tokens and about equal length, at the best borders.

        The flag of a part says that the cut in front of it is within running prose.
        """
        if not self._body[start:end].strip():
            return []
        length = end - start
        if length <= MAX_COUNTED_CHARACTERS:
            tokens = self._weigh(self._body[start:end])
            if tokens <= budget or length == 1:
                return [(start, end, continues)]
            stride_limit = max(1, length * budget // tokens)
        else:
            stride_limit = MAX_COUNTED_CHARACTERS
        parts: list[tuple[int, int, bool]] = []
        at = start
        while at < end:
            count = math.ceil((end - at) / stride_limit)
            if count == 1:
                border, within_prose = end, False
            else:
                border, within_prose = self._border(at, at + math.ceil((end - at) / count), kind, running)
            part_end = at + len(self._body[at:border].rstrip())
            parts += self._cut(at, part_end, kind, running, budget, continues)
            at, continues = self._next_start(border, end), within_prose
        return parts

    def _border(self, at: int, stop: int, kind: Kind, running: bool) -> tuple[int, bool]:
        """Return where to cut within `body[at:stop]`, late rather than early, and if that cuts prose."""
        middle = (at + stop) // 2
        prose = kind not in ("code", "table")
        if not running and (border := self._line_border(at, middle, stop)):
            return border, False
        if prose and (starts := self._sentence_starts(middle, stop)):
            return starts[-1], running
        if running and (border := self._body.rfind("\n", middle, stop) + 1):
            return border, True
        for border in range(stop, at, -1):
            if self._body[border - 1].isspace():
                return border, prose
        return self._character_border(at, stop), False

    def _line_border(self, at: int, middle: int, stop: int) -> int:
        """Return the start of the least indented line of the second half, the latest of these; 0 for none.

        In code and YAML that is where the next definition or key begins.
        """
        best, least = 0, stop
        for line in _LINE_START.finditer(self._body, middle - 1 if middle > at else at):
            if line.start() >= stop:
                break
            indent = line.end() - line.start(1)
            if indent <= least:
                best, least = line.start(1), indent
        return best or self._body.rfind("\n", at, middle) + 1

    def _sentence_starts(self, start: int, stop: int) -> list[int]:
        ends = (found.end() for found in _SENTENCE_END.finditer(self._body, start, stop))
        return [end for end in ends if end < len(self._body) and not self._body[end].islower()]

    def _character_border(self, at: int, stop: int) -> int:
        """Return `stop`, or a little less where a letter would lose its accents or vowel signs."""
        for border in range(stop, max(at, stop - 8), -1):
            following = self._body[border : border + 1]
            if following != "\u200d" and not unicodedata.category(following or " ").startswith("M"):
                return border
        return stop

    def _next_start(self, border: int, end: int) -> int:
        """Skip white space, but not the indentation of the line on which the text goes on."""
        start = border
        while start < end and self._body[start].isspace():
            start += 1
        line_start = self._body.rfind("\n", border, start) + 1
        return line_start if line_start and start < end else start

    def _overlap(self, before: _Piece, overlap_tokens: int) -> int:
        """Return where the last `overlap_tokens` of a piece begin, at a sentence if one begins there."""
        characters = (before.end - before.start) * overlap_tokens // before.tokens
        earliest = max(before.start, before.end - characters)
        # The full stop and the space in front of `earliest` belong to what begins right there.
        sentences = self._sentence_starts(max(before.start, earliest - 2), before.end)
        if sentences and sentences[0] >= earliest:
            return sentences[0]
        word = _WORD_START.search(self._body, max(before.start, earliest - 1), before.end)
        return word.end() if word else before.end

    # --- from pieces to chunks -------------------------------------------------------------------

    def _pack(self, section: _Section, above: list[_Piece]) -> tuple[list[list[_Piece]], list[_Piece]]:
        """Return groups of pieces, each a chunk, and the headings at the end that still want a text.

        `above` are such headings from before the section.
        """
        everything = [*above, *section.pieces()]
        if _only_headings(everything):
            return self._spill(everything)
        if not self._is_split_at_headers(section) and _tokens(everything) <= self._target(section.path):
            return [everything], []

        groups: list[list[_Piece]] = []
        run: list[list[_Piece]] = []  # small neighbours that may share a chunk
        own = [*above, *section.own]
        if _only_headings(own):
            waiting = own
        else:
            *groups, last = self._fill([[piece] for piece in own])
            run, waiting = [last], []
        for child in section.children:
            unit = [*waiting, *child.pieces()]
            stands_alone = self._document.source_type == "readme" and child.level <= 2
            if _only_headings(unit):
                spilled, waiting = self._spill(unit)
                if spilled:
                    groups += [*self._fill(run), *spilled]
                    run = []
            elif stands_alone or _tokens(unit) > self._target(child.path):
                packed, headings = self._pack(child, waiting)
                groups += [*self._fill(run), *packed]
                run, waiting = [], headings
            else:
                run.append(unit)
                waiting = []
        return [*groups, *self._fill(run)], waiting

    def _is_split_at_headers(self, section: _Section) -> bool:
        """Spec 002: a README is split by its `##` headers, small or not."""
        return self._document.source_type == "readme" and any(
            child.level <= 2 and not _only_headings(child.pieces()) for child in section.children
        )

    def _spill(self, headings: list[_Piece]) -> tuple[list[list[_Piece]], list[_Piece]]:
        """Keep headings waiting for their text, unless they are so many that they are the text."""
        if _tokens(headings) <= self._target(()) // 2:
            return [], headings
        return self._fill([[piece] for piece in headings]), []

    def _fill(self, units: list[list[_Piece]]) -> list[list[_Piece]]:
        """Join neighbours up to the target size, first come first served.

        Greedy on purpose: an edit moves borders only until the old and the new text share one again.
        """
        groups: list[list[list[_Piece]]] = []
        group: list[list[_Piece]] = []
        size = 0
        for unit in units:
            grown = size + unit[0].gap_tokens + _tokens(unit)
            if group and grown > self._room_beside(group, unit):
                moving = self._lead_in(group, unit)
                groups.append(group[: len(group) - moving])
                group = group[len(group) - moving :]
                size = _tokens(_flat(group))
            group.append(unit)
            size = _tokens(_flat(group)) if len(group) == 1 else size + unit[0].gap_tokens + _tokens(unit)
        if group:
            groups.append(group)
        if len(groups) > 1:
            self._level(groups)
        return [_flat(group) for group in groups]

    def _room_beside(self, group: list[list[_Piece]], unit: list[_Piece]) -> int:
        clings = unit[0].trails or all(piece.leads_in for other in group for piece in other)
        path = _common_path([*group[0], *unit])
        return self._hard(path) if clings else self._target(path)

    def _lead_in(self, group: list[list[_Piece]], unit: list[_Piece]) -> int:
        """Return how many units at the end of the group belong with the next one, and fit with it."""
        moving = 0
        while moving < len(group) and all(piece.leads_in for piece in group[-1 - moving]):
            moving += 1
        if moving == len(group):
            return 0
        while moving and _tokens([*_flat(group[-moving:]), *unit]) > self._hard(unit[0].path):
            moving -= 1
        return moving

    def _level(self, groups: list[list[list[_Piece]]]) -> None:
        """Spare the last group from being a crumb: join it to the one before, or share with that one."""
        *_, before, last = groups
        if _tokens(_flat(last)) >= self._target(last[0][0].path) // 4:
            return
        path = _common_path([*_flat(before), *_flat(last)])
        if _tokens([*_flat(before), *_flat(last)]) <= self._hard(path):
            groups[-2:] = [[*before, *last]]
            return
        while len(before) > 1:
            rest, moved = before[:-1], [*before[-1], *_flat(last)]
            imbalance = _tokens(_flat(before)) - _tokens(_flat(last))
            too_large = _tokens(moved) > self._hard(_common_path(moved))
            if too_large or abs(_tokens(_flat(rest)) - _tokens(moved)) >= imbalance:
                return
            last.insert(0, before.pop())

    def _add(self, pieces: list[_Piece]) -> None:
        """Append the chunk of these pieces, or several if the estimate of its tokens was too low."""
        path = _common_path(pieces)
        start, end = pieces[0].start, pieces[-1].end
        # Never before the start of the chunk in front, or it would hold all of that one.
        floor = self._chunks[-1].start + 1 if self._chunks else 0
        for first in dict.fromkeys((max(pieces[0].overlap_start, min(floor, start)), start)):
            embedded_text = self._embedded(first, end, path)
            if self._count(embedded_text) <= self._limit:
                self._append(first, end, path, pieces[0].page_number, embedded_text)
                return
        if len(pieces) > 1:
            half = len(pieces) // 2
            self._add(pieces[:half])
            self._add(pieces[half:])
        elif end - start > 1:
            border, _ = self._border(start, (start + end + 1) // 2, "text", True)
            for part_start, part_end in ((start, border), (self._next_start(border, end), end)):
                if self._body[part_start:part_end].strip():
                    part = replace(pieces[0], start=part_start, end=part_end, overlap_start=part_start)
                    self._add([part])
        else:
            raise ValueError(f"one character takes more than the limit of {self._limit} tokens")

    def _add_whole(self) -> bool:
        """Append the whole document as one chunk, if it is within all limits and on one page."""
        blocks = self._document.blocks
        start, end = blocks[0].start, blocks[-1].end
        if end - start > MAX_CHUNK_BYTES or len(self._body[start:end].encode()) > MAX_CHUNK_BYTES:
            return False
        if blocks[0].page_number != blocks[-1].page_number:
            return False
        path = _common_path(blocks)
        embedded_text = self._embedded(start, end, path)
        if self._count(embedded_text) > self._limit:
            return False
        self._append(start, end, path, blocks[0].page_number, embedded_text)
        return True

    def _embedded(self, start: int, end: int, path: tuple[str, ...]) -> str:
        prefix, _ = self._prefix(path)
        return f"{prefix}\n\n{self._body[start:end]}" if prefix else self._body[start:end]

    def _append(self, start: int, end: int, path: tuple[str, ...], page_number: int | None, embedded_text: str) -> None:
        text = self._body[start:end]
        self._chunks.append(
            Chunk(
                index=len(self._chunks),
                text=text,
                start=start,
                end=end,
                section=" > ".join(path) or None,
                page_number=page_number,
                embedded_text=embedded_text,
                token_count=self._count(text),
                hash=hashlib.sha256(embedded_text.encode()).hexdigest(),
            )
        )


def _flat(group: list[list[_Piece]]) -> list[_Piece]:
    return [piece for unit in group for piece in unit]


# A full stop, what closes behind it, and the white space after it; CJK writes none. That a sentence does
# not go on in lower case is checked apart: "e.g. this".
_SENTENCE_END = re.compile(r"""[.!?…][)\]}"'”’»]*\s+|[。！？][」』）”’]*\s*""")
_WORD_START = re.compile(r"\s(?=\S)")
_LINE_START = re.compile(r"\n([ \t]*)(?=\S)")
