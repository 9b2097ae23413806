"""The entry point of the command `foredraft`: errors become messages and exit codes."""

from __future__ import annotations

import os
import sys

from .terminal import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    discard_output,
    interruption_ends_at_once,
    is_broken_pipe,
    is_unwritable,
    write_what_can_be_encoded,
)

EXIT_BAD_INPUT = 2
EXTRAS = {  # extra -> the packages that it brings
    "sim": ("typer", "rich", "pydantic", "simpy", "pyarrow"),
    "gpu": ("torch", "tokenizers", "safetensors", "jinja2"),
    "flashinfer": ("flashinfer",),
    "properties": ("hypothesis",),
    "planning": ("scipy", "yaml"),
    "cluster": ("ray", "grpc"),
    "report": ("plotly",),
    "picture": ("kaleido",),
    "server": ("fastapi", "starlette", "uvicorn", "prometheus_client"),
    "kv-events": ("zmq", "msgspec"),
    "otel": ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"),
    "lossless": ("httpx",),
}
NEED_MODELS = ("generate", "bench", "selftest", "tiny")


def main() -> None:
    """Run the command. Bad input is one message and exit code 2, an interruption is exit code 130, neither a traceback.

    A reader that stops before the end of the output, as `head` does, is exit code 141 without a message.
    """
    with interruption_ends_at_once():
        from ..core.errors import ForedraftError

    try:
        with interruption_ends_at_once():
            write_what_can_be_encoded()
            from .app import app
            from .names import split_setting

            split_setting(os.environ)
        try:
            app(prog_name="foredraft")
        finally:
            if sys.stdout is not None:  # it may be closed: `foredraft … >&-`
                sys.stdout.flush()
    except ForedraftError as error:
        _exit(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        _exit("interrupted", EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        extra = next((extra for extra, packages in EXTRAS.items() if error.name in packages), None)
        if extra is None:
            raise
        if extra == "sim" and sys.argv[1:2] and sys.argv[1] in NEED_MODELS:
            extra = "gpu"  # which brings what the command needs, too
        from ..observe.distribution.install_hint import install_command

        _exit(f"{error.name} is not installed: {install_command(extra)}", EXIT_BAD_INPUT)
    except (BrokenPipeError, SystemExit) as error:
        if not is_broken_pipe(error):
            raise
        discard_output()
        sys.exit(EXIT_BROKEN_PIPE)
    except OSError as error:
        if not is_unwritable(error):
            raise
        discard_output()
        _exit(f"the output cannot be written: {error.strerror}", EXIT_BAD_INPUT)


def _exit(message: str, code: int) -> None:
    for line in message.splitlines():
        print(f"foredraft: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
