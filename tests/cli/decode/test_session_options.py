"""The options of a session are declared once: what a command offers, and what is refused, follow from their fields."""

import dataclasses
from pathlib import Path

import pytest
from foredraft.cli.decode.options import SESSION
from foredraft.core.errors import ConfigError
from foredraft.gpu.session.plan import check_choices
from foredraft.gpu.types.session_options import DECLARED, SessionOptions

BOUNDED = [name for name, declared in DECLARED.items() if declared.least is not None]
LISTED = [name for name, declared in DECLARED.items() if declared.known]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_number_below_the_least_is_refused(name):
    least = DECLARED[name].least
    check_choices(SessionOptions(Path("model"), **{name: least}))
    with pytest.raises(ConfigError, match=f"{name}: must be at least {least}, got {least - 1}"):
        check_choices(SessionOptions(Path("model"), **{name: least - 1}))


@pytest.mark.parametrize("name", LISTED)
def test_a_value_that_is_not_known_is_refused(name):
    for known in DECLARED[name].known:
        check_choices(SessionOptions(Path("model"), **{name: known}))
    with pytest.raises(ConfigError, match=f"{name}: 'other' is none of {', '.join(DECLARED[name].known)}"):
        check_choices(SessionOptions(Path("model"), **{name: "other"}))


def test_commands_offer_what_has_a_text_with_its_default():
    usual = {one.name: one.default for one in dataclasses.fields(SessionOptions)}
    assert {name: one.default for name, one in SESSION.items()} == {
        name: usual[name] for name, declared in DECLARED.items() if declared.text
    }
    for name, one in SESSION.items():
        (shown,) = one.annotation.__metadata__
        assert shown.help.startswith(DECLARED[name].text[:20]) and shown.rich_help_panel == DECLARED[name].panel
