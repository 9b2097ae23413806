"""The tables of docs/decode.md against the code and its tests:
what is supported has a row and a comparison, and a row is supported."""

from __future__ import annotations

import re
from pathlib import Path

from family_shapes import SHAPES, family_of
from foredraft.gpu.models.families import ARCHITECTURES, DECODED, MULTIMODAL, architecture_of
from foredraft.gpu.models.heads.config import EAGLE, PREDICTION_LAYERS, SPECULATORS
from foredraft.gpu.models.stored.quantized import METHODS
from kinds_of_drafts import DRAFTS
from stored_formats import FORMS
from test_checkpoint_heads import HEAD_FORMS
from test_models import FAMILIES

MIMO = "MiMoForCausalLM"
TEXT = (Path(__file__).parents[3] / "docs" / "decode.md").read_text(encoding="utf-8")


def column(heading: str, number: int = 0) -> list[str]:
    """A column of the table whose first line starts with `heading`, row by row."""
    rows = TEXT.partition(f"| {heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1 + number] for row in rows]


def codes(cells: list[str]) -> set[str]:
    """What the cells have in backquotes."""
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_architectures():
    assert codes(column("architecture")) == {*ARCHITECTURES, *MULTIMODAL}
    compared = {name for name, _ in FAMILIES.values()}
    # transformers has no MiMo; its layers are Qwen2's, and test_prediction_layers writes its layer out.
    assert compared == set(ARCHITECTURES) - {MIMO}


def proved(family: str) -> str:
    """The row of a family in the table of what is proved, from the tests that prove it."""
    architecture = architecture_of(family)
    count = sum(name == architecture for name, _ in FAMILIES.values())
    logits = f"{count} configuration{'s' * (count > 1)}" if count else "none; its layers are those of `qwen2`"
    forms = {"qwen3_moe": "every form but MXFP4", "gpt_oss": "FP8 by row, MXFP4"}.get(family, "FP8 by row")
    drafts = [options.get("algorithm") or name for name, options in DRAFTS.items() if not name.startswith("itself,")]
    drafts += ["`STANDALONE`"] + ["prediction layer"] * (DECODED[family].prediction is not None)
    names = ", ".join(dict.fromkeys(name if "`" in name or " " in name else f"`{name}`" for name in drafts))
    only_cpu = DECODED[family].has_latent or DECODED[family].has_full_heads or DECODED[family].has_states
    device = "CPU" if only_cpu else "CPU, GPU"
    return f"| `{family}` | {logits} | {forms} | {names} | {device} |"


def test_what_is_proved_of_each_family():
    heading = "| family | logits compared with"
    rows = TEXT.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    assert rows == [proved(family) for family in DECODED]
    assert {family_of(label) for label in SHAPES} == set(DECODED), "quantized weights and drafts of each"


def test_quantized_forms():
    assert codes(column("`quant_method`")) == set(METHODS)
    assert {form["quant_method"] for form, _ in FORMS.values()} | {"mxfp4"} == set(METHODS)


def test_head_forms():
    rows = list(zip(column("draft |"), column("draft |", 1), column("draft |", 2), strict=True))
    for form, algorithm in [
        *HEAD_FORMS,
        ("MiMo", EAGLE),
        ("DeepSeek-V3", EAGLE),
        ("GLM-4.5", EAGLE),
        ("Qwen3.5", EAGLE),
    ]:
        assert any(form in draft + layout and codes([name]) == {algorithm} for draft, layout, name in rows), (
            form,
            algorithm,
        )
    assert PREDICTION_LAYERS[:3] == (MIMO, "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
    assert PREDICTION_LAYERS[3:] == ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    kinds = re.findall(r"speculators_model_type: (\w+)", "".join(layout for _, layout, _ in rows))
    assert {*kinds} == {*SPECULATORS, "dflash"}  # block drafters have files of their own
    compared = {algorithm for form, algorithm in HEAD_FORMS if form == "speculators"}
    assert compared | {"P_EAGLE"} == {*SPECULATORS.values()}  # `tests/gpu/draft` compares P-EAGLE's
