"""The documentation site: `make docs` builds it into build/docs."""

from __future__ import annotations

import os
import re

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from lightning_bytescheduler import __version__

project = "lightning-bytescheduler"
author = "the authors of lightning-bytescheduler"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

# Anchors as forges make them, so that a link holds on both.
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 60
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

# Links into the documentation of others need the network. The build must not: it is the same with and without.
nitpicky = True
nitpick_ignore_regex = []
if os.environ.get("DOCS_INTERSPHINX") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }
# Names of others are not looked for: without their inventories none would be found, and with them not all are in there.
nitpick_ignore_regex += [
    (r"py:.*", r"(torch|lightning|collections|datetime|os|pathlib|typing|numpy|fsspec)(\..*)?"),
]

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True}
exclude_patterns: list[str] = []


_BENCHMARKS = re.compile(r"\[([^\]]*)\]\(\.\./benchmarks/README\.md[^)]*\)")


def _benchmarks_are_in_the_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """On a forge pages link to the benchmarks' README, which is no page of this site."""
    source[0] = _BENCHMARKS.sub(r"\1 (`benchmarks/README.md` in the repository)", source[0])


def _first_line_is_prose(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking what a property's docstring says before a colon for its type."""
    if what in ("attribute", "property"):
        lines.insert(0, "")


def _types_may_have_no_page(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element) -> Element | None:
    """A type in a signature may have no page; what a sentence refers to must have one."""
    return None if "refwarn" in node else text


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _benchmarks_are_in_the_repository)
    app.connect("autodoc-process-docstring", _first_line_is_prose, priority=400)  # before napoleon
    app.connect("missing-reference", _types_may_have_no_page, priority=900)  # after intersphinx
