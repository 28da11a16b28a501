"""Datasheets: every figure agrees with the architecture, every name means one product.

Where documents disagree: Turing's SM has 96 KB of L1 and shared memory, of which 64 KB can be
shared (the whitepaper and the programming guide); L40S's dense fp16 is half of its sparse 733, as
SMs x units x clock say, not the 362.05 of its datasheet; H200's L2 is the 60 MB of the driver.
"""

import types

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import device, spec_checks, specs

PEAKS = [c for c in specs.COLUMNS if c.endswith(("_tflops", "_tops"))]
CHECKED = [
    *PEAKS,
    *("sms", "boost_mhz", "tensor_boost_mhz", "memory_bus_bits", "memory_mtps", "memory_gb_per_s"),
    *("l1_kb_per_sm", "shared_kb_per_sm", "registers_kb_per_sm"),
]
FRAME = specs.table()


def by_name(name: str) -> specs.GPU:
    (gpu,) = [gpu for gpu in specs.gpus() if gpu.name == name]
    return gpu


# The file


def test_the_products_asked_for_are_there():
    names = set(FRAME["name"])
    assert len(FRAME) >= 28 and len(names) == len(FRAME)
    assert names >= {
        *("V100 SXM2 16GB", "V100 SXM2 32GB", "V100 PCIe 16GB", "T4", "A10", "A40", "RTX A6000"),
        *("A100 SXM4 40GB", "A100 SXM4 80GB", "A100 PCIe 40GB", "A100 PCIe 80GB"),
        *("H100 SXM", "H100 PCIe", "H100 NVL", "H200 SXM", "H200 NVL", "B200", "L4", "L40S"),
        *("RTX 2080 Ti", "RTX 3060", "RTX 3080", "RTX 3090", "RTX 4060", "RTX 4070", "RTX 4080"),
        *("RTX 4090", "RTX 5070", "RTX 5080", "RTX 5090", "RTX PRO 6000 Blackwell", "MI300X"),
    }


def test_every_row_says_what_and_whence():
    assert list(FRAME.columns) == list(specs.COLUMNS)
    may_be_empty = {*PEAKS, "tensor_boost_mhz", "l2_mb", "l1_kb_per_sm"} - {"fp32_tflops"}
    for column in set(FRAME.columns) - may_be_empty:
        assert FRAME[column].notna().all(), column
    for column in set(FRAME.columns) - set(specs.TEXT):
        assert pd.api.types.is_numeric_dtype(FRAME[column]), column
        assert not (FRAME[column] <= 0).any(), column
    for source in FRAME["source"]:
        assert any(word in source for word in ("whitepaper", "datasheet", "data sheet", "announce"))
    assert set(FRAME["compute_capability"]) == set(specs.UNITS)  # "10.0" is not the number 10
    assert (FRAME["shared_kb_per_sm"] <= FRAME["l1_kb_per_sm"].fillna(np.inf)).all()


def test_figures_agree_with_each_other_and_with_the_architecture():
    assert spec_checks.inconsistencies(FRAME) == []


@pytest.mark.parametrize("factor", [0.9, 1.1, 2.0])
def test_every_single_wrong_figure_is_found(factor):
    """2.0 is the sparse rate in the place of the dense one."""
    wrong = []
    for row in FRAME.to_dict("records"):
        for column in CHECKED:
            if row[column] == row[column]:  # not NaN
                label = f"{row['name']}, {column} x {factor}"
                wrong.append({**row, column: row[column] * factor, "name": label})
    found = {finding.split(": ")[0] for finding in spec_checks.inconsistencies(pd.DataFrame(wrong))}
    assert len(wrong) > 500
    assert [row["name"] for row in wrong if row["name"] not in found] == []


def test_a_finding_names_row_column_value_and_expectation():
    wrong = FRAME.copy()
    wrong.loc[wrong["name"] == "H100 SXM", "bf16_tflops"] = 1978.9
    findings = spec_checks.inconsistencies(wrong)
    assert "H100 SXM: bf16_tflops is 1978.9, expected 989.4" in findings  # against fp16
    assert len(findings) == 2 and all("bf16_tflops" in finding for finding in findings)


