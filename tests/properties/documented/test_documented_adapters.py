"""The adapters that stand in docs/contracts.md drive components of the shape that they are for."""

import re
from pathlib import Path

import pytest
from foredraft.properties.allocator.contract import AllocatorConfig
from foredraft.properties.allocator.plain import PlainAllocator
from foredraft.properties.conformance import PropertiesBroken, check_allocator

torch = pytest.importorskip("torch")

TEXT = (Path(__file__).parents[3] / "docs" / "contracts.md").read_text(encoding="utf-8")


class Pool:
    """The plain allocator with the methods of SGLang's paged one: tensors in, tensors or None out."""

    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        self.plain = PlainAllocator(AllocatorConfig(size // page_size, page_size))

    def alloc(self, need_size):
        return torch.tensor(self.plain.alloc(need_size)) if self.plain.can_allocate(need_size) else None

    def alloc_extend(self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens):
        answer = self.plain.alloc_extend(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist())
        assert answer is None or len(answer) == extend_num_tokens
        return None if answer is None else torch.tensor(answer)

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        answer = self.plain.alloc_decode(seq_lens.tolist(), last_loc.tolist())
        return None if answer is None else torch.tensor(answer)

    def free(self, free_index):
        self.plain.free(free_index.tolist())

    def available_size(self):
        return self.plain.num_free()

    def get_all_free_pages(self):
        return torch.tensor(self.plain.free_pages(), dtype=torch.int64)


class ReadsOneTooMany(Pool):
    """Goes on behind the last slot, where the page is full as well."""

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        return last_loc + 1


def checked(pool):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "available_size" in block]
    names = {"Pool": pool}
    exec(compile(code, "docs/contracts.md", "exec"), names)
    options = {"capabilities": names["CAPABILITIES"], "supports": names["supports"]}
    return check_allocator(names["Adapter"], budget=4_000, **options)


def test_a_paged_allocator_of_tensors():
    report = checked(Pool)
    assert report.ok and report.executed["decode"] > 50 and report.executed["give-back"] > 20


def test_a_defect_of_one():
    with pytest.raises(PropertiesBroken, match="alloc_decode"):
        checked(ReadsOneTooMany)
