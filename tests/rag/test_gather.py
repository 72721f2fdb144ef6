"""Listings of sources: which files count, that a listing is whole or an error, and what git must not do."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rag.errors import InvalidInput, SourceUnavailable, UnreadableDocument
from rag.gather import PathFilter, check_address, list_commit, list_directory

EVERYTHING = PathFilter()
ROOT = os.geteuid() == 0


def write(top: Path, **files: str) -> None:
    """`write(top, a__b_md="…")` writes a/b.md."""
    for name, text in files.items():
        path = top / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def listed(top: Path, paths: PathFilter = EVERYTHING) -> list[str]:
    with list_directory(top, paths) as listing:
        return [file.path for file in listing.files]


def content(listing, path: str) -> bytes:
    file = next(file for file in listing.files if file.path == path)
    with listing.open(file) as opened:
        return opened.read()


# --- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.md", ["a.md", "docs/deep/a.md"], ["a.mdx", "a.md/b.txt"]),
        ("docs/*.md", ["docs/a.md"], ["docs/deep/a.md", "other/docs/a.md"]),
        ("docs/**/*.md", ["docs/a.md", "docs/deep/er/a.md"], ["a.md", "docs/a.txt"]),
        ("docs/", ["docs/a.md", "docs/deep/a.txt"], ["docs", "my/docs/a.md"]),
        ("/docs/**", ["docs/a.md"], ["more/docs/a.md"]),
        ("**/adr/**", ["adr/1.md", "x/adr/y/1.md"], ["adr.md"]),
        ("a?.md", ["ab.md"], ["a.md", "a/.md"]),
        ("a.(b)+[c].md", ["a.(b)+[c].md"], ["a.b.md"]),
    ],
)
def test_patterns_match_as_people_expect(pattern: str, matching: list[str], others: list[str]):
    chosen = PathFilter(include=[pattern])
    assert [path for path in matching if not chosen.allows(path)] == []
    assert [path for path in others if chosen.allows(path)] == []
    dropped = PathFilter(exclude=[pattern])
    assert [path for path in matching if dropped.allows(path)] == []


def test_what_is_excluded_does_not_come_back_by_being_included():
    assert not PathFilter(include=["**/*.md"], exclude=["drafts/"]).allows("drafts/a.md")


@pytest.mark.parametrize("pattern", ["", "/", "./", "   ", "x" * 2_000])
def test_patterns_that_say_nothing_are_refused(pattern: str):
    with pytest.raises(InvalidInput) as refused:
        PathFilter(exclude=[pattern])
    assert refused.value.field == "exclude"


def test_a_pattern_takes_no_exponential_time():
    assert not PathFilter(include=["**/" * 20 + "x.md"]).allows("/".join("abcdefgh" * 4) + "/y.md")


# --- directories ---------------------------------------------------------------------------------


def test_a_directory_is_its_plain_visible_files_in_order(tmp_path: Path):
    write(tmp_path, b_md="b", a__deep_txt="a", a___hidden_md="h", a__data_bin="x")
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git", page_md="g")
    (tmp_path / ".project-spec.yaml").write_text("name: x", encoding="utf-8")
    with list_directory(tmp_path, EVERYTHING) as listing:
        assert [file.path for file in listing.files] == [".project-spec.yaml", "a/deep.txt", "b.md"]
        assert (listing.left_out, listing.version) == (1, None)
        assert content(listing, "b.md") == b"b"
        assert listing.uri(listing.files[2]) == (tmp_path / "b.md").as_uri()


def test_links_are_never_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    write(outside, secret_md="secret")
    top = tmp_path / "top"
    write(top, a_md="a")
    (top / "file.md").symlink_to(outside / "secret.md")
    (top / "folder").symlink_to(outside)
    (top / "loop").symlink_to(top)
    assert listed(top) == ["a.md"]


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_link_that_comes_between_listing_and_reading_is_not_followed(tmp_path: Path, swapped: str):
    outside = tmp_path / "outside"
    write(outside, a_md="secret")
    top = tmp_path / "top"
    write(top, deep__a_md="a")
    with list_directory(top, EVERYTHING) as listing:
        if swapped == "file":
            (top / "deep/a.md").unlink()
            (top / "deep/a.md").symlink_to(outside / "a.md")
        else:
            (top / "deep/a.md").unlink()
            (top / "deep").rmdir()
            (top / "deep").symlink_to(outside)
        with pytest.raises(OSError, match=r"link|symbolic"):
            content(listing, "deep/a.md")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path):
    write(tmp_path, a_md="a")
    with list_directory(tmp_path, EVERYTHING) as listing:
        (tmp_path / "a.md").unlink()
        os.mkfifo(tmp_path / "a.md")
        with pytest.raises(OSError, match="no plain file"):
            content(listing, "a.md")


def test_a_directory_that_is_not_there_is_an_error_and_not_empty(tmp_path: Path):
    with pytest.raises(SourceUnavailable, match="no such file"):
        listed(tmp_path / "missing")
    write(tmp_path, file_md="x")
    with pytest.raises(SourceUnavailable, match="not a directory"):
        listed(tmp_path / "file.md")


def test_a_folder_that_cannot_be_read_makes_the_whole_listing_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, a_md="a", deep__b_md="b")
    if ROOT:  # whom no permission stops
        real = os.scandir
        denied = PermissionError(13, "Permission denied")

        def scandir(path):
            if Path(path).name == "deep":
                raise denied
            return real(path)

        monkeypatch.setattr("rag.gather.os.scandir", scandir)
    else:
        (tmp_path / "deep").chmod(0)
    try:
        with pytest.raises(SourceUnavailable, match="permission denied"):
            listed(tmp_path)
    finally:
        (tmp_path / "deep").chmod(0o700)


# --- git -----------------------------------------------------------------------------------------


def git(place: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": "2026-11-01T10:00:00Z",
        "GIT_COMMITTER_DATE": "2026-11-01T10:00:00Z",
    }
    options = ["-c", "user.name=Mara", "-c", "user.email=mara@acme.example", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *options, "-C", str(place), *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    git(place, "init", "--quiet")
    write(place, README_md="# One", docs__a_md="a", picture_png="x")
    commit(place)
    return place


def commit(place: Path) -> str:
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "x")
    return git(place, "rev-parse", "HEAD")


def test_a_repository_is_the_files_of_a_commit_and_not_of_the_folder(repository: Path):
    head = git(repository, "rev-parse", "HEAD")
    write(repository, README_md="# Two", later_md="later")
    with list_commit(str(repository), "HEAD", EVERYTHING) as listing:
        assert [file.path for file in listing.files] == ["README.md", "docs/a.md"]
        assert (listing.version, listing.left_out) == (head, 1)
        assert content(listing, "README.md") == b"# One"
        assert content(listing, "docs/a.md") == b"a"
        assert listing.files[0].updated_at == datetime(2026, 11, 1, 10, tzinfo=UTC)
        assert listing.uri(listing.files[0]) == repository.as_uri() + "#README.md"


@pytest.mark.parametrize("bare", [False, True])
def test_branches_tags_and_commits_are_refs_of_plain_and_bare_repositories(
    repository: Path, tmp_path: Path, bare: bool
):
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "tag", "v1")
    write(repository, README_md="# Two")
    second = commit(repository)
    place = repository
    if bare:
        place = tmp_path / "bare.git"
        git(tmp_path, "clone", "--quiet", "--bare", str(repository), str(place))
    for ref, expected in [("main", second), ("v1", first), (first, first), ("refs/heads/main", second)]:
        with list_commit(str(place), ref, EVERYTHING) as listing:
            assert listing.version == expected


def test_links_and_submodules_of_a_repository_are_passed_over(repository: Path, tmp_path: Path):
    (repository / "link.md").symlink_to("/etc/passwd")
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    write(other, inside_md="x")
    commit(other)
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "module")
    commit(repository)
    with list_commit(str(repository), "HEAD", EVERYTHING) as listing:
        assert [file.path for file in listing.files] == ["README.md", "docs/a.md"]


def test_nothing_that_a_repository_configures_runs(repository: Path, tmp_path: Path):
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n", encoding="utf-8")
    trap.chmod(0o755)
    for hook in ("post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc"):
        target = repository / ".git/hooks" / hook
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(trap)
    for key in ("core.fsmonitor", "core.pager", "gpg.program", "filter.x.smudge", "diff.x.textconv", "core.sshCommand"):
        git(repository, "config", key, str(trap))
    git(repository, "config", "log.showSignature", "true")
    (repository / ".gitattributes").write_text("*.md filter=x diff=x\n", encoding="utf-8")
    git(
        repository,
        "-c",
        "filter.x.smudge=cat",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.hooksPath=/dev/null",
        "add",
        ".",
    )
    (tmp_path / "sprung").unlink(missing_ok=True)
    with list_commit(str(repository), "HEAD", EVERYTHING) as listing:
        assert content(listing, "README.md") == b"# One"
    assert not (tmp_path / "sprung").exists()


def test_a_folder_inside_of_a_repository_is_none(repository: Path):
    with pytest.raises(SourceUnavailable), list_commit(str(repository / "docs"), "HEAD", EVERYTHING):
        pass


@pytest.mark.parametrize("ref", ["missing", "v9"])
def test_a_missing_branch_is_an_error_and_not_empty(repository: Path, ref: str):
    with (
        pytest.raises(SourceUnavailable, match="the repository cannot be read"),
        list_commit(str(repository), ref, EVERYTHING),
    ):
        pass


@pytest.mark.parametrize("ref", ["", "-x", "--upload-pack=x", "a..b", "a b", "a//b", "HEAD@{1}", "a:b", "x" * 300])
def test_what_is_no_ref_never_reaches_git(repository: Path, ref: str):
    with pytest.raises(InvalidInput) as refused, list_commit(str(repository), ref, EVERYTHING):
        pass
    assert refused.value.field == "ref"


def test_a_repository_without_a_commit_is_an_error(tmp_path: Path):
    git(tmp_path, "init", "--quiet")
    with pytest.raises(SourceUnavailable), list_commit(str(tmp_path), "HEAD", EVERYTHING):
        pass


def test_what_git_lfs_keeps_elsewhere_is_refused_as_such(repository: Path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    write(repository, large_md=pointer)
    commit(repository)
    with (
        list_commit(str(repository), "HEAD", EVERYTHING) as listing,
        pytest.raises(UnreadableDocument, match="Git LFS"),
    ):
        content(listing, "large.md")


def test_an_object_that_is_missing_is_an_error_of_that_file(repository: Path):
    with list_commit(str(repository), "HEAD", EVERYTHING) as listing:
        key = listing.files[0].key
        (repository / ".git/objects" / key[:2] / key[2:]).unlink()
        with pytest.raises(OSError, match="is missing in the repository"):
            content(listing, "README.md")
        assert content(listing, "docs/a.md") == b"a"


@pytest.mark.parametrize(
    "address",
    [
        "ext::sh -c touch% /tmp/x",
        "file:///srv/repository",
        "ssh://host/repository",
        "git@host:repository",
        "git://host/repository",
        "http://host/repository",
        "https://",
        "https://mara:secret@host/repository",
        "https://host/a b",
        "-oProxyCommand=x",
        "fd::17",
        "/not/here",
    ],
)
def test_only_https_is_spoken_and_no_password_is_taken(address: str):
    with pytest.raises(InvalidInput) as refused, list_commit(address, "HEAD", EVERYTHING):
        pass
    assert refused.value.field == "git"
    assert "secret" not in refused.value.message
    assert check_address("https://host/repository.git")


@contextmanager
def served(repository: Path, *, password: str | None = None) -> Iterator[str]:
    """The repository over HTTP, by git's own program for servers; for `name:password` alone, when one is given."""
    wanted = None if password is None else "Basic " + base64.b64encode(password.encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            if wanted is not None and self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            environment = {
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(repository.parent),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type") or "",
                "CONTENT_LENGTH": str(len(body)),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol") or "",
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding") or "",
            }
            done = subprocess.run(["git", "http-backend"], env=environment, input=body, capture_output=True, check=True)
            head, _, rest = done.stdout.partition(b"\r\n\r\n")
            lines = [line.split(": ", 1) for line in head.decode().split("\r\n")]
            status = next((value for name, value in lines if name == "Status"), "200 OK")
            self.send_response(int(status.split()[0]))
            for name, value in lines:
                if name != "Status":
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(rest)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{repository.name}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_repository_at_an_address_is_fetched_read_and_forgotten(repository: Path, monkeypatch, tmp_path: Path):
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    head = git(repository, "rev-parse", "HEAD")
    with served(repository / ".git") as address, list_commit(address, "main", EVERYTHING) as listing:
        assert listing.version == head
        assert content(listing, "docs/a.md") == b"a"
        assert listing.uri(listing.files[0]) == f"{address}#README.md"
        assert list(place.iterdir())
    assert list(place.iterdir()) == []


def test_an_address_without_a_server_is_an_error(tmp_path: Path):
    with pytest.raises(SourceUnavailable), list_commit("http://127.0.0.1:9/x", "main", EVERYTHING):
        pass
