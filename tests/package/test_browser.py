"""Output for browsers, opened in one: the HTML of objects, and a picture as SVG."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import streamalloc as sa
from tests.package.test_html import OBJECTS
from tests.support import MiB

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# What a page says of itself once it is laid out.
MEASURE = """
<script>
const cards = [...document.querySelectorAll(".card")].map(card => ({
    name: card.id, text: card.innerText, width: Math.max(...[...card.querySelectorAll("*")].map(e =>
        e.getBoundingClientRect().right)), height: card.getBoundingClientRect().height,
    filled: [...card.querySelectorAll("div[title]")].map(e => e.getBoundingClientRect().width)}));
document.body.innerHTML = `<pre id="answer">${encodeURIComponent(JSON.stringify(cards))}</pre>`;
</script>
"""


def rendered(page: Path) -> dict[str, dict[str, Any]]:
    """Rendered cards of a page, by name."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2000",
        f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search('<pre id="answer">(.*?)</pre>', done.stdout)
    assert found is not None, done.stdout[:1000]

    return {card["name"]: card for card in json.loads(unquote(found[1]))}


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.simulated_only("browsers show the same of either driver")
@pytest.mark.gpus(2)
def test_cards_and_pictures(device: sa.Device, peer: sa.Device, tmp_path: Path) -> None:
    figure_of = pytest.importorskip("matplotlib.figure")
    with ExitStack() as stack:
        cards = {kind: make(stack, device, peer)._repr_html_() for kind, (make, _) in OBJECTS.items()}
        pool, stream = stack.enter_context(sa.MemoryPool(device)), stack.enter_context(device.create_stream())
        with sa.observe(pool) as observer, observer.phase("step"), observer.tag("<b>not bold</b>"):
            stack.enter_context(pool.allocate(5 * MiB, stream))
        cards["leaks"] = observer._repr_html_()
        drawn = observer.plot()
        assert isinstance(drawn, figure_of.Figure)
        svg = io.StringIO()
        drawn.savefig(svg, format="svg")
        cards["picture"] = svg.getvalue()[svg.getvalue().index("<svg") :]
    page = tmp_path / "page.html"
    body = "".join(f'<div class="card" id="{kind}">{card}</div>' for kind, card in cards.items())
    page.write_text(f"<!doctype html><meta charset='utf-8'><body style='margin:0'>{body}{MEASURE}", encoding="utf-8")
    found = rendered(page)
    assert found.keys() == cards.keys()
    for kind, card in found.items():
        assert 0 < card["width"] <= 960 and card["height"] > 10, kind
    assert "<b>not bold</b>" in found["leaks"]["text"] and "5.0 MiB" in found["leaks"]["text"]
    # The strip of a range is to scale: 4 and 2 of 32 MiB.
    large, small = found["range"]["filled"]
    assert large == pytest.approx(2 * small, rel=0.02) and small > 20
