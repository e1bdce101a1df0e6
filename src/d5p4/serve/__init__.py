"""An OpenAI-compatible server and the playground. Needs the extra `serve`.

app = d5p4.serve.create_app(model, name="countdown")         # an ASGI app
d5p4.serve.serve(model, name="countdown", port=8000)         # or the whole server
"""

import sys
from pathlib import Path

from ..errors import D5P4Error

try:
    from .app import create_app
    from .requests import Limits
    from .server import serve
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    if package not in ("fastapi", "uvicorn", "prometheus_client", "starlette", "pydantic"):
        raise
    checkout = Path(__file__).parents[3]
    source = f"-e '{checkout}[serve]'" if (checkout / "pyproject.toml").is_file() else "'d5p4[serve]'"
    raise D5P4Error(f"{package} is missing: {sys.executable} -m pip install {source}") from None

__all__ = ["Limits", "create_app", "serve"]
