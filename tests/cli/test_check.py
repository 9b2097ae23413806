"""`foredraft check`: what it prints, what it leaves behind, how it ends."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from foredraft.checks import registry
from foredraft.checks.adapters import kv_allocator
from foredraft.cli.checking.processes import side_by_side
from foredraft.core.errors import ForedraftError
from foredraft.properties.harness.invariants import all_invariants

BAD = Path(__file__).parents[1] / "support" / "bad_allocators.py"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Change into a directory with a user's module."""
    (tmp_path / "theirs.py").write_text(
        BAD.read_text(encoding="utf-8") + "\nCAPABILITIES = ('misuse',)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("theirs", None)


def test_failures_for_github_name_file_and_line(command, theirs, monkeypatch):
    outcome = command("check", "allocator", "theirs:Exact", "--budget", "4000", "--format", "github")
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("::error ")]
    source = (theirs / "theirs.py").read_text().splitlines()
    where, _, text = line.removeprefix("::error ").partition("::")
    file, number, title = where.split(",")
    assert "theirs:Exact: ALLOC-14 is broken in run" in outcome.err and "are being shrunk" in outcome.err
    assert file == "file=theirs.py" and source[int(number.removeprefix("line=")) - 1].startswith("class Exact")
    assert title == "title=ALLOC-14 theirs%3AExact"
    assert re.search(r"%0Awas \d slots were refused", text) and text.endswith("ALLOC-14.case.json")
    (theirs / "below").mkdir()
    monkeypatch.chdir(theirs / "below")  # a component elsewhere has its whole path, an object the place of its class
    more = "from functools import partial\nmade = partial(Exact)\n"
    (theirs / "theirs.py").write_text((theirs / "theirs.py").read_text() + more)
    sys.modules.pop("theirs")
    sys.path.insert(0, str(theirs))
    outcome = command("check", "allocator", "theirs:made", "--capability", "misuse", "--format", "github")
    assert f"::error file={theirs}/theirs.py,{number}," in outcome.out, outcome.out
    good = command("check", "allocator", "theirs:ListAllocator", "--budget", "4000", "--format", "github")
    assert good.code == 0 and "::error" not in good.out
    refused = command("check", "allocator", "theirs:Exact", "--format", "github", "--json")
    assert refused.code == 2 and "--format" in refused.err
    assert command("check", "allocator", "theirs:Exact", "--format", "gitlab").code == 2


def test_what_a_component_prints_stands_in_no_report(command, theirs):
    more = "\nclass Prints(ListAllocator):\n    def alloc(self, n):\n        print('x' * 5_000)\n        return super().alloc(n)\n"
    (theirs / "theirs.py").write_text((theirs / "theirs.py").read_text() + more)
    outcome = command("check", "allocator", "theirs:Prints", "--budget", "2000")
    assert outcome.code == 0 and len(outcome.out) < 3_000
    assert re.search(r"\nprinted by the component, and not shown: \d,\d{3},\d{3} characters, first 'xxx", outcome.out)
    found = json.loads(command("check", "allocator", "theirs:Prints", "--budget", "2000", "--json").out)
    assert found["ok"]


def test_ours(command, theirs):
    subjects = registry.SUBJECTS["allocator"]
    outcome = command("check", "allocator", "--budget", "2000")
    assert outcome.code == 0, outcome.out
    assert outcome.out.count("\nok\n") == len(subjects) and "kv_allocator:make" in outcome.out
    found = json.loads(command("check", "allocator", "--budget", "2000", "--json").out)
    reports = found["components"]
    assert found["ok"] and [report["ok"] for report in reports] == [True] * len(subjects) and len(subjects) > 2
    assert all(report["operations"] >= 500 and report["seed"] == 1 for report in reports)
    assert reports[0]["invariants"]["ALLOC-01"]["evaluations"] > 500
    assert not (theirs / "runs").exists()