@pytest.mark.parametrize(
    "name, column, value",
    [
        ("V100 SXM2 16GB", "bf16_tflops", 125.0),  # Volta has no such unit
        ("T4", "tf32_tflops", 32.5),
        ("A100 SXM4 80GB", "fp8_tflops", 624.0),
        ("RTX A6000", "fp16_fp16_accumulate_tflops", 309.7),  # full rate either way
        ("RTX 4090", "fp16_tflops", 330.3),  # the rate with sums in fp16
        ("H100 SXM", "compute_capability", "8.9"),
        ("H100 SXM", "compute_capability", "9.1"),
        ("H100 SXM", "architecture", "Ampere"),
        ("T4", "shared_kb_per_sm", 96),
        ("H100 NVL", "memory_gb", 84),
        ("MI300X", "l1_kb_per_sm", 32.0),
        ("L4", "fp32_tflops", np.nan),
        ("L4", "boost_mhz", np.nan),
        ("L4", "memory_mtps", np.nan),
    ],
)
def test_other_slips_are_found(name, column, value):
    wrong = FRAME.astype(object)
    wrong.loc[wrong["name"] == name, column] = value
    findings = spec_checks.inconsistencies(wrong)
    assert findings and all(finding.startswith(f"{name}: ") for finding in findings)


# Figures that the notebooks lean on


# What no other figure implies, typed a second time: GB of memory, MB of L2, W.
SINGLE_FIGURES = {
    "V100 SXM2 16GB": (16, 6, 300),
    "V100 SXM2 32GB": (32, 6, 300),
    "V100 PCIe 16GB": (16, 6, 250),
    "V100 PCIe 32GB": (32, 6, 250),
    "T4": (16, 4, 70),
    "RTX 2070": (8, 4, 175),
    "RTX 2080 Ti": (11, 5.5, 250),
    "A100 SXM4 40GB": (40, 40, 400),
    "A100 SXM4 80GB": (80, 40, 400),
    "A100 PCIe 40GB": (40, 40, 250),
    "A100 PCIe 80GB": (80, 40, 300),
    "A10": (24, 6, 150),
    "A40": (48, 6, 300),
    "RTX A6000": (48, 6, 300),
    "RTX 3060": (12, 2.25, 170),
    "RTX 3080": (10, 5, 320),
    "RTX 3090": (24, 6, 350),
    "L4": (24, 48, 72),
    "L40S": (48, 96, 350),
    "RTX 4060": (8, 24, 115),
    "RTX 4070": (12, 36, 200),
    "RTX 4080": (16, 64, 320),
    "RTX 4090": (24, 72, 450),
    "H100 SXM": (80, 50, 700),
    "H100 PCIe": (80, 50, 350),
    "H100 NVL": (94, None, 400),
    "H200 SXM": (141, 60, 700),
    "H200 NVL": (141, None, 600),
    "B200": (180, 126, 1000),
    "RTX 5070": (12, 48, 250),
    "RTX 5080": (16, 64, 360),
    "RTX 5090": (32, 96, 575),
    "RTX PRO 6000 Blackwell": (96, 128, 600),
    "MI300X": (192, 32, 750),
}


def test_figures_that_stand_alone_are_those_of_a_second_list():
    for gpu in specs.gpus():
        assert (gpu.memory_gb, gpu.l2_mb, gpu.power_w) == SINGLE_FIGURES[gpu.name], gpu.name


@pytest.mark.parametrize("name", ["L4", "H100 SXM", "T4", "MI300X"])
def test_sparse_peaks_are_found_even_with_a_clock_to_match(name):
    row = FRAME[FRAME["name"] == name].copy()
    row["tensor_boost_mhz"] = 2 * row["tensor_boost_mhz"].fillna(row["boost_mhz"])
    tensor = [c for c in PEAKS if c.startswith(("tf32", "fp16", "bf16", "int8", "fp8"))]
    row[tensor] = 2 * row[tensor]
    assert spec_checks.inconsistencies(row)


def test_a_peak_that_every_tensor_core_has_must_be_given():
    row = FRAME[FRAME["name"] == "H100 SXM"].assign(fp16_tflops=float("nan"))
    assert any("fp16_tflops" in finding for finding in spec_checks.inconsistencies(row))


