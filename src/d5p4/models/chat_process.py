"""The process that renders chat templates for `chat.py`: python chat_process.py SECONDS BYTES

Every line of its input is [template, variables, most characters] as JSON, and every line of its output [text, error].
The system ends it when a line takes more than SECONDS of processor time, and gives it at most BYTES of memory.
"""

import faulthandler
import json
import os
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None


class Generation(Extension):
    """Renders the content of `{% generation %}` unchanged. This tag marks the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def tojson(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    del environment.globals["lipsum"]
    return environment.from_string(template)


def main(seconds: int, memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for the text
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(ValueError, OSError):  # macOS has no limit on the address space
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        if resource is None:
            faulthandler.dump_traceback_later(seconds, exit=True)
        else:
            used, hard = int(sum(os.times()[:2])), resource.getrlimit(resource.RLIMIT_CPU)[1]
            with suppress(ValueError):  # the limit of this process may be lower already
                resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))
        text: Any = None
        error: str | None = None
        try:
            template, variables, most = json.loads(line)
            text = compiled(template).render(variables)
            if len(text) > most:
                text, error = None, f"it writes {len(text):,} characters"
        except Exception as reason:  # a template may raise any error
            error = " ".join(f"{type(reason).__name__}: {reason}".split())[:1000]
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([text, error]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
