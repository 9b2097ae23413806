"""The page in headless Chromium: `make browser`."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from foredraft.sim.scenario_file import load_scenario
from page_server import PageServer, page_server, wait_until

pytest.importorskip("selenium", reason="the extra dev is not installed")

import chromium
from chromium import Page
from selenium.webdriver.common.keys import Keys

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(chromium.place() is None, reason="no Chromium and chromedriver on the path"),
]

LAUNCH = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 64"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{second:02}.000000,{100 + second},20\n" for second in range(60)
)
FEW = "#workload.num_requests=60&page.batch=8"


@pytest.fixture(scope="module")
def browser(served: PageServer) -> Iterator[Page]:
    with chromium.chromium(served.address) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.resize(1280, 900)
    browser.colours("light")
    browser.open(FEW).js("localStorage.clear()")
    browser.errors()
    return browser.open(FEW)


def test_a_change_is_answered_then_simulated(page: Page, record_property):
    assert page.text("verdict").startswith("Speculation pays")
    page.wait("document.getElementById('run').dataset.done")
    took = []
    for label, value in (("GPU", "H200"), ("Server", "sglang-0.5"), ("Draft steps", "fixed"), ("Kind of text", "math")):
        before, verdict = page.text("rounds"), page.text("what")
        page.choose(label, value)
        took.append(int(page.js("document.getElementById('found').dataset.tookMs")))
        assert label == "Draft steps" or (page.text("rounds"), page.text("what")) != (before, verdict), label
    record_property("note", f"the page: answers after {', '.join(map(str, took))} ms")
    page.wait("Number(document.getElementById('run').dataset.done) >= 2")
    assert page.js("document.querySelectorAll('#latencies .range').length") == 8
    assert page.js("document.querySelectorAll('#run-found path.line').length") == 6
    expected = ("hardware.gpu=H200", "hardware.server=sglang-0.5", "speculation.steps=3", "acceptance.preset=math")
    assert all(pair in page.fragment for pair in expected)
    assert not page.errors()


def test_a_slider_moves_the_numbers_beside_it(page: Page):
    slider = page.control("Batch")
    slider.send_keys(Keys.ARROW_RIGHT * 40)
    batch = int(page.control("Batch", "input[type=number]").get_attribute("value"))
    assert batch > 8 and f"page.batch={batch}" in page.fragment
    page.wait(f"document.getElementById('cost-caption').textContent.startsWith('{batch} requests')")
    number = page.control("Batch", "input[type=number]")
    number.send_keys(Keys.CONTROL + "a")
    number.send_keys("5", Keys.ENTER)
    page.wait("document.getElementById('cost-caption').textContent.startsWith('5 requests')")


def test_the_address_keeps_everything(page: Page):
    page.choose("GPU", "L40S")
    page.choose("Load", "closed")
    page.control("Values to try").send_keys("speculation.steps=0..2", Keys.TAB)
    link, command, toml = page.js("location.href"), page.text("command"), page.text("toml")
    page.driver.get("about:blank")
    page.driver.get(link)
    page.wait("document.getElementById('found')?.dataset.answered")
    assert (page.text("command"), page.text("toml"), page.js("location.href")) == (command, toml, link)
    assert page.control("Load").get_attribute("value") == "closed"
    assert page.control("Values to try").get_attribute("value") == "speculation.steps=0..2"
    with page.answering():
        page.driver.execute_script("location.hash = '#hardware.gpu=H100&page.batch=8'")
    assert page.control("GPU").get_attribute("value") == "H100"


def test_file_and_command_say_the_same(page: Page, tmp_path: Path):
    page.choose("GPU", "H200")
    page.choose("Drafts by", "NGRAM")
    file = tmp_path / "scenario.toml"
    file.write_text(page.text("toml"))
    words = shlex.split(page.text("command"))
    assert words[:2] == ["foredraft", "simulate"]
    assert load_scenario(file)[0] == load_scenario(None, words[3::2])[0]
    assert load_scenario(file)[0].speculation.algorithm == "NGRAM"


def test_two_pages_do_not_disturb_each_other(page: Page):
    first = page.driver.current_window_handle
    page.choose("GPU", "L40S")
    shown = page.text("what")
    page.driver.switch_to.new_window("tab")
    page.open("#hardware.gpu=B200&workload.num_requests=20000&page.batch=64")
    assert page.control("GPU").get_attribute("value") == "B200"
    page.driver.switch_to.window(first)
    assert page.text("what") == shown and page.control("GPU").get_attribute("value") == "L40S"
    page.choose("GPU", "H100")
    page.wait("document.getElementById('run').dataset.done")
    for window in page.driver.window_handles:
        if window != first:
            page.driver.switch_to.window(window)
            assert "B200" in page.text("toml")
            page.driver.close()
    page.driver.switch_to.window(first)


# -- dropped and pasted ------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_read(page: Page):
    with page.answering():
        page.drop("mine.toml", '[hardware]\ngpu = "L40S"\n\n[engine]\nmax_running = 32\n')
    assert page.control("GPU").get_attribute("value") == "L40S" and "engine.max_running=32" in page.fragment
    assert page.find("textarea[aria-label^='Other keys']").get_attribute("value") == "engine.max_running=32"
    with page.answering():
        page.drop("requests.csv", TRACE)
    assert page.control("Load").get_attribute("value") == "trace" and "60 requests" in page.text("read-notes")
    assert page.text("command").endswith("--trace requests.csv")
    page.wait("document.getElementById('run-caption').textContent.startsWith('Simulated: 60 requests')")
    page.choose("Load", "open")
    page.find("textarea.paste").send_keys(LAUNCH)
    page.find("#take").click()
    page.wait("document.getElementById('toml').textContent.includes('vllm-0.18')")
    assert 'gpu = "L40S"' in page.text("toml") and page.text("read-notes").startswith("Read as a launch command.")
    assert not page.errors()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("diary.txt", "Dear diary", "diary.txt: is none of a scenario"),
        ("mine.toml", "[hardware]\ngpus = 2", "unknown key"),
        ("big.csv", "x" * 8_000_000, "--trace FILE"),
        ("<img src=x>.toml", "=", "<img src=x>.toml"),
    ],
)
def test_what_is_no_scenario_changes_nothing(page: Page, name: str, text: str, words: str):
    before = page.fragment
    page.drop(name, text)
    page.wait("!document.getElementById('problem').hidden")
    assert words in page.text("problem") and page.fragment == before
    assert not page.js("document.querySelectorAll('#problem img').length")
    page.choose("GPU", "H200")
    assert page.js("document.getElementById('problem').hidden"), "the next change goes on"


def test_a_key_that_is_wrong_is_shown_at_its_control(page: Page):
    page.open("#hardware.gpu=H200x&page.batch=8")
    assert "did you mean 'H200'" in page.text("problem")
    assert page.control("GPU").get_attribute("aria-invalid") == "true"
    with page.answering():
        page.find("#problem button").click()
    assert page.js("document.getElementById('problem').hidden") and "gpu" not in page.fragment


# -- a plan ------------------------------------------------------------------------------------------------------------


BEST = "document.querySelector('#candidates tr.best th').firstChild.textContent"


def fill(page: Page, label: str, value: str) -> None:
    field = page.control(label)
    field.clear()
    field.send_keys(value, Keys.TAB)


def test_a_plan_is_cancelled_and_answered(page: Page):
    page.find("#plan-start").click()
    page.wait("document.querySelector('#plan-progress span').textContent.includes(' left')")
    assert "candidates" in page.js("document.querySelector('#plan-progress span').textContent")
    page.choose("Kind of text", "code")  # the page answers meanwhile
    page.find("#plan-progress button").click()
    assert page.text("plan-lead") == "Cancelled."
    for label, value in (("Requests of a run", "100"), ("Most runs per load", "2"), ("GPUs", "1")):
        fill(page, label, value)
    fill(page, "Load, requests/s", "1")
    fill(page, "Values to try", "speculation.steps=0,3")
    page.find("#plan-start").click()
    page.wait("!document.getElementById('plan-scroll').hidden")
    assert " on 1 GPU" in page.text("plan-lead")
    assert page.js("document.querySelectorAll('#candidates tbody tr').length") == 2
    page.find("#export summary").click()
    page.find("#export-server").send_keys("vLLM")
    page.wait("document.getElementById('export-text').textContent.startsWith('vllm serve')")
    chosen = page.js("document.getElementById('export-of').selectedOptions[0].textContent")
    assert chosen.startswith("the plan's ") and chosen[11:] == page.js(BEST)
    page.find("#command-name").send_keys("plan")
    assert "--try speculation.steps=0,3" in page.text("command")
    fill(page, "Limits", "ttft<1")
    page.find("#plan-start").click()
    page.wait("document.getElementById('plan-lead').textContent.includes('ttft')")


def test_files_for_those_who_run_it_are_shown_and_saved(page: Page, tmp_path: Path):
    page.open("#hardware.server=trtllm-1.x&speculation.policy=%22fixed%22&page.batch=8&workload.num_requests=60")
    page.find("#export summary").click()
    page.wait("document.getElementById('export-text').textContent.startsWith('trtllm-serve')")
    assert "One replica of TensorRT-LLM, each on one GPU." in page.text("export-about")
    page.find("#export-file").send_keys("trtllm.yaml")
    assert "speculative_config" in page.text("export-text")
    page.choose("Tensor parallel", "2")
    page.wait("document.getElementById('export-about').textContent.includes('2 GPUs')")
    page.find("#export-server").send_keys("SGLang")
    page.wait("document.getElementById('export-about').textContent.includes('SGLang')")
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find("#export-file").send_keys("deployment.yaml")
    page.find("#export-save").click()
    wait_until(lambda: (tmp_path / "deployment.yaml").exists(), what="for the file")
    assert "sglang.launch_server" in (tmp_path / "deployment.yaml").read_text()
    page.find("#export-server").send_keys("vLLM")
    page.choose("Draft steps", "adaptive")
    page.wait("document.getElementById('export-about').textContent.includes('has no arguments')")
    assert page.js("document.getElementById('export-found').hidden") and not page.errors()


# -- how it is used ----------------------------------------------------------------------------------------------------

REACHABLE = """(() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
    .filter((one) => one.tabIndex >= 0 && one.checkVisibility({ visibilityProperty: true }) && !one.disabled))()"""
NAMELESS = f"""{REACHABLE}.filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length ||
    document.getElementById(one.getAttribute('aria-labelledby')))).map((one) => one.outerHTML)"""


def test_the_keyboard_alone_is_enough(page: Page):
    page.wait("document.getElementById('run').dataset.done && document.getElementById('run-progress').hidden")
    assert not page.js(NAMELESS)
    order = page.js(f"{REACHABLE}.map((one) => [one.id, one.ariaLabel ?? ''])")
    page.driver.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    seen = []
    for _ in range(len(order) + 5):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(page.js("[document.activeElement.id, document.activeElement.ariaLabel ?? '']"))
        if seen[-1] == order[-1]:
            break
    assert seen[0][0] == "skip" and seen == order
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.js(outline) == "solid", "the focus is seen"
    gpu = page.control("GPU")
    page.driver.execute_script("arguments[0].focus()", gpu)
    with page.answering():
        page.driver.switch_to.active_element.send_keys("H2")
    assert gpu.get_attribute("value") == "H200"
    page.driver.execute_script("document.getElementById('skip').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.js("document.activeElement.id") == "answers"
    page.driver.execute_script("document.getElementById('plan-start').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait("!document.getElementById('plan-progress').hidden")
    page.driver.execute_script("document.querySelector('#plan-progress button').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.SPACE)
    assert page.text("plan-lead") == "Cancelled."


CONTRASTS = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const light = (colours) => {
    canvas.fillStyle = '#fff'; canvas.fillRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const papers = (one) => (one ? [...papers(one.parentElement), getComputedStyle(one).backgroundColor] : []);
  const found = [];
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.checkVisibility() || one.closest('svg, [disabled], option')) continue;
    const behind = papers(one), ink = light([...behind, getComputedStyle(one).color]), paper = light(behind);
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) found.push(`${one.tagName} ${one.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()"""


