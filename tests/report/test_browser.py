"""The page in headless Chromium: quiet, whole, sortable, and as wide as the window, on a desk and on a phone."""

from __future__ import annotations

import shutil

import pytest

from depthroute.report import build_report

PHONE, DESK = 375, 1440
KINDS = ("study", "run", "probe", "evaluation")
LOSSES = {"additive": {0: 3.34, 1: 3.33}, "mhar": {0: 3.28, 1: 3.26}, "mhar-with-a-long-name": {0: 3.30, 1: 3.31}}
# Every picture of the page, and whether the browser could decode it: HTML images, and those inside of the figures.
PICTURES = """async () => {
  const found = [...document.images].map((image) => image.src);
  for (const image of document.querySelectorAll("svg image"))
    found.push(image.href.baseVal || image.getAttributeNS("http://www.w3.org/1999/xlink", "href"));
  return Promise.all(found.map((source) => {
    const image = new Image();
    image.src = source;
    return image.decode().then(() => image.naturalWidth > 0, () => false);
  }));
}"""
COLUMN = "(rows, column) => rows.map((row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim())"


@pytest.fixture(scope="module")
def pages(chromium, tmp_path_factory, make_run, make_study, make_read_weights, make_evaluation, probed):
    """Kind -> the page of a folder of that kind."""
    folder = tmp_path_factory.mktemp("pages")
    study = make_study(folder / "study", LOSSES, layers=2, heads=2)
    shutil.copy(probed[2] / "probe.json", study / "runs" / "mhar" / "seed-0")
    run = make_run(folder / "run", steps=200, weights=make_read_weights(2, 2), gates=4, sequences=20)
    shutil.copy(probed[1] / "probe.json", run)
    probe = folder / "probe"
    probe.mkdir()
    shutil.copy(probed[1] / "probe.json", probe)
    make_evaluation(folder / "evaluation", {"plain": 0.0, "a-model-with-a-longer-name": 0.05})
    return {name: build_report(folder / name) for name in KINDS}


@pytest.fixture
def visit(chromium):
    """Opens a page and returns it; at the end it must have said nothing on the console and asked for no other file."""
    contexts, complaints = [], []

    def opened(path, width=DESK, **options):
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
        page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def test_on_a_phone_a_long_name_leaves_room_for_its_numbers(visit, tmp_path, make_study):
    name = "an_arm_whose_name_has_no_place_to_break_it_and_is_long"
    page = visit(build_report(make_study(tmp_path / "study", {"additive": {0: 3.3}, name: {0: 3.2}}, layers=1)), PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    for cell in page.locator("table.comparison tbody th").all():
        assert cell.bounding_box()["width"] < 0.65 * PHONE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_whole_and_no_wider_than_the_window(pages, visit, kind, width, scheme):
    page = visit(pages[kind], width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    decoded = page.evaluate(PICTURES)
    assert all(decoded)
    assert bool(decoded) == (kind != "evaluation")  # whose figures are lines alone
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background.strip("rgb()").split(","))) < 200) == (scheme == "dark")


def test_every_figure_is_a_file_that_the_browser_shows(pages, visit):
    page = visit(pages["study"])
    for path in (pages["study"].parent / "figures").iterdir():
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.nodeName") == "svg"
        assert page.evaluate("document.querySelector('parsererror')") is None


def column(table, index):
    return table.locator("tbody").first.evaluate(f"(body) => ({COLUMN})([...body.rows], {index})")


@pytest.mark.parametrize("press", ["mouse", "Enter", "Space"])
def test_a_table_is_sorted_by_mouse_and_keyboard(pages, visit, press):
    page = visit(pages["study"])
    table = page.locator("table.comparison")
    button = table.get_by_role("button", name="Held-out loss")

    def activate():
        if press == "mouse":
            button.click()
        else:
            button.focus()
            page.keyboard.press(press)

    original = column(table, 1)
    numbers = sorted(original, key=float)
    assert original != numbers
    for order, expected in (("ascending", numbers), ("descending", numbers[::-1]), ("none", original)):
        activate()
        assert column(table, 1) == expected
        assert table.locator("thead th").nth(1).get_attribute("aria-sort") == order
    assert table.locator("tfoot").inner_text().startswith("unigram entropy")


def test_a_heading_is_reached_by_the_tab_key(pages, visit):
    page = visit(pages["study"])
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('table.comparison thead button')"):
            break
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    heads = page.locator("table.comparison thead th")
    assert [heads.nth(i).get_attribute("aria-sort") for i in range(3)] == ["none", "ascending", "none"]


def test_every_table_is_sortable_in_every_column_by_what_it_shows(pages, visit):
    for path in pages.values():
        page = visit(path)
        page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        tables = page.locator("table.sortable")
        assert tables.count() == page.locator("table").count() > 0
        for table in tables.all():
            for index, button in enumerate(table.locator("thead button").all()):
                button.click()
                values = [value for value in column(table, index) if value]
                try:
                    keys = [float(value) for value in values]
                except ValueError:
                    keys = [value[0].casefold() for value in values]
                assert keys == sorted(keys)


def test_what_is_not_known_comes_last_either_way(pages, visit):
    page = visit(pages["study"])
    table = page.locator("table.comparison")
    button = table.get_by_role("button", name="Difference to additive")
    for _ in range(2):
        button.click()
        assert column(table, 2)[-1] == ""


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_without_scripts_the_page_is_all_there(pages, visit, width):
    page = visit(pages["study"], width, java_script_enabled=False)
    assert page.locator("h1").inner_text() == "synthetic study"
    assert page.locator("table.comparison tbody tr").count() == len(LOSSES)
    assert page.locator("button").count() == 0
    assert page.locator("figure svg").first.is_visible()
    page.locator("summary").first.click()
    assert page.locator("details").first.get_attribute("open") is not None


def test_markup_in_names_runs_nothing(tmp_path, visit, make_study):
    evil = "<img src=x onerror=alert(1)><script>document.title='taken'</script>"
    study = make_study(tmp_path / "study", {"additive": {0: 3.3, 1: 3.4}, "mhar": {0: 3.2, 1: 3.3}}, layers=1)
    (study / "samples.json").write_text(f'[{{"arm": "mhar", "prompt": "", "text": "{evil}"}}]')
    settings = (study / "study.yaml").read_text()
    (study / "study.yaml").write_text(settings.replace("synthetic study", f'"{evil}"'))
    page = visit(build_report(study))
    assert page.locator("h1").inner_text() == evil
    assert page.title().startswith(evil)
    assert page.locator("img, main script").count() == 0


def test_it_prints_on_paper_without_buttons(pages, visit):
    page = visit(pages["study"])
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
