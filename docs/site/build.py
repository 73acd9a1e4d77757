"""Build the documentation site: `python docs/site/build.py OUT`, which is `make docs`.

    docs/*.md  ─┐
    README.md … ┴─ stage: links rewritten ─> OUT/src ─ Sphinx, warnings are errors ─> OUT/html

The pages that generate.py writes are committed: see `make reference`. Nothing is read from the network. The build
starts from nothing each time: an incremental one would not report a link to a page that was removed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import navigation
from stage import Stage, StageError

REPO = Path(__file__).resolve().parents[2]


def stage(repo: Path, out: Path) -> Stage:
    """Write all pages of the site, in Markdown, below `out`.

    Raises:
        StageError: Links without a target, all of them.
    """
    staged = Stage(repo, out)
    for name, source in navigation.STAGED.items():
        staged.add_file(name, repo / source)
    for page in sorted((repo / "docs").rglob("*.md")):
        staged.add_file(page.relative_to(repo / "docs").as_posix(), page)
    staged.rewrite_links()
    staged.write()
    navigation.write_sections(out)
    shutil.copytree(repo / "docs/pictures", out / "pictures", dirs_exist_ok=True)
    return staged


def build(repo: Path, out: Path) -> int:
    """Stage the pages and run Sphinx on them; 0 if there was neither an error nor a warning."""
    from sphinx.cmd.build import main as sphinx

    for folder in ("src", "html", "doctrees"):
        shutil.rmtree(out / folder, ignore_errors=True)
    try:
        stage(repo, out / "src")
    except StageError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    here = str(Path(__file__).resolve().parent)
    arguments = ["-q", "-W", "--keep-going", "-n", "-c", here, "-d", str(out / "doctrees"), "-b", "html"]
    return int(sphinx([*arguments, str(out / "src"), str(out / "html")]))


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    code = build(REPO, target)
    print(f"docs: {target / 'html' / 'index.html'}" if code == 0 else "docs: FAILED", file=sys.stderr)
    raise SystemExit(code)
