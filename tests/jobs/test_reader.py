import json

import pytest

from d5p4 import D5P4Error
from d5p4.jobs import PromptFile, PromptLine

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def read(tmp_path):
    def call(content, name="p.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(PromptFile(path))

    return call


def test_json_lines(read):
    lines = read(
        '{"id": "a", "prompt": "x", "reference": [4], "level": 2}\n'
        "\n"
        '{"messages": [{"role": "user", "content": "hi"}], "prompt": null}\r\n'
        '{"id": 0, "prompt": "u\u2028v"}'
    )
    assert [(line.line, line.id, line.prompt) for line in lines] == [
        (1, "a", "x"),
        (3, None, MESSAGES),
        (4, 0, "u\u2028v"),
    ]
    assert lines[0].fields == {"id": "a", "prompt": "x", "reference": [4], "level": 2}
    assert lines[1].fields == {"messages": MESSAGES, "prompt": None}


def test_plain_text_and_a_byte_order_mark(read):
    lines = read("one \n\n  \n{two}\n", "p.TXT")
    assert lines == [PromptLine(1, None, "one ", {"prompt": "one "}), PromptLine(4, None, "{two}", {"prompt": "{two}"})]
    assert read(b'\xef\xbb\xbf{"prompt": "x"}')[0].prompt == "x"


def test_a_bad_line_is_named(read):
    for line, expected in (
        ("{'prompt': 1}", "not valid JSON: "),
        ("[" * 100_000, "not valid JSON: "),
        ("[1]", "expected a JSON object, found a list"),
        ('"x"', "expected a JSON object, found text"),
        ("{}", "neither 'prompt' nor 'messages'"),
        (json.dumps({"prompt": "x", "messages": MESSAGES}), "both 'prompt' and 'messages'"),
        ('{"prompt": 3}', "'prompt' must be text, not a number"),
        ('{"prompt": ["x"]}', "'prompt' must be text, not a list"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": "hi"}', "at least one message"),
        ('{"messages": ["hi"]}', "an object with 'role' and 'content'"),
        ('{"messages": [{"role": "user"}]}', "an object with 'role' and 'content'"),
        ('{"prompt": "x", "id": true}', "'id' must be text or a whole number, not true or false"),
        ('{"prompt": "x", "id": 1.5}', "'id' must be text or a whole number, not a number"),
        (r'{"prompt": "\ud800"}', "half a surrogate pair"),
        ('{"prompt": "x", "id": "first"}', "id 'first' was used before, in line 1"),
    ):
        good, bad = read('{"id": "first", "prompt": "x"}\n\n' + line + "\n")
        assert not good.error and bad.line == 3 and expected in bad.error, line[:60]


def test_files_that_cannot_be_read(read, tmp_path):
    for path, expected in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(D5P4Error, match=f"{path.name}.* {expected}"):
            list(PromptFile(path))
    for content in (b"", b" \n\n"):
        with pytest.raises(D5P4Error, match="p.jsonl holds no prompt"):
            read(content)
    assert "not UTF-8 text: byte 2" in read(b"ab\xff")[0].error
