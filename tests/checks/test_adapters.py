"""Names in place of module:make: every component that comes with the suite has one, as other packages
may give theirs."""

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from foredraft.checks.registry import SUBJECTS as OF_CONTRACT
from foredraft.core.errors import ConfigError
from foredraft.properties.harness.importing import ENTRY_POINTS, NotInstalled, load_make, resolved
from foredraft.properties.harness.letters import Choices
from foredraft.properties.suites import suite_of

ROOT = Path(__file__).resolve().parents[2]
OFFERED = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"][ENTRY_POINTS]
SUBJECTS = [(contract, subject) for contract, subjects in OF_CONTRACT.items() for subject in subjects]


@pytest.mark.parametrize(("contract", "subject"), SUBJECTS, ids=[subject for _, subject in SUBJECTS])
def test_what_is_checked_has_a_name_that_loads(contract, subject):
    assert list(OFFERED.values()).count(subject) == 1, f"{subject} has no name in {ENTRY_POINTS}"
    try:
        make = load_make(subject)
    except NotInstalled as error:
        pytest.skip(str(error))
    assert make(suite_of(contract).component(make).configure(Choices())) is not None


@pytest.mark.xdist_group("transformers")  # one worker imports it
def test_there_is_a_name_for_what_is_not_ours():
    others = set(OFFERED) - {name for name, value in OFFERED.items() if value in dict(map(reversed, SUBJECTS))}
    assert others == {"transformers-blocks", "transformers-scheduler"}
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    for name in sorted(others):
        assert load_make(OFFERED[name]).capabilities


def test_the_installed_package_offers_its_names():
    installed = {point.name for point in entry_points(group=ENTRY_POINTS)}
    assert {"kv-allocator", "reference-executor", "plain-engine"} <= installed
    assert load_make("reference-executor").capabilities == load_make(resolved("reference-executor")).capabilities


def test_a_name_means_what_its_module_does(monkeypatch, tmp_path):
    """Also with what the module declares for it, and with the words that a module would fail with."""
    (tmp_path / "named.py").write_text("CAPABILITIES = ('paged',)\ndef make(config): return config\n")
    (tmp_path / "needing.py").write_text("import a_package_that_is_missing\n")
    offered = [EntryPoint(name, f"{module}:make", ENTRY_POINTS) for name, module in (("a", "named"), ("b", "needing"))]
    monkeypatch.setattr("foredraft.properties.harness.importing.entry_points", lambda group: offered)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_make("a").capabilities == ("paged",) and load_make("a")(7) == 7
    with pytest.raises(NotInstalled, match="a_package_that_is_missing"):
        load_make("b")
    with pytest.raises(ConfigError, match="installed: a, b"):
        load_make("something")
