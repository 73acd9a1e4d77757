"""Pages with their links rewritten, so that a link that works in the repository works on the site too."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath

import navigation

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)((?:\s+\"[^\"]*\")?)\)")
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


class StageError(Exception):
    """Links that lead nowhere."""


class Stage:
    """The pages of the site, as Markdown.

    A link may lead to another page, to a picture, or to a file of the repository; such a file gets a page of its own.

    Args:
        repo: The repository's root.
        out: The folder that gets the pages.
    """

    def __init__(self, repo: Path, out: Path) -> None:
        self.repo, self.out = repo, out
        self.pages: dict[str, str] = {}
        self.problems: list[str] = []
        self._sources: dict[str, Path] = {}
        # Where each file or folder of the repository is on the site.
        self._places = {source: name for name, source in navigation.STAGED.items()} | navigation.FOLDERS

    def add_file(self, name: str, source: Path) -> None:
        """Add a Markdown file of the repository as the page `name`."""
        self._sources[name] = source

    def rewrite_links(self) -> None:
        """Rewrite the links of all files that were added.

        Raises:
            StageError: Links without a target.
        """
        for name, source in self._sources.items():
            parts = CODE.split(source.read_text(encoding="utf-8"))
            for index in range(0, len(parts), 2):  # every second part is code

                def on_site(match: re.Match[str], name: str = name, source: Path = source) -> str:
                    text, target, title = match.groups()
                    return f"{text}({self._target(target, name, source)}{title})"

                parts[index] = LINK.sub(on_site, parts[index])
            self.pages[name] = "".join(parts)
        if self.problems:
            raise StageError("links that lead nowhere:\n  " + "\n  ".join(self.problems))

    def write(self) -> None:
        """Write all pages."""
        for name, text in self.pages.items():
            path = self.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def _target(self, target: str, name: str, source: Path) -> str:
        """Where a link of the file `source` leads from the page `name`."""
        if target.startswith("#") or re.match(r"[a-z]+:", target):
            return target
        path, _, anchor = target.partition("#")
        in_repo = posixpath.normpath((source.parent.relative_to(self.repo) / path).as_posix())
        file = self.repo / in_repo
        if not file.exists():
            self.problems.append(f"{source.relative_to(self.repo)}: {target}")
            return target
        place = self._places.get(in_repo)
        if place is None:
            place = in_repo.removeprefix("docs/") if in_repo.startswith("docs/") else self._page_of(file, in_repo)
        relative = posixpath.relpath(place, PurePosixPath(name).parent.as_posix())
        return f"{relative}#{anchor}" if anchor else relative

    def _page_of(self, file: Path, in_repo: str) -> str:
        """A page that shows a file of the repository, or the files of a folder."""
        name = f"files/{in_repo}.md"
        files = [file] if file.is_file() else sorted(path for path in file.iterdir() if path.is_file())
        blocks = [f"---\norphan: true\n---\n\n# {in_repo}\n"]
        for path in files:
            title = "" if file.is_file() else f"## {path.name}\n\n"
            text = path.read_text(encoding="utf-8").rstrip()
            blocks.append(f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n")
        self.pages[name] = "\n".join(blocks)
        return name
