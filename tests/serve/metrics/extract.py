"""Reads the metrics that another server exports from its package, without importing it.

    python tests/serve/metrics/extract.py vllm-0.33.0-….whl > tests/serve/metrics/vllm-0.33.0.json

Writes name → [kind, labels, buckets], sorted by name. `buckets` is null where the source computes them.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile

SOURCES = {
    "vllm": ("vllm/v1/metrics/loggers.py", "vllm/v1/spec_decode/metrics.py", "vllm/v1/metrics/buckets.py"),
    "sglang": ("sglang/srt/observability/metrics_collector.py",),
}
ENGINE = {
    "vllm": ["model_name", "engine"],
    "SchedulerMetricsCollector": ["model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"],
    "TokenizerMetricsCollector": ["model_name", "engine_type"],
}
KINDS = {"gauge": "gauge", "counter": "counter", "histogram": "histogram"}


def metrics_of(wheel: str) -> dict[str, list]:
    """Return the metrics of the package in a wheel."""
    server = "vllm" if "vllm" in wheel.rpartition("/")[2] else "sglang"
    trees = [ast.parse(zipfile.ZipFile(wheel).read(path)) for path in SOURCES[server]]
    lists = {name: value for tree in trees for name, value in _named_lists(tree).items()}
    found = {}
    for tree in trees:
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            base = ENGINE["vllm"] if server == "vllm" else ENGINE.get(owner.name)
            if base is None:
                continue
            sums = (
                node for node in ast.walk(owner) if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
            )
            named = {ast.unparse(one.targets[0]): one.value for one in sums}
            for call in (node for node in ast.walk(owner) if isinstance(node, ast.Call)):
                kind = next((kind for word, kind in KINDS.items() if word in ast.unparse(call.func).lower()), None)
                given = {one.arg: one.value for one in call.keywords}
                names = _names(given.get("name"), owner) if kind and "labelnames" in given else []
                for name in names:
                    buckets = _buckets(given.get("buckets"), lists) if kind == "histogram" else None
                    found[name] = [kind, _labels(given["labelnames"], base, named), buckets]
    return dict(sorted(found.items()))


def _names(node: ast.expr | None, owner: ast.ClassDef) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.Name):  # of a loop over pairs of name and text
        texts = (one.value for one in ast.walk(owner) if isinstance(one, ast.Constant) and isinstance(one.value, str))
        return [
            text
            for text in texts
            if text.startswith("vllm:spec_decode_num") and "per_pos" not in text and " " not in text
        ]
    return []


def _labels(node: ast.expr, base: list[str], named: dict[str, ast.expr]) -> list[str]:
    if isinstance(node, ast.Name) and node.id in named:
        node = named[node.id]
    own = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    is_alone = isinstance(node, ast.List) and not any(isinstance(item, ast.Starred) for item in node.elts)
    return own if is_alone else [*base, *own]


def _named_lists(tree: ast.AST) -> dict[str, list[float]]:
    """Return the lists of numbers that names stand for, also as the default of another list."""
    found: dict[str, list[float]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                if (numbers := _numbers(node.value)) is not None:
                    found[target.id] = numbers
                elif isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "histogram_buckets":
                    found[target.id] = [node.value.args[0].value]  # the name of a family
    return found


def _numbers(node: ast.expr) -> list[float] | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    is_numbers = isinstance(value, list | tuple) and value and all(isinstance(one, int | float) for one in value)
    return [float(one) for one in value] if is_numbers else None


def _buckets(node: ast.expr | None, lists: dict[str, list[float]]) -> list[float] | None:
    if node is None:
        return None
    if isinstance(node, ast.Call) and node.args:
        node = node.args[-1]
    named = lists.get(node.id) if isinstance(node, ast.Name) else _numbers(node)
    if named and isinstance(named[0], str):
        return lists.get(f"{named[0].upper()}_BUCKETS")
    return named


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in metrics_of(sys.argv[1]).items())
    print("{\n" + ",\n".join(lines) + "\n}")
