"""What a server writes to standard error: what it tells, a line for each request, and the lines of its libraries."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("uvicorn", "asyncio", "fastapi", "opentelemetry")


def printable(text: str) -> str:
    """Return a text on one line without control characters, which are written as Python's escapes: the path of
    a request could end a line, or change a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@dataclass(frozen=True, slots=True)
class ServerLog:
    """Writes lines as text or, `as_json`, each as one JSON object."""

    as_json: bool = False

    def tell(self, message: str) -> None:
        """Write a sentence for who runs the server."""
        level = "warning" if message.startswith("note: ") else "info"
        text = json.dumps({"level": level, "message": message}) if self.as_json else f"foredraft: {message}"
        print(text, file=sys.stderr, flush=True)

    def access(self, facts: Mapping[str, Any]) -> None:
        """Write the line of a request that has been answered."""
        if self.as_json:
            text = json.dumps({"level": "info", "message": "request", **facts})
        else:
            head = f"{facts['client']} {facts['method']} {facts['path']} {facts['status']} {facts['ms']:.1f} ms"
            more = (f"{name}={facts[name]}" for name in ("request_id", "trace_id", "orders") if facts.get(name))
            text = printable(" ".join([head, *more]))
        print(text, file=sys.stderr, flush=True)

    def take_over(self) -> None:
        """Write the lines of the libraries from warnings on in this form, too."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLine() if self.as_json else _TextLine("%(levelname)s: %(message)s"))
        for name in LIBRARIES:
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(logging.WARNING)


class _TextLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))  # a traceback, which follows, has its lines


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts)
