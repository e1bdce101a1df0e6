"""Writes the page and its traces as one file that needs no server and no network."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import D5P4Error
from ..store import json_bytes, json_line, replace_file, write_text
from .trace import FORMAT

_STYLE = re.compile(r'<link rel="stylesheet" href="page/([\w.-]+)">')
_SCRIPT = re.compile(r'<script src="page/([\w.-]+)"[^>]*></script>')
# The texts of a trace may contain anything, so characters that could end a script element become escapes.
_UNSAFE = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def page_folder() -> Path:
    """Return the folder of index.html and of the style sheets and scripts, which index.html refers to as page/NAME."""
    return Path(__file__).parent / "page"


def html(traces: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with its styles, scripts and traces inside. The page cannot load or connect to anything else."""
    if not traces:
        raise D5P4Error("there is no trace to show: give at least one trace")
    page = (page_folder() / "index.html").read_text(encoding="utf-8")
    allowed: dict[str, list[str]] = {"style": [], "script": []}

    def inline(kind: str, name: str) -> str:
        text = (page_folder() / name).read_text(encoding="utf-8")
        allowed[kind].append("'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'")
        return f"<{kind}>{text}</{kind}>"

    page = _STYLE.sub(lambda link: inline("style", link[1]), page)
    safe = json_bytes({"format": FORMAT, "traces": list(traces)}).decode().translate(_UNSAFE)
    data = f'<script type="application/json" id="traces">{safe}</script>\n'
    early, *later = _SCRIPT.findall(page)  # the first script sets the theme before the browser draws anything
    page = _SCRIPT.sub("", page).replace("</head>", inline("script", early) + "\n</head>")
    page = page.replace("</body>", data + "\n".join(inline("script", name) for name in later) + "\n</body>")
    policy = (
        f"default-src 'none'; script-src {' '.join(allowed['script'])}; style-src {' '.join(allowed['style'])}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)


def write_html(path: str | Path, traces: Sequence[Mapping[str, Any]]) -> None:
    """Write the page with these traces into one file."""
    write_text(Path(path), html(traces))


def write_json(path: str | Path, traces: Sequence[Mapping[str, Any]]) -> None:
    """Write the traces alone, as a JSON file that the page can open."""
    replace_file(Path(path), lambda file: file.write(json_line({"format": FORMAT, "traces": list(traces)})))
