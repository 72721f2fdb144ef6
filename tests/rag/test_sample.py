"""The sample corpus keeps what its manifest promises to the demo.

Who sees what is worked out here from the rules that the manifest states, not with the database.
"""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml
from pypdf import PdfReader

SAMPLE = Path(__file__).resolve().parents[2] / "rag" / "_sample"
MANIFEST: dict[str, Any] = yaml.safe_load((SAMPLE / "corpus.yaml").read_text(encoding="utf-8"))
DOCUMENTS: dict[str, dict[str, Any]] = {document["path"]: document for document in MANIFEST["documents"]}
PRINCIPALS: dict[str, dict[str, Any]] = {principal["key"]: principal for principal in MANIFEST["principals"]}
QUESTIONS: list[dict[str, Any]] = MANIFEST["questions"]

# Read off the pages by hand: what answers each question, in the words of the source that should be found.
ANSWERS = {
    "projects/orion/deploy-runbook.md": "Tuesday and Thursday, 09:40 to 11:10",
    "projects/lyra/deploy-runbook.md": "Sunday night, 01:30 to 04:00",
    "incidents/2026-03-14-double-charge.md": "was worked out by Accounting afterwards",
    "finance/double-charge-cost.md": "cost the company 29,217.40 euros net",
    "people/mara/notes.md": "a charged handheld scanner with the demo pass",
    "people/ilse/notes.md": "a laptop with the tide model",
    "safety/deck-safety.pdf": "a mean wind speed of 17 m/s or at gusts of 23 m/s",
    "de/gefahrgut-autodeck.md": "höchstens 10 Liter Benzin oder Diesel",
    "handbook/leave.md": "up to 5 days of annual leave into the next year",
}


def pages(path: str) -> list[str]:
    """The text of each page, one page where the format has none, on one line."""
    if path.endswith(".pdf"):
        texts = [page.extract_text() for page in PdfReader(SAMPLE / path, strict=True).pages]
    else:
        texts = [(SAMPLE / path).read_bytes().decode("utf-8")]
    return [re.sub(r"\s+", " ", text) for text in texts]


def visible(path: str, principal: dict[str, Any]) -> bool:
    document = DOCUMENTS[path]
    if not set(document["tags"]) & set(principal["tags"]):
        return False
    if document["scope"] == "public":
        return True
    if document["user"] != principal["user"]:
        return False
    return document["scope"] == "user" or principal["project"] in (document["project"], "*")


def test_the_manifest_declares_every_file_once_and_nothing_else() -> None:
    files = {file.relative_to(SAMPLE).as_posix() for file in SAMPLE.rglob("*") if file.is_file()}
    assert sorted(document["path"] for document in MANIFEST["documents"]) == sorted(files - {"corpus.yaml"})
    assert "corpus.yaml" in files


@pytest.mark.parametrize("path", DOCUMENTS)
def test_a_document_is_a_file_with_text_on_every_page(path: str) -> None:
    assert all(len(text.split()) > 100 for text in pages(path))


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.endswith(".yaml")])
def test_a_project_specification_is_yaml_about_its_own_project(path: str) -> None:
    assert yaml.safe_load((SAMPLE / path).read_text(encoding="utf-8"))["project"] == DOCUMENTS[path]["project"]


def test_the_page_in_another_language_says_so_in_its_front_matter() -> None:
    _, front, _ = (SAMPLE / "de/gefahrgut-autodeck.md").read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(front)["language"] == "de"


@pytest.mark.parametrize("document", MANIFEST["documents"], ids=lambda document: document["path"])
def test_a_document_names_the_owner_that_its_scope_needs_and_no_other(document: dict[str, Any]) -> None:
    owner = {"public": set(), "user": {"user"}, "project": {"user", "project"}}[document["scope"]]
    assert set(document) == {"path", "scope", "tags"} | owner
    assert document["tags"]
    assert document["tags"] == sorted(set(document["tags"]))


def test_the_corpus_reaches_two_users_two_projects_and_restricted_tags() -> None:
    # Counted by hand in the folder: 14 open pages, one each for hr and finance, two a project, one a user.
    access = [(d["scope"], d.get("user"), d.get("project"), *d["tags"]) for d in MANIFEST["documents"]]
    assert {key: access.count(key) for key in access} == {
        ("public", None, None, "public"): 12,
        ("public", None, None, "ops", "public"): 2,
        ("public", None, None, "hr"): 1,
        ("public", None, None, "finance"): 1,
        ("project", 7, "orion", "public"): 2,
        ("project", 8, "lyra", "public"): 2,
        ("user", 7, None, "public"): 1,
        ("user", 8, None, "public"): 1,
    }


@pytest.mark.parametrize(
    ("key", "count", "hidden"),
    [
        (
            "mara",
            17,
            {"hr/salary-bands.md", "finance/double-charge-cost.md", "projects/lyra/deploy-runbook.md"},
        ),
        ("ilse", 18, {"hr/salary-bands.md", "projects/orion/deploy-runbook.md", "people/mara/notes.md"}),
        ("outsider", 0, set(DOCUMENTS)),
    ],
)
def test_a_principal_sees_the_documents_of_their_own_side(key: str, count: int, hidden: set[str]) -> None:
    seen = {path for path in DOCUMENTS if visible(path, PRINCIPALS[key])}
    assert len(seen) == count
    assert not seen & hidden


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["ask"])
class TestQuestion:
    def test_expects_something_of_every_principal(self, question: dict[str, Any]) -> None:
        assert set(question["expect"]) == set(PRINCIPALS)

    def test_expects_nothing_only_of_those_who_see_nothing(self, question: dict[str, Any]) -> None:
        for key, path in question["expect"].items():
            sees_anything = any(visible(other, PRINCIPALS[key]) for other in DOCUMENTS)
            assert (path is not None) == sees_anything

    def test_expects_of_a_principal_a_source_that_they_see(self, question: dict[str, Any]) -> None:
        for key, path in question["expect"].items():
            assert path is None or visible(path, PRINCIPALS[key])

    def test_expects_different_sources_only_where_one_of_them_is_hidden(self, question: dict[str, Any]) -> None:
        # Who sees both sources is expected to get the better one, which the other principal may not see.
        for (one, ours), (other, theirs) in permutations(question["expect"].items(), 2):
            if ours and theirs and ours != theirs:
                assert not (visible(theirs, PRINCIPALS[one]) and visible(ours, PRINCIPALS[other]))

    def test_is_answered_by_its_source_and_by_no_other_document(self, question: dict[str, Any]) -> None:
        for source in filter(None, question["expect"].values()):
            holders = [path for path in DOCUMENTS if any(ANSWERS[source] in page for page in pages(path))]
            assert holders == [source]

    def test_names_the_page_that_holds_the_answer_when_the_source_has_pages(self, question: dict[str, Any]) -> None:
        for source in filter(None, question["expect"].values()):
            texts = pages(source)
            number = question.get("page")
            assert (number is not None) == (len(texts) > 1)
            assert [n for n, text in enumerate(texts, 1) if ANSWERS[source] in text] == [number or 1]


def test_two_people_get_different_sources_from_three_of_the_six_questions() -> None:
    sources = [set(question["expect"].values()) - {None} for question in QUESTIONS]
    assert [len(found) for found in sources] == [2, 2, 2, 1, 1, 1]
