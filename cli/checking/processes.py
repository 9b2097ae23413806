"""Runs checks side by side, in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from ...core.errors import ForedraftError


def side_by_side(module: str, shared: Mapping[str, Any], checks: Sequence[Mapping[str, str]]) -> Iterator[Any]:
    """Yield the answers to all checks, in their order. `module` answers them, see `ChildPool`; a check has the `name`
    of its component. There are as many processes as cores; a component is one core's work.

    Raises ForedraftError for an answer that is an error, and for a check whose process dies.
    """
    from ...observe.children.cores import usable_cores
    from ...observe.children.pool import ChildPool, Died

    with closing(ChildPool[int](module, shared, min(usable_cores(), len(checks)))) as processes:
        for number, check in enumerate(checks):
            processes.submit(number, check)
        answers: dict[int, Any] = {}
        for number in range(len(checks)):
            while number not in answers:
                ended, answer = processes.next_ended()
                if isinstance(answer, Died):
                    raise ForedraftError(f"the process that checks {checks[ended]['name']} {answer.reason}")
                if "error" in answer:
                    raise ForedraftError(answer["error"])
                answers[ended] = answer
            yield answers.pop(number)


def serve_checks(answer: Callable[[Mapping[str, Any], Mapping[str, str]], Mapping[str, Any]]) -> None:
    """Answer checks in a process of `side_by_side`; bad input is an answer, too."""
    from ...observe.children.pool import serve_jobs

    def run(shared: Mapping[str, Any], check: Mapping[str, str], tell: object) -> Mapping[str, Any]:
        try:
            return answer(shared, check)
        except ForedraftError as error:
            return {"error": str(error)}

    serve_jobs(run)
