"""The page of curves: complete in itself, small, and with the numbers of the runs."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megarl.cli import main
from megarl.observe.drawing import COLOURS, MOST_POINTS, OTHER_COLOUR, draw_timeline
from megarl.observe.panels import PANELS, draw_all, relative_luminance, run_colours
from megarl.observe.series import Series, thinned
from megarl.watch.report import write_report
from megarl.watch.run_state import read_run_state
from tests.browser import CHROMIUM, browser
from tests.tiers import slow
from tests.unit.runs import make_run

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"
# elements that are closed by what follows them
VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Elements, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "poster") and not (
                value or ""
            ).startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def words(svg: ElementTree.Element) -> set[str]:
    return {"".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")}


def test_a_page_needs_no_network_and_closes_what_it_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "a <run> & more", token_mult_prob_error=1.0)
    assert main(["plot", str(run_dir)]) == 0
    written = capsys.readouterr().out.splitlines()
    assert [Path(line).name for line in written] == ["reward.png", "loss.png", "timing.png", "report.html"]
    text = (run_dir / "report.html").read_text()
    page = Page(text)
    assert (
        page.open == []
        and page.fetched == []
        and "script" not in page.elements
        and "@import" not in text
        and "url(http" not in text
    )
    assert "a &lt;run&gt; &amp; more" in text and "<run>" not in text
    titles = set(re.findall(r"<h2>(.*?)</h2>", text))
    assert {
        "Reward",
        "Loss",
        "KL from the reference policy",
        "Length of responses",
        "Throughput",
        "Time by phase",
    } <= titles
    assert {
        "Generation against training",
        "Memory of the fullest rank",
        "Gradient norm",
    } <= titles and "Entropy" not in titles
    assert "<td>step 30 of 40 ━" in text and "0.300 (from 0.0100; best 0.300 at step 30)" in text
    assert [path.name for path in run_dir.iterdir() if path.name.endswith(".tmp")] == []
    check_references(pictures(text))


def check_references(found: list[ElementTree.Element]) -> None:
    """What a picture refers to is in itself, and in no other picture of the page."""
    assert len(found) >= 8
    owner: dict[str, int] = {}
    for number, svg in enumerate(found):
        own = {name for element in svg.iter() if (name := element.get("id")) is not None}
        wanted = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', ElementTree.tostring(svg, encoding="unicode")))
        assert wanted and wanted <= own
        for name in wanted:
            assert owner.setdefault(name, number) == number, f"{name} is in two pictures"


def test_every_panel_names_its_unit_and_the_steps(tmp_path: Path) -> None:
    series = {
        name: Series(tuple(range(1, 31)), (0.5,) * 30)
        for panel in PANELS
        for curve in panel.curves
        for name in curve.metrics
    }
    drawn = draw_all({"run": series})
    assert list(drawn) == [panel.title for panel in PANELS]
    for panel in PANELS:
        shown = words(ElementTree.fromstring(drawn[panel.title]))
        assert {panel.unit, "training step"} <= shown
        assert all(any(curve.name in word for word in shown) for curve in panel.curves), (panel.title, shown)


@slow
def test_runs_are_compared_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(tmp_path / "group" / name, seed=seed)
        for seed, name in enumerate(("first", "second", "third"))
    ]
    assert main(["plot", str(tmp_path / "group")]) == 0
    page = tmp_path / "group" / "comparison.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    reward = next(svg for svg in pictures(text) if "reward, accuracy (fraction)" in words(svg))
    assert not {"first", "second", "third"} & words(reward) and {
        "reward of sampled responses (running mean)",
        "validation accuracy",
    } <= words(reward)
    legend = re.findall(r'<i style="background:(#\w+)"></i>(\w+)</span>', text)
    assert [name for _, name in legend] == ["first", "second", "third"]
    strokes = [
        set(re.findall(r"stroke: (#\w{6})", ElementTree.tostring(svg, encoding="unicode")))
        for svg in pictures(text)[:-1]
    ]
    assert all({colour for colour, _ in legend} <= colours for colours in strokes)
    assert {"first", "second", "third", "seconds a step, mean of all steps"} <= words(pictures(text)[-1])
    assert main(["plot", str(runs[0]), str(runs[2]), "--out", str(tmp_path / "new" / "two.html")]) == 0
    assert "second" not in re.findall(r"<th>(.*?)</th>", (tmp_path / "new" / "two.html").read_text())


def test_long_runs_stay_small_and_keep_their_spikes(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, steps=3000)
    assert write_report([run_dir], tmp_path / "page.html").stat().st_size < 600_000
    values = [0.0] * 10_000
    values[7777] = 9.0
    steps, means, lowest, highest = thinned(Series(tuple(range(10_000)), tuple(values)), MOST_POINTS)
    assert len(steps) == MOST_POINTS and max(highest) == 9.0 and min(lowest) == 0.0
    assert sum(means) / MOST_POINTS == pytest.approx(9.0 / 10_000) and steps == sorted(steps)
    assert thinned(Series((1, 2), (3.0, 4.0)), 5) == ([1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0])


def test_restarts_are_marked(tmp_path: Path) -> None:
    series = {"train/loss": Series(tuple(range(1, 31)), tuple(range(30)))}
    assert "restart" in words(ElementTree.fromstring(draw_all({"run": series}, [12])["Loss"]))
    assert "restart" not in words(ElementTree.fromstring(draw_all({"run": series})["Loss"]))


def test_a_run_with_nothing_to_draw_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, steps=0)
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["plot", str(tmp_path)]) == 2
    assert not (tmp_path / "report.html").exists()


@slow
def test_the_validation_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]  # with a row of 9 s for step 0
    assert read_run_state(runs[0]).series["timing/step_s"].steps[0] == 0
    # 30 steps of 2 s of generation; 3 checkpoints of 5 s among them; 3.75 s a step and what the checkpoints
    # add
    alone, beside = (
        words(pictures(write_report(runs[:count], tmp_path / "page.html").read_text())[-1])
        for count in (1, 2)
    )
    assert {"generation (2 s)", "train (1.5 s)", "checkpoint (0.5 s)"} <= alone
    assert "4.25 s" in beside


@slow
def test_a_page_elsewhere_leaves_the_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run")
    before = sorted(run_dir.iterdir())
    assert main(["plot", str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert sorted(run_dir.iterdir()) == before and capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"


@slow
def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "page.html"):
        assert main(["plot", str(run_dir), "--out", str(out)]) == 2
        assert "Fix: give a file that can be written as --out FILE" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


@slow
def test_a_run_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    page = tmp_path / "page.html"
    assert main(["plot", str(run_dir), str(tmp_path / "latest"), f"{run_dir}/.", "--out", str(page)]) == 0
    assert "<title>run</title>" in page.read_text()


@slow
def test_names_of_runs_are_written_as_they_are(tmp_path: Path) -> None:
    runs = {"$a_{$": make_run(tmp_path / "$a_{$"), "_b": make_run(tmp_path / "_b", seed=1)}
    page = write_report(list(runs.values()), tmp_path / "page.html").read_text()
    names = {f"{tmp_path.name}/$a_{{$", f"{tmp_path.name}/_b"}
    assert names <= words(pictures(page)[-1]) and all(f"</i>{name}</span>" in page for name in names)


@pytest.mark.filterwarnings("error")
def test_many_runs_with_long_names_leave_room_for_their_curves(tmp_path: Path) -> None:
    runs = {
        f"{'grpo-qwen2.5-1.5b-lr1e-6-kl0.001-' * 2}seed-{seed}": {
            "train/reward": Series((1, 2, 3), (0.1, 0.2, 0.3)),
            "validation/accuracy": Series((1, 2), (0.1, 0.2)),
            "timing/train_s": Series((1, 2, 3), (1.0, 2.0, 1.0)),
        }
        for seed in range(20)
    }
    few, many = draw_all(dict(list(runs.items())[:2])), draw_all(runs)
    assert plot_area(many["Reward"]) == plot_area(few["Reward"])
    assert plot_area(many["Time by phase"])[0] > 250
    assert len(set(run_colours(20))) == 20


@pytest.mark.parametrize("ready_first", [False, True])
def test_a_timeline_shows_when_trainer_and_engines_work(ready_first: bool) -> None:
    """In order both wait at the end of a step; ready first the trainer waits before it trains."""
    steps = tuple(range(1, 31))
    own = {"timing/step_s": 4.0, "timing/rollout_wait_s": 1.0, "timing/engine_idle_s": 3.0}
    series = {name: Series(steps, (value,) * 30) for name, value in own.items()}
    if ready_first:
        series["train/rollouts_ready"] = Series(steps, (3.0,) * 30)
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_timeline(axes, series)
    engines, trainer = (
        [path.get_extents().intervalx.tolist() for path in bars.get_paths()] for bars in axes.collections
    )
    assert len(trainer) == 12 and trainer[2] == ([9.0, 12.0] if ready_first else [8.0, 11.0])
    assert engines[2] == [8.0, 9.0]
    drawn = draw_all({"run": series})
    assert {"trainer (75% of the time)", "engines (25% of the time)"} <= words(
        ElementTree.fromstring(drawn["Trainer and engines"])
    )
    assert "Trainer and engines" not in draw_all({"run": series, "other": series})


def test_what_is_not_computed_has_no_curve() -> None:
    """Zeros of a loss without a reference policy are none of its divergence; a reward of zero is one."""
    steps, none = tuple(range(1, 31)), (0.0,) * 30
    zeros = {
        name: Series(steps, none) for panel in PANELS for curve in panel.curves for name in curve.metrics
    }
    absent = {panel.title for panel in PANELS} - draw_all({"run": zeros}).keys()
    assert absent >= {
        "KL from the reference policy",
        "Critic",
        "Entropy",
        "Model FLOP utilisation",
        "Memory of the fullest rank",
    }
    assert not absent & {"Reward", "Loss", "Gradient norm", "Truncated responses", "Learning rate"}
    assert not draw_all({"run": {}})
    some = zeros | {
        "performance/train_mfu": Series(steps, (0.4,) * 30),
        "train/kl_in_reward": Series(steps, (*none[1:], 0.1)),
    }
    drawn = draw_all({"run": some, "other": zeros})
    assert "KL from the reference policy" in drawn and "Entropy" not in drawn
    shown = " ".join(words(ElementTree.fromstring(drawn["Model FLOP utilisation"])))
    assert "training" in shown and "log-probabilities" not in shown


def contrast(one: str, other: str) -> float:
    """Ratio of WCAG 2 of two colours ``#rgb`` or ``#rrggbb``."""
    parts = [
        [colour[1:][place] * 2 for place in range(3)] if len(colour) == 4 else re.findall("..", colour[1:])
        for colour in (one, other)
    ]
    dark, light = sorted(
        relative_luminance((int(red, 16) / 255, int(green, 16) / 255, int(blue, 16) / 255))
        for red, green, blue in parts
    )
    return (light + 0.05) / (dark + 0.05)


