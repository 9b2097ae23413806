"""Pages of metrics with histograms of lengths, in the form of those of vLLM 0.19 and SGLang 0.5."""

from __future__ import annotations

from pathlib import Path

VLLM = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
SGLANG = ("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram")
BOUNDS = (1, 10, 100, 1000, 10_000)


def histogram(name: str, lengths: list[int], labels: str = 'engine="0",', time: str = "") -> list[str]:
    """The lines of a histogram of these lengths."""
    lines = [f"# HELP {name} Number of tokens.", f"# TYPE {name} histogram"]
    model = f'{labels}model_name="meta-llama/Llama-3.1-8B-Instruct"'
    for bound in (*map(float, BOUNDS), float("inf")):
        le = "+Inf" if bound == float("inf") else bound
        count = float(sum(length <= bound for length in lengths))
        lines.append(f'{name}_bucket{{{labels}le="{le}",model_name="meta-llama/Llama-3.1-8B-Instruct"}} {count}{time}')
    lines += [
        f"{name}_count{{{model}}} {float(len(lengths))}{time}",
        f"{name}_sum{{{model}}} {float(sum(lengths))}{time}",
    ]
    return [*lines, f"{name}_created{{{model}}} 1.764e+09{time}"]


def page(path: Path, prompts: list[int], outputs: list[int], names: tuple[str, str] = VLLM, **more: str) -> str:
    lines = ["# TYPE process_start_time_seconds gauge", "process_start_time_seconds 1.764e+09"]
    lines += [*histogram(names[0], prompts, **more), *histogram(names[1], outputs, **more)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
