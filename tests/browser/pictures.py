"""The picture of the playground in README.md and docs/: `python -m tests.browser.pictures` from the root."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.browser.driving import browsing, ready, serving


def main() -> None:
    path = Path(__file__).parents[2] / "docs" / "playground.png"
    with serving() as address, browsing() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 1500}, color_scheme="light")
        ready(page, address)
        page.wait_for_timeout(600)
        shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
    few = shot.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
