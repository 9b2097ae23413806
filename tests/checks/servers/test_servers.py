"""Components of other servers: recorded histories, packages that cannot be opened, and the real packages."""

import json
import os
import sys
from pathlib import Path

import pytest
from foredraft.checks.adapters.step_controller import ControllerAdapter, make_ema
from foredraft.checks.registry import mutants_of
from foredraft.checks.servers import release, wheel
from foredraft.checks.servers.bug_report import bug_report
from foredraft.checks.servers.packages import PACKAGES, Defect, ServerComponent, package_of
from foredraft.checks.servers.recording import play
from foredraft.checks.servers.release import Recorded, Release
from foredraft.cli.__main__ import main
from foredraft.core.errors import ConfigError
from foredraft.properties.conformance import check
from foredraft.properties.harness.invariants import of_contract
from foredraft.properties.harness.swarm import Budget, Swarm
from foredraft.properties.harness.trial import Violation
from foredraft.properties.step_controller.rule import AverageRule, read_table
from foredraft.properties.suites import suite_of

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def history_of(name):
    (path,) = [path for path in RECORDED if path.name == name]
    return json.loads(path.read_text(encoding="utf-8"))


# -- recorded from the real packages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_the_real_component_answered_holds(path):
    component, case = play(json.loads(path.read_text(encoding="utf-8")), path.name)
    trial = component.execute(case.config, case.operations)
    assert trial.num_operations >= 30 and sum(trial.evaluations) > 100


def tampered(history, method, change):
    """Change the first recorded answer of a method that `change` has another one for."""
    for note in history["answers"]:
        if note[0] == method and len(note) == 2 and note[1] not in (None, "=") and change(note[1]) != note[1]:
            note[1] = change(note[1])
            return history
    raise AssertionError(f"no answer of {method}")


@pytest.mark.parametrize(
    ("name", "method", "change", "id"),
    [
        ("sglang_allocators-make_token-0.5.23.json", "alloc", lambda slots: [slot + 1 for slot in slots], "ALLOC"),
        ("sglang_radix-make-0.5.23.json", "num_evictable", lambda number: number + 1, "RADIX"),
        ("sglang_steps-make-0.5.23.json", "steps_for", lambda steps: steps + 1, "STEPS"),
        ("vllm_manager-make-0.33.0.json", "admit", lambda length: length + 1, "BLOCKS"),
        ("vllm_manager-make-0.33.0.json", "events", lambda events: events[1:], "BLOCKS-08"),
        (
            "vllm_manager-make_states-0.33.0.json",
            "tables_of",
            lambda tables: [tables[0], [-1] * len(tables[1])],
            "BLOCKS-06",
        ),
        ("vllm_scheduler-make_eagle-0.33.0.json", "slots_of", lambda slots: slots[:-1], "RELAY-06"),
        ("vllm_scheduler-make-0.33.0.json", "free_pages", lambda pages: pages[1:], "RELAY"),
    ],
)
def test_another_answer_breaks_it(name, method, change, id):
    component, case = play(tampered(history_of(name), method, change), name)
    with pytest.raises(Violation) as caught:
        component.execute(case.config, case.operations)
    assert any(broken.id.startswith(id) for broken in caught.value.broken), caught.value


# -- a defect is still found where a design asks for less --------------------------------------------------------------


def searched(contract, name, capability, budget=12_000):
    """Search for a planted defect with the invariants that catch it; the component declares this capability, too."""
    (defect,) = [each for each in mutants_of(contract) if each.name == name]
    suite = suite_of(contract)
    declared = {*suite.component(defect.make).capabilities.declared, capability}
    declared |= {"ordered_reuse"} if capability == "late_tokens" else set()
    component = suite.component(defect.make, sorted(declared))
    wanted = [item for item in component.invariants if item.id in defect.caught_by]
    return Swarm(component, 1).search(wanted, Budget(operations=budget))


@pytest.mark.parametrize(
    ("contract", "name", "capability"),
    [
        ("prefix-cache", "LocksTheNodeAlone", "unchecked_locks"),
        ("engine", "CachesTheLastToken", "caches_at_allocation"),
        ("engine", "StreamsWhatTheDeviceSays", "late_tokens"),
        ("engine", "QueuesTheRetractedLast", "strict_priorities"),
        ("engine", "CachesTheLastToken", "ragged_drafts"),
    ],
)
def test_a_planted_defect_is_found_where_less_is_asked(contract, name, capability):
    assert searched(contract, name, capability) is not None


