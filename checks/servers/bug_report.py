"""The report of a failure of another server's component, for its maintainers: versions, their own calls, what was
expected and why."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from ...properties.harness.report import Failure
from .packages import ServerComponent
from .release import Release


def bug_report(release: Release, component: ServerComponent, failure: Failure, replay: str) -> str:
    """Return the report as Markdown. `replay`: the command that runs the case again."""
    known = component.defects_of(release.version)
    summary = known.get(failure.id, failure.sentence)
    calls = [line for calls in failure.calls for line in calls]
    lines = [
        f"# {release.package} {release.version}, {component.name}: {summary}",
        "",
        f"Found by `foredraft check {release.package}` as a violation of {failure.id} ({failure.sentence}).",
        *(() if failure.id in known else ("It is new: look whether the adapter is right before you send this.",)),
        "",
        "## Versions",
        "",
        *(f"* {name} {_version(name)}" for name in ("foredraft", "torch")),
        f"* {release.package} {release.version}, Python {platform.python_version()}, CPU; modules that need a device "
        "are not imported",
        "",
        "## Calls",
        "",
        "```python",
        *component.made(failure.case.config).splitlines(),
        *calls,
        "```",
        "",
        "## What happens",
        "",
        f"At {failure.ends_in}: {failure.finding.was}.",
        "",
        "## What was expected",
        "",
        f"{failure.finding.should}. Why: {failure.finding.why}.",
        "",
        "## Run it again",
        "",
        "```bash",
        replay,
        "```",
    ]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of a source tree"
