"""`python -m bench.mock`: the mock server; see --help."""

import contextlib
import gc
import resource

import typer
import uvloop

from bench.mock.behaviour import Behaviour, MockSettings
from bench.mock.server import serve
from cpd.common.errors import ConfigError
from cpd.common.options import command
from cpd.common.process import end_with_supervisor


def run(settings: MockSettings) -> None:
    """Serve an OpenAI-compatible endpoint with known timing and faults. Prints its URL when it listens."""
    end_with_supervisor()
    behaviour = Behaviour.model_validate(settings.model_dump(include=set(Behaviour.model_fields)))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each connection is one
    gc.disable()  # a collection would pause thousands of streams
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(behaviour, settings.host, settings.port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error


if __name__ == "__main__":
    typer.run(command(MockSettings, run))