def test_strict_priorities_are_a_design():
    assert searched("engine", "NeverAges", "strict_priorities", budget=4_000) is None


class Decided(AverageRule):
    """The rule as a controller has it: rounding decides."""

    @staticmethod
    def _above(average, threshold):
        return average > threshold


class Untold(ControllerAdapter):
    """Follows the rule without being told the steps of a round, and tries again at each look."""

    def __init__(self, config):
        super().__init__(make_ema(config).controller)
        self.table = read_table(config.table)
        self.captured = config.captured
        self.rule = Decided(self.table, config.initial, backs_off=False)

    def number(self, batch_size):
        return self.table.range_of(batch_size, self.captured)

    def steps_for(self, batch_size, kv_tokens):
        return self.rule.steps(self.number(batch_size))

    def observe(self, correct, batch_size, executed_steps):
        number = self.number(batch_size)
        self.rule.take(number, correct, self.rule.steps(number))


class IgnoresItsRange(Untold):
    def number(self, batch_size):
        return 0


def test_a_controller_that_is_not_told_the_steps_follows_the_rule_all_the_same():
    names = ("adaptive", "average_rule", "untold_steps")

    def supports(config):
        table = read_table(config.table)
        return not table.min_dwell_batches

    suite = suite_of("step-controller")
    held = check(suite, Untold, capabilities=names, budget=1_500, supports=supports)
    assert held.ok and held.evaluations["STEPS-14"], held.text()
    broken = check(suite, IgnoresItsRange, capabilities=names, budget=3_000, supports=supports)
    assert {failure.id for failure in broken.failures} <= {"STEPS-01", "STEPS-14"} and broken.failures


# -- packages that cannot be opened ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch):
    """Every test begins with no package named or opened."""
    monkeypatch.setattr(release, "_named", {})
    monkeypatch.setattr(release, "_opened", {})


@pytest.fixture
def refused(monkeypatch, capsys):
    """`refused("check", …)`: the message of a command that ends with exit code 2 and prints nothing else."""

    def message(*arguments):
        monkeypatch.setattr("sys.argv", ["foredraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "") and "Traceback" not in err, err
        return err

    return message


def unpacked(folder, name, *modules):
    (folder / f"{name}.dist-info").mkdir(parents=True)
    for module in modules:
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        (folder / module).write_text("")
    return folder


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_package_that_is_not_there(refused, name):
    if has_installed(name):
        pytest.skip(f"{name} is installed")
    assert f"{name}: is not installed; install it, or name its wheel: --wheel FILE" in refused("check", name)


def has_installed(name):
    try:
        wheel.installed(name)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("vllm", "vllm-0.1.0", "vllm 0.1.0; the adapters are written for 0.32.0, 0.33.0"),
        ("vllm", "vllm-0.33.0", "vllm 0.33.0 has no module vllm.envs: a part of it is missing, or it is another"),
        ("sglang", "sglang-0.5.23", "sglang 0.5.23 has no module sglang.srt.managers.schedule_policy: a part of it is"),
        ("sglang", "vllm-0.33.0", "expected the package sglang, found vllm-0.33.0.dist-info"),
        ("transformers", "vllm-0.33.0", "it is imported as a whole, so it must be installed"),
    ],
)
def test_a_package_that_cannot_be_used(refused, tmp_path, name, found, said):
    assert said in refused("check", name, "--wheel", unpacked(tmp_path, found))


def test_a_file_that_is_no_wheel(refused, tmp_path):
    (tmp_path / "vllm-1.whl").write_text("no archive")
    assert "is no wheel and no folder of an unpacked wheel" in refused(
        "check", "vllm", "--wheel", tmp_path / "vllm-1.whl"
    )


def test_a_wheel_without_effect(refused, tmp_path):
    assert "only other servers' components need it" in refused("check", "allocator", "--wheel", tmp_path)
    folder = unpacked(tmp_path / "x", "other-1")
    assert "expected one of the packages vllm, sglang" in refused("check", "--replay", "c.json", "--wheel", folder)
    assert "its adapters are shipped" in refused("check", "vllm", "my:make")


def test_a_package_without_adapters():
    with pytest.raises(ConfigError, match="there are no adapters for it"):
        package_of("sglangg")


