"""What `from rag import …` offers a library user."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rag


def test_every_public_name_is_there() -> None:
    for name in rag.__all__:
        assert getattr(rag, name).__name__ == name


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RagService'"):
        _ = rag.RagService


def test_all_of_it_can_be_imported_and_nothing_is_loaded_before() -> None:
    program = "import sys, rag\nassert 'psycopg' not in sys.modules\nfrom rag import *\nprint(RAGService.__module__)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "rag.answer\n"
