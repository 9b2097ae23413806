"""Damaged input files: a corpus of sound ones of every kind that a command reads, and random damage to them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.cli.__main__ import main

EXPECTED_CODES = (0, 1, 2, 130)
CPU_SECONDS = 30  # a damaged input that keeps a command busy for longer counts as one that hangs it
ADDRESS_SPACE = 12 << 30
CASES = Path(__file__).with_name("cases")

HUGE = "9" * 5000
JSON_VALUES = (
    *("null", "true", "false", "0", "-1", "1", "2", "7", "0.5", "1e300", "-0.0", "1e999", "NaN", "-Infinity", HUGE),
    *(str(2**31), str(2**53), str(2**63 - 1), str(2**63), str(-(2**63)), str(2**64), str(10**19), "1" + "0" * 25),
    *[r'""', r'"x"', r'"="', r'"\ud800"', r'"\u0000"', r'"é漢😀"', r'"1"', r'"-1"', r'"../../x"', r'"1e5"'],
    f'"{"a" * 70_000}"',
    *("[]", "{}", "[[]]", "[1]", "[-1]", '["a"]', "[null]", '{"a":1}', "[" * 60 + "]" * 60, "[" * 3000, '{"a":' * 3000),
    "[" + ",".join("7" * 3 for _ in range(5000)) + "]",
)
WORDS = (
    *("", "0", "-1", "1", "0.5", "1e300", "1e999", "nan", "inf", "-inf", HUGE, str(2**31), str(2**63), str(2**64)),
    *("\n", "\0", "\r", " ", "\ufeff", "\u2028", "a" * 200_000, "[" * 3000, "{" * 3000),
    *["x", '"', "'", ",", "é漢😀", "٣", "=", "#", "true", "[]", "1e5", "0x10", "1_000"],
    *("9999-99-99 99:99:99", "2262-04-12 00:00:00", "1969-12-31 23:59:59"),
)


@dataclass(frozen=True)
class Sound:
    """A sound input: its text, and the commands that read it, `{}` for the path of the file."""

    name: str
    text: str
    commands: tuple[tuple[str, ...], ...]
    file_name: str = "input"

    @property
    def is_json(self) -> bool:
        return self.text.lstrip().startswith("{")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:4{i}.680590{i},{300 + 7 * i},{3 + i}\n" for i in range(6)
)
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{5 * i},ChatGPT,{400 + i},{4 + i},{404 + 2 * i},Conversation log\n" for i in range(6)
)
MOONCAKE = "".join(
    json.dumps(
        {
            "timestamp": 100 * i,
            "input_length": 1000,
            "output_length": 5 + i,
            "hash_ids": [1, 2] if i % 2 else [1, i + 3],
        }
    )
    + "\n"
    for i in range(6)
)
RECORDED_JSON = "".join(json.dumps({"request": f"a{i}", "runs": [3, 2, 1, 0, 5, i]}) + "\n" for i in range(4))
RECORDED_CSV = "request,position,longest_run\n" + "".join(
    f"a{i},{j},{(i + j) % 5}\n" for i in range(3) for j in range(4)
)
ADAPTIVE = {
    "ema_alpha": 0.3,
    "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": -0.25, "update_interval": 5},
    "8": {"candidate_steps": [0, 1, 3], "warmup_batches": 3, "ceiling_coeff": 2.5, "min_dwell_batches": 2},
}
SCENARIO = """
seed = 3
[model]
target = "llama-3.1-8b"
[hardware]
gpu = "H100"
tensor_parallel = 2
[speculation]
algorithm = "EAGLE3"
policy = "ema"
adaptive = {"1" = {candidate_steps = [1, 3]}, "8" = {candidate_steps = [1]}}
[acceptance]
conditional = [0.8, 0.7, 0.6]
regimes = {stretch_len = 8, shifts = [0.5, -0.5], weights = [1.0, 2.0]}
[engine]
page_size = 16
max_running = 8
kv_slots = 4096
[workload]
num_requests = 4
rate = 2.5
"""
FAULTS = """
[device.hangs]
probability = 0.01
watchdog_s = 4.0
[device.out_of_memory]
probability = 0.02
lasts_s = 1.0
"""
RESPONSES = "".join(
    json.dumps(
        {
            "metadata": {"session_num": i},
            "metrics": {"request_latency": {"value": 1.5, "unit": "ms"}},
            "spec_decode_acceptance": {
                "engine": "vllm",
                "mean_acceptance_length": 2.5,
                "acceptance_histogram": {"0": 1, "1": 1, "2": 1, "3": 1},
                "num_accepted_draft_tokens": 6,
                "num_draft_tokens": 12,
                "num_spec_steps": 4,
                "num_spec_tokens": 3,
                "per_step_accepted": [0, 3, 1, 2],
                "per_step_drafted": [3, 3, 3, 3],
            },
        }
    )
    + "\n"
    for i in range(60)
)
COUNTERS = "# HELP vllm:spec_decode_num_drafts_total Number of drafts.\n" + "".join(
    f'vllm:spec_decode_num_{name}_total{{model_name="m"{label}}} {value}\n'
    for name, label, value in (
        ("drafts", "", 1000.0),
        ("draft_tokens", "", 3000.0),
        ("accepted_tokens", "", 1.66e3),
        ("accepted_tokens_per_pos", ',position="0"', 710.0),
        ("accepted_tokens_per_pos", ',position="1"', 530.0),
        ("accepted_tokens_per_pos", ',position="2"', 420.0),
    )
)
SERVER_LOG = "[2025-11-04 11:35:54] server_args=ServerArgs(speculative_num_steps=3)\n" + "".join(
    f"[2025-11-04 11:36:0{i} TP0] Decode batch. #running-req: {i + 1}, #token: 234, accept len: 2.{i}0, accept rate: 0.{33 + 3 * i}, "
    "gen throughput (token/s): 90.1\n"
    for i in range(4)
)
VLLM_LOG = "INFO 05-30 07:21:00 [loggers.py:271] Engine 000: Running: 1 reqs\n" + "".join(
    f"INFO 05-30 07:21:{i}0 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.01, Accepted throughput: 20.60 tokens/s, "
    f"Drafted throughput: 60.90 tokens/s, Accepted: {206 + i} tokens, Drafted: {609 + 3 * i} tokens, "
    "Per-position acceptance rate: 0.601, 0.286, 0.128, Avg Draft acceptance rate: 33.8%\n"
    for i in range(4)
)
MEANS = "steps,accept_length\n1,1.65\n3,2.24\n7,2.59\n"
FEW = ("--set", "workload.num_requests=3", "--set", "workload.output.mean=8")


def sound_inputs(directory: Path) -> list[Sound]:
    """Return one sound input of every kind, logs of runs among them; `directory` takes the files of the runs."""
    found = []
    for name, settings in {
        "log": ("engine.page_size=4", "speculation.policy=ema"),
        "log of two pools": ("hardware.replicas=2", "disaggregation.prefill=1", "disaggregation.decode=1"),
        "log of faults": (),
    }.items():
        run = directory / name.replace(" ", "-")
        options = [word for setting in settings for word in ("--set", setting)]
        options += ["--faults", "swarm"] if "faults" in name else []
        few = ("--set", "workload.num_requests=5", "--set", "engine.multi_step_rounds=2")
        code, _, errors = execute(("simulate", "--quiet", "--no-perfetto", *few, *options, "--out", str(run)))
        assert code == 0, errors
        commands = (("audit", "--replay", "{}"), ("audit", "{}"), ("calibrate", "--acceptance", "{}"))
        found.append(Sound(name, (run / "events.jsonl").read_text(), commands))
    truncated = ("--allow-truncated",)
    found.append(
        Sound(
            "log without end",
            found[0].text,
            (
                ("audit", "--replay", "{}", *truncated),
                ("audit", "{}", *truncated),
                ("calibrate", "--acceptance", "{}", *truncated),
            ),
        )
    )
    found += [
        Sound(f"case of {path.parent.name}", path.read_text(), (("check", "--replay", "{}"),))
        for path in sorted(CASES.glob("*/*.json"))
    ]
    simulate = ("simulate", "--quiet")
    explain = (*simulate, "--explain", "--set")
    fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    config = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
    config |= dict(zip(fields, (4096, 14336, 32, 8, 32), strict=True))
    return [
        *found,
        Sound("azure", AZURE, ((*simulate, "--trace", "{}"),)),
        Sound("burstgpt", BURSTGPT, ((*simulate, "--trace", "{}"),)),
        Sound("mooncake", MOONCAKE, ((*simulate, "--trace", "{}"),)),
        Sound("recorded runs", RECORDED_JSON, ((*simulate, *FEW, "--set", "acceptance.recorded={}"),)),
        Sound("recorded runs as CSV", RECORDED_CSV, ((*simulate, *FEW, "--set", "acceptance.recorded={}"),)),
        Sound("table of steps", json.dumps(ADAPTIVE, indent=1), ((*explain, "speculation.adaptive={}"),)),
        Sound("model", json.dumps(config, indent=1), ((*explain, "model.target={}"),), "config.json"),
        Sound("scenario", SCENARIO, ((*simulate, "{}", "--explain"),)),
        Sound("responses with rounds", RESPONSES, (("calibrate", "--acceptance", "{}"),)),
        Sound("page of counters", COUNTERS, (("calibrate", "--acceptance", "{}"),)),
        Sound("log of a server", SERVER_LOG, (("calibrate", "--acceptance", "{}"),)),
        Sound("log of a vLLM server", VLLM_LOG, (("calibrate", "--acceptance", "{}"),)),
        Sound("mean accept lengths", MEANS, (("calibrate", "--acceptance", "{}"),)),
        Sound("plan of faults", FAULTS, ((*simulate, *FEW, "--faults", "{}"),)),
    ]


def damaged(sound: Sound, seed: int) -> bytes:
    """Return the input with one to three damages, drawn from `seed`."""
    rng = random.Random(seed)
    text = sound.text
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if sound.is_json and rng.random() < 0.6:
            text = _with_other_value(text, rng)
        elif rng.random() < 0.6:
            text = _with_other_word(text, rng)
        else:
            text = _with_other_lines(text, rng)
    raw = text.encode("utf-8", "surrogatepass")
    return _with_other_bytes(raw, rng) if rng.random() < 0.15 else raw


def _with_other_value(text: str, rng: random.Random) -> str:
    """Replace, drop or repeat one value somewhere in one JSON document of the text."""
    lines = text.splitlines(keepends=True) or [""]
    whole = not lines[0].rstrip().endswith("}")  # else one document per line
    at = rng.randrange(len(lines))
    try:
        document = json.loads(text if whole else lines[at])
    except (ValueError, RecursionError):
        return text
    holders = list(_holders(document))
    if not holders:
        return text
    holder = rng.choice(holders)
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    marker = "@@damaged@@"
    how = rng.random()
    if how < 0.7:
        holder[key] = marker
    elif how < 0.85:
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(["", "x", "1", "t", "ns", "é", marker])] = holder[key]
    else:
        holder.insert(0, holder[key])
    written = json.dumps(document, ensure_ascii=rng.random() < 0.5).replace(f'"{marker}"', rng.choice(JSON_VALUES))
    return written if whole else "".join([*lines[:at], written + "\n", *lines[at + 1 :]])


def _holders(value: Any) -> Iterator[dict | list]:
    if isinstance(value, dict | list) and value:
        yield value
        for item in list(value.values()) if isinstance(value, dict) else value:
            yield from _holders(item)


def _with_other_word(text: str, rng: random.Random) -> str:
    words = list(re.finditer(r"[\w.+-]+", text))
    if not words:
        return text
    word = rng.choice(words)
    return text[: word.start()] + rng.choice(WORDS) + text[word.end() :]


def _with_other_lines(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(5)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(at, lines[other])
    elif how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        return text[: rng.randrange(len(text) + 1)]
    else:
        lines.insert(at, rng.choice(WORDS) + "\n")
    return "".join(lines)


def _with_other_bytes(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 1, 4)))) + raw[at + rng.randrange(3) :]


class Hangs(Exception):
    """The command used more processor time than a damaged input may cost."""


def _stop(signal_number: int, frame: object) -> None:
    raise Hangs


def execute(arguments: tuple[str, ...]) -> tuple[int | None, str, str]:
    """Run the command in this process. Returns its exit code, None if it raised or hung, and what it
    printed to each stream."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before, sys.argv = sys.argv, ["foredraft", *arguments]
    old_limit, old_handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGVTALRM, _stop)
    code: int | None = 0
    try:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, old_limit[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
            except BaseException:  # whatever would be a traceback for a user is what is looked for
                errors.write(traceback.format_exc()[-3000:])
                code = None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old_handler)
        resource.setrlimit(resource.RLIMIT_AS, old_limit)
        sys.argv = before
    return code, *(stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, errors))


def run_damaged(directory: Path, sounds: list[Sound], seeds: range) -> Iterator[tuple[str, int | None, str]]:
    """Run each command on a damaged input per seed.
    Yields (the input's name and seed, exit code or None, standard error)."""
    for seed in seeds:
        sound = sounds[seed % len(sounds)]
        path = directory / sound.file_name
        path.write_bytes(damaged(sound, seed))
        for command in sound.commands:
            code, _, errors = execute(tuple(word.replace("{}", str(path)) for word in command))
            yield f"{sound.name}, seed {seed}, {command[0]}", code, errors
        path.unlink()


def unexpected(code: int | None, errors: str) -> bool:
    """Whether a command ended otherwise than a command may:
    with another exit code, a traceback, or without a word on what is wrong."""
    return code not in EXPECTED_CODES or "Traceback" in errors or (code == 2 and not errors.strip())