def test_light_and_dark_pages_can_be_read(tmp_path: Path) -> None:
    text = write_report([make_run(tmp_path, token_mult_prob_error=1.0)], tmp_path / "page.html").read_text()
    assert contrast("#fff", "#000000") == pytest.approx(21)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None and not re.search(
        r"#[0-9a-f]{3,6}\b", re.sub(r"--[\w-]+: #\w+", "", style[1])
    ), "all colours have a name"
    light, dark = (
        dict(re.findall(r"(--[\w-]+): (#\w+)", part)) for part in style[1].split("prefers-color-scheme: dark")
    )
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for ink, below in (
            ("text", "card"),
            ("text", "page"),
            ("text", "inset"),
            ("muted", "card"),
            ("muted", "page"),
            ("bad", "bad-page"),
        ):
            assert contrast(colours[f"--{ink}"], colours[f"--{below}"]) >= 4.5, (ink, below, colours)
        for ink in ("good", "bad"):
            assert contrast(colours[f"--{ink}"], colours["--card"]) >= 4.5
        for colour in {*COLOURS, OTHER_COLOUR, *run_colours(8), *run_colours(40)}:
            assert contrast(colour, colours["--card"]) >= 3, colour
    for svg in pictures(text):
        drawn = ElementTree.tostring(svg, encoding="unicode")
        assert "currentColor" in drawn
        assert set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"url\(#\w+\)|href=\"#\w+\"", "", drawn))) <= {
            *COLOURS,
            OTHER_COLOUR,
        }
        assert float(str(svg.get("viewBox")).split()[2]) == 320
        assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawn)) >= 11


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_phone_shows_the_page_without_scrolling_sideways(tmp_path: Path) -> None:
    names = [
        name.removeprefix("train/")
        for panel in PANELS
        for curve in panel.curves
        for name in curve.metrics
        if name.startswith("train/")
    ]
    runs = [make_run(tmp_path / name, **dict.fromkeys(names, 0.5)) for name in ("run", "another-run-" * 8)]
    pages = [write_report(runs[:count], tmp_path / f"page{count}.html") for count in (1, 2)]
    sizes = """[...document.querySelectorAll("svg text")].map(text =>
        parseFloat(getComputedStyle(text).fontSize)
        * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width)"""
    outside = """[...document.querySelectorAll("svg text")].filter(text => {
        const [word, picture] = [text, text.ownerSVGElement].map(each => each.getBoundingClientRect());
        return word.left < picture.left - 1 || word.right > picture.right + 1 || word.top < picture.top - 1;
    }).map(text => text.textContent)"""
    (tmp_path / "profile").mkdir()
    with browser(tmp_path / "profile") as opened:
        for page, width, scheme in itertools.product(pages, (390, 1400), ("light", "dark")):
            opened.look(width, scheme)
            opened.open(page)
            assert (
                opened.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                == 0
            )
            assert min(opened.value(sizes)) > 10.9 and opened.value(outside) == []
            ink = {"light": "rgb(34, 48, 58)", "dark": "rgb(227, 232, 235)"}[scheme]
            assert opened.value("getComputedStyle(document.querySelector('svg text')).fill") == ink
        assert opened.faults == []


