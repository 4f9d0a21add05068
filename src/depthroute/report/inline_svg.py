"""Making a matplotlib SVG part of a page."""

from __future__ import annotations

import re

from markupsafe import Markup

from depthroute.report.style import INK

_PIXELS_PER_POINT = 4 / 3


def inline_svg(svg: str, name: str, label: str) -> Markup:
    """The SVG as markup: scalable, labelled, in the text colour of the page, with ids unlike those of other figures.

    `svg` is what matplotlib writes, where all text is escaped; `name` starts its ids, so it has letters, digits and
    "-", "_", "." alone.
    """
    svg = svg[svg.index("<svg") :]
    # A style element would apply to the whole page.
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    opening, rest = svg.split(">", 1)
    width = round(float(re.findall(r'\bwidth="([\d.]+)pt"', opening)[0]) * _PIXELS_PER_POINT)
    opening = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", opening)
    attributes = Markup(' role="img" aria-label="{}" style="max-width:{}px">').format(label, width)
    return Markup(opening) + attributes + Markup(rest)
