"""A real server and a real browser, for tests and for the pictures in docs/."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.serve.process import process

PUZZLE = "86,28,13,31:96"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-lcd-text"]


@contextmanager
def serving(*options: str, model: str = "countdown") -> Iterator[str]:
    """`d5p4 serve` with a shipped model, in a process of its own; its address."""
    with process("--model", model, "--port", "0", *options) as server:
        yield f"{server.url}/"


@contextmanager
def browsing() -> Iterator[Browser]:
    """A chromium of this machine; Playwright's own download is not needed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    assert path is not None, f"these tests need a browser; install one of {', '.join(names)}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def listen(page: Page, host: str) -> list[str]:
    """What a good page never does: errors, refused content, requests to other hosts. The list fills as it happens."""
    wrong: list[str] = []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"console {message.type}: {message.text}")

    def asked(request: Any) -> None:
        if not request.url.startswith((host, "data:", "blob:")):
            wrong.append(f"request to {request.url}")

    page.on("console", heard)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("request", asked)
    return wrong


def ready(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("button", name="Run").and_(page.locator(":enabled")).wait_for()


def small(
    page: Page,
    *,
    seed: int | None = 5,
    steps: int = 12,
    k: int = 3,
    w: int = 2,
    methods: tuple[str, str] = ("independent", "d5p4"),
) -> None:
    """A run that takes a second."""
    page.get_by_label("Prompt", exact=True).fill(PUZZLE)
    if page.locator("#settings").get_attribute("open") is None:
        page.locator("#settings > summary").click()
    page.get_by_label("k answers").fill(str(k))
    page.get_by_label("tokens", exact=True).fill("36")
    page.get_by_label("seed", exact=True).fill("" if seed is None else str(seed))
    more = page.locator("#more")
    if more.get_attribute("open") is None:
        more.locator("summary").first.click()
    for run, method in zip("ab", methods, strict=True):
        page.locator(f"#method-{run}").select_option(method)
        for name, value in (("steps", steps), ("w", w)):
            field = page.locator(f"#{run}-{name}")
            if field.is_visible():
                field.fill(str(value))


def finished(page: Page) -> None:
    page.locator("#pictures").wait_for(state="visible")


def run(page: Page) -> None:
    page.get_by_role("button", name="Run").click()
    finished(page)


def texts(page: Page, run: int) -> list[str]:
    """The answers of a run as they are shown; masks are not text."""
    return page.locator(".run").nth(run).locator(".line").all_inner_texts()


def until(page: Page, expression: str) -> None:
    """Wait for JavaScript to be true; the page's policy forbids to wait in the page itself."""
    for _ in range(3000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never: {expression}")


def traces(page: Page) -> list[dict[str, Any]]:
    """What the page itself shows."""
    return page.evaluate("D5P4.results.replays().map((replay) => replay.trace)")
