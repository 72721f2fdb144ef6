"""Ways to write a word so that a person still reads it, and a program that compares characters does not."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

CYRILLIC = str.maketrans("ACEHIKMOPSTXYaceiopsxy", "АСЕНІКМОРЅТХУасеіорѕху")
GREEK = str.maketrans("ABEHIKMNOTXYZo", "ΑΒΕΗΙΚΜΝΟΤΧΥΖο")
SMALL_CAPITALS = dict(
    zip(
        map(ord, "abcdefghijklmnoprtuvwyz"),
        "ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀᴛᴜᴠᴡʏᴢ",
        strict=True,
    )
)


def shifted(upper: int, lower: int) -> dict[int, str]:
    """Another alphabet, by where its letters begin."""
    return {ord("A") + at: chr(upper + at) for at in range(26)} | {ord("a") + at: chr(lower + at) for at in range(26)}


DISGUISES: dict[str, Callable[[str], str]] = {
    "zero width": lambda text: "\u200b".join(text),
    "joiners": lambda text: "\u200d\u2060".join(text),
    "soft hyphens": lambda text: "\u00ad".join(text),
    "variation selectors": lambda text: "\ufe0f".join(text),
    "fillers": lambda text: "\u3164".join(text),
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "combining": lambda text: "".join(c + "\u0336" if c.isalpha() else c for c in text),
    "accents": lambda text: unicodedata.normalize("NFC", "".join(c + "\u0301" if c.isalpha() else c for c in text)),
    "cyrillic": lambda text: text.translate(CYRILLIC),
    "greek": lambda text: text.translate(GREEK),
    "small capitals": lambda text: text.lower().translate(SMALL_CAPITALS),
    "bold": lambda text: text.translate(shifted(0x1D400, 0x1D41A)),
    "monospace": lambda text: text.translate(shifted(0x1D670, 0x1D68A)),
    "circles": lambda text: text.translate(shifted(0x24B6, 0x24D0)),
    "negative squares": lambda text: text.translate(shifted(0x1F170, 0x1F170)),
    "flags": lambda text: text.translate(shifted(0x1F1E6, 0x1F1E6)),
    "overridden": lambda text: f"\u202d{text}\u202c",
    "isolated": lambda text: "\u2066" + "\u2069\u2066".join(text) + "\u2069",
    "brackets": lambda text: text.replace("[", "\u3010").replace("<", "\u2039").replace(":", "\u02d0"),
    "wide spaces": lambda text: text.replace(" ", "\u2003"),
    "other digits": lambda text: text.translate({ord("0") + at: chr(0x660 + at) for at in range(10)}),
    "line separator": lambda text: f"so\u2028{text}",
    "carriage return": lambda text: f"so\r{text}",
    "control": lambda text: "\x7f".join(text),
}
