"""The pieces of the HTML pages."""

from dataclasses import dataclass
from xml.etree import ElementTree

from diffcache import page


@dataclass
class Row:
    module: str = "transformer"
    site: str = "model"
    branch: str = "cond"
    chunk: int | None = None
    step: int = 0
    timestep: float = 999.0
    decision: str = "compute"
    reason: str = "warm-up"
    metric: float | None = None
    error: float | None = None


def cells(svg):
    """(title, number of rectangles) of each cell."""
    tree = ElementTree.fromstring(svg[: svg.index("</svg>") + 6])
    return [(g.findtext("title"), len(g.findall("rect"))) for g in tree.iter("g")]


def test_the_timeline_has_a_cell_for_each_call():
    rows = [Row(), Row(step=1, decision="reuse", reason="table", metric=0.25, error=0.5)]
    first, second = cells(page.timeline_svg(rows))
    assert first == ("step 0, compute: warm-up", 2)
    assert second == ("step 1, reuse: table, metric 0.25, error 0.5", 1)


def test_branches_and_modules_have_lanes_of_their_own():
    rows = [Row(branch=b, module=m) for b in ("cond", "uncond") for m in ("a", "<b>")]
    svg = page.timeline_svg(rows)
    assert "a cond" in svg and "&lt;b&gt; uncond" in svg
    assert len(cells(svg)) == 4


def test_several_decisions_of_one_step_share_a_cell():
    rows = [Row(site=f"block {i}", decision="reuse" if i else "compute") for i in range(4)]
    assert cells(page.timeline_svg(rows)) == [("step 0: 25% of 4 decisions compute", 2)]


def test_chunks_follow_each_other():
    rows = [Row(chunk=c, step=s) for c in range(2) for s in range(2)]
    titles = [title for title, _ in cells(page.timeline_svg(rows))]
    assert titles[2] == "chunk 1, step 0, compute: warm-up"


def test_nothing_recorded_is_said():
    assert "No calls" in page.timeline_svg([])


def test_the_table_escapes_and_leaves_out_what_is_not_known():
    html = page.decision_table([Row(reason="a < b", metric=0.1234567)])
    assert "a &lt; b" in html and "0.123" in html and "None" not in html


def test_a_page_is_whole_and_asks_for_nothing():
    html = page.page("a <title>", ["<p>one</p>", page.section("two", "Head & foot")], "let a = 1;")
    assert html.startswith("<!doctype html>")
    assert "<title>a &lt;title&gt;</title>" in html and "Head &amp; foot" in html
    assert html.count("<section>") == 2
    assert "default-src 'none'" in html
    assert "http" not in html.replace("http-equiv", "")
