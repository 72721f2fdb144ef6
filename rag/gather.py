"""What a source holds: the files of a directory, or those of a commit of a git repository.

A listing is complete or an error, since what is not in it is removed from the index. Links are never followed,
submodules never entered; of a repository no hook, filter or configured program runs, and only `https` is spoken.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, BinaryIO, Protocol
from urllib.parse import urlsplit

from rag.errors import InvalidInput, SourceUnavailable, UnreadableDocument
from rag.parse import SUFFIXES

# A clone of all Linux kernels is larger; a source of documents is not.
MAX_FILES = 1_000_000
FETCH_TIMEOUT_S = 600.0
GIT_TIMEOUT_S = 60.0
# Below this a file is handed over in memory.
SPOOL_BYTES = 8 * 1024 * 1024

_REF = re.compile(r"(?!.*\.\.)(?!.*//)[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a listing; `path` is below the top of its source, with slashes. `key` is where its content is."""

    path: str
    size: int
    key: str
    updated_at: datetime | None


class Listing(Protocol):
    """All files of a source at one moment, in the order of their paths."""

    files: Sequence[File]
    left_out: int
    """Files of formats that are not accepted."""
    version: str | None

    def open(self, file: File) -> BinaryIO:
        """The content. Raises OSError for a file that cannot be read, UnreadableDocument for one that is elsewhere."""

    def uri(self, file: File) -> str:
        """Where a person finds the file."""


