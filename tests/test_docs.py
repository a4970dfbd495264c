"""README and docs: their examples run, in order, and their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

import mmkv

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs (\w+) -->")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, each behind as many empty lines as stand before it on the page."""
    text = page.read_text()
    return [
        "\n" * text.count("\n", 0, match.start(2)) + match[2]
        for match in FENCED.finditer(text)
        if match[1] == language
    ]  # fmt: skip


def anchor(heading: str) -> str:
    """The anchor that a heading gets on a page."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in NEEDS.findall(page.read_text()):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


def test_each_page_has_directories_of_its_own() -> None:
    """Whoever runs the examples of one page after those of another meets no pool of another layout."""
    seen: dict[str, Path] = {}
    for page in PAGES:
        for block in blocks(page, "python"):
            for name in re.findall(r'(?:Pool\.open|ChatPool)\([^"\n]*"([^"]+)"', block):
                assert seen.setdefault(name, page) == page, f"{name} is on {page.name} and on {seen[name].name}"
    assert len(seen) > 5


def test_the_readme_has_an_example_of_about_ten_lines() -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, fragment = target.partition("#")
        linked = Path(os.path.normpath(page.parent / path)) if path else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        if fragment:
            anchors = {anchor(heading) for heading in HEADING.findall(FENCED.sub("", linked.read_text()))}
            assert fragment in anchors, f"{page.name} links to {target}, and there is no such heading"


@pytest.mark.parametrize("module", ["mmkv", *(module.name for module in pkgutil.walk_packages(mmkv.__path__, "mmkv."))])
def test_doctests_pass(module: str) -> None:
    if module.startswith("mmkv.integrations."):
        pytest.importorskip("transformers")
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert not failed
