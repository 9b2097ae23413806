"""docs/sentences.py: the same seed draws the same sentences; it finds the four kinds, and sees where sentences end."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentences

ROOT = Path(__file__).resolve().parents[2]

PAGE = """# A heading of four words or more

The first sentence goes on
in a second line. `free` refuses a list of pages.

<!-- varies -->
```console
$ this is code and not a sentence
```
Prose after a command is prose again.

<!-- from a-table -->
| generated | this cell is generated from the source |
<!-- end -->

| word | meaning of the word |
| --- | --- |
| **row** | a line of the request table |
| `open`, `grow`, `trim`, `close` | `rows` |

* An item of a list ends here
* and this is the next item
"""
MODULE = '''"""Hold the rows of the table. Short one."""

WIDTH = 4  # slots that each row may hold


def grow(row):
    """Give a row its next slots.

    Returns None if no slot is free, as `reserve(row)` does.
    """
    # The row keeps its slots until the step is committed,
    # because a transfer may still read them.
    if row < 0:
        raise ValueError(f"row {row} is negative: expected a row of the table")  # noqa: this is a directive of a tool


Rows = option(int, "--rows", "Rows that the table may have at most.")
'''


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "rows.py").write_text(MODULE)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "copy.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (
            "documents",
            [
                (3, "The first sentence goes on in a second line."),
                (4, "`free` refuses a list of pages."),
                (10, "Prose after a command is prose again."),
                (16, "meaning of the word"),
                (18, "a line of the request table"),
                (21, "An item of a list ends here"),
                (22, "and this is the next item"),
            ],
        ),
        (
            "docstrings",
            [
                (1, "Hold the rows of the table."),
                (7, "Give a row its next slots."),
                (9, "Returns None if no slot is free, as `reserve(row)` does."),
            ],
        ),
        (
            "comments",
            [
                (3, "slots that each row may hold"),
                (11, "The row keeps its slots until the step is committed, because a transfer may still read them."),
            ],
        ),
        (
            "messages",
            [
                (17, "Rows that the table may have at most."),
                (14, "row {row} is negative: expected a row of the table"),
            ],
        ),
    ],
)
def test_the_sentences_of_a_kind(tree, kind, found):
    assert [(item.line, item.text) for item in sentences.all_sentences(kind, tree)] == found


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Use a key, e.g. Seed or steps. Then run it.", ["Use a key, e.g. Seed or steps.", "Then run it."]),
        ("It takes 1.5 ms. The rest takes 2.", ["It takes 1.5 ms.", "The rest takes 2."]),
        ("It needs 20 s. [contracts.md](a.md) says why.", ["It needs 20 s.", "[contracts.md](a.md) says why."]),
        ("Call `plan. Then` now. It returns.", ["Call `plan. Then` now.", "It returns."]),
        ("`free` refuses it. `alloc` does not.", ["`free` refuses it.", "`alloc` does not."]),
        ("(Both end here.) So do **all.** Others, too.", ["(Both end here.)", "So do **all.**", "Others, too."]),
        ("Why? Because rows leave! It ends with config.json and goes on", None),
    ],
)
def test_where_a_sentence_ends(text, pieces):
    wanted = pieces or ["Why?", "Because rows leave!", "It ends with config.json and goes on"]
    found = sentences.split(text)
    assert [piece for _, piece in found] == wanted
    assert all(text[start:].startswith(piece) for start, piece in found)


def test_the_same_seed_draws_the_same_sentences():
    some = {"count": 42, "paths": ("docs/design.md", "core/kv", "cli")}
    first = sentences.sample(1, **some)
    assert first == sentences.sample(1, **some) != sentences.sample(2, **some)
    assert [[item.kind for item in first].count(kind) for kind in sentences.KINDS] == [11, 11, 10, 10]
    for item in first:
        lines = (ROOT / item.path).read_text(encoding="utf-8").splitlines()
        word = item.text.split()[0].strip("`*\"'(")
        assert item.kind == "messages" or word in lines[item.line - 1], item
