"""`foretoken cost` and `foretoken doctor`: what they print, and what they refuse."""

from __future__ import annotations

import pytest


def test_cost_prints_parts_that_sum_to_the_round(command):
    code, out, errors = command("cost", "--batch", "4,32", "--steps", "0..2", "--context", "100")
    assert (code, errors) == (0, "")
    for block in out.split("\n\n")[1:]:
        lines = {line[:18]: [cell.replace(",", "") for cell in line[18:].split()] for line in block.splitlines()[1:]}
        parts = [cells for name, cells in lines.items() if name.startswith("  ")]
        device = lines["device".ljust(18)]
        assert len(parts) > 4 and len(device) == 3
        for column in range(3):
            total = sum(int(cells[column]) for cells in parts if cells[column] != "–")
            assert total == pytest.approx(int(device[column]), abs=len(parts))


def test_doctor_says_where_it_pays_and_where_not(command):
    pays = command("doctor", "--requests", "30")
    assert pays.code == 0 and "Speculation pays" in pays.out and "p99 ms" in pays.out
    pays_not = command("doctor", "--requests", "30", "--set", "acceptance.conditional=[0.02]")
    assert pays_not.code == 0 and "Speculation does not pay" in pays_not.out
    assert max(map(len, (pays.out + pays_not.out).splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--set", "speculation.algorithm=NONE"], "name the algorithm"),
        (["doctor", "--set", "model.target=llama-3.1-70b"], "does not fit"),
        (["cost", "--batch", "0"], "--batch: 0 is no integer from 1 on"),
        (["cost", "--steps", "1.5"], "--steps: 1.5 is no integer"),
        (["cost", "--steps", "3..1"], "the range '3..1' is empty"),
    ],
)
def test_what_cannot_be_answered_is_one_message(command, arguments: list[str], message: str):
    code, _, errors = command(*arguments)
    assert code == 2 and message in errors and "Traceback" not in errors
