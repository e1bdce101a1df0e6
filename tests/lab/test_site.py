"""The documentation site is built without warnings, is complete, and loads nothing from other hosts."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from d5p4 import D5P4Error
from d5p4_lab import site

pytest.importorskip("zensical")
COUNTED = {"h1", "h2", "h3", "li", "td", "th", "pre", "code", "em", "strong", "img"}
HIDDEN = {"button", "nav", "script", "style"}


class Html(HTMLParser):
    """The ids, links and resources of a page, and the text and the elements of its article (or of a fragment)."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.resources, self.navigation = set(), set(), set(), set()
        self.elements, self.words, self.broken_paragraphs = Counter(), [], 0
        self.in_paragraph = False
        self.in_article, self.hidden, self.is_permalink = "<article" not in text, 0, False
        self.feed(text)
        self.text = "".join("".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        classes = (values.get("class") or "").split()
        self.ids.add(values.get("id"))
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
            if "md-nav__link" in classes:
                self.navigation.add(values["href"])
        elif "src" in values or tag == "link":
            self.resources.add(values.get("src") or values["href"])
        self.in_article |= tag == "article"
        self.broken_paragraphs += self.in_paragraph and tag == "div"  # a browser ends the paragraph here
        self.in_paragraph |= tag == "p"
        self.hidden += tag in HIDDEN
        self.is_permalink |= "headerlink" in classes
        if self.in_article and not self.hidden and tag in COUNTED:
            self.elements[tag] += 1

    def handle_endtag(self, tag):
        self.in_article &= tag != "article"
        self.in_paragraph &= tag != "p"
        self.hidden -= tag in HIDDEN
        self.is_permalink &= tag != "a"

    def handle_data(self, data):
        if self.in_article and not self.hidden and not self.is_permalink:
            self.words.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The site, built from a clean folder. A warning of Zensical is an error."""
    return site.build(tmp_path_factory.mktemp("out").resolve())


@pytest.fixture(scope="module")
def pages(folder):
    return {path: Html(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html") if path.name != "404.html"}


def pages_of_docs() -> list[Path]:
    return [*site.DOCS.rglob("*.md"), site.ROOT / "CHANGELOG.md", site.ROOT / "CONTRIBUTING.md"]


def test_every_page_is_in_the_navigation(folder, pages):
    listed = {(folder / link).resolve() for link in pages[folder / "index.html"].navigation if "#" not in link}
    missing = [path for path in pages_of_docs() if (folder / site.place(path)).with_suffix(".html") not in listed]
    assert not missing, f"add these pages to docs/zensical.toml: {missing}"


def test_every_link_and_every_resource_is_on_the_site(folder, pages):
    broken, elsewhere = [], []
    for path, page in pages.items():
        elsewhere += [(path.name, url) for url in page.resources if urlsplit(url).netloc]
        for link in page.links | page.resources:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:  # data: is part of the page
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].ids if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(folder)}: {link}")
    assert not elsewhere and not broken, (elsewhere, broken)
    for style in folder.rglob("*.css"):  # a script loads mermaid and others only for pages that need them; ours do not
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text(encoding="utf-8")), style


def test_pages_say_what_a_code_host_shows(folder, pages):
    """The site and a CommonMark parser show the same text, lists, tables, code and emphasis."""
    parser = MarkdownIt("commonmark").enable("table")
    for path in pages_of_docs():
        page = pages[(folder / site.place(path)).with_suffix(".html")]
        expected = Html(parser.render(site.page_of(path)))
        assert page.elements == expected.elements, path
        assert page.text == expected.text, path
        assert not page.broken_paragraphs, path


def test_long_tables_and_signatures_are_on_the_site_alone(tmp_path):
    page = site.DOCS / "tree-measurements.md"
    committed, staged = page.read_text(encoding="utf-8"), site.page_of(page)
    assert "### Five numbers" not in committed and "<!-- site:" not in staged
    assert staged.partition("### Five numbers\n\n")[2].startswith("| method | per pass |")
    assert staged.count("\n|") > 4 * committed.count("\n|")
    assert "def generate(" in site.page_of(site.DOCS / "python.md")
    assert "| the paper | ours | n |" in site.page_of(site.CLAIMS)
    assert "| the paper | ours | n |" not in site.CLAIMS.read_text("utf-8")
    (tmp_path / "page.md").write_text("<!-- site: countdown: coverage-9 | Nine numbers -->\n")
    with pytest.raises(D5P4Error, match="countdown: coverage-9 .* does not exist"):
        site.page_of(tmp_path / "page.md")


def test_a_link_that_leads_nowhere_is_refused():
    with pytest.raises(D5P4Error, match=r"docs/guide\.md: \.\./gone\.md does not exist"):
        site.rewritten("[gone](../gone.md)", site.DOCS / "guide.md")
