"""The options of a session are declared once: what a command offers, and what is refused, follow from their fields."""

import dataclasses
from inspect import Parameter, signature
from pathlib import Path

import pytest
import typer
from foredraft.cli.calibration.calibrate import calibrate
from foredraft.cli.decode.bench import SHARED, bench
from foredraft.cli.decode.generate import generate
from foredraft.cli.decode.options import SESSION
from foredraft.cli.decode.selftest import selftest
from foredraft.cli.serving.serve import serve
from foredraft.core.errors import ConfigError
from foredraft.core.tree.chains import AcceptRule
from foredraft.gpu.measure.plan import BenchOptions
from foredraft.gpu.session.plan import check_choices
from foredraft.gpu.types.session_options import ACCEPT_RULES, DECLARED, SessionOptions

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
    usual = {one.name: one.default for one in dataclasses.fields(SessionOptions)} | {"model": Parameter.empty}
    assert {name: one.default for name, one in SESSION.items()} == {
        name: usual[name] for name, declared in DECLARED.items() if declared.text
    }
    for name, one in SESSION.items():
        (shown,) = one.annotation.__metadata__
        assert shown.help.startswith(DECLARED[name].text[:20]) and shown.rich_help_panel == DECLARED[name].panel


LISTS = {"bench": {"steps"}, "calibrate": {"steps"}}  # of steps to compare, where a session has one number
OF_MODEL = {"calibrate": {"model", "topk", "num_draft_tokens", "context_len"}}  # what is measured, not how


@pytest.mark.parametrize("command", [generate, serve, bench, selftest, calibrate], ids=lambda command: command.__name__)
def test_an_option_with_the_name_of_a_sessions_has_its_declaration(command):
    """Whatever a command adds to the help, it begins with the declared text; the default is the declared one."""
    own = LISTS.get(command.__name__, set()) | OF_MODEL.get(command.__name__, set())
    shared = [one for one in signature(command, eval_str=True).parameters.values() if one.name in SESSION.keys() - own]
    assert shared
    for one in shared:
        (shown,) = [part for part in one.annotation.__metadata__ if isinstance(part, typer.models.OptionInfo)]
        assert shown.help.startswith(DECLARED[one.name].text)
        if one.name not in ("model", "max_running"):
            assert one.default == SESSION[one.name].default


def test_the_rules_of_acceptance_are_the_cores():
    assert tuple(AcceptRule) == ACCEPT_RULES


def test_a_benchmark_has_the_defaults_of_a_session():
    assert {one.name for one in dataclasses.fields(BenchOptions)} >= SHARED
    usual = {one.name: one.default for one in dataclasses.fields(SessionOptions) if one.name != "model"}
    assert {one.name: one.default for one in dataclasses.fields(BenchOptions) if one.name in usual} == {
        name: usual[name] for name in usual.keys() & {one.name for one in dataclasses.fields(BenchOptions)}
    }
