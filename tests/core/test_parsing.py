"""Texts from outside: what is read is what was written, and what exceeds a limit is refused with its place."""

import json
import math

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.parsing import (
    MAX_DEPTH,
    MAX_INTEGER,
    ConfigReader,
    ParseError,
    parse_json,
    parse_toml,
    read_json_object,
    refuse_repeated_keys,
)
from foredraft.observe.input_files import read_lines, read_text, read_toml
from hypothesis import given, settings
from hypothesis import strategies as st

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=15)
@given(values, st.sampled_from([None, 2]), st.booleans())
def test_what_json_writes_is_read_back(value, indent, ascii_only):
    assert parse_json(json.dumps(value, indent=indent, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ('{"a": 1,\n "b": }', "Expecting value (line 2 column 7)"),
        ('{"a": NaN}', "NaN is no JSON number (column 7)"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("[1e999]", "1e999 is too large"),
        ("9" * 5000, "an integer of 5000 digits; expected one of 64 bits (column 1)"),
        (str(MAX_INTEGER + 1), "an integer of 20 digits"),
        (f"-{MAX_INTEGER + 1}", "an integer of 20 digits"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep (column {MAX_DEPTH + 1})"),
        ("[" * 100_000, f"nested more than {MAX_DEPTH} deep"),
        ('{"a":' * 100_000, f"nested more than {MAX_DEPTH} deep"),
        (r'{"a": ["\ud800"]}', "half of a surrogate pair"),
        (r'{"\udfff": 1}', "half of a surrogate pair"),
    ],
)
def test_what_json_must_not_hold(text, words):
    with pytest.raises(ParseError) as caught:
        parse_json(text)
    assert words in str(caught.value)


def test_the_limits_themselves_are_read():
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deepest)) == deepest
    assert parse_json('"' + "[" * 1000 + r"\"" + '"') == "[" * 1000 + '"'  # brackets in a text nest nothing
    assert len(parse_json("[" + "[]," * 1000 + "[]]")) == 1001
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert parse_json(f"-{MAX_INTEGER}") == -MAX_INTEGER
    assert parse_json("[1, 2]", refuse_repeated_keys) == [1, 2]
    with pytest.raises(ParseError, match="'a' is written twice"):
        parse_json('{"a": 1, "a": 2}', refuse_repeated_keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = ", "Invalid value"),
        ("a = " + "9" * 5000, "digits"),
        (f"a = {MAX_INTEGER + 1}", "an integer of 65 bits"),
        ("a = " + "[" * 5000, f"nested more than {MAX_DEPTH} deep"),
        ("a = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        (".".join("a" * (MAX_DEPTH + 2)) + " = 1", f"nested more than {MAX_DEPTH} deep"),
    ],
)
def test_what_toml_must_not_hold(text, words):
    with pytest.raises(ParseError) as caught:
        parse_toml(text)
    assert words in str(caught.value)


def test_toml_within_the_limits():
    read = parse_toml('a = [1, {b = 2.5}]\n[t]\nx = "y"\nz = inf')
    assert read == {"a": [1, {"b": 2.5}], "t": {"x": "y", "z": math.inf}}


def test_files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\n")  # a byte order mark and Windows' ends of lines
    assert read_text(path) == "a = 1\nb = 2\n"
    assert read_toml(path) == {"a": 1, "b": 2}
    assert list(read_lines(path)) == ["a = 1\r\n", "b = 2\n"]
    for read in (read_text, lambda *given: list(read_lines(*given))):
        with pytest.raises(ConfigError, match=r"nothing: cannot be read: No such file"):
            read(tmp_path / "nothing")
        with pytest.raises(ConfigError, match="cannot be read"):
            read("zero\0byte")
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            read(tmp_path)
        with pytest.raises(ConfigError, match="than 5 bytes"):
            read(path, 5)
    path.write_bytes(b"a = 1\nb = \xff")
    with pytest.raises(ConfigError, match="is not UTF-8: byte 0xff at byte 11"):
        read_text(path)
    with pytest.raises(ConfigError, match="line 2: is not UTF-8: byte 0xff at byte 5"):
        list(read_lines(path))


@pytest.mark.parametrize("digits", [str(int(1e30)), f"-{MAX_INTEGER + 1}", "1" + "0" * 308])
def test_a_file_of_another_program_may_have_integers_of_any_length(digits):
    assert parse_json(f'{{"a": [{digits}, 7]}}', long_integers=True) == {"a": [int(digits), 7]}
    with pytest.raises(ParseError, match="an integer of"):
        parse_json(digits)


@pytest.mark.parametrize("digits", ["9" * 309, "9" * 5000, "1e999"])
def test_what_no_float_has_room_for_is_infinite_in_a_checkpoint_and_refused_elsewhere(tmp_path, digits):
    path = tmp_path / "config.json"
    path.write_text(f'{{"longest": {digits}, "shortest": -{digits}}}')
    assert read_json_object(str(path), read_text, of_checkpoint=True) == {"longest": math.inf, "shortest": -math.inf}
    with pytest.raises(ConfigError, match="is not JSON: "):
        read_json_object(str(path), read_text)
    with pytest.raises(ParseError, match="is too large"):
        parse_json(digits, long_integers=True)


def test_a_key_that_is_read_has_64_bits():
    for value in (MAX_INTEGER + 1, 10**300, math.inf):
        reader = ConfigReader({"size": value, "ids": [value], "id": value}, "config.json")
        assert (reader.integer("size"), reader.integers("ids"), reader.token_ids("id")) == (1, (), ())
        assert [problem.key for problem in reader.problems] == ["size", "ids", "id"]
    assert ConfigReader({"size": MAX_INTEGER}, "config.json").integer("size") == MAX_INTEGER


def test_configurations_that_python_wrote_may_have_infinity():
    assert parse_json('{"limit": [0.0, Infinity, -Infinity]}', with_infinity=True) == {
        "limit": [0.0, math.inf, -math.inf]
    }
    with pytest.raises(ParseError, match="NaN is no JSON number"):
        parse_json("[NaN]", with_infinity=True)
