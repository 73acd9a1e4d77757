"""The words that the search knows: English ones by their stems, Chinese ones by pairs of characters.

Sphinx's own Chinese search needs jieba, whose last release is of 2020. Pairs need no dictionary: a query is cut the
same way, and a page that has all pairs of it has, nearly always, the query itself.
"""

from __future__ import annotations

import re

from sphinx.search.en import SearchEnglish

_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff"
_PART = re.compile(rf"[{_CHINESE}]+|[^\W{_CHINESE}]+")

_JS_SPLITTER = r"""
var splitQuery = (query) => {
  const words = [];
  for (const part of query.match(/[\u3400-\u4dbf\u4e00-\u9fff]+|[\p{Letter}\p{Number}_]+/gu) || []) {
    if (!/^[\u3400-\u4dbf\u4e00-\u9fff]/.test(part)) {
      words.push(...part.split(/[\u3400-\u4dbf\u4e00-\u9fff]+/).filter((word) => word));
    } else if (part.length === 1) {
      words.push(part);
    } else {
      for (let i = 0; i + 1 < part.length; i++) words.push(part.slice(i, i + 2));
    }
  }
  return words;
};
"""


class EnglishAndChinese(SearchEnglish):
    """English words, and pairs of Chinese characters."""

    lang = "en-zh"
    language_name = "English"  # Sphinx calls its stemmer in JavaScript by this name
    js_splitter_code = _JS_SPLITTER

    def split(self, input: str) -> list[str]:
        """Cut text into the words that are searched for."""
        return [word for part in _PART.findall(input) for word in _pairs(part)]


def _pairs(part: str) -> list[str]:
    """Pairs of neighboring characters of a run of Chinese ones; anything else is one word."""
    if len(part) < 2 or not re.match(f"[{_CHINESE}]", part):
        return [part]
    return [part[index : index + 2] for index in range(len(part) - 1)]