def save_picture(page: Page, place: Path) -> None:
    """Write what the window shows as a small PNG."""
    from PIL import Image

    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(96).save(place, optimize=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_wide_and_narrow_light_and_dark(page: Page, width: int, scheme: str):
    page.resize(width, 900)
    page.colours(scheme)
    page.open(FEW)
    page.wait("document.getElementById('run').dataset.done")
    assert page.js("document.documentElement.scrollWidth") <= width, "nothing is beside the screen"
    assert page.js("getComputedStyle(document.documentElement).getPropertyValue('color-scheme')") == "light dark"
    paper = page.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 380) is (scheme == "light")
    assert page.js(CONTRASTS) == []
    charts = "[...document.querySelectorAll('.chart svg')].map((one) => one.getBoundingClientRect())"
    assert page.js(f"{charts}.every((box) => box.right <= innerWidth && box.width > 150)")
    if (place := os.environ.get("PICTURE", "")) and (width, scheme) == (1280, "light"):
        save_picture(page, Path(place))
    page.find("#theme").click()
    assert page.js("document.documentElement.dataset.theme") == "light"


def test_nothing_comes_from_the_network(page: Page):
    page.wait("document.getElementById('run').dataset.done")
    resources = page.js("performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(resources) > 8 and all(one.startswith(page.address) for one in resources)


def test_a_server_that_is_gone_is_said(tmp_path: Path, page: Page):
    with page_server(tmp_path) as server:
        other = Page(page.driver, server.address)
        other.open(FEW)
        server.process.kill()
        server.process.wait()
        other.choose("GPU", "H200")
        assert "does not answer" in other.text("problem")
