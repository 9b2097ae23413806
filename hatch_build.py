"""What an editable install imports: `build/editable/foredraft`, a package of links to the folders of this clone.

The folders at the root map to one package (`[tool.hatch.build.targets.wheel.sources]`). Python and type checkers that
follow the path find it under its own name, and files that are added later, too, as folders are linked whole.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.specifiers import SpecifierSet


class LinkFolders(BuildHookInterface):
    """Make the links before an editable install, and refuse a Python that is too old before any install."""

    def dependencies(self) -> list[str]:
        """Return no packages. Raises SystemExit for a Python that `requires-python` excludes.

        pip asks for these packages first. Without this check some versions of pip try every release of the dependencies
        for minutes before they compare the versions of Python.
        """
        wanted, found = self.metadata.core.requires_python, platform.python_version()
        if not SpecifierSet(wanted).contains(found, prereleases=True):
            raise SystemExit(f"foredraft needs Python {wanted}, and this is Python {found}")
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the links anew if `version` is "editable". Raises OSError where links cannot be made."""
        if version != "editable":
            return
        root = Path(self.root)
        (folder,) = (root / name for name in self.build_config.dev_mode_dirs)
        shutil.rmtree(folder, ignore_errors=True)
        for source, target in self.build_config.sources.items():
            package, inside = folder / target, root / source
            is_whole = "/" in target.strip("/")  # `api` shares its package with the links to the other folders
            for link, path in (
                {package: inside}.items() if is_whole else ((package / p.name, p) for p in inside.iterdir())
            ):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path, target_is_directory=path.is_dir())
