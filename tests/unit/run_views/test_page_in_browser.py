"""The page in a real browser: phone and desktop, light and dark, hover, keys, and 50 hostile texts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import samebits
from samebits.run_views.history import read_history
from samebits.run_views.page.build import report_page
from tests.unit.run_views.browser import Page, browser, find_chromium
from tests.unit.run_views.folders import make_run
from tests.unit.run_views.hostile import HOSTILE, poison
from tests.unit.run_views.test_report_page import run_with_faults

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(report_page([read_history(run_with_faults(tmp_path / "run"))]), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_desktop_in_both_color_schemes(page: Page, report: Path, width: int) -> None:
    colors = []
    for is_dark in (False, True):
        page.open(report, width=width, is_dark=is_dark)
        assert page.eval("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert page.eval("[...document.querySelectorAll('section')].every(s => s.getBoundingClientRect().width > 300)")
        colors.append(page.eval("getComputedStyle(document.body).backgroundColor"))
        assert page.requests() == []
        assert page.problems() == []
    assert colors[0] != colors[1]


def test_no_number_is_broken_over_two_lines_on_a_phone(page: Page, tmp_path: Path) -> None:
    runs = [read_history(make_run(tmp_path / str(number), lr=0.1 + number / 8, top1=0.98)) for number in range(3)]
    path = tmp_path / "page.html"
    path.write_text(report_page(runs), encoding="utf-8")
    page.open(path, width=390)
    broken = """[...document.querySelectorAll('td, tbody th')].filter(c => {
      const range = document.createRange();
      range.selectNodeContents(c);
      return !c.firstElementChild && /^[\\w.,%]+$/.test(c.textContent) && c.textContent.length < 17 &&
        new Set([...range.getClientRects()].map(b => Math.round(b.top))).size > 1;
    }).map(c => c.textContent)"""
    assert page.eval("document.querySelectorAll('td').length") > 50
    assert page.eval(broken) == []


def test_hover_and_keys_show_the_values_of_a_point(page: Page, report: Path) -> None:
    page.open(report)
    left, top, width = page.eval(
        "(() => { const b = document.querySelector('.area').getBoundingClientRect();"
        " return [b.left, b.top, b.width] })()"
    )
    page.move(left + width / 3, top + 60)
    assert page.eval("document.querySelector('.tip').checkVisibility()")
    text = page.eval("document.querySelector('.tip').innerText")
    assert text.startswith("epoch 1, step 50")
    assert re.fullmatch(r"training\n1\.5\d*\nvalidation\n1\.667", text.partition("\n")[2])
    page.move(1, 1)
    assert not page.eval("document.querySelector('.tip').checkVisibility()")
    page.eval("document.querySelector('.area').focus()")
    page.press("End")
    assert page.eval("document.querySelector('.tip').innerText").startswith("epoch 3, step 150")
    page.press("ArrowLeft")
    assert page.eval("document.querySelector('.tip').innerText").startswith("epoch 2.98, step 149")
    assert page.problems() == []


def test_the_box_stays_inside_the_window_of_a_phone(page: Page, report: Path) -> None:
    page.open(report, width=390)
    for share in (0.01, 0.3, 0.6, 0.99):
        left, top, width = page.eval(
            "(() => { const b = document.querySelector('.area').getBoundingClientRect();"
            " return [b.left, b.top, b.width] })()"
        )
        page.move(left + share * width, top + 50)
        box = page.eval(
            "(() => { const b = document.querySelector('.tip').getBoundingClientRect(); return [b.left, b.right] })()"
        )
        assert box[0] >= 0
        assert box[1] <= 390


def test_50_hostile_texts_run_nothing_and_request_nothing(page: Page, tmp_path: Path) -> None:
    assert len(HOSTILE) >= 50
    runs = [poison(make_run(tmp_path / str(number)), text) for number, text in enumerate(HOSTILE)]
    target = tmp_path / "hostile.html"
    for start in range(0, len(runs), 20):
        histories = [read_history(run) for run in runs[start : start + 20]]
        target.write_text(report_page(histories), encoding="utf-8")
        page.open(target, width=390)
        assert page.requests() == []
        assert page.problems() == []  # a dialog, an error, or content that the policy refused
        assert page.eval("document.querySelectorAll('script').length") == 2
        assert page.eval("document.querySelectorAll('iframe, object, embed, form, input, link, base').length") == 0
        assert page.eval("document.documentElement.scrollWidth") == 390
        page.eval("document.querySelectorAll('.area').forEach((a, i) => i < 5 && a.focus())")
        page.press("End")
        assert page.problems() == []


def test_50_hostile_texts_run_nothing_in_notebooks(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(HOSTILE):
        poison(make_run(tmp_path / "runs" / f"{number:02}"), text)
    runs = samebits.runs(tmp_path / "runs")
    target = tmp_path / "cells.html"
    cells = [runs._repr_html_(), *(run._repr_html_() for run in runs)]
    target.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{''.join(cells)}", encoding="utf-8")
    page.open(target)
    assert page.requests() == []
    assert page.problems() == []
    assert page.eval("document.querySelectorAll('script, img, iframe, object, form, input, link, base').length") == 0
    assert page.eval("document.querySelectorAll('svg').length") == 2 * len(runs)


def test_the_policy_stops_script_even_if_escaping_failed(page: Page, report: Path) -> None:
    bad = (
        "<img src=x onerror='document.title=1'><script>document.title=1</script><img src=http://attacker.invalid/x.png>"
    )
    report.write_text(report.read_text().replace("<h1>", f"{bad}<h1>"))
    page.open(report)
    assert page.eval("document.title") == "run, Samebits"
    refused = page.problems()
    assert sum("Content Security Policy" in text for text in refused) >= 3
