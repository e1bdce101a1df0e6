from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.driving import browsing, listen, ready, run, serving, small


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if "tests/browser" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with browsing() as chromium:
        yield chromium


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Callable[..., Any]]:
    """A page in a fresh profile. What goes wrong on it unseen fails the test."""
    contexts, wrong = [], []

    def call(*, host: str = server, allow: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(accept_downloads=True, **options)
        context.set_default_timeout(30_000)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        wrong.append((listen(page, host), allow))
        return page

    yield call
    for context in contexts:
        context.close()
    unexpected = [
        message for messages, allow in wrong for message in messages if not any(text in message for text in allow)
    ]
    assert unexpected == []


@pytest.fixture
def playground(visit: Callable[..., Any], server: str) -> Callable[..., Any]:
    """The playground in a fresh profile: filled in for a small run (`small`), which has finished unless go=False."""

    def call(*, fill: bool = True, go: bool = True, **given: Any) -> Any:
        wishes = {name: given.pop(name) for name in ("seed", "steps", "k", "w", "methods") if name in given}
        page = visit(**given)
        ready(page, server)
        if fill:
            small(page, **wishes)
        if fill and go:
            run(page)
        return page

    return call