def test_bandwidths():
    assert by_name("RTX 4080").memory_gb_per_s == 716.8
    h100 = {gpu.memory_gb_per_s for gpu in specs.gpus() if gpu.name.startswith("H100")}
    assert h100 == {3352, 2039, 3938}
    h100 = [gpu for gpu in specs.gpus() if gpu.name.startswith("H100")]
    assert len({gpu.peak_tflop_per_s("float8") for gpu in h100}) == 3
    assert by_name("H200 SXM").memory_gb_per_s == 4800


def test_peaks_of_an_h200():
    h200 = by_name("H200 SXM")
    peaks = {dtype: h200.peak_tflop_per_s(dtype) for dtype in specs.DTYPES}
    assert peaks == {
        "float64": 66.9,  # tensor cores
        "float32": 66.9,  # ordinary lanes
        "tfloat32": 494.7,
        "float16": 989.4,
        "bfloat16": 989.4,
        "int8": 1978.9,
        "float8": 1978.9,
    }
    lanes = {dtype: h200.peak_tflop_per_s(dtype, tensor_cores=False) for dtype in specs.DTYPES}
    assert lanes["float64"] == 33.5 and lanes["float32"] == 66.9
    assert lanes["float16"] == lanes["bfloat16"] == pytest.approx(133.8)  # the whitepaper's figure
    assert lanes["tfloat32"] is lanes["int8"] is lanes["float8"] is None
    assert round(h200.ridge_flop_per_byte(torch.bfloat16)) == 206  # 989.4e12 / 4.8e12
    assert round(h200.ridge_flop_per_byte("float32")) == 14
    assert h200.ridge_flop_per_byte("float64", tensor_cores=False) == pytest.approx(
        33.5e12 / 4.8e12
    )


