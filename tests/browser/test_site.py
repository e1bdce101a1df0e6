"""The documentation site in a real browser, from a plain file server: search, schemes, narrow screens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from d5p4_lab import site

WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = site.build(tmp_path_factory.mktemp("out"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_the_search_finds_a_section(visit: Callable[..., Any], host: str) -> None:
    page = visit(host=host, viewport=WIDE)
    page.goto(f"{host}index.html")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("combobox", name="Search").fill("importance weights")
    page.locator("a[href*='tree.html'][href$='#importance-weights']:visible").click()
    page.wait_for_url("**/tree.html*#importance-weights")
    assert page.get_by_role("heading", name="Importance weights").is_visible()


def test_no_page_is_wider_than_a_narrow_screen(visit: Callable[..., Any], host: str) -> None:
    page = visit(host=host, viewport=NARROW)
    for path in sorted(site.DOCS.rglob("*.md")):
        page.goto(host + site.place(path).with_suffix(".html").as_posix())
        page.locator("article h1").wait_for()
        assert page.evaluate("document.querySelector('article').scrollWidth <= window.innerWidth"), path.name
