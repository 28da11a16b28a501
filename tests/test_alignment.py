"""Powers of two, aligned accesses and padding, against what they are defined by."""

import collections

import matplotlib.pyplot as plt
import pytest

from helpers import alignment


def test_the_power_of_two_by_division():
    for n in range(1, 3000):
        power = 1
        while n % (2 * power) == 0:
            power *= 2
        assert alignment.power_of_2_dividing(n) == power
    for wrong in (0, -2, 1.5):
        with pytest.raises(ValueError):
            alignment.power_of_2_dividing(wrong)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_widest_access_is_aligned_in_every_row(itemsize):
    for leading in range(1, 300):
        starts = [row * leading * itemsize for row in range(64)]
        fits = [size for size in (1, 2, 4, 8, 16) if all(start % size == 0 for start in starts)]
        assert alignment.widest_access_bytes(leading, itemsize) == max(fits)


def test_the_vocabulary():
    assert alignment.round_up(50257, 64) == 50304 == alignment.round_up(50304, 64)
    assert alignment.round_up(50257, 8) == 50264
    assert alignment.widest_access_bytes(50257, 2) == 2
    assert alignment.widest_access_bytes(50264, 2) == 16
    with pytest.raises(ValueError):
        alignment.round_up(5, 0)


def test_sizes_have_as_many_of_each_class_and_are_spread():
    sizes = alignment.sizes_by_class(512, 4096, per_class=12)
    assert sizes == sorted(set(sizes)) and 512 <= min(sizes) and max(sizes) <= 4096
    found = collections.Counter(map(alignment.class_of, sizes))
    assert found == dict.fromkeys(alignment.CLASSES, 12)
    for kind in alignment.CLASSES:
        members = [n for n in sizes if alignment.class_of(n) == kind]
        assert members[0] < 1000 and members[-1] > 3600  # not all in one corner
    assert alignment.sizes_by_class(512, 4096, 12) == sizes
    assert alignment.sizes_by_class(512, 4096, 12, seed=1) != sizes


def test_small_classes_give_all_they_have():
    sizes = alignment.sizes_by_class(96, 384, per_class=100)
    assert [n for n in sizes if n % 128 == 0] == [128, 256, 384]
    assert [n for n in sizes if alignment.class_of(n) == 64] == [192, 320]
    assert alignment.sizes_by_class(3, 3, per_class=5) == [3]
    for wrong in ((0, 5, 1), (6, 5, 1), (1, 5, 0)):
        with pytest.raises(ValueError):
            alignment.sizes_by_class(*wrong)


def test_the_scatter_has_one_colour_a_class():
    fig, ax = plt.subplots()
    alignment.scatter(ax, [1791, 1792, 1793, 1800], [1.0, 5.0, 1.1, 4.0])
    drawn = [collection.get_offsets().tolist() for collection in ax.collections]
    assert drawn == [[[1791, 1.0], [1793, 1.1]], [[1800, 4.0]], [[1792, 5.0]]]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["1", "8", "128 or more"]
    colours = {tuple(collection.get_facecolor()[0]) for collection in ax.collections}
    assert len(colours) == 3
    plt.close(fig)