@pytest.mark.parametrize(
    "dtype, name",
    [
        (torch.float64, "float64"),
        (torch.float32, "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.int8, "int8"),
        (torch.float8_e4m3fn, "float8"),
        (torch.float8_e5m2, "float8"),
        ("torch.bfloat16", "bfloat16"),
    ],
)
def test_torchs_dtypes_are_understood(dtype, name):
    gpu = by_name("RTX 4090")
    assert gpu.peak_tflop_per_s(dtype) == gpu.peak_tflop_per_s(name) is not None


@pytest.mark.parametrize("dtype", ["fp16", "half", "", torch.int32, torch.float8_e8m0fnu, None])
def test_an_unknown_dtype_is_refused_with_the_list(dtype):
    with pytest.raises(ValueError, match="float64, float32, tfloat32, float16, bfloat16, int8"):
        by_name("A10").peak_tflop_per_s(dtype)


def test_a_geforce_sums_slower_in_fp32():
    geforce, pro = by_name("RTX 4090"), by_name("L40S")
    assert geforce.peak_tflop_per_s("float16") == 165.2
    assert geforce.peak_tflop_per_s("float16", accumulator="float16") == 330.3
    assert geforce.peak_tflop_per_s("float8", accumulator="float16") == 660.6
    assert pro.peak_tflop_per_s("float16", accumulator="float16") == 366.5  # the same either way
    assert geforce.peak_tflop_per_s("float16", accumulator="float16", tensor_cores=False) == 82.6
    for dtype, accumulator in [("bfloat16", "float16"), ("float16", "half"), ("float16", "")]:
        with pytest.raises(ValueError, match="does not sum in"):
            geforce.peak_tflop_per_s(dtype, accumulator=accumulator)


def test_what_is_unknown_is_none():
    v100, b200 = by_name("V100 SXM2 16GB"), by_name("B200")
    assert v100.peak_tflop_per_s("bfloat16") is v100.peak_tflop_per_s("tfloat32") is None
    assert v100.ridge_flop_per_byte("bfloat16") is None
    assert v100.peak_tflop_per_s("bfloat16", tensor_cores=False) is None
    assert v100.peak_tflop_per_s("float64") == 7.8  # it has no tensor cores for float64
    assert b200.peak_tflop_per_s("float16", tensor_cores=False) is None
    nothing = specs.GPU("x")
    assert all(nothing.peak_tflop_per_s(dtype) is None for dtype in specs.DTYPES)
    assert all(nothing.peak_tflop_per_s(d, tensor_cores=False) is None for d in specs.DTYPES)
    assert nothing.ridge_flop_per_byte("float32") is None


# Names


def test_every_name_finds_its_row_and_no_name_stands_twice():
    owners = {}
    for gpu in specs.gpus():
        for name in (gpu.name, *gpu.torch_names):
            assert specs.find(name) is gpu is specs.get(name)
            assert name == name.strip() and name
            assert owners.setdefault(name.lower(), gpu) is gpu
        assert len(set(gpu.torch_names)) == len(gpu.torch_names) > 0
        assert not gpu.mig and not gpu.partial


@pytest.mark.parametrize(
    "name, product",
    [
        ("NVIDIA H200", "H200 SXM"),
        ("nvidia_h200", "H200 SXM"),  # helpers.device.slug
        ("h200-sxm", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("nvidia h100 nvl", "H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla T4", "T4"),
        ("  NVIDIA   L4 ", "L4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("GeForce RTX 3090", "RTX 3090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_spelling_does_not_matter(name, product):
    assert specs.find(name).name == specs.get(name).name == product


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4080 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 5070 Ti",
        "NVIDIA GeForce RTX 2080",
        "NVIDIA GeForce RTX 2080 SUPER",
        "NVIDIA A100X",
        "NVIDIA A100",  # four products
        "NVIDIA H100",  # three products
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H800",
        "NVIDIA GH200 480GB",
        "NVIDIA A10G",
        "NVIDIA A10M",
        "NVIDIA L40",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "Tesla V100S-PCIE-32GB",
        "Tesla T40",
        "AMD Instinct MI300A",
        "AMD Instinct MI325X",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID T4-8Q",
        "NVIDIA",
        "",
    ],
)
def test_another_product_is_not_found(name):
    assert specs.find(name) is None
    with pytest.raises(KeyError, match="no datasheet"):
        specs.get(name)


def test_a_wrong_name_gets_the_closest_ones():
    with pytest.raises(KeyError, match="H100 SXM"):
        specs.get("NVIDIA H100")
    with pytest.raises(KeyError, match="RTX 4080"):
        specs.get("rtx 4080 super")


# The device at hand

H200 = dict(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=143156 * 2**20,
    L2_cache_size=60 * 2**20,
    shared_memory_per_multiprocessor=228 * 1024,
    regs_per_multiprocessor=65536,
    clock_rate=1_980_000,
)
H100_SLICE = {
    **H200,
    "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "multi_processor_count": 16,
    "total_memory": 9856 * 2**20,
    "L2_cache_size": 6 * 2**20,
}


@pytest.fixture
def gpu_at_hand(monkeypatch):
    """A function: pretend that the machine's GPU has these properties, and say what it is."""

    def pretend(sensors=None, hip=None, **properties):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8f2c4e1a-0b7d-5c3e-9a61-2d4f6b8c0e13")
        monkeypatch.setattr(device, "has_cuda", lambda: True)
        monkeypatch.setattr(device, "sensors", lambda: sensors or {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "hip", hip)
        found = types.SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
        return specs.this_gpu()

    return pretend


def test_without_a_gpu_there_is_none(monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert specs.this_gpu() is None


@pytest.mark.skipif(not device.has_cuda(), reason="needs a GPU")
def test_the_machines_own_gpu_is_described():
    gpu = specs.this_gpu()
    properties = torch.cuda.get_device_properties(0)
    assert gpu.sms == properties.multi_processor_count and gpu.source
    if properties.name == "NVIDIA H200" and properties.multi_processor_count == 132:
        assert gpu is by_name("H200 SXM")
        own = specs._driver_facts(properties)  # the datasheet against the silicon
        for column in ("compute_capability", "l2_mb", "shared_kb_per_sm", "registers_kb_per_sm"):
            assert own[column] == getattr(gpu, column), column
        assert own["boost_mhz"] == gpu.boost_mhz
        assert getattr(properties, "memory_bus_width", 6016) == gpu.memory_bus_bits
        # two transfers a clock
        assert getattr(properties, "memory_clock_rate", 3_201_000) * 2 / 1000 == gpu.memory_mtps


def test_a_whole_card_is_the_datasheets_row(gpu_at_hand):
    assert gpu_at_hand(**H200) is by_name("H200 SXM")
    assert gpu_at_hand(**{**H200, "clock_rate": None}) is by_name("H200 SXM")


@pytest.mark.parametrize(
    "name, sms, mib",  # what PyTorch reports of cards with error correction in their memory
    [
        ("Tesla T4", 40, 14930),
        ("NVIDIA L40S", 142, 45589),
        ("NVIDIA B200", 148, 182642),
        ("NVIDIA GeForce RTX 3060", 28, 12011),
        ("NVIDIA H100 PCIe", 114, 81008),
    ],
)
def test_memory_that_the_driver_keeps_is_no_contradiction(gpu_at_hand, name, sms, mib):
    card = gpu_at_hand(name=name, multi_processor_count=sms, total_memory=mib * 2**20)
    assert card is specs.get(name)


@pytest.mark.case("E23")
def test_a_mig_slice_has_its_share_and_an_unknown_bandwidth(gpu_at_hand):
    """Case E23: whole-card peaks are wrong for a slice; CUDA_VISIBLE_DEVICES holds a UUID."""
    part, whole = gpu_at_hand(**H100_SLICE), by_name("H100 SXM")
    assert part.mig and part.partial and part.part_of == "H100 SXM"
    assert part.name == H100_SLICE["name"] and part.sms == 16
    assert part.memory_gb == pytest.approx(9.625) and part.l2_mb == 6
    for dtype in specs.DTYPES:
        share = whole.peak_tflop_per_s(dtype) * 16 / 132
        assert part.peak_tflop_per_s(dtype) == pytest.approx(share)
    # SMs x lanes x 2 x clock is the same figure
    assert part.fp32_tflops == pytest.approx(16 * 128 * 2 * 1.98e-3, rel=0.01)
    assert part.memory_gb_per_s is part.memory_bus_bits is part.memory_mtps is part.power_w is None
    assert part.ridge_flop_per_byte("bfloat16") is None
    assert "16/132" in part.source and "bandwidth unknown" in part.source
    assert part.shared_kb_per_sm == 228 and part.compute_capability == "9.0"


@pytest.mark.parametrize("profile", ["1g.10gb+me", "1c.3g.40gb", "7g.80gb"])
def test_every_mig_profile_is_a_part(gpu_at_hand, profile):
    sms = {"1g.10gb+me": 16, "1c.3g.40gb": 16, "7g.80gb": 132}[profile]
    name = f"NVIDIA H100 80GB HBM3 MIG {profile}"
    part = gpu_at_hand(**{**H100_SLICE, "name": name, "multi_processor_count": sms})
    assert part.mig and part.part_of == "H100 SXM" and part.memory_gb_per_s is None
    assert part.peak_tflop_per_s("bfloat16") == pytest.approx(989.4 * sms / 132)


def test_a_slice_of_an_unlisted_card_has_no_tensor_peaks(gpu_at_hand):
    part = gpu_at_hand(**{**H100_SLICE, "name": "NVIDIA H20 MIG 1g.12gb"})
    assert part.mig and part.partial and part.part_of is None
    assert part.peak_tflop_per_s("bfloat16") is None and part.fp32_tflops > 0


def test_a_card_with_hidden_sms_is_a_part_under_the_same_name(gpu_at_hand):
    """An MPS limit or a vGPU: the whole name, fewer SMs."""
    part = gpu_at_hand(**{**H200, "multi_processor_count": 66})
    assert part.partial and not part.mig and part.part_of == "H200 SXM"
    assert part.peak_tflop_per_s("bfloat16") == pytest.approx(989.4 / 2)
    assert part.memory_gb_per_s is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "NVIDIA GeForce RTX 3080", "multi_processor_count": 70},  # the 12 GB card
        {"name": "NVIDIA GeForce RTX 3060", "multi_processor_count": 28},  # another memory
        {"multi_processor_count": 144, "total_memory": H200["total_memory"]},
        {"total_memory": 70 * 2**30},
        {"total_memory": None},
        {"multi_processor_count": None},
    ],
)
def test_a_listed_name_with_other_facts_is_not_that_product(gpu_at_hand, change):
    card = gpu_at_hand(**{**H200, "total_memory": 8 * 2**30, **change})
    assert card not in specs.gpus() and not card.partial
    assert card.memory_gb_per_s is None and card.peak_tflop_per_s("float16") is None


@pytest.mark.case("M10")
def test_an_unlisted_card_says_only_what_it_knows(gpu_at_hand):
    card = gpu_at_hand(**{**H200, "name": "NVIDIA H20", "multi_processor_count": 78})
    assert (card.name, card.sms, card.compute_capability) == ("NVIDIA H20", 78, "9.0")
    assert card.architecture == "Hopper" and card.boost_mhz == 1980
    assert (card.l2_mb, card.shared_kb_per_sm, card.registers_kb_per_sm) == (60, 228, 256)
    assert card.memory_gb == pytest.approx(139.8, abs=0.01)
    assert card.peak_tflop_per_s("float32") == pytest.approx(78 * 128 * 2 * 1.98e-3)
    assert card.peak_tflop_per_s("float64") == pytest.approx(78 * 64 * 2 * 1.98e-3)
    for dtype in ("tfloat32", "float16", "bfloat16", "int8", "float8"):
        assert card.peak_tflop_per_s(dtype) is None
    assert card.memory_gb_per_s is None and card.ridge_flop_per_byte("float32") is None
    assert "driver" in card.source and "unknown" in card.source and not card.partial


def test_nvmls_clock_comes_before_the_property(gpu_at_hand):
    unlisted = {**H200, "name": "NVIDIA H20"}
    assert gpu_at_hand(sensors={"sm_max_mhz": 1830.0}, **unlisted).boost_mhz == 1830
    no_clock = gpu_at_hand(**{**unlisted, "clock_rate": None})
    assert no_clock.boost_mhz is None and no_clock.fp32_tflops is None


@pytest.mark.case("E24")
@pytest.mark.parametrize(
    "properties",
    [{}, {"name": "NVIDIA Mystery"}, {"name": "NVIDIA H200", "major": 9, "minor": 0}],
)
def test_missing_attributes_are_unknown_not_errors(gpu_at_hand, properties):
    """Case E24: names of properties vary by torch version and vendor."""
    card = gpu_at_hand(**properties)
    assert card.name == properties.get("name", "unknown GPU")
    assert card.sms is card.memory_gb is card.l2_mb is card.fp32_tflops is None
    assert card.compute_capability == ("9.0" if "major" in properties else None)
    assert all(card.peak_tflop_per_s(dtype) is None for dtype in specs.DTYPES)


def test_a_new_compute_capability_has_no_peaks(gpu_at_hand):
    card = gpu_at_hand(**{**H200, "name": "NVIDIA R100", "major": 11})
    assert card.compute_capability == "11.0" and card.sms == 132
    assert card.architecture is card.fp32_tflops is card.fp64_tflops is None


MI300X = dict(
    name="AMD Instinct MI300X",
    major=9,
    minor=4,
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    total_memory=196592 * 2**20,
    L2_cache_size=4 * 2**20,
)


@pytest.mark.case("E24")
def test_rocm(gpu_at_hand):
    assert gpu_at_hand(hip="6.4", **MI300X) is by_name("MI300X")
    part = gpu_at_hand(hip="6.4", **{**MI300X, "multi_processor_count": 38})  # one die of eight
    assert part.part_of == "MI300X" and part.fp32_tflops == pytest.approx(163.4 / 8)
    unlisted = gpu_at_hand(
        hip="6.4", clock_rate=2_100_000, **{**MI300X, "name": "AMD Instinct MI308X"}
    )
    assert unlisted.compute_capability == "gfx942" and unlisted.fp32_tflops == pytest.approx(
        163.4, 1e-3
    )
    bare = gpu_at_hand(hip="6.4", name="AMD Radeon Graphics", major=11, minor=0)
    assert bare.compute_capability is bare.fp32_tflops is None
