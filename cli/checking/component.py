"""What a user says of a component that `foredraft check` is to check."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..options import refuse_without_effect


class OwnComponent(NamedTuple):
    """What a user says of a component: its capabilities, and which failures are known."""

    capability: list[str] | None
    expect: list[str] | None
    allow: list[str] | None
    without: list[str] | None
    every_failure: bool

    def rules_beside(self, other: str) -> list[tuple[str, bool, str]]:
        """Return the rules of `refuse_without_effect` for what `other` does instead of a check."""
        return [
            ("--capability", bool(self.capability), f"{other} asks for none"),
            ("--expect", bool(self.expect), f"{other} expects nothing"),
            ("--allow", bool(self.allow), f"{other} allows nothing"),
            ("--without", bool(self.without), f"{other} leaves nothing out"),
            ("--every-failure", self.every_failure, f"{other} is about single failures"),
        ]

    def options(self) -> dict[str, Any]:
        """Return the arguments of `properties.conformance.check`. Raises ConfigError for an unreadable `expect`."""
        return {
            "capabilities": self.capability or None,
            "expected_failures": _expected(self.expect),
            "allowed_failures": self.allow or (),
            "without": self.without or (),
            "every_failure": self.every_failure,
        }


def refuse_with_package(subject: str | None, said: OwnComponent, is_annotated: bool) -> None:
    """Refuse options that the check of a package makes no use of."""
    refuse_without_effect(
        ("SUBJECT", subject is not None, "its adapters are shipped"),
        ("--capability", bool(said.capability), "its adapters declare theirs"),
        ("--expect", bool(said.expect), "what is known of it is listed"),
        ("--allow", bool(said.allow), "what is known of it is listed"),
        ("--without", bool(said.without), "nothing is left out"),
        ("--every-failure", said.every_failure, "its checks go on after a failure anyway"),
        ("--format", is_annotated, "its failures are not in your files"),
    )


def _expected(items: list[str] | None) -> dict[str, str]:
    from ...core.errors import ConfigError

    expected = {}
    for item in items or ():
        id, separator, reason = item.partition("=")
        if not separator or not reason.strip():
            raise ConfigError.of(
                "--expect", "", f"{item!r}: expected ID=REASON, for example ALLOC-10='frees are not checked'"
            )
        expected[id.strip()] = reason.strip()
    return expected
