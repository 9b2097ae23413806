"""Chromium without a window, driven by Selenium; what a test asks of a page."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage",
)  # fmt: skip
WAITS_S = 120.0  # on a busy machine


def place() -> tuple[str, str] | None:
    """Return the paths of Chromium and its driver; None without them."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


class Page:
    """One window of the browser, and what is on it."""

    def __init__(self, driver: Chrome, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, fragment: str = "") -> Page:
        """Load the page anew, and wait for its first answer."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}{fragment}")
        self.wait("document.getElementById('found')?.dataset.answered")
        return self

    def js(self, expression: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {expression}", *arguments)

    def wait(self, expression: str, seconds: float = WAITS_S) -> Any:
        begin = time.monotonic()
        while not (found := self.js(expression)):
            assert time.monotonic() - begin < seconds, f"waited in vain for {expression}; {self.text('problem')}"
            time.sleep(0.02)
        return found

    def text(self, name: str) -> str:
        return self.js("document.getElementById(arguments[0])?.textContent", name)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def control(self, label: str, beside: str = "") -> WebElement:
        """Return the control that a label names, or another one in its line."""
        return self.driver.execute_script(
            "const label = [...document.querySelectorAll('label')].find((one) => one.firstChild.textContent === arguments[0]);"
            "return arguments[1] ? label.parentElement.querySelector(arguments[1]) : label.control", label, beside,
        )  # fmt: skip

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Wait at the end of the block until what changes in it is answered."""
        before = int(self.js("document.getElementById('found').dataset.answered"))
        yield
        self.wait(f"Number(document.getElementById('found').dataset.answered) > {before}")

    @property
    def fragment(self) -> str:
        return self.js("decodeURIComponent(location.hash)")

    def choose(self, label: str, value: str) -> None:
        with self.answering():
            self.driver.execute_script(
                "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))",
                self.control(label), value,
            )  # fmt: skip

    def drop(self, name: str, text: str) -> None:
        """Drop a file on the page."""
        self.driver.execute_script(
            "const data = new DataTransfer(); data.items.add(new File([arguments[1]], arguments[0]));"
            "window.dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }))",
            name, text,
        )  # fmt: skip

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """Return what the browser has complained about since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def chromium(address: str) -> Iterator[Page]:
    """Start the browser with an empty profile."""
    found = place()
    assert found is not None, "the caller has looked for it"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = found[0]
        for flag in (*FLAGS, f"user-data-dir={Path(profile)}", "window-size=1280,900"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=ChromeService(found[1]))
        try:
            yield Page(driver, address)
        finally:
            driver.quit()
