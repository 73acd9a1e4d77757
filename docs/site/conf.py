"""Sphinx's settings for the site; build.py runs it on the staged pages with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from search_words import EnglishAndChinese
from sphinx.application import Sphinx

import samebits

project = "Samebits"
author = copyright = "the Samebits developers"
release = version = samebits.__version__
extensions = ["myst_parser"]

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may go from # to ###

smartquotes = False  # -- begins an option

highlight_language = "text"
pygments_style = "tango"

html_theme = "pydata_sphinx_theme"
html_title = f"Samebits {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["table.js"]
html_search_language = "en-zh"
html_search_scorer = str(Path(__file__).with_name("static") / "scorer.js")
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


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.add_search_language(EnglishAndChinese)
    app.connect("html-page-context", _set_language)
