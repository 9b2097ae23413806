"""One thread for each process of tests, the tiers of tests, and notes: lines that a test records with
`record_property("note", …)` end the run's output. (Printing would not do: with several workers what a test prints is
lost.)
"""

import gc
import os
import signal
from fnmatch import fnmatchcase

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes to draw says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200)
settings.register_profile("fast", settings.get_profile("tests"), max_examples=25)
settings.load_profile("tests")
# A process that a shell has started in the background (`make test &`) ignores SIGINT, and so would every process of a
# test: Python sets its handler only where the signal is not ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The tests' tensors are tiny: a pool of threads in every worker and every process of a test would only wait for each
# other.
os.environ["OMP_NUM_THREADS"] = "1"
# Most objects that collection makes live until the end: the collector would look at them again and again.
gc.disable()
# Whether the extra `measured` is installed changes no test but those that ask for it.
os.environ["FOREDRAFT_KERNELS"] = "roofline"


FAST = "not ci and not slow and not gpu and not readme and not browser"
"""The tests of `make test`, and of a folder or a file that is named without `-m`."""


def pytest_configure(config):
    """Leave the other tiers out, unless `-m` or the name of a test asks for them. Hypothesis draws fewer examples."""
    if not config.option.markexpr and not any("::" in argument for argument in config.args):
        config.option.markexpr = FAST
    if config.option.markexpr == FAST:
        settings.load_profile("fast")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """Mark the cases that a test's mark `fast` does not name as `ci`, where its `ci` names them, or else as slow."""
    unknown = {}
    for item in items:
        if mark := item.get_closest_marker("fast"):
            later = mark.kwargs.get("ci", ())
            later = (later,) if isinstance(later, str) else later
            named = [name for name in (*mark.args, *later) if fnmatchcase(item.callspec.id, name)]
            left = unknown.setdefault(item.nodeid.partition("[")[0], {*mark.args, *later})
            left.difference_update(named)
            if not set(named) & set(mark.args):
                item.add_marker("ci" if named else "slow")
    wrong = {test: names for test, names in unknown.items() if names}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"the mark `fast` names cases that are not there: {wrong}")


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_give_groups_to_one_worker(items):
    """Let pytest see the groups: pytest-xdist 3.8 writes them into `_nodeid`, which pytest 9.2 does not read, and
    they had no effect."""
    for item in items:
        grouped = getattr(item, "_nodeid", item.nodeid)
        if grouped != item.nodeid and hasattr(item, "_id"):
            item._id = type(item._id).parse(grouped)


def pytest_collection_finish():
    """Leave the modules and the tests out of every later collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories of a small target and its drafts, by name; no test writes there."""
    from small_checkpoint import write_head, write_standalone, write_target

    root = tmp_path_factory.mktemp("models")
    heads = {name: write_head(root / name, name) for name in ("EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE")}
    return {"target": write_target(root / "target"), "STANDALONE": write_standalone(root / "standalone"), **heads}


@pytest.fixture
def forget():
    """Take out of the registry what a test has registered."""
    from foredraft.core.algorithm.registry import algorithm_names, unregister_algorithm

    before = set(algorithm_names())
    yield
    for name in set(algorithm_names()) - before:
        unregister_algorithm(name)


def pytest_terminal_summary(terminalreporter):
    notes = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "note" and report.when == "call"
    ]
    if notes:
        terminalreporter.section("notes")
        for note in sorted(notes):
            terminalreporter.line(note)
