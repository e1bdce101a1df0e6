"""`d5p4 serve`: an OpenAI-compatible server with a playground."""

import logging
import os
from typing import Annotated

import typer

from ..errors import D5P4Error
from ..models.load import without_weights
from ..options import ServerLimits, Settings, load_plugins, parameters_of
from .common import load_model, note
from .options import DEFAULT_MODEL, Device, Dtype, Given, ModelName, Plugin, Quiet

LIMITS = parameters_of(ServerLimits)
FIXED = ("max_tokens_per_forward", "deterministic", "cache")  # options that a server sets for all requests
PARAMETERS = {**LIMITS, **{name: parameters_of(Settings)[name] for name in FIXED}}


def serve(
    *,
    model: ModelName = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen at. Use 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at. 0 takes a free port.", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients (default: hub id, shipped name or folder's name).")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="D5P4_API_KEY", help="Bearer token that requests must send.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may use, such as a proxy's. Repeatable.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web pages of this origin may use the server; * allows all. Repeatable.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write the prompts into the log.")] = False,
    plugin: Plugin = None,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    options: Given,
) -> None:
    """Serve a model over HTTP: OpenAI's API, and a playground.

    Example: d5p4 serve --model countdown --port 8000
    """
    from ..serve import Limits
    from ..serve import serve as run
    from ..serve.server import loopback

    if api_key is not None and not api_key.strip():
        raise D5P4Error("is empty; give a token, or leave it out", option="api_key", value=api_key)
    load_plugins(plugin or [])
    source = without_weights(model)[1]  # raises an error for a wrong name or kind of model, before the server listens
    options = {name: PARAMETERS[name].check(PARAMETERS[name].from_text(text)) for name, text in options.items()}
    limits = Limits(**{name: options.pop(name) for name in LIMITS if name in options})
    options |= {"hosts": allowed_host or [], "cors_origins": cors_origin or [], "log_prompts": log_prompts}

    def started(url: str) -> None:
        if not quiet:
            typer.echo(f"playground  {url}/\nOpenAI API  {url}/v1", err=True)
            if api_key is None and not loopback(host):
                note("anybody who reaches this address can use the server; give --api-key to require a token")

    if not quiet:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
        logging.getLogger("d5p4.serve").setLevel(logging.INFO)  # one line per request, without prompts and answers
    # A path becomes the folder's name, so that clients do not see the path.
    named = source.folder.resolve().name if os.path.isdir(os.path.expanduser(model)) else model
    options |= {"name": name or named, "host": host, "port": port, "api_key": api_key}
    run(lambda: load_model(model, device, dtype, shown=False), limits=limits, started=started, **options)
