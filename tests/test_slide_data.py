"""The tables behind the slides' pictures: complete, with sources, and in line with gpus.csv."""

import re

import pandas as pd
import pytest
from notebook_files import ROOT

from helpers import anatomy, specs

DATA = ROOT / "data"


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / f"{name}.csv")


def test_cpu_trends():
    trends = read("cpu_trends")
    assert list(trends.columns) == ["year", "quantity", "value"] and not trends.isna().any(
        axis=None
    )
    assert trends["year"].between(1971, 2018).all() and (trends["value"] > 0).all()
    counts = trends.groupby("quantity", sort=False).size()
    assert counts.to_dict() == {
        "transistors, thousands": 90,
        "single-thread speed, SPECint x 1000": 69,
        "clock, MHz": 90,
        "power, W": 90,
        "logical cores": 79,
    }
    for _, points in trends.groupby("quantity"):
        assert points["year"].is_monotonic_increasing
    first = trends.groupby("quantity").first()["value"]
    assert first["transistors, thousands"] == pytest.approx(2.3, rel=0.01)  # the Intel 4004
    cores = trends[trends["quantity"] == "logical cores"]["value"]
    assert (cores == cores.round()).all()


def test_growth_names_products_of_the_table_and_fills_in_the_rest():
    growth = read("growth")
    assert growth["gpu"].is_unique and growth["announced"].is_monotonic_increasing
    for row in growth.itertuples():
        listed = isinstance(row.datasheet, str)
        assert listed == pd.isna(row.fp32_tflops) == pd.isna(row.memory_gb_per_s), row.gpu
        if listed:
            gpu = specs.get(row.datasheet)
            assert gpu.architecture == row.architecture and gpu.name.startswith(row.gpu)
            assert gpu.fp32_tflops and gpu.fp16_tflops and gpu.memory_gb_per_s
        assert len(row.source) > 10


def test_growth_by_parts():
    # Chips x lanes x clock in GHz x 2, from the same documents.
    peaks = read("growth").set_index("gpu")["fp32_tflops"]
    lanes = {"K80": (2496, 0.875), "M40": (3072, 1.114), "P100": (3584, 1.480)}
    for name, (count, ghz) in lanes.items():
        assert peaks[name] == pytest.approx(2 * count * ghz / 1e3, rel=0.01)


def test_tpus():
    tpus = read("tpus").set_index("chip")
    assert not tpus.isna().any(axis=None)
    for name in ("A100 SXM4 80GB", "H100 SXM"):
        gpu, row = specs.get(name), tpus.loc[name]
        assert (row["cores"], row["bf16_tflops"]) == (gpu.sms, gpu.bf16_tflops)
        assert (row["memory_gb"], row["memory_gb_per_s"]) == (gpu.memory_gb, gpu.memory_gb_per_s)
        assert row["matrix_units_per_core"] == anatomy.tensor_cores_per_sm(gpu)
        units = specs.UNITS[gpu.compute_capability]["bf16"]
        assert row["matrix_units_per_core"] * row["multiply_adds_per_unit"] == units
    only_tpus = tpus[tpus["core"] == "TensorCore"]
    assert only_tpus["source"].str.contains(r"https://cloud\.google\.com/tpu/docs/v\d").all()
    clock = (
        tpus["bf16_tflops"]
        * 1e3
        / (2 * tpus["cores"] * tpus["matrix_units_per_core"] * tpus["multiply_adds_per_unit"])
    )
    assert clock.drop("TPU v6e").between(1, 2).all()  # notebook 01 says what is odd about v6e


@pytest.mark.parametrize("path", sorted(DATA.glob("*.csv")), ids=lambda path: path.name)
def test_every_table_is_described(path):
    described = re.findall(r"^\| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE)
    assert path.name in described
