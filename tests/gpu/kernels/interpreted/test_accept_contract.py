"""Cases of the acceptance contract that once broke the Triton kernels."""

from pathlib import Path

from foredraft.checks.adapters.torch_accept import DeviceAccept
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.properties.harness.cases import load_case
from foredraft.properties.suites import suite_of

CASES = Path(__file__).parents[3] / "support" / "cases" / "accept"


def test_a_tree_without_candidates_has_rows_of_its_own():
    """Its ancestor bits were one row in memory, seen as many; the kernels read past it."""
    case = load_case(CASES / "a-tree-without-candidates-is-its-root.json", suite_of)
    violation = case.replay(lambda config: DeviceAccept(TritonOps(), "cpu"))
    assert violation is None, str(violation)
