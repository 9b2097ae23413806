"""`foredraft report`: a run, two runs, a sweep, a plan, a tune or a twin as one HTML file, and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import AsJson, argument, option, print_document

if TYPE_CHECKING:
    from ...observe.figures.page import ReportPage

PIXELS = (1000, 2)  # width of a picture, and its scale


# fmt: off
Source = Annotated[Path, argument("RUN|SWEEP|PLAN|TUNE|TWIN",
    "Directory of simulate --out, sweep, plan or tune; or a file of twin --json.")]
Other = Annotated[Path | None, argument("OTHER", "Directory of another run, to stand beside the first.")]
Out = Annotated[Path | None, option("--out", "File of the page. Default: report.html in the directory.", "FILE")]
Png = Annotated[Path | None, option("--png", "Also write each figure as a picture; needs Chrome or Chromium.", "DIR")]
# fmt: on


def report(
    source: Source,
    other: Other = None,
    out: Out = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Make one HTML file of a run, a sweep, a plan, a tune or a twin: answer, figures, scenario, provenance.

    With two runs the page puts them side by side: their numbers, latencies and
    rounds, and the keys of the scenarios that differ.

    The page needs no network and no other file, so you can mail it or keep it
    beside the run. It fits a phone and follows the light or dark setting.
    Percentiles cover all requests. A text below each figure explains its curves.
    The command does not replace a file that another program wrote.

        foredraft simulate --out runs/chat
        foredraft report runs/chat
        foredraft report runs/plain runs/drafts
        foredraft report runs/plan-5a6b7c8d --out plan.html --png pictures
        foredraft bench --twin --json > twin.json
        foredraft report twin.json --out twin.html
    """
    from ...observe.figures.reports import page_of
    from ...observe.output_files import write_text

    place = out or _default_place(source, other)
    _check_replaceable(place)
    page = page_of(source, other)
    text = page.html()
    write_text(place, text, replace=True)
    num_bytes = len(text.encode())
    if not as_json:
        typer.echo(f"Written to {place} ({num_bytes / 1e6:.1f} MB, {len(page.pictures)} figures).")
    if png is not None:
        _write_pictures(page, png)
    if as_json:
        from ..documents.simulation import ReportDocument

        names = [picture.name for picture in page.pictures]
        print_document(ReportDocument(str(place), num_bytes, names, None if png is None else str(png)))
    elif png is not None:
        typer.echo(f"{len(page.pictures)} pictures are in {png}.")


def _default_place(source: Path, other: Path | None) -> Path:
    if other is not None:
        return source / f"beside-{other.resolve().name}.html"
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")


def _check_replaceable(place: Path) -> None:
    """Raise ForedraftError if there is a file that `report` has not written."""
    from ...core.errors import ForedraftError
    from ...observe.figures.page import MARK

    if place.is_dir():
        raise ForedraftError(f"{place}: is a directory; expected a file")
    if place.exists():
        with place.open("rb") as file:
            if MARK.encode() not in file.read(200):
                raise ForedraftError(
                    f"{place}: exists already and is not a report; give another --out, or remove the file"
                )


def _write_pictures(page: ReportPage, folder: Path) -> None:
    from ...core.errors import ForedraftError
    from ...observe.output_files import UnwritableFile

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(folder, error) from None
    import kaleido
    from choreographer.errors import BrowserClosedError, BrowserDepsError, BrowserFailedError, ChromeNotFoundError

    width, scale = PIXELS
    figures = [
        {
            "fig": picture.figure.to_plotly_json(),
            "path": str(folder / f"{picture.name}.png"),
            "opts": {"width": width, "height": picture.figure.layout.height, "scale": scale},
        }
        for picture in page.pictures
    ]
    try:
        kaleido.write_fig_from_object_sync(figures)
    except ChromeNotFoundError:
        message = "--png needs Chrome or Chromium, and none was found: install it, or name its program in BROWSER_PATH"
        raise ForedraftError(message) from None
    except (BrowserClosedError, BrowserDepsError, BrowserFailedError) as error:
        message = f"--png: the browser did not start: {str(error).strip() or type(error).__name__}"
        raise ForedraftError(message) from None