@pytest.mark.ci
def test_a_subject_of_ours_whose_package_is_missing_is_skipped(command, theirs, monkeypatch):
    """Adapters of ours are skipped with the reason; one that the user names is an error."""
    (theirs / "needing.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.setitem(registry.SUBJECTS, "allocator", ("needing:make", registry.SUBJECTS["allocator"][0]))
    outcome = command("check", "allocator", "--budget", "2000")
    reason = "needs a_package_that_is_missing, which is not installed"
    assert outcome.code == 0 and f"needing:make skipped: {reason}" in outcome.out and outcome.out.count("\nok\n") == 1
    as_json = command("check", "allocator", "--budget", "2000", "--json")
    assert json.loads(as_json.out)["components"][1]["skipped"] == reason
    (theirs / "later.py").write_text("def make(config):\n    import a_package_that_is_missing\n")
    for name in ("needing:make", "later:make"):
        named = command("check", "allocator", name)
        assert named.code == 2 and reason in named.err and not (theirs / "runs").exists()
    unnamed = command("check", "needing:make")
    assert unnamed.code == 2 and "for example: allocator needing:make" in unnamed.err


def test_it_goes_on_after_a_failure_if_asked(command, theirs):
    (theirs / "two.py").write_text(
        "from theirs import ListAllocator\n\n\nclass Two(ListAllocator):\n"
        "    def alloc(self, n):\n        return None if n == 2 else super().alloc(n)\n\n"
        "    def num_free(self):\n        return super().num_free() + (len(self.pages) == 3)\n"
    )
    arguments = ("check", "allocator", "two:Two", "--budget", "5000", "--json")
    ids = {}
    for options in ((), ("--every-failure",)):
        outcome = command(*arguments, *options)
        assert outcome.code == 1
        ids[options] = [one["invariant"] for one in json.loads(outcome.out)["components"][0]["failures"]]
    assert len(ids[()]) == 1 and len(ids["--every-failure",]) > 1, ids
    assert command("check", "--every-failure", "--list").code == 2


CHECKS = """
import os
from foredraft.observe.children.pool import serve_jobs

def answer_of(shared, check, tell):
    if check["name"] == shared["deadly"]:
        os.kill(os.getpid(), 9)
    return {"error": "as asked"} if check["name"] == shared["wrong"] else {"text": check["name"]}

serve_jobs(answer_of)
"""


def test_a_check_whose_process_dies_is_one_error_and_no_wait_for_ever(tmp_path, monkeypatch):
    (tmp_path / "written_checks.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    checks = [{"name": name} for name in "abcd"]
    shared = {"deadly": "", "wrong": ""}
    assert [found["text"] for found in side_by_side("written_checks", shared, checks)] == list("abcd")
    with pytest.raises(ForedraftError, match="the process that checks c died, 2 times: killed by SIGKILL"):
        list(side_by_side("written_checks", {**shared, "deadly": "c"}, checks))
    with pytest.raises(ForedraftError, match="as asked"):
        list(side_by_side("written_checks", {**shared, "wrong": "d"}, checks))


def test_a_good_one(command, theirs):
    outcome = command("check", "allocator", "theirs:make", "--budget", "5000", "--seed", "4")
    assert (
        outcome.code == 0 and "theirs:make (seed 4" in outcome.out and "skipped: ALLOC-07 (needs table)" in outcome.out
    )


def test_a_bad_one_and_its_case(command, theirs):
    checked = ("check", "allocator", "theirs:make_bad", "--budget", "5000")
    outcome, as_json = command(*checked), command(*checked, "--json")
    assert outcome.code == as_json.code == 1
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("  replay ")]
    words = line.split()
    assert words[1:4] == ["foredraft", "check", "--replay"]
    (failure,) = json.loads(as_json.out)["components"][0]["failures"]
    assert json.loads(Path(words[4]).read_text()) == failure["case"]
    for part in (failure["invariant"], failure["sentence"], failure["was"], failure["should"], failure["why"]):
        assert part in outcome.out

    again = command(*words[2:])
    assert again.code == 1
    assert failure["was"] in again.out and failure["sentence"] in again.out and "-1\n" in again.out

    module = Path("theirs.py")
    # Of another length: a compiled file is taken for the source's if time, in seconds, and length are the same.
    mended_line = "return ListAllocator(config)  # mended"
    module.write_text(module.read_text().replace("return NegativeSlice(config)", mended_line))
    sys.modules.pop("theirs")
    mended = command(*words[2:])
    assert mended.code == 0 and "holds" in mended.out


def test_expected_failures_on_the_command_line(command, theirs):
    outcome = command("check", "allocator", "theirs:Exact", "--budget", "20000", "--expect", "ALLOC-14=known")
    assert outcome.code == 0 and "expected: known" in outcome.out


@pytest.mark.fast("ALLOC-14", ci="*")
@pytest.mark.parametrize("id", ["ALLOC-14", "ALLOC-10"])
def test_an_allowed_failure_may_also_hold(command, theirs, id):
    words = ("check", "allocator", "theirs:Exact", "--budget", "20000", "--expect", "ALLOC-14=known")
    outcome = command(*(words if id == "ALLOC-10" else words[:-2]), "--allow", id)
    assert outcome.code == 0
    assert ("expected: it is allowed to" in outcome.out) == (id == "ALLOC-14")


def test_an_unknown_invariant_is_not_allowed(refused, theirs):
    assert "ALLOC-14" in refused("check", "allocator", "theirs:Exact", "--allow", "ALOC-14")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allocater",), ["did you mean 'allocator'"]),
        (("scheduler",), ["there is no contract", "allocator"]),
        (("serve",), ["did you mean 'server'", "foredraft check server URL"]),
        (("vlm",), ["no contract 'vlm'", "did you mean 'vllm'"]),
        (("http://127.0.0.1:8000",), ["foredraft check server http://127.0.0.1:8000"]),
        (("https://a.b/v1", "--against", "http://a:1"), ["foredraft check server https://a.b/v1"]),
        (("localhost:8000",), ["foredraft check server localhost:8000"]),
        (("allocator", "theirs"), ["module:make"]),
        (("allocator", "nowhere:make"), ["nowhere", "cannot be imported"]),
        (("allocator", "theirs:mak"), ["'mak'", "did you mean 'make'"]),
        (("allocator", "theirs:__doc__"), ["expected a callable"]),
        (("allocator", "theirs:make", "--budget", "soon"), ["60s"]),
        (("allocator", "theirs:make", "--capability", "pagd"), ["did you mean 'paged'"]),
        (("allocator", "theirs:make", "--expect", "ALLOC-01"), ["ID=REASON"]),
        (("allocator", "--capability", "paged"), ["module:make"]),
        (("--replay", "none.json"), ["none.json", "cannot be read"]),
        (("allocator", "theirs:CannotBeMade", "--cases", "theirs.py/x"), ["theirs.py", "cannot be written"]),
    ],
)
def test_bad_input_is_one_message(refused, theirs, arguments, words):
    message = refused("check", *arguments)
    assert all(word in message for word in words), message


