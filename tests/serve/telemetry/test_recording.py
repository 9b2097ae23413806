"""The record of a server: what is left of it when the server is killed, edited tables, starts, and its files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.core.errors import ConfigError
from foredraft.observe.log import EventLog, read_log
from foredraft.serve.telemetry.recording import Recording
from server_process import recorded, serve
from typer.testing import CliRunner

ASKED = {"prompt": "Why is the sky blue?", "max_tokens": 40, "ignore_eos": True}


def _replay(path: Path) -> str:
    done = CliRunner().invoke(app, ["audit", "--replay", str(path), "--allow-truncated"])
    assert done.exit_code == 0 and "identical" in done.output, done.output
    return done.output


def test_a_server_that_is_killed_leaves_its_record(tmp_path: Path):
    """Whole up to the last second; and however the file is cut, what is there replays."""
    record = tmp_path / "record"
    with serve(tmp_path, "--record", str(record), "--speed", "20") as (process, address, _):
        for _ in range(12):
            assert httpx.post(f"{address}/v1/completions", json=ASKED).status_code == 200
        time.sleep(0.5)  # idle
        process.kill()
        process.wait()
    (folder,) = recorded(record)
    log = folder / "events.jsonl"
    ended = sum(len(line.data.get("finished", ())) for line in read_log(log, allow_truncated=True))
    submitted = [line for line in read_log(log, allow_truncated=True) if line.kind == "submit"]
    assert len(submitted) == 12 and ended == 12
    _replay(folder)
    data = log.read_bytes()
    first_line = data.index(b"\n") + 1
    for cut in range(first_line, len(data), (len(data) - first_line) // 6):
        log.write_bytes(data[:cut])
        _replay(log)


@pytest.mark.ci
def test_a_busy_server_that_is_killed_loses_a_second_at_most(tmp_path: Path):
    record = tmp_path / "record"
    with serve(tmp_path, "--record", str(record)) as (process, address, _):
        asked = {**ASKED, "max_tokens": 5000, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as stream:
            lines, begin = stream.iter_lines(), time.monotonic()
            while time.monotonic() < begin + 2.5:
                next(lines)
            process.kill()
            process.wait()
    (folder,) = recorded(record)
    times = [line.data["ns"] for line in read_log(folder / "events.jsonl", allow_truncated=True) if "ns" in line.data]
    assert times[-1] - times[0] > 1e9
    _replay(folder)


def test_each_start_has_its_folder(tmp_path: Path):
    for _ in range(2):
        with Recording(tmp_path / "record") as recording:
            sinks = recording.sinks(lambda: {"scenario": {}})
            assert len(sinks(0)) == len(sinks(1)) == 2 and recording.folder is not None
    folders = recorded(tmp_path / "record")
    assert [[file.name for file in folder.iterdir()] for folder in folders] == [["events.jsonl"]] * 2
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--record"):
        Recording(tmp_path / "file")


def test_a_log_in_parts_is_read_as_one(tmp_path: Path):
    source = tmp_path / "whole"
    arguments = ["simulate", "--set", "workload.num_requests=20", "--out", str(source), "--quiet"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    lines = (source / "events.jsonl").read_text().splitlines()
    header = {key: value for key, value in json.loads(lines[0]).items() if key not in ("t", "schema", "foredraft")}
    log = EventLog(tmp_path / "events.jsonl", header, part_bytes=20_000)
    for line in lines[1:-1]:
        log._lines.append(line)
        log.flush()
    log.close(complete=True)
    parts = sorted(tmp_path.glob("events*.jsonl"))
    assert len(parts) > 2 and max(part.stat().st_size for part in parts) < 40_000
    texts = [record.text for record in read_log(tmp_path / "events.jsonl")]
    assert texts[:-1] == lines[:-1]
    (tmp_path / f"events.{len(parts)}.jsonl").unlink()
    with pytest.raises(Exception, match="breaks off after this line"):
        list(read_log(tmp_path / "events.jsonl"))
    _replay(tmp_path / "events.jsonl")
