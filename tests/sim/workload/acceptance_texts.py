"""Texts of servers that say how many drafts were accepted."""

from __future__ import annotations


def written(tmp_path, text, name="input"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


VLLM_SERVER = (
    "INFO 05-30 07:21:00 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 0 reqs\n"
    "INFO 05-30 07:21:10 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.89, Accepted throughput: 0.36 tokens/s, "
    "Drafted throughput: 1.15 tokens/s, Accepted: 104 tokens, Drafted: 330 tokens, "
    "Per-position acceptance rate: 0.691, 0.491, 0.291, 0.182, 0.164, 0.073, Avg Draft acceptance rate: 31.5%\n"
)

SERVER = """[2025-11-04 11:35:50] The server is fired up and ready to roll!
[2025-11-04 11:36:00 TP0] Decode batch. #running-req: 1, #token: 234, accept len: 2.00, accept rate: 0.33, gen throughput (token/s): 9
[2025-11-04 11:36:01 TP0] Decode batch. #running-req: 3, #token: 999, accept len: 3.00, accept rate: 0.67, gen throughput (token/s): 9
[2025-11-04 11:36:02 TP0] Decode batch. #running-req: 1, #token: 234, accept len: 0.00, accept rate: 0.00, gen throughput (token/s): 0
"""

ARGUMENTS = "[2025-11-04] server_args=ServerArgs(speculative_num_steps={}, speculative_eagle_topk={}, tp_size=1)\n"


def sglang_lines(*pairs):
    """Lines of SGLang with these accept lengths and accept rates."""
    form = (
        "[2025-11-04 11:36:00] Decode batch, #running-req: 1, accept len: {:.2f}, accept rate: {:.2f}, #queue-req: 0\n"
    )
    return "".join(form.format(*pair) for pair in pairs)
