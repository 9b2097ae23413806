"""Tokenizers, chat templates and streamed text."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from foredraft.core.contract.text import REPLACEMENT, StreamDecoder, TextDecoder, context_of
from foredraft.core.errors import ConfigError, InvalidRequest
from foredraft.gpu.session.text import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoint import small_tokenizer, train_tokenizer, write_tokenizer
from tokenizers import decoders, models

BYTE_LEVEL = Tokenizer(train_tokenizer(), "byte level", special_tokens={"eos_token": "</s>"})


def make_byte_fallback() -> Tokenizer:
    """As Llama 2: pieces with a mark for the space, and bytes that are characters only as a whole run."""
    pieces = ["▁", "▁he", "llo", "▁wor", "ld", "a", "b", "c", ".", "€"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(tokenizer, "byte fallback")


BYTE_FALLBACK = make_byte_fallback()
# Where tokens meet in odd ways: characters in parts, bytes that begin none, spaces that a first token loses, tokens
# without text, ids without a token, which models have whose embeddings are padded.
ODD_TOKENS = {
    BYTE_LEVEL: [0, 1, BYTE_LEVEL.vocab_size, *BYTE_LEVEL.encode("漢😀€ a b").tolist()],
    BYTE_FALLBACK: [*range(257, BYTE_FALLBACK.vocab_size + 1), *(1 + byte for byte in "€a".encode())],
}


def pieces_of(draw, tokens: list[int]) -> list[list[int]]:
    """`tokens` cut as steps would deliver them."""
    pieces, begin = [], 0
    while begin < len(tokens):
        size = draw(st.integers(1, 5))
        pieces.append(tokens[begin : begin + size])
        begin += size
    return pieces


@given(data=st.data(), tokenizer=st.sampled_from(list(ODD_TOKENS)))
def test_streamed_text_is_the_decoded_text(data, tokenizer):
    """Of any tokens at all, also bytes that are no text; and what was shown is never taken back."""
    odd, any_token = st.sampled_from(ODD_TOKENS[tokenizer]), st.integers(0, tokenizer.vocab_size - 1)
    tokens = data.draw(st.lists(odd if data.draw(st.booleans()) else any_token, max_size=40))
    stream, shown = StreamDecoder(tokenizer), ""
    whole = tokenizer.decode(np.array(tokens, dtype=np.int64))
    for piece in pieces_of(data.draw, tokens):
        shown += stream.push(piece)
        assert whole.startswith(shown)
    assert shown + stream.finish() == whole


@given(data=st.data(), tokenizer=st.sampled_from(list(ODD_TOKENS)))
def test_an_output_is_the_continuation_of_its_prompt(data, tokenizer):
    """A decoder that strips a space strips it from the prompt alone."""
    prompt = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    tokens = data.draw(st.lists(st.sampled_from(ODD_TOKENS[tokenizer]), max_size=40))
    before, whole = (tokenizer.decode(np.array(part, dtype=np.int64)) for part in (prompt, prompt + tokens))
    if before.endswith(REPLACEMENT) or (prompt and prompt[-1] in tokenizer.byte_ids):
        return  # the output may complete a character of the prompt, or break it
    stream = StreamDecoder(tokenizer, context=context_of(tokenizer, prompt))
    shown = "".join(map(stream.push, pieces_of(data.draw, tokens))) + stream.finish()
    assert before + shown == whole


def test_an_id_without_a_token_breaks_no_run_of_bytes():
    *most, last = (1 + byte for byte in "€".encode())
    tokens = [*most, BYTE_FALLBACK.vocab_size + 7, last]
    stream = StreamDecoder(BYTE_FALLBACK)
    shown = "".join(stream.push([token]) for token in tokens) + stream.finish()
    assert shown == BYTE_FALLBACK.decode(np.array(tokens)) == "€"


def test_a_token_inside_a_text_keeps_its_space():
    space, end = (BYTE_FALLBACK._tokenizer.token_to_id(token) for token in ("▁he", "<unk>"))
    assert BYTE_FALLBACK.decode(np.array([space])) == "he"
    assert BYTE_FALLBACK.text_of(space) == " he" and BYTE_FALLBACK.bytes_of(space) == b" he"
    (token,) = BYTE_LEVEL.encode(" the")[:1].tolist()
    assert BYTE_LEVEL.text_of(token) == BYTE_LEVEL.decode(np.array([token])) != ""
    assert BYTE_LEVEL.text_of(1) == "" and BYTE_FALLBACK.text_of(end) == "<unk>"


@given(data=st.data(), text=st.text(max_size=20))
def test_no_half_character_is_shown(data, text):
    text = text.replace(REPLACEMENT, "")
    tokens = BYTE_LEVEL.encode(text).tolist()
    stream, shown = StreamDecoder(BYTE_LEVEL), ""
    for piece in pieces_of(data.draw, tokens):
        more = stream.push(piece)
        assert REPLACEMENT not in more
        shown += more
        # All that is whole is shown at once: at most one character is held back.
        assert len(BYTE_LEVEL.decode(np.array(stream._tokens))) - len(shown) <= 1
    assert shown + stream.finish() == text


@given(
    data=st.data(),
    text=st.text("abé ", max_size=30),
    stops=st.lists(st.text("abé ", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(data, text, stops):
    """As the engine does it: the request ends with the token that completes a stop string."""
    tokens = BYTE_LEVEL.encode(text)
    ends = (n for n in range(1, len(tokens) + 1) if any(stop in BYTE_LEVEL.decode(tokens[:n]) for stop in stops))
    tokens = tokens[: next(ends, len(tokens))]
    whole = BYTE_LEVEL.decode(tokens)
    places = [whole.index(stop) for stop in stops if stop in whole]
    expected = whole[: min(places)] if places else whole
    stream, shown = StreamDecoder(BYTE_LEVEL, stops), ""
    for piece in pieces_of(data.draw, tokens.tolist()):
        shown += stream.push(piece)
        assert expected.startswith(shown), "part of a stop string was shown"
    shown += stream.finish()
    assert shown == expected
    assert (stream.stop is not None) == bool(places)


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = StreamDecoder(BYTE_LEVEL, ["bcd"])
    letters = {letter: BYTE_LEVEL.encode(letter) for letter in "abcxd"}
    assert [stream.push(letters[letter]) for letter in "abbcx"] == ["a", "", "b", "", "bcx"]
    assert [stream.push(letters[letter]) for letter in "bc"] == ["", ""]
    assert stream.finish() == "bc"
    stream = StreamDecoder(BYTE_LEVEL, ["bcd"])
    assert "".join(stream.push(letters[letter]) for letter in "abcda") == "a"
    assert stream.stop == "bcd" and stream.finish() == ""


def test_a_run_of_bytes_waits_for_its_end():
    """A decoder with byte fallback reads € from E2 82 AC, and nothing at all from E2 82 AC E2."""
    run = [BYTE_FALLBACK._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    letter = BYTE_FALLBACK._tokenizer.token_to_id("a")
    stream = StreamDecoder(BYTE_FALLBACK)
    assert [stream.push([token]) for token in [*run, letter]] == ["", "", "", "€a"]
    stream = StreamDecoder(BYTE_FALLBACK)
    assert [stream.push([token]) for token in [*run, run[0]]] == [""] * 4
    assert stream.finish() == REPLACEMENT * 4


def test_streaming_costs_the_same_per_token_however_long_the_text():
    class Counting(TextDecoder):
        longest = 0

        def decode(self, tokens):
            self.longest = max(self.longest, len(tokens))
            return BYTE_LEVEL.decode(tokens)

    counting = Counting()
    stream = StreamDecoder(counting)
    for token in BYTE_LEVEL.encode("for i in range(10): print(i) 漢字 😀\n" * 50):
        stream.push([token])
    assert counting.longest < 20


# -- files of a checkpoint --------------------------------------------------------------------------------------------


def test_a_tokenizer_is_read_from_its_directory(tmp_path):
    tokenizer = small_tokenizer(tmp_path)
    assert tokenizer.eos_ids == (1,) and tokenizer.bos_id == 0
    tokens = tokenizer.encode("naïve 漢字")
    assert tokens.dtype == np.int64 and tokenizer.decode(tokens) == "naïve 漢字"
    assert tokenizer.decode(np.array([0, *tokens, 1])) == "naïve 漢字"
    assert tokens.max() < tokenizer.vocab_size


def test_ends_of_text_come_from_all_files_that_name_one(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer.load(tmp_path).eos_ids == (1, 5, 7)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.load(tmp_path).eos_ids == (1,)
    write_tokenizer(tmp_path, eos_token=None)
    assert Tokenizer.load(tmp_path).eos_ids == (9,)


def test_padding_of_the_file_is_not_applied(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(max_length=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode("for i in range")) == "for i in range"
    assert len(Tokenizer.load(tmp_path).encode("a b c")) < 8


MESSAGES = [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("form", ["text", "list", "file"])
def test_a_chat_template_is_found_in_all_its_places(tmp_path, form):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    given_as = {
        "text": template,
        "list": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}],
        "file": "not this one",
    }
    write_tokenizer(tmp_path, chat_template=given_as[form])
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    text = tokenizer.render_chat(MESSAGES)
    assert text == "[system]Be <brief> & kind.\n[user]Hi\n[assistant]"
    assert tokenizer.render_chat(MESSAGES, "messages") == text.removesuffix("[assistant]")
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == text


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", "Once upon ", "<user>Hi</s><assistant>Once upon "),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}", " Once ", "<user>Hi</s><assistant>Once"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", "Hi", "<user>Hi</s><assistant>Hi"),
    ],
)  # fmt: skip
def test_the_last_message_is_continued(tmp_path, template, content, expected):
    write_tokenizer(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    assert Tokenizer.load(tmp_path).render_chat(messages, "continue") == expected


def test_a_template_that_changes_the_last_message_cannot_continue_it(tmp_path):
    write_tokenizer(tmp_path, chat_template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        Tokenizer.load(tmp_path).render_chat([{"role": "assistant", "content": "word"}], "continue")


TEMPLATES = {
    "special tokens, blocks trimmed": "{{ bos_token }}{% for m in messages %}\n  {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "no tools": "{% if tools is not none or documents is not none %}tools{% else %}none{% endif %}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.xdist_group("transformers")  # one worker imports it
@pytest.mark.parametrize("longest", [None, 10**400, 512])
def test_what_transformers_saves_is_read(tmp_path, longest):
    """Without a greatest length it writes int(1e30)."""
    transformers = pytest.importorskip("transformers")
    given = {} if longest is None else {"model_max_length": longest}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES["json"], **given
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.xdist_group("transformers")  # one worker imports it
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_renders_them(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    tokenizer = small_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES[name],
    )
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(MESSAGES) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_error_of_the_request(tmp_path, template, words):
    tokenizer = small_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(InvalidRequest, match=words) as caught:
        tokenizer.render_chat(MESSAGES)
    assert str(tmp_path) in str(caught.value)


def test_a_model_without_template_says_so(tmp_path):
    tokenizer = small_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{}", "no tokenizer"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, not list"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("chat_template.jinja", "\udcff", "is not UTF-8"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, words):
    write_tokenizer(tmp_path)
    path = tmp_path / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    assert str(path) in str(caught.value) and words in str(caught.value)


def test_a_template_that_is_none_is_named(tmp_path):
    tokenizer = small_tokenizer(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="chat_template"):
        tokenizer.render_chat(MESSAGES)


def test_a_directory_that_is_not_there(tmp_path):
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        Tokenizer.load(tmp_path)


def test_the_settings_file_may_be_absent(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == () and tokenizer.bos_id is None
    assert json.loads((tmp_path / "tokenizer.json").read_text())  # the tokenizer itself was there


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_of_two_stop_strings_the_one_that_begins_first_counts(stops):
    stream = StreamDecoder(BYTE_LEVEL, stops)
    assert stream.push(BYTE_LEVEL.encode("xab")) == "x" and stream.stop == "ab"
