"""The documentation site: `make docs` builds it into build/docs."""

from __future__ import annotations

import os

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
    (r"py:.*", r"(torch|lightning|pl|L|dist|nn|collections|datetime|os|pathlib|typing|numpy|np|fsspec)(\..*)?"),
]

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
exclude_patterns: list[str] = []
