"""Takes the pictures of a report that docs/report.md shows: on a desk and on a phone, light and dark.

    python scripts/screenshots.py runs/quickstart/report/index.html docs/images/report

Writes <prefix>-{desk,phone}-{light,dark}.png, the top of the page, and <prefix>-queries.png, its last part about what
queries learned, where there is one. Needs `make browser`.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Page as Tab

DEVICES = {"desk": (1440, 1500), "phone": (375, 1850)}  # width and height in pixels


def main(page: Path, prefix: Path) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for device in DEVICES:
            for scheme in ("light", "dark"):
                path = prefix.with_name(f"{prefix.name}-{device}-{scheme}.png")
                save_small(take(browser, page, device, scheme), path)
        if picture := take(browser, page, "desk", "light", "section[id^=probe]"):
            save_small(picture, prefix.with_name(f"{prefix.name}-queries.png"))
        browser.close()


def take(browser: Browser, page: Path, device: str, scheme: str, part: str | None = None) -> bytes | None:
    """The top of the page, as that device shows it, or the last part of it that a selector finds."""
    width, height = DEVICES[device]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(page.resolve().as_uri())
    picture = None
    if part is None:
        picture = tab.screenshot()
    elif tab.locator(part).count():
        picture = with_margin(tab, part)
    context.close()
    return picture


def with_margin(tab: Tab, part: str, margin: int = 24) -> bytes:
    box = tab.locator(part).last.bounding_box()
    clip = {"x": box["x"] - margin, "y": box["y"] - margin}
    clip |= {"width": box["width"] + 2 * margin, "height": box["height"] + 2 * margin}
    return tab.screenshot(full_page=True, clip=clip)


def save_small(picture: bytes, path: Path) -> None:
    """In 256 colours, chosen so that small coloured marks keep theirs."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: screenshots.py PAGE PREFIX")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
