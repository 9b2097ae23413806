"""A draw of defects: patches, each with a short script by which a caller sees it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from .sites import AREAS, ROOT

MOST_LINES = 15


@dataclass(frozen=True)
class DrawnDefect:
    """A plausible mistake: in `file` the text `old`, which stands there once, becomes `new`.

    `show`: a script of at most `MOST_LINES` lines over the Python API, which prints something else, or fails, with the
    defect.
    """

    id: str
    area: str
    site: str
    mistake: str
    file: str
    old: str
    new: str
    show: str

    def applied(self, text: str) -> str:
        """Return the text of the file with the defect. Raises ValueError if `old` does not stand there once."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.id}: `old` stands {text.count(self.old)} times in {self.file}, expected once")
        return text.replace(self.old, self.new)

    def gone(self) -> str:
        """Return why the tree has no place for the defect any more; "" if it has."""
        try:
            self.applied((ROOT / self.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    @property
    def group(self) -> str:
        return next(group for group, areas in AREAS.items() if self.area in areas)


@dataclass(frozen=True)
class DrawOfDefects:
    """The defects of one file, and the digest of their patches, by which it is known that these were not changed."""

    path: Path
    digest: str
    defects: tuple[DrawnDefect, ...]
    passed_over: dict[str, str]  # sites of the draw without a defect, and the reasons


def read_draw(path: Path) -> DrawOfDefects:
    """Read a draw. Raises ValueError for an unknown area, and for a script that is too long."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    shows, found = data.get("shows", {}), {}
    for id, entry in data["defects"].items():
        script = shows.get(entry["show"], entry["show"]).strip("\n")
        if len(script.splitlines()) > MOST_LINES:
            raise ValueError(f"{path}: {id}.show has {len(script.splitlines())} lines, expected {MOST_LINES} at most")
        area = id.rpartition("-")[0]
        if all(area not in areas for areas in AREAS.values()):
            raise ValueError(f"{path}: {id} is of no area; an id is that of an area and a number, such as kv-1")
        texts = {key: entry[key].strip("\n") for key in ("old", "new")}
        file = entry["site"].split()[0]
        found[id] = DrawnDefect(id, area, entry["site"], entry["mistake"], file, show=script, **texts)
    patches = sha256("\0".join(f"{one.id} {one.file}\0{one.old}\0{one.new}" for one in found.values()).encode())
    digest = patches.hexdigest()[:16]
    return DrawOfDefects(path, digest, tuple(found.values()), data.get("passed_over", {}))
