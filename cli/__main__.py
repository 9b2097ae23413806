"""The entry point of the command `foretoken`: errors become messages and exit codes."""

from __future__ import annotations

import sys

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXTRAS = {  # extra -> the packages that it brings
    "sim": ("typer", "rich", "pydantic", "simpy", "pyarrow"),
    "gpu": ("torch", "tokenizers", "safetensors", "jinja2"),
    "properties": ("hypothesis",),
}
NEED_MODELS = ("generate", "bench", "tiny")


def main() -> None:
    """Run the command. Bad input is one message and exit code 2, an interruption is exit code 130, neither a traceback."""
    from ..core.errors import ForetokenError

    try:
        from .app import app

        app()
    except ForetokenError as error:
        _exit(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        _exit("interrupted", EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        extra = next((extra for extra, packages in EXTRAS.items() if error.name in packages), None)
        if extra is None:
            raise
        if extra == "sim" and sys.argv[1:2] and sys.argv[1] in NEED_MODELS:
            extra = "gpu"  # which brings what the command needs, too
        _exit(f"{error.name} is not installed: pip install 'foretoken[{extra}]'", EXIT_BAD_INPUT)


def _exit(message: str, code: int) -> None:
    for line in message.splitlines():
        print(f"foretoken: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
