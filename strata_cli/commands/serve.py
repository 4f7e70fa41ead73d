"""`strata serve`: answers OpenAI's clients over HTTP until it is told to end."""

from __future__ import annotations

from typing import Any

import click

from strata_cli.commands.opening import ENGINE_SETTINGS, given_flags
from strata_cli.commands.options import config_options, load_config, service_variables
from strata_cli.errors import ConfigError

SERVER_SETTINGS = (
    "host",
    "port",
    "api_key",
    "allow_no_key",
    "allowed_hosts",
    "trusted_origins",
    "cors_origins",
    "parallel",
    "max_queue",
    "max_body_bytes",
    "max_messages",
    "max_prompts",
    "body_timeout_s",
    "request_timeout_s",
    "engine_silence_s",
    "lazy_load",
    "idle_unload_s",
)
CACHE_SETTINGS = (
    "prompt_cache",
    "prompt_cache_mib",
    "prompt_cache_every",
    "prompt_cache_root",
    "conversation_cache_mib",
)
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")


@click.command(short_help="Answer OpenAI's clients over HTTP.")
@config_options(*ENGINE_SETTINGS, *SERVER_SETTINGS, *CACHE_SETTINGS, *SAMPLING_DEFAULTS)
def serve(**flags: Any) -> None:
    """Serve the model to OpenAI's clients, until Ctrl-C or SIGTERM.

    Chat completions, completions, models, tokens, health and metrics; docs/serve.md describes them.
    Listens on this machine alone unless --host says otherwise, which asks for a key.

    \b
    strata serve --model model.gguf
    curl http://127.0.0.1:8080/v1/models
    """
    config = load_config(flags)
    try:
        from strata_cli.server.notify import Notifier
        from strata_cli.server.serving import Surroundings
        from strata_cli.server.serving import serve as run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"strata serve needs the package {error.name}, which is not installed",
            hint="pip install 'strata-cli[serve]'",
        ) from error
    notifier = Notifier.from_environment(service_variables())
    run(config, Surroundings(notifier=notifier, say=_say, flags=given_flags()))


def _say(text: str) -> None:
    click.echo(f"strata: {text}", err=True)
