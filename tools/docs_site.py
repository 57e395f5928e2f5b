"""Hook of MkDocs for links out of docs/, images of the repository, and two pages of its root.

On GitHub, relative links of a guide to source files work unchanged. The site has no source files, so the hook replaces
such links by addresses of the repository. A link to a missing file is a warning, which `make docs` turns into an error.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/robojax/robojax/blob/main"
PAGES = {"reference/contributing.md": "CONTRIBUTING.md", "reference/changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")
logger = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files, **_: Any) -> str:
    here = page.file.src_uri
    source = PAGES.get(here, f"docs/{here}")

    def link_in_site(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page_of = {file: name for name, file in PAGES.items()}
        if target.startswith("docs/") or target in page_of:
            inside = page_of.get(target, target.removeprefix("docs/"))
        elif not (ROOT / target).exists():
            logger.warning("%s links to %s, which does not exist", source, target)
            return match[0]
        elif target.endswith(".png"):
            inside = target
            if files.get_file_from_path(inside) is None:
                files.append(File.generated(config, inside, abs_src_path=str(ROOT / target)))
        else:
            return f"{REPOSITORY}/{target}{anchor}"
        return posixpath.relpath(inside, posixpath.dirname(here) or ".") + anchor

    return LINK.sub(link_in_site, markdown)