def plot_area(picture: str) -> tuple[float, float]:
    """Width and height of the axes, in points."""
    corners = re.search(
        r'<g id="patch_2">\s*<path d="M ([\d.]+) ([\d.]+)\s+L ([\d.]+) ([\d.]+)\s+L ([\d.]+) ([\d.]+)',
        picture,
    )
    assert corners is not None
    left, bottom, right, _, _, top = map(float, corners.groups())
    return right - left, bottom - top


def test_validations_of_a_long_run_stay_small_too(tmp_path: Path) -> None:
    many = Series(tuple(range(1, 20_001)), (0.5, 0.6) * 10_000)
    drawn = draw_all({"run": {"validation/accuracy": many}})["Reward"]
    assert len(drawn) < 60_000 and "validation accuracy" in drawn


def test_what_is_no_run_among_several_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in ``megarl plot runs/*``, beside the files of Slurm jobs."""
    run_dir = make_run(tmp_path / "runs/a")
    (tmp_path / "runs/slurm/17").mkdir(parents=True)
    (tmp_path / "runs/comparison.html").write_text("")
    others = [str(tmp_path / "runs/slurm"), str(tmp_path / "runs/comparison.html")]
    assert main(["plot", str(run_dir), *others]) == 0
    told = capsys.readouterr().err
    assert told.count("left out: ") == 2 and all(other in told for other in others)
    assert main(["plot", str(run_dir), str(tmp_path / "none")]) == 2
    assert main(["plot", *others]) == 2
