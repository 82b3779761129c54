"""The documentation is complete: what the package exports, raises and accepts has its place there."""

from __future__ import annotations

import inspect
import re

import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_bytescheduler
from lightning_bytescheduler import (
    ByteSchedulerError,
    ByteSchedulerStrategy,
    CreditTuner,
    DiLoCoStrategy,
    SliceDataModule,
)
from tests.docs.pages import DOCS, PAGES, REPOSITORY, Page

_OF_LIGHTNING = inspect.signature(DDPStrategy).parameters

OWN_VARIABLE = re.compile(r"\bBYTESCHEDULER_[A-Z]+(?:_[A-Z]+)*\b")


def page(name: str) -> Page:
    return Page(DOCS / f"{name}.md")


def test_the_readme_is_short() -> None:
    assert (REPOSITORY / "README.md").stat().st_size <= 8192


def test_each_page_is_in_the_index() -> None:
    index = page("index")
    trees = "".join(block.text for block in index.blocks if block.language == "{toctree}")
    listed = set(re.findall(r"^(?!:)(?:.* <)?([\w-]+)>?$", trees, re.MULTILINE))
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert listed == pages
    assert {f"{name}.md" for name in pages} <= set(index.targets)


def test_a_newcomer_can_read_all_of_it() -> None:
    sizes = [path.stat().st_size for path in DOCS.glob("*.md")]
    assert len(sizes) <= 14
    assert sum(sizes) <= 110 * 1024


def test_three_pictures_come_before_the_first_table() -> None:
    tutorial = page("index").text.partition("\n|")[0]
    assert len(re.findall(r"^!\[", tutorial, re.MULTILINE)) == 3


def test_the_readme_leads_to_each_page() -> None:
    linked = set(Page(REPOSITORY / "README.md").targets)
    assert {f"docs/{path.name}" for path in DOCS.glob("*.md")} <= linked


def test_each_exported_name_is_in_the_reference() -> None:
    text = "".join(block.text for block in page("api").blocks)
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    assert documented == {name for name in lightning_bytescheduler.__all__ if not name.startswith("__")}


def test_forty_names_are_public_at_most() -> None:
    text = "".join(block.text for block in page("api").blocks)
    documented = re.findall(r"^\.\. auto(\w+):: ", text, re.MULTILINE)
    assert "module" not in documented  # it would show all names of a room
    assert len(documented) <= 40


def test_each_exception_has_a_way_out() -> None:
    headings = set(page("troubleshooting").headings)
    exported = {name: getattr(lightning_bytescheduler, name) for name in lightning_bytescheduler.__all__}
    errors = {
        name
        for name, value in exported.items()
        if inspect.isclass(value) and issubclass(value, ByteSchedulerError) and value is not ByteSchedulerError
    }
    assert len(errors) > 10
    assert errors <= headings


@pytest.mark.parametrize(
    ("name", "taker"),
    [
        ("options", ByteSchedulerStrategy),
        ("diloco", DiLoCoStrategy),
        ("slices", SliceDataModule),
        ("options", CreditTuner),
    ],
)
def test_each_option_is_described(name: str, taker: type) -> None:
    options = [
        option
        for option, parameter in inspect.signature(taker).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and option not in _OF_LIGHTNING
    ]
    text = page(name).text
    assert [option for option in options if f"`{option}`" not in text and f"`{option}=" not in text] == []


def test_each_variable_is_described() -> None:
    sources = (REPOSITORY / "src").rglob("*.py")
    used = {name for path in sources for name in OWN_VARIABLE.findall(path.read_text(encoding="utf-8"))}
    described = set(OWN_VARIABLE.findall(page("options").text))
    assert described == used


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_references_lead_to_what_is_there(page: Page) -> None:
    assert not re.search(r"\bseeds? 0\d\d\b|\bDESIGN\b", page.text)