def test_only_the_scheduler_of_an_opened_package_is_imported_from_its_files(tmp_path, monkeypatch):
    (tmp_path / "vllmx-0.1.dist-info").mkdir()
    (tmp_path / "vllmx" / "core").mkdir(parents=True)
    (tmp_path / "vllmx" / "__init__.py").write_text("raise ImportError('needs a GPU')")
    source = (
        "from vllmx.device import Stream, logger_of\nfrom vllmx import limits\nvalue = (Stream(1), limits.Most.rows)\n"
    )
    source += "logger_of('plan').debug('%d rows', 1)\nlogger_of('plan').warning_once('x')"
    (tmp_path / "vllmx" / "core" / "plan.py").write_text(source)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert wheel.open_wheel(tmp_path, "vllmx", ("vllmx.core",), ()) == "0.1"
    from vllmx.core import plan

    assert [type(part).__name__ for part in plan.value[:1]] == ["Stream"]
    assert list(plan.value[1]) == [] and not hasattr(plan.value[0], "priority")


def test_a_function_is_taken_out_of_a_file_that_is_not_imported(tmp_path):
    (tmp_path / "big.py").write_text(
        "import no_such_module\ndef half(x: Tensor):\n    return other(x) / 2\ndef other(x): return x"
    )
    found = wheel.load_functions(tmp_path, "big.py", ["half", "other"], {})
    assert found["half"](3) == 1.5
    with pytest.raises(ConfigError, match=r"big\.py has no function third"):
        wheel.load_functions(tmp_path, "big.py", ["third"], {})


# -- what is reported --------------------------------------------------------------------------------------------------


class Pool:
    def take(self, number, why=""):
        return [number]


class Loses:
    """An allocator behind a recorded pool; it loses what is freed."""

    made = "pool = Pool()"

    def __init__(self, config):
        self.own_calls = None
        self.pool = Recorded(Pool(), "pool", self)
        self.free_list = list(range(config.num_pages))

    def alloc(self, num_slots):
        self.pool.take(num_slots, why="room")
        taken, self.free_list = self.free_list[:num_slots], self.free_list[num_slots:]
        return taken if len(taken) == num_slots else None

    def free(self, slots):
        self.pool.take(-1)

    def can_allocate(self, num_slots):
        return num_slots <= len(self.free_list)

    def num_free(self):
        return len(self.free_list)


def test_a_report_for_maintainers_has_their_calls(monkeypatch):
    (failure,) = check(suite_of("allocator"), Loses, budget=500, every_failure=True, subject="x:make").failures[:1]
    assert failure.calls[0] == ("can_allocate(1) -> True", "pool.take(1, why='room')  # [1]")
    component = ServerComponent("Pool", "allocator", "x:make", 1, defects=(Defect((failure.id,), "frees are lost"),))
    monkeypatch.setattr(ServerComponent, "made", lambda *_: Loses.made)
    text = bug_report(Release("theirs", "1.0", Path("w")), component, failure, "foredraft check --replay c")
    assert text.startswith("# theirs 1.0, Pool: frees are lost\n")
    for part in (
        "pool = Pool()\ncan_allocate(1)",
        "pool.take(1, why='room')  # [1]",
        "Why: ",
        "foredraft check --replay c",
    ):
        assert part in text, text


def test_what_is_known_of_a_release():
    component = ServerComponent("x", "engine", "x:make", 1, {"to_tail": ""}, (Defect(("ENGINE-11",), "y", ("1.0",)),))
    assert component.may_break("1.0") == ("ENGINE-11",) and component.may_break("1.1") == ()
    assert component.relaxed == ["to_tail"]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_said_of_components_is_about_their_contracts(name):
    for component in PACKAGES[name].components:
        suite = suite_of(component.contract)
        assert set(component.relaxed) <= set(suite.capabilities.RELAXES)
        for version in PACKAGES[name].releases:
            assert set(component.may_break(version)) <= {item.id for item in of_contract(suite.name)}


# -- the real packages, at night ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_the_real_packages(name, monkeypatch, capsys, tmp_path):
    """The wheels are in the folder that FOREDRAFT_WHEELS names; else the installed package is checked."""
    package = PACKAGES[name]
    folder = Path(os.environ.get("FOREDRAFT_WHEELS", tmp_path))
    wheels = [path for version in package.releases for path in folder.glob(f"{name}-{version}-*.whl")]
    if not wheels and not has_installed(name):
        pytest.skip(f"no wheel of {name} in FOREDRAFT_WHEELS, and it is not installed")
    option = ["--wheel", str(wheels[-1])] if wheels else []
    monkeypatch.setattr("sys.argv", ["foredraft", "check", name, "--cases", str(tmp_path), *option])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("      ")]
    assert len(lines) == 1 + len(package.components) + len(package.absent)
    assert not any("FAILED" in line for line in lines)
