"""The local model in a process of its own: the same vectors, and nothing that outlives whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rag.embed import LocalEmbedder
from rag.errors import EmbeddingUnavailable
from rag.minilm import MiniLM, installed_folder
from rag.model_process import ModelProcess
from rag.settings import Settings
from rag.word_pieces import WordPieces

TEXTS = ["the ferry leaves at nine", "bread needs flour and water", "lighthouse keeper " * 60]
# A machine that is busy takes seconds to start an interpreter.
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def folder() -> Path:
    found = installed_folder()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def batch(folder: Path) -> list[list[int]]:
    word_pieces = WordPieces(folder)
    return [word_pieces.ids(text, cut=True) for text in TEXTS]


@pytest.fixture
def process(folder: Path) -> Iterator[ModelProcess]:
    started = ModelProcess(folder, threads=2)
    yield started
    started.close()


def pid_of(process: ModelProcess) -> int:
    assert process._running is not None
    return process._running.process.pid


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has to wait for any more, in a container without an init, has ended too.
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())


def wait_for_the_end(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while is_there(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_vectors_are_those_of_the_model(process: ModelProcess, folder: Path, batch: list[list[int]]) -> None:
    alone = MiniLM(folder)
    assert np.array_equal(process.embed(batch), alone.embed(batch))
    assert np.array_equal(process.embed(batch[:1]), alone.embed(batch[:1]))


def test_each_caller_gets_its_own_vectors(process: ModelProcess, folder: Path, batch: list[list[int]]) -> None:
    expected = [MiniLM(folder).embed([ids]) for ids in batch]
    with ThreadPoolExecutor(2) as pool:
        for index, vectors in enumerate(pool.map(process.embed, [[ids] for ids in batch] * 40)):
            assert np.array_equal(vectors, expected[index % len(batch)])


def test_a_process_that_dies_is_an_error_and_is_started_anew(process: ModelProcess, batch: list[list[int]]) -> None:
    first = process.embed(batch)
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EmbeddingUnavailable, match="has ended"):
        process.embed(batch)
    assert np.array_equal(process.embed(batch), first)
    assert pid_of(process) != pid
    assert not is_there(pid)


def test_all_who_wait_are_told_that_it_died(folder: Path) -> None:
    process = ModelProcess(folder, threads=2)
    long = [[101, *[2000] * 254, 102]] * 200
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(process.embed, long) for _ in range(2)]
        os.kill(pid_of(process), signal.SIGKILL)
        for one in waiting:
            with pytest.raises(EmbeddingUnavailable):
                one.result(PATIENCE_S)
    assert process.embed(long[:1]).shape == (1, 384)
    process.close()


def test_bad_input_ends_nothing_for_others(process: ModelProcess, batch: list[list[int]]) -> None:
    # Beyond the vocabulary: no tokenizer gives it out, and if one did the process would be replaced.
    with pytest.raises(EmbeddingUnavailable):
        process.embed([[1_000_000]])
    assert process.embed(batch).shape == (3, 384)


def test_closing_ends_it(folder: Path, batch: list[list[int]]) -> None:
    process = ModelProcess(folder, threads=1)
    process.embed(batch)
    pid = pid_of(process)
    process.close()
    assert not is_there(pid)
    process.close()


async def test_the_embedder_ends_it(folder: Path) -> None:
    embedder = LocalEmbedder(Settings(_env_file=None))
    await embedder.embed(TEXTS, purpose="document")
    pid = pid_of(embedder._model)
    await embedder.close()
    assert not is_there(pid)


async def test_an_embedder_goes_on_after_its_process_died() -> None:
    embedder = LocalEmbedder(Settings(_env_file=None))
    expected = await embedder.embed(TEXTS, purpose="document")
    running = asyncio.ensure_future(embedder.embed(["word " * 200] * 200, purpose="document"))
    await asyncio.sleep(0.2)
    os.kill(pid_of(embedder._model), signal.SIGKILL)
    with pytest.raises(EmbeddingUnavailable):
        await running
    assert await embedder.embed(TEXTS, purpose="document") == expected
    await embedder.close()


# A program without `if __name__ == "__main__"`, which multiprocessing would run again in each process.
PROGRAM = """
import asyncio, os, signal, sys, time
# A shell may have started the tests in the background, where it has this ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from rag.embed import LocalEmbedder
from rag.settings import Settings
embedder = LocalEmbedder(Settings(_env_file=None))
vectors = asyncio.run(embedder.embed(["hello"], purpose="query"))
print(len(vectors[0]), embedder._model._running.process.pid, flush=True)
if "wait" in sys.argv:
    time.sleep(600)
if "crash" in sys.argv:
    os._exit(3)
"""


@pytest.mark.parametrize("end", ["return", "crash"])
def test_it_ends_with_the_program(tmp_path: Path, end: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, end], capture_output=True, text=True, check=False, cwd=tmp_path)
    width, pid = done.stdout.split()
    assert (width, done.stderr) == ("512", "")
    wait_for_the_end(int(pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_the_program_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, program, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline().split()[1])
        assert is_there(pid)
        running.send_signal(number)
        running.wait(PATIENCE_S)
        wait_for_the_end(pid)


def test_an_interrupt_of_the_terminal_is_not_for_it(process: ModelProcess) -> None:
    # A terminal sends it to the whole group; the program ends the process when it has done its last batch.
    assert os.getpgid(pid_of(process)) != os.getpgid(0)


def test_a_process_that_cannot_be_started_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EmbeddingUnavailable, match="cannot be started"):
        ModelProcess(folder, threads=1)


def test_it_loads_nothing_of_the_service() -> None:
    program = (
        "import sys, rag.model_process\n"
        "print(sorted({'psycopg', 'pydantic', 'tokenizers', 'rag.errors', 'rag.answer'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['rag.errors']\n"
