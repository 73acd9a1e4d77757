"""The documentation site builds without a warning, a dead link fails the build, and pages fit on a phone."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import samebits

pytestmark = pytest.mark.timeout(1300)  # a build takes 10 s, and minutes where all cores are busy
PHONE_PX = 390
CHINESE_WORD = "\u8fdb\u7a0b"  # process
# What a user types, and the page that comes first.
NAMED = {
    "early stopping": "own-images.html",
    "batch_norm": "reference/settings.html",
    "optim.lr": "reference/settings.html",
    "stop_early": "reference/settings.html",
    "label_smoothing": "reference/settings-classify.html",
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Opens each page in a frame as wide as a phone, and writes how wide its content is.
MEASURE = """<!doctype html><body><script>
const pages = PAGES, found = {};
const frame = document.createElement("iframe");
frame.style = "border:0;width:WIDTHpx;height:800px";
document.body.append(frame);
async function measure() {
  for (const page of pages) {
    await new Promise((done) => { frame.onload = done; frame.src = page; });
    const root = frame.contentDocument.documentElement;
    const brokenImages = [...frame.contentDocument.images].filter((image) => image.complete && !image.naturalWidth);
    found[page] = [root.scrollWidth, brokenImages.length];
  }
  for (const word of QUERIES) {
    const open = new Promise((done) => { frame.onload = done; });
    frame.src = "search.html?q=" + encodeURIComponent(word);
    await open;
    const results = () => [...frame.contentDocument.querySelectorAll("#search-results li a")];
    const isDone = () => /Search finished/.test(frame.contentDocument.body.textContent);
    for (let i = 0; i < 600 && !isDone(); i++) await new Promise((done) => setTimeout(done, 100));
    found["search " + word] = results().map((link) => link.href);
  }
  document.body.innerHTML = "";
  const result = document.createElement("pre");
  result.textContent = "RESULT" + JSON.stringify(found) + "END";
  document.body.append(result);
}
measure();
</script></body>"""


def _build(repo: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repo / "docs/site/build.py"), str(out)]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def site(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from this checkout."""
    out = tmp_path_factory.mktemp("site")
    run = _build(repo, out)
    assert run.returncode == 0, run.stderr
    return out / "html"


@pytest.mark.full
def test_the_site_has_every_page_and_every_public_name(site: Path, repo: Path) -> None:
    for page in (repo / "docs").rglob("*.md"):
        assert (site / page.relative_to(repo / "docs").with_suffix(".html")).exists(), page
    api = (site / "reference/api.html").read_text(encoding="utf-8")
    names = {name for name in samebits.__all__ if name[0] != "_"}
    assert {name for name in names if f"<h3>{name}<" not in api} == set()
    settings = (site / "reference/settings-classify.html").read_text(encoding="utf-8")
    assert 'id="data-crop-area"' in settings
    assert 'id="optim-lr"' not in settings
    shared = (site / "reference/settings.html").read_text(encoding="utf-8")
    assert 'id="optim-lr"' in shared
    assert 'href="settings.html#optim"' in settings
    assert 'id="samebits-train"' in (site / "reference/cli.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_search_finds_chinese_words(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    terms = json.loads(re.sub(r"^Search\.setIndex\((.*)\)\s*$", r"\1", index, flags=re.DOTALL))["terms"]
    assert CHINESE_WORD in terms
    assert "checkpoint" in terms


@pytest.mark.full
def test_guides_are_grouped_and_the_search_ranks_decisions_last(site: Path) -> None:
    page = (site / "text.html").read_text(encoding="utf-8")
    for group in ("Train on your data", "Make your training script exact", "Several machines"):
        assert f'<span class="caption-text">{group}</span>' in page
    script = (site / "_static/language_data.js").read_text(encoding="utf-8")
    assert re.search(r'page\.startsWith\("adr/"\).*return score - 100', script)


def _copy(repo: Path, to: Path, text: str) -> None:
    """A checkout whose page on speed ends with `text`."""
    for name in ("docs", "src", "examples"):
        shutil.copytree(repo / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for page in repo.glob("*.md"):
        shutil.copy2(page, to / page.name)
    with (to / "docs/speed.md").open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")


def test_a_link_to_no_file_fails_the_build(repo: Path, tmp_path: Path) -> None:
    _copy(repo, tmp_path, "[a](gone.md) and [b](../tests/gone.py)")
    run = _build(tmp_path, tmp_path / "out")
    assert run.returncode != 0
    assert "docs/speed.md: gone.md" in run.stderr
    assert "docs/speed.md: ../tests/gone.py" in run.stderr
    assert not (tmp_path / "out/html").exists()


@pytest.mark.full
def test_a_reference_to_nothing_fails_the_build(repo: Path, tmp_path: Path) -> None:
    _copy(repo, tmp_path, "[a](memory.md#no-such-heading)")
    (tmp_path / "docs/nowhere.md").write_text("# Nowhere\n\nA page that no section lists.\n")
    run = _build(tmp_path, tmp_path / "out")
    assert run.returncode != 0
    for problem in ("no-such-heading", "nowhere.md: WARNING: document isn't included"):
        assert problem in run.stderr


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site, and a page that measures it, on a port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_pages_fit_on_a_phone_and_the_search_finds_them(site: Path, address: str, tmp_path: Path) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts)
    script = MEASURE.replace("PAGES", json.dumps([*pages, "wide.html"])).replace("WIDTH", str(PHONE_PX))
    script = script.replace("QUERIES", json.dumps(["checkpoints", CHINESE_WORD, *NAMED]))
    (site / "measure.html").write_text(script, encoding="utf-8")
    (site / "wide.html").write_text("<div style='width: 500px'>a page that does not fit</div>", encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    command += ["--virtual-time-budget=1000000", "--dump-dom", f"{address}/measure.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=1200).stdout
    for name in ("measure.html", "wide.html"):
        (site / name).unlink()
    found = json.loads(dom[dom.index("RESULT") + 6 : dom.rindex("END")])
    links = found.pop("search checkpoints")
    assert any("resume.html" in link for link in links)
    is_last = [any(page in link for page in ("/adr/", "changelog.html", "results.html")) for link in links]
    assert is_last == sorted(is_last), "decisions and histories come after guides"
    assert any("zh-CN/launchers.html" in link for link in found.pop(f"search {CHINESE_WORD}"))
    for query, page in NAMED.items():
        assert any(page in link for link in found.pop(f"search {query}")[:2]), query
    assert found.pop("wide.html")[0] >= 500
    assert sorted(found) == pages
    assert {page: width for page, (width, _) in found.items() if width > PHONE_PX} == {}
    assert {page: broken for page, (_, broken) in found.items() if broken} == {}
