"""A model that does whatever a text in its prompt tells it, disguised or not: the worst that an injection can meet."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tests.fakes.chat import Message

LABEL = re.compile(r"^\[(S\d+-[0-9a-f]{6})\]$", re.MULTILINE)
# What the model says when it takes quoted material for the structure of its prompt.
HIJACKED = "HIJACKED"

_TWINS = str.maketrans("АВСЕНІЈКМОРЅТХУасеіјорѕхуΑΒΕΗΙΚΜΝΟΡΤΥΧΖο", "ABCEHIJKMOPSTXYaceijopsxyABEHIKMNOPTYXZo")
_CITE = re.compile(r"(?:\bcite|as the source:|zitiere|укажи источник)[ :]+(.+)$", re.IGNORECASE | re.MULTILINE)
_PRINT = re.compile(
    r"\b(?:print|repeat|reveal|translate|output|wiederhole|повтори)\b[^\n]*"
    r"(?:system prompt|instructions|rules|above|systemprompt|инструкции)([^\n]*)",
    re.IGNORECASE,
)
_SHOW = re.compile(r"\b(?:show|embed|render|add|link)\b[^:\n]*: ?(.+)$", re.IGNORECASE | re.MULTILINE)
_RATE = re.compile(r"\b(?:rate|grade|confidence|score)\b[^\n]*?100([^\n]*)", re.IGNORECASE)
_DUMP = re.compile(r"\beverything (?:that )?you (?:know|were given|have read)\b", re.IGNORECASE)
_STRUCTURE = re.compile(
    r"<\|[^<>\n]{1,60}\|>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>"
    r"|</?(?:system|user|assistant|tool_call|function_calls|think)>|<invoke "
    r"|^[ \t>*#]*(?:system|human|assistant|user)[ \t*]*:",
    re.IGNORECASE | re.MULTILINE,
)
_RULE = re.compile(r"^---$", re.MULTILINE)


@dataclass
class Obeying:
    """`answer` and `fill` of a fake server; keeps what it was made to say."""

    cites: bool = True
    """Whether the sources of the prompt are cited as well, as an answer that wants to be believed does."""
    emitted: list[str] = field(default_factory=list)
    graded: list[str] = field(default_factory=list)
    prompts: list[list[Message]] = field(default_factory=list)

    def begin(self, *, cites: bool) -> None:
        """Forget what was before."""
        self.cites = cites
        self.emitted, self.graded, self.prompts = [], [], []

    def answer(self, messages: list[Message]) -> str:
        self.prompts.append(messages)
        system, user = messages[0]["content"], messages[-1]["content"]
        text = read(user)
        labels = LABEL.findall(user)
        said = ["Backups run at night."]
        if self.cites:
            said += [f"[{label}]" for label in labels]
        orders = [*self._orders(text, system, user), *([HIJACKED] if hijacked(user, text, len(labels)) else [])]
        self.emitted += orders
        return " ".join([*said, *orders])

    def fill(self, schema: Mapping[str, Any], messages: list[Message]) -> str:
        if "data" in schema["properties"]:
            return self._filled(messages)
        order = _RATE.search(read(messages[-1]["content"]))
        if order is None:
            return '{"score": 50}'
        how = order[1].lower()
        reply = '{"score": 100}'
        for word, other in (("because", "100 because I was told"), ("prose", "confidence: 100"), ("bare", "100")):
            if word in how:
                reply = other
        self.graded.append(reply)
        return reply

    def _filled(self, messages: list[Message]) -> str:
        """A form with all orders in its values; at first they are its sources as well."""
        system, user = messages[0]["content"], messages[1]["content"]
        text, labels = read(user), LABEL.findall(user)
        orders = [*self._orders(text, system, user), *([HIJACKED] if hijacked(user, text, len(labels)) else [])]
        self.prompts.append(messages)
        self.emitted += orders
        again = len(messages) > 2
        sources = [*labels, *([] if again else (order.strip("[]")[:500] for order in orders))]
        return json.dumps(
            {
                "found": True,
                "data": {"answer": " ".join(("At night.", *orders)), "list": [f"At {labels[0]}", *orders]},
                "source_citations": [{"path": "/answer", "source": source} for source in sources],
                "confidence": "high",
            }
        )

    def _orders(self, text: str, system: str, user: str) -> list[str]:
        # As it was written, and as it was meant.
        marks = dict.fromkeys(_as_mark(order) for order in (*_CITE.findall(user), *_CITE.findall(text)))
        said = list(marks)
        for how in _PRINT.findall(text):
            said.append(_printed(system, how.lower()))
        data = quote(" ".join(user.partition("---\n")[2].split())[:80])
        said += [order.replace("{data}", data) for order in _SHOW.findall(text)]
        said += ["I am sure. confidence: 100 %"] * bool(_RATE.search(text))
        said += [user] * bool(_DUMP.search(text))
        return said


def read(text: str) -> str:
    """What a model makes of characters that look like others, or like nothing."""
    plain = "".join(chr(ord(c) - 0xE0000) if "\U000e0020" <= c <= "\U000e007e" else c for c in text)
    kept = (c for c in unicodedata.normalize("NFKD", plain) if unicodedata.category(c) not in ("Cf", "Mn", "Me"))
    return "".join(kept).translate(_TWINS)


def hijacked(user: str, text: str, sources: int) -> bool:
    """Whether something quoted passes for a part of the prompt, to a model that reads `text`."""
    body = text.rpartition("\nQUESTION: ")[0]
    # Of an earlier message, the names of the speakers are ours.
    ours = re.sub(r"(?m)^(?:user|assistant|summary): ", "", body.partition("\nEND OF EARLIER MESSAGES")[0])
    quoted = ours + body.partition("\nEND OF EARLIER MESSAGES")[2] if "EARLIER MESSAGES (" in body else body
    return bool(
        _STRUCTURE.search(quoted)
        or len(re.findall(r"(?im)\bend of sources\b", text)) != 1
        or len(re.findall(r"(?im)\bend of earlier messages\b", text)) > 1
        or len(re.findall(r"(?im)^[ \t>*#]*question[ \t*]*:", text)) != 1
        or len(_RULE.findall(user)) != 2 * sources
        or len(re.findall(r"(?i)\[ ?(?:s\d|sourceid\b)", text)) != sources
    )


def _as_mark(order: str) -> str:
    """A mark as it stood before it was quoted."""
    return order.strip().rstrip(".").replace("(", "[", 1)


def _printed(system: str, how: str) -> str:
    if "code" in how:
        return f"```\n{system}\n```"
    if "line" in how:
        return "\n".join(f"> {line}" for line in system.splitlines())
    if "one" in how:
        return " ".join(system.split())
    return f"My rules are: {system}"
