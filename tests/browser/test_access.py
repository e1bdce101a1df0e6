"""Whoever reads by keyboard, by screen reader, on a small screen or in the dark gets the same page."""

from __future__ import annotations

import pytest

import d5p4
from d5p4 import load, view
from tests.browser.driving import PUZZLE, listen

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def test_everything_has_a_name(playground):
    page = playground(steps=3)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex], [role=img], progress")]
            .filter((node) => !node.hidden && !node.closest("[hidden]"))
            .filter((node) => !node.getAttribute("aria-label") && !(node.labels && node.labels.length)
                && !(node.matches("button") && node.textContent.trim()))
            .map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    assert page.get_by_role("region", name="run B: d5p4").get_by_role("listitem").count() == 3
    for details in page.locator("details.as-table summary").all():
        details.click()
    assert page.get_by_role("table").count() == 4
    assert "d5p4: " in page.locator("#announce").inner_text()


def test_by_keyboard_alone(playground):
    page = playground(steps=3, go=False, reduced_motion="reduce")
    page.get_by_label("Prompt", exact=True).focus()
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outlined = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outlined != "none" or page.evaluate("document.activeElement === document.body")
        if page.evaluate("document.activeElement.id") == "run":
            break
    assert {"method-a", "method-b", "compare", "b-beta", "k", "b-w", "b-distinct", "SUMMARY", "run"} <= seen
    hint = page.get_by_label("what is beta?")  # a question mark opens a sentence, and Escape closes it
    hint.focus()
    page.keyboard.press("Enter")
    sentence = page.locator(".hint[open] p")
    assert sentence.inner_text() == d5p4.METHODS["d5p4"].parameters["beta"].option.help
    page.keyboard.press("Escape")
    assert not sentence.is_visible()
    page.locator("#run").focus()
    page.keyboard.press("Enter")
    page.locator("#pictures").wait_for(state="visible")
    assert page.evaluate("getComputedStyle(document.querySelector('.token')).animationName") == "none"


def test_no_screen_scrolls_sideways(playground):
    page = playground(steps=3, viewport={"width": 360, "height": 780})
    for width in (360, 768, 1000, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 780})
        page.wait_for_timeout(100)  # pictures follow
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, canvas, .run, .token")]
                .filter((node) => node.offsetParent).filter((node) => {
                  const box = node.getBoundingClientRect();
                  const outside = box.width && (box.left < -1 || box.right > innerWidth + 1);
                  return outside && !node.closest(".table-scroll, .tree");
                }).map((node) => node.outerHTML.slice(0, 80))"""
        )
        assert outside == []


def test_a_file_needs_nothing_else(browser, tmp_path):
    """`d5p4 trace` writes the same view; texts that look like markup stay texts."""
    model = load("countdown")
    options = {"k": 3, "w": 2, "gen_length": 36, "steps": 12, "seed": 5}
    traces = [view.trace(model, PUZZLE, method=name, **options) for name in ("independent", "d5p4")]
    for trace in traces:
        trace["prompt"] = "</script><img src=x onerror=alert(1)> ü €"
    file = tmp_path / "trace.html"
    view.write_html(file, traces)
    context = browser.new_context(offline=True)
    page = context.new_page()
    wrong = listen(page, "file://")
    page.goto(f"{file.as_uri()}#step=4&theme=dark")
    assert page.locator("#asked").inner_text() == traces[0]["prompt"]
    assert page.locator("img").count() == 0 and page.locator("form#form").count() == 0
    assert page.locator("#scrub").input_value() == "4"
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("End")
    shown = page.locator(".run").nth(1).locator(".line").all_inner_texts()
    assert shown == [answer["text"] for answer in traces[1]["answers"]]
    refused = page.evaluate("fetch('https://example.org/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    wrong[:] = [message for message in wrong if "example.org" not in message]  # the try above, which the policy stopped
    assert wrong == []
    context.close()