class PathFilter:
    """Which paths of a source count: those that match one of `include`, if any, and none of `exclude`.

    `*` stands for anything but a slash, `**` for any folders, `?` for one character. A pattern without a slash is of a
    name at any depth, and one that ends in a slash is of everything below. Raises InvalidInput for an empty one.
    """

    def __init__(self, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = [_Pattern(text, "include") for text in include]
        self._exclude = [_Pattern(text, "exclude") for text in exclude]

    def allows(self, path: str) -> bool:
        """Whether the path counts, hidden or not."""
        if self._include and not any(pattern.matches(path) for pattern in self._include):
            return False
        return not any(pattern.matches(path) for pattern in self._exclude)


class _Pattern:
    """A pattern of paths, matched part by part: as one regular expression, a few `**` would take years."""

    def __init__(self, text: str, field: str) -> None:
        text = text.removeprefix("./").removeprefix("/") if text.strip("/. ") else ""
        if not text or len(text) > 1_000:
            raise InvalidInput(f"a pattern of {field} is empty or too long", field=field)
        if text.endswith("/"):
            text += "**"
        if "/" not in text:
            text = f"**/{text}"
        self._parts = [
            None if part == "**" else re.compile(fnmatch.translate(part.replace("[", "[[]")))
            for part in text.split("/")
        ]

    def matches(self, path: str) -> bool:
        names = path.split("/")
        # Which numbers of names the parts so far can stand for.
        reached = {0}
        for place, part in enumerate(self._parts):
            if part is None:
                # At the end it stands for something: `docs/**` is not `docs` itself.
                least = min(reached, default=len(names)) + (place == len(self._parts) - 1)
                reached = set(range(least, len(names) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(names) and part.match(names[at])}
        return len(names) in reached


def is_listed(path: str) -> bool:
    """Whether a path is of a file that people see; hidden ones are not, but project specifications (spec 002) are."""
    *folders, name = path.split("/")
    if any(folder.startswith(".") for folder in folders):
        return False
    return not name.startswith(".") or Path(name).stem == ".project-spec"


def _chosen(files: Iterator[File], paths: PathFilter) -> tuple[list[File], int]:
    chosen: list[File] = []
    left_out = 0
    for number, file in enumerate(files):
        if number >= MAX_FILES:
            raise SourceUnavailable(f"the source has more than {MAX_FILES:,} files")
        if not is_listed(file.path) or not paths.allows(file.path):
            continue
        if Path(file.path).suffix.lower() in SUFFIXES:
            chosen.append(file)
        else:
            left_out += 1
    return sorted(chosen, key=lambda file: file.path), left_out


# --- a directory ---------------------------------------------------------------------------------


class Directory:
    """The files below a directory as they are now, whatever a `.gitignore` says."""

    files: Sequence[File]
    version: str | None = None

    def __init__(self, top: Path, paths: PathFilter) -> None:
        self._top = top.resolve()
        try:
            self.files, self.left_out = _chosen(self._below(self._top, ""), paths)
        except OSError as error:
            reason = (error.strerror or "cannot be read").lower()
            raise SourceUnavailable(f"the directory {top} cannot be listed: {reason}") from error

    def _below(self, folder: Path, prefix: str) -> Iterator[File]:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith("."):
                        yield from self._below(Path(entry.path), path + "/")
                elif entry.is_file(follow_symlinks=False):
                    known = entry.stat(follow_symlinks=False)
                    updated_at = datetime.fromtimestamp(known.st_mtime, UTC)
                    yield File(path=path, size=known.st_size, key=path, updated_at=updated_at)

    def open(self, file: File) -> BinaryIO:
        path = self._top / file.key
        # A link that came into the place of a file or a folder meanwhile may lead anywhere.
        if path.parent.resolve() != path.parent:
            raise OSError(None, "is below a link")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(None, "is no plain file")
        return os.fdopen(descriptor, "rb")

    def uri(self, file: File) -> str:
        return (self._top / file.key).as_uri()


@contextmanager
def list_directory(top: Path, paths: PathFilter) -> Iterator[Listing]:
    """The files below a directory. Raises SourceUnavailable unless every folder could be read."""
    yield Directory(top, paths)


# --- a git repository ----------------------------------------------------------------------------


class Commit:
    """The files of a commit, read from the objects of a repository that is on this machine."""

    files: Sequence[File]
    version: str | None

    def __init__(self, git: _Git, ref: str, paths: PathFilter, *, where: str) -> None:
        self._git = git
        self._where = where
        commit = git.line("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        committed = re.search(r"^committer .* (\d+) [+-]\d{4}$", git.text("cat-file", "-p", commit), re.MULTILINE)
        self.version = commit
        self._updated_at = datetime.fromtimestamp(int(committed[1]), UTC) if committed else None
        self.files, self.left_out = _chosen(self._blobs(commit), paths)
        self._lock = threading.Lock()
        self._reader: subprocess.Popen[bytes] | None = None

    def _blobs(self, commit: str) -> Iterator[File]:
        for entry in self._git.text("ls-tree", "-r", "-z", "--long", "--full-tree", commit).split("\0"):
            if not entry:
                continue
            described, path = entry.split("\t", 1)
            mode, kind, name, size = described.split()
            # 120000 is a link, and a submodule is a commit.
            if kind == "blob" and mode in ("100644", "100755"):
                yield File(path=path, size=int(size), key=name, updated_at=self._updated_at)

    def open(self, file: File) -> BinaryIO:
        with self._lock:
            if self._reader is None:
                self._reader = self._git.start("cat-file", "--batch")
            reader = self._reader
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(file.key.encode() + b"\n")
            reader.stdin.flush()
            head = reader.stdout.readline().split()
            if len(head) != 3 or head[1] != b"blob":
                # Of a partial clone: what is missing is not fetched.
                raise OSError(None, "is missing in the repository")
            # Closed by whoever asked for it.
            content: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115
            _copy(reader.stdout, content, int(head[2]))
            reader.stdout.read(1)
        content.seek(0)
        if content.read(len(_LFS)) == _LFS:
            content.close()
            raise UnreadableDocument("is kept in Git LFS, of which only a pointer is in the repository")
        content.seek(0)
        return content  # type: ignore[return-value]

    def uri(self, file: File) -> str:
        return f"{self._where}#{file.path}"

    def close(self) -> None:
        """End the program that reads objects."""
        if self._reader is not None:
            assert self._reader.stdin is not None
            assert self._reader.stdout is not None
            self._reader.stdin.close()
            self._reader.stdout.close()
            self._reader.wait(GIT_TIMEOUT_S)


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size > 0:
        piece = source.read(min(size, 1024 * 1024))
        if not piece:
            raise OSError(None, "cannot be read from the repository")
        target.write(piece)
        size -= len(piece)


@contextmanager
def list_commit(repository: str, ref: str, paths: PathFilter, *, askpass: Path | None = None) -> Iterator[Listing]:
    """The files of a commit of a local repository, or of one at an https address, fetched to read it once.

    `askpass` is a program that git asks for a name and a password (gitcredentials(7), GIT_ASKPASS). Raises
    SourceUnavailable, InvalidInput for an address or a ref that is none.
    """
    if not _REF.fullmatch(ref):
        raise InvalidInput("ref must be a branch, a tag or a commit", field="ref")
    program = shutil.which("git")
    if program is None:
        raise SourceUnavailable("the program git is not installed")
    if "://" not in repository and Path(repository).is_dir():
        place = Path(repository).resolve()
        commit = Commit(_Git(program, place), ref, paths, where=place.as_uri())
        try:
            yield commit
        finally:
            commit.close()
        return
    address = check_address(repository)
    with tempfile.TemporaryDirectory(prefix="rag-source-") as folder:
        git = _Git(program, Path(folder))
        git.text("init", "--quiet", "--bare", "--template=", ".")
        git.fetch(address, ref, askpass=askpass)
        commit = Commit(git, "FETCH_HEAD", paths, where=address)
        try:
            yield commit
        finally:
            commit.close()


def check_address(address: str) -> str:
    """The address as it came. Raises InvalidInput unless it is https, or http of this machine, without a password."""
    parts = urlsplit(address)
    own = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (own or parts.scheme == "https") or re.search(r"[\x00-\x20\x7f]", address):
        raise InvalidInput("a repository is a directory of this machine or an https address", field="git")
    if parts.username is not None or parts.password is not None:
        # It would stand in every source_uri, which every reader sees.
        raise InvalidInput("the address of a repository must not hold a password", field="git")
    return address


class _Git:
    """The program git on one repository: no hooks, no configuration but the repository's own, no questions."""

    def __init__(self, program: str, place: Path) -> None:
        self._place = place
        self._command = [
            program,
            *("-C", str(place), "--no-pager", "--no-optional-locks", "--no-replace-objects"),
            # Only objects are read: whose the files are does not matter, since nothing that they configure runs.
            *("-c", f"safe.directory={place}", "-c", f"safe.directory={place}/.git"),
            *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.allow=never"),
        ]
        self._environment = {
            "PATH": os.defpath,
            "LC_ALL": "C",
            "HOME": "/nonexistent",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_LAZY_FETCH": "1",
            # A folder inside of somebody else's repository is none.
            "GIT_CEILING_DIRECTORIES": str(place.parent),
        }

    def text(self, *arguments: str) -> str:
        return self._run(arguments, timeout_s=GIT_TIMEOUT_S).decode("utf-8", "surrogateescape")

    def line(self, *arguments: str) -> str:
        return self.text(*arguments).strip()

    def fetch(self, address: str, ref: str, *, askpass: Path | None) -> None:
        if askpass is not None and not os.access(askpass, os.X_OK):
            raise SourceUnavailable(f"the program {askpass} cannot be run")
        scheme = urlsplit(address).scheme
        options = [f"protocol.{scheme}.allow=always", "http.followRedirects=false", "credential.helper="]
        self._run(
            [
                *(part for option in options for part in ("-c", option)),
                *("fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--no-auto-maintenance"),
                *("--end-of-options", address, ref),
            ],
            timeout_s=FETCH_TIMEOUT_S,
            asking={} if askpass is None else {"GIT_ASKPASS": str(askpass)},
        )

    def _run(self, arguments: Sequence[str], *, timeout_s: float, asking: Mapping[str, str] | None = None) -> bytes:
        try:
            done = subprocess.run(  # noqa: S603
                [*self._command, *arguments],
                env=self._environment | dict(asking or {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceUnavailable(f"git took longer than {timeout_s:.0f} s") from error
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            reason = said[-1][:200] if said else "no such branch, tag or commit"
            raise SourceUnavailable(f"the repository cannot be read: {reason}")
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            [*self._command, *arguments],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
