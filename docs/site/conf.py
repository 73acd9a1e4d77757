"""Sphinx's settings for the site; build.py runs it on the staged pages with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from docutils import nodes
from search_words import EnglishAndChinese
from sphinx.application import Sphinx

import samebits

project = "Samebits"
author = copyright = "the Samebits developers"
release = version = samebits.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may go from # to ###

# Docstrings are in Google's form, with single backticks around code as in Markdown.
default_role = "code"
smartquotes = False  # -- begins an option
toc_object_entries = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
# Types of other packages have their own sites. Inner classes of Samebits have no page; see `_link_public_name`.
nitpick_ignore_regex = [(r"py:.*", r"(?!samebits\.[A-Za-z_]+$).*")]

highlight_language = "text"
pygments_style = "tango"

html_theme = "pydata_sphinx_theme"
html_title = f"Samebits {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["table.js"]
html_search_language = "en-zh"
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "show_version_warning_banner": False,
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher", "language"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
templates_path = ["templates"]
html_sidebars = {"index": [], "getting-started": []}

CHINESE = "zh-CN/"


def _link_public_name(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Element | None:
    """Resolve a class by its public name where a signature names the module that defines it."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in samebits.__all__ or node.get("samebits_tried"):
        return None
    node["samebits_tried"] = True
    domain = env.get_domain("py")
    found = domain.resolve_any_xref(env, node.get("refdoc", ""), app.builder, f"samebits.{name}", node, contnode)
    return found[0][1] if found else None


def _set_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give a Chinese page its language, for fonts and readers, and each page the way to its other language."""
    is_chinese = page.startswith(CHINESE)
    other = page.removeprefix(CHINESE) if is_chinese else CHINESE + page
    known = app.env.found_docs
    fallback = "index" if is_chinese else f"{CHINESE}index"
    context["other_language"] = other if other in known else fallback
    context["other_language_name"] = "English" if is_chinese else "中文"
    context["other_language_tag"] = "en" if is_chinese else "zh-CN"
    if is_chinese:
        context["language"] = "zh-CN"


def _from_markdown(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn what docstrings have of Markdown, code spans and indented code, into reStructuredText."""
    for index, line in enumerate(lines):
        lines[index] = re.sub(r"(?<![`:\w])`([^`\n]+)`(?![`_\w])", r"``\1``", line)
        after = lines[index + 1 : index + 3]
        is_code = len(after) == 2 and not after[0].strip() and _indent(after[1]) > _indent(line)
        if line.endswith(":") and not line.endswith("::") and is_code:
            lines[index] = f"{line}:"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.add_search_language(EnglishAndChinese)
    app.connect("missing-reference", _link_public_name)
    app.connect("html-page-context", _set_language)
    app.connect("autodoc-process-docstring", _from_markdown)
