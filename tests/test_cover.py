"""The README's picture, and the glossary: both are of what the collection has."""

import csv

from matplotlib import image
from notebook_files import ROOT
from PIL import Image
from test_lecture_map import NOTEBOOK_OF, sections

from helpers import cover


def test_the_picture_is_of_the_recorded_numbers():
    with Image.open(cover.PATH) as picture:
        stored = picture.text["Source"]
    assert stored == cover.digest(), "python -m helpers.cover draws it anew"
    assert cover.PATH.stat().st_size < 300_000


def test_the_picture_is_drawn(tmp_path):
    file = tmp_path / "cover.png"
    cover.draw_cover().savefig(file, dpi=60)
    pixels = image.imread(file)
    assert pixels.shape[1] == 660 and pixels.std() > 0.05


def test_the_readme_shows_it_before_the_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 0 < text.index(f"]({cover.PATH.relative_to(ROOT).as_posix()})") < text.index("make run")


def test_the_glossary_has_the_lectures_groups_and_sections_that_there_are():
    with (ROOT / "data" / "glossary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["group"]) for row in rows} == set(range(1, 19))
    assert len({row["term"] for row in rows}) == len(rows)
    for row in rows:
        assert all(row.values()), row
        stem, _, heading = row["where"].partition("#")
        assert heading in sections(NOTEBOOK_OF[stem]), row["where"]