def test_the_list(command):
    outcome = command("check", "--list")
    lines = outcome.out.splitlines()
    number = len(all_invariants())
    assert outcome.code == 0 and lines[-1] == f"{number} invariants, each checked for a contract."
    assert sum("[contract " in line for line in lines) == number
    at = next(number for number, line in enumerate(lines) if line.strip().startswith("ALLOC-04"))
    assert "ref(page) == number of holders" in lines[at] and "with sharing, after every operation" in lines[at + 1]
    assert "19 invariants" in command("check", "allocator", "--list").out


def test_the_kill_matrix(command, theirs, monkeypatch):
    few = registry.mutants_of("allocator")[:3]
    monkeypatch.setattr(registry, "mutants_of", lambda contract: few)
    outcome = command("check", "--mutants")
    assert outcome.code == 0 and "3 of 3 mutants killed" in outcome.out
    kills = json.loads(command("check", "--mutants", "--json").out)["contracts"]["allocator"]
    assert [kill["mutant"] for kill in kills] == [mutant.name for mutant in few] and kills[0]["case"]["operations"]

    harmless = dataclasses.replace(few[0], name="Harmless", make=kv_allocator.make)
    monkeypatch.setattr(registry, "mutants_of", lambda contract: (*few, harmless))
    outcome = command("check", "allocator", "--mutants", "--budget", "2000")
    assert outcome.code == 1 and "3 of 4 mutants killed" in outcome.out
    assert [line.split()[0] for line in outcome.out.splitlines() if "SURVIVED" in line] == ["Harmless"]


@pytest.mark.ci
def test_the_real_executor_is_checked_in_both_ways(command, theirs):
    pytest.importorskip("torch")
    outcome = command("check", "executor", "--ops", "torch", "--budget", "60", "--json")
    document = json.loads(outcome.out)
    names = [one["subject"].rpartition(":")[2] for one in document["components"]]
    assert sorted(names) == ["make_cpu_torch", "make_cpu_torch_captured"]
    assert all(one["operations"] >= 30 for one in document["components"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--list", "--without", "free"), "--without: has no effect: --list leaves nothing out"),
        (("--mutants", "--expect", "ALLOC-10=known"), "--expect: has no effect: --mutants expects nothing"),
        (("--mutants", "--wheel", "vllm.whl", "--every-failure"), "--every-failure: has no effect: --mutants is about"),
        (("--list", "--wheel", "vllm.whl"), "--wheel: has no effect: only other servers' components need it"),
    ],
)
def test_an_option_of_a_check_beside_another_kind_of_work_is_refused(command, arguments, words):
    outcome = command("check", *arguments)
    assert outcome.code == 2 and words in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("executor", "--ops", "trion"), "--ops: 'trion' is none of host, torch, triton, which cpu has (did you mean"),
        (("executor", "--ops", "triton"), "--ops: triton on a CPU is interpreted: set TRITON_INTERPRET=1"),
        (("executor", "--device", "gpu"), "'gpu' is neither cpu nor cuda"),
        (("accept", "--device", "cpu"), "only the contract executor has them"),
        (("executor", "--mutants", "--ops", "torch"), "--mutants has components of its own"),
        (("executor", "plain-engine", "--ops", "torch"), "--device and --ops choose the component"),
    ],
)
def test_a_device_that_cannot_be_is_refused(command, monkeypatch, arguments, words):
    pytest.importorskip("torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    outcome = command("check", *arguments)
    assert outcome.code == 2 and words in outcome.err, outcome.err
