"""The local model in a process of its own, so that it and what stores its vectors do not wait for each other.

In one process they share the interpreter's lock: numpy asks for it again after each of some thousand products that a
batch is made of, and has to wait for whatever Python is running then. On 2 processors documents of 1 KB took 1.31 times
what the model takes alone when it was in the same process, and 1.17 times with the two apart (11 rounds by turns).

`ModelProcess` is the near side. The far side is this file as a program: unlike a child of multiprocessing it does not
import the program that started it. It ends when that does, however it does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag.errors import EmbeddingUnavailable
from rag.minilm import WIDTH, Floats, MiniLM


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    free: queue.SimpleQueue[Connection]


class ModelProcess:
    """Computes vectors, on so many threads of the process, which share the weights."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        """Start it, and do not wait until it is ready. Raises EmbeddingUnavailable when it cannot be started."""
        self._folder = folder
        self._threads = threads
        self._lock = threading.Lock()
        self._running: _Running | None = self._start()

    def embed(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Like `MiniLM.embed`; for as many callers at once as there are threads on the far side.

        Raises EmbeddingUnavailable when the process ends; the next call starts another.
        """
        with self._lock:
            running = self._running = self._running or self._start()
            channel = running.free.get_nowait()
        try:
            channel.send_bytes(_packed(texts))
            answer = channel.recv_bytes()
        except (OSError, EOFError) as error:
            channel.close()
            self._end(running)
            raise EmbeddingUnavailable("the process of the local embedding model has ended") from error
        running.free.put(channel)
        return np.frombuffer(answer, np.float32).reshape(len(texts), WIDTH)

    def close(self) -> None:
        """End the process; what it computes is lost."""
        with self._lock:
            running = self._running
        if running is not None:
            self._end(running)

    def _start(self) -> _Running:
        near, far = zip(*(Pipe() for _ in range(self._threads)), strict=True)
        descriptors = [channel.fileno() for channel in far]
        try:
            process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-P", "-m", __name__, self._folder, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                # An interrupt of the terminal is for the program, which may have a batch to finish.
                process_group=0,
                env=os.environ
                | {
                    # It finds modules where this one does.
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    # OpenBLAS keeps buffers for each thread that it might use.
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        except OSError as error:
            raise EmbeddingUnavailable("the process of the local embedding model cannot be started") from error
        finally:
            for channel in far:
                channel.close()
        free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for channel in near:
            free.put(channel)
        weakref.finalize(self, _stop, process)
        return _Running(process, free)

    def _end(self, running: _Running) -> None:
        with self._lock:
            if self._running is running:
                self._running = None
            # Those that are in use are closed by whoever uses them.
            while not running.free.empty():
                running.free.get_nowait().close()
        _stop(running.process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _packed(texts: Sequence[Sequence[int]]) -> bytes:
    """How many texts, how long each is, and the word pieces of all."""
    lengths = [len(ids) for ids in texts]
    return np.array([len(texts), *lengths, *chain.from_iterable(texts)], np.int32).tobytes()


def _unpacked(request: bytes) -> list[npt.NDArray[np.int32]]:
    numbers = np.frombuffer(request, np.int32)
    count = int(numbers[0])
    ends = np.cumsum(numbers[1 : count + 1])
    return np.split(numbers[count + 1 :], ends[:-1])


def _answer(model: MiniLM, channel: Connection) -> None:
    # Closed when something fails: the near side takes that for the end of the process.
    with channel, contextlib.suppress(EOFError):
        while True:
            channel.send_bytes(model.embed(_unpacked(channel.recv_bytes())).tobytes())


def _serve(folder: Path, descriptors: Sequence[int]) -> None:
    model = MiniLM(folder)
    threads = [threading.Thread(target=_answer, args=(model, Connection(number))) for number in descriptors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]])
