"""Records a decode as a trace in plain JSON, and makes the page that shows the trace.

For example:

    trace = d5p4.view.trace(model, "86,28,13,31:96", method="d5p4", seed=1)
    d5p4.view.write_html("trace.html", [trace])
"""

from .html import html, page_folder, write_html, write_json
from .pieces import drafts
from .trace import FORMAT, Recorder, grade, trace

__all__ = ["FORMAT", "Recorder", "drafts", "grade", "html", "page_folder", "trace", "write_html", "write_json"]
