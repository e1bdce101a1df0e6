"""The page as one file: whole, safe whatever the texts say, allowed to reach nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from d5p4 import view
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
NASTY = "</script><script>alert(1)</script><!-- \u2028 ü € 😀 \x00 & \" '"


class Reader(HTMLParser):
    """The scripts, styles and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.parts, self.addresses, self.handlers = None, [], [], []

    def handle_starttag(self, tag, attributes):
        self.inside = (tag, dict(attributes)) if tag in ("script", "style") else None
        self.addresses += [(tag, name, value) for name, value in attributes if name in ("src", "href", "action")]
        self.handlers += [name for name, _ in attributes if name.startswith("on") or name == "style"]

    def handle_data(self, data):
        if self.inside:
            self.parts.append((*self.inside, data))

    def handle_endtag(self, tag):
        self.inside = None


@pytest.fixture(scope="module")
def trace():
    return view.trace(FakeModel(), "ab", k=2, gen_length=4, seed=1)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_texts_come_back_as_they_were(trace):
    nasty = trace | {"prompt": NASTY}
    reader = read(view.html([nasty, trace]))
    (data,) = [text for tag, attributes, text in reader.parts if attributes.get("id") == "traces"]
    assert json.loads(data) == {"format": view.FORMAT, "traces": [nasty, trace]}
    assert not any("alert(1)" in text and attributes.get("id") != "traces" for _, attributes, text in reader.parts)


def test_nothing_is_outside_and_the_policy_knows_every_script(trace):
    text = view.html([trace])
    reader = read(text)
    outside = [address for address in reader.addresses if not address[2].startswith(("data:", "#"))]
    assert outside == [] and reader.handlers == []
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src" not in policy
    for tag, attributes, body in reader.parts:
        if attributes.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy, tag
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script>")


def test_every_file_of_the_page_is_used():
    page = (view.page_folder() / "index.html").read_text(encoding="utf-8")
    there = {path.name for path in view.page_folder().iterdir()}
    recording = {"recording.json"}  # the playground opens on it
    assert there == {"index.html", *re.findall(r'"page/([\w.]+)"', page)} | recording
    for name in there - recording:
        text = (view.page_folder() / name).read_text(encoding="utf-8")
        assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    assert " style=" not in page and " onclick" not in page
