"""One word per concept: what the glossary calls a run is called a run everywhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, Page, pages

BANNED = {
    r"(?<!asyncio )(?<!asyncio\.)\btasks?\b": "a function is a job, a request for it a run",
    r"\bjob (instances?|executions?)\b": "one request to execute a job is a run",
    r"\b(queue|consumer) groups?\b": "workers that share a queue are a group",
    r"\bDLQ\b|\bdead[- ]letter queues?\b": "a run given up is a dead letter",
    r"\bfencing tokens?\b|\bgeneration numbers?\b": "the fencing number is the epoch",
    r"\bmasters?\b|\bslaves?\b|\bminions?\b": "roles are scheduler, dispatcher, coordinator, agent",
    r"\bvisibility timeouts?\b": "the server's wait for a sign of life is ack_wait",
    r"\bsubscriber groups?\b": "each job that subscribes has its own subscription",
}
ONCE = re.compile(r"exactly[- ]once", re.IGNORECASE)
DENIED = re.compile(r"\b(never|not|no|nobody|cannot)\b", re.IGNORECASE)


OF_OTHERS = ("comparison.md", "compared.md", "coming-from/")
"""Pages that speak of other systems, in their words."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_uses_the_words_of_the_glossary(page: Page) -> None:
    """A synonym that would make a reader wonder whether it is something else is not used."""
    if any(part in page.name for part in OF_OTHERS):
        return
    for pattern, instead in BANNED.items():
        found = re.search(pattern, page.prose, re.IGNORECASE)
        assert not found, f"{page.name}: {found[0]!r}: {instead}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_promises_no_exactly_once(page: Page) -> None:
    """We say "effectively once"; "exactly once" occurs only where it is denied."""
    for sentence in re.split(r"(?<=[.!?:;|])\s|\n\n", page.prose):
        if ONCE.search(sentence):
            assert DENIED.search(sentence), f"{page.name}: {' '.join(sentence.split())!r}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_names_no_machine(page: Page) -> None:
    """No path of somebody's machine, no private host."""
    assert not re.search(r"/(home|root|tmp|work|Users)/\w", page.text), page.name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_is_finished(page: Page) -> None:
    """No place is left for what somebody meant to write later."""
    found = re.search(r"\b(TODO|TBD|FIXME|XXX|FIGURE_\w+|lorem ipsum)\b", page.text)
    assert not found, f"{page.name}: {found[0]}"


def test_glossary_has_every_word() -> None:
    """Each concept of the vocabulary is explained once."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, re.MULTILINE)
    assert len(words) == len(set(words))
    wanted = {
        *("job", "run", "attempt", "event", "schedule", "slot", "lease", "term", "epoch", "claim"),
        *("node", "worker", "agent", "group", "scheduler", "dispatcher", "coordinator"),
        "dead letter",
    }
    assert wanted <= set(words)


def test_glossary_names_classes_that_exist() -> None:
    """The code has a concept under the name that the glossary says."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z][a-z]\w+)(?:\.\w+)?`", glossary))
    source = "".join(p.read_text("utf-8") for p in (ROOT / "src" / "holdfast").rglob("*.py"))
    defined = set(re.findall(r"^(?:class )?(\w+)(?:[(:\[]| = )", source, re.MULTILINE))
    assert len(named) > 40
    assert not named - defined
