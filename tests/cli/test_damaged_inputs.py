"""Damaged files of every kind: a command ends with one of its exit codes, never with a traceback, and bad
input has a message."""

from __future__ import annotations

import pytest
from damaged_inputs import execute, run_damaged, sound_inputs, unexpected


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    return sound_inputs(tmp_path_factory.mktemp("sound"))


@pytest.mark.slow
def test_the_corpus_is_sound(sounds, tmp_path):
    """Otherwise damage would be looked for in what nothing reads."""
    for sound in sounds:
        path = tmp_path / sound.file_name
        path.write_text(sound.text)
        for command in sound.commands:
            code, out, errors = execute(tuple(word.replace("{}", str(path)) for word in command))
            assert (code, errors) == (0, ""), (sound.name, command)
            assert out


def damages(sounds, tmp_path, seeds):
    return [
        f"{what}: exit code {code}\n{errors}"
        for what, code, errors in run_damaged(tmp_path, sounds, seeds)
        if unexpected(code, errors)
    ]


def test_damaged_inputs(sounds, tmp_path):
    assert damages(sounds, tmp_path, range(15)) == []


def test_what_was_a_crash_or_a_hang_is_a_message(sounds, tmp_path):
    """A list as dtype, a million million layers, half a draft step."""
    assert damages(sounds, tmp_path, (1139, 1213, 5661)) == []


@pytest.mark.slow
def test_ten_thousand_damaged_inputs(sounds, tmp_path):
    assert damages(sounds, tmp_path, range(1000, 11_000)) == []
