"""What the command line prints of an answer that is being written."""

from __future__ import annotations

import json

import pytest

from rag import screen
from rag.events import Citations, Retracted, Token


def test_text_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("Backups ", "run [x] ", "at night."):
        screen.print_event(Token(text=text), as_json=False)
    assert capsys.readouterr().out == "Backups run [x] at night."


def test_what_is_no_longer_said_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_event(Retracted(text="They run.", reason="gone"), as_json=False)
    assert capsys.readouterr().out == "\nno longer said: gone\nThey run."


def test_as_json_each_event_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_event(Token(text="a\nb"), as_json=True)
    screen.print_event(Citations(citations=()), as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"event": "token", "text": "a\nb"},
        {"event": "citations", "citations": []},
    ]
