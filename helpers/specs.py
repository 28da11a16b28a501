"""Datasheets: look a GPU up, and say what is unknown.

data/gpus.csv has one row a product with the makers' own figures, empty where they publish none.
Peaks are dense: a datasheet's headline is often for matrices half of zeros, and twice as high.
"""

import dataclasses
import difflib
import functools
import re
from pathlib import Path

import torch

from helpers import device as machine

GPUS = Path(__file__).resolve().parent.parent / "data" / "gpus.csv"
COLUMNS = GPUS.read_text(encoding="utf-8").split("\n", 1)[0].split(",")
TEXT = "name torch_names architecture compute_capability memory_type source".split()
DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "int8", "float8")
_STEMS = dict(zip(DTYPES, "fp64 fp32 tf32 fp16 bf16 int8 fp8".split(), strict=True))

# An SM (AMD: compute unit) by compute capability: KB of L1 + shared memory, of it shared, and of
# registers; then multiply-adds per clock, of ordinary lanes and (from fp64_tensor on) of tensor
# cores, dense, with the fastest sums: a GeForce sums in fp32 at half the rate. From the CUDA C++
# Programming Guide and the architecture whitepapers. "-": not there, or not published.
_TABLE = """
cc     architecture l1 shared registers fp64 fp32 lanes_fp16 lanes_bf16 fp64_tensor tf32 fp16 bf16 int8 fp8
7.0    Volta     128  96 256  32  64 128   -   -    -  512    -    -    -
7.5    Turing     96  64 256   2  64 128   -   -    -  512    - 1024    -
8.0    Ampere    192 164 256  32  64 256 128  64  512 1024 1024 2048    -
8.6    Ampere    128 100 256   2 128 128 128   -  256  512  512 1024    -
8.9    Ada       128 100 256   2 128 128 128   -  256  512  512 1024 1024
9.0    Hopper    256 228 256  64 128 256 256 128 1024 2048 2048 4096 4096
10.0   Blackwell 256 228 256  64 128   -   -  64 2048 4096 4096 8192 8192
12.0   Blackwell 128 100 256   2 128 128 128   -  256  512  512 1024 1024
gfx942 CDNA3       -  64 512  64 128   -   - 128  512 1024 1024 2048 2048
"""  # noqa: E501
_HEAD, *_ROWS = map(str.split, _TABLE.strip().splitlines())
UNITS = {
    row[0]: {k: int(v) if v.isdigit() else v for k, v in zip(_HEAD, row, strict=True) if v != "-"}
    for row in _ROWS
}

_FIELDS = [(column, str if column in TEXT else float, None) for column in COLUMNS]


@dataclasses.dataclass(frozen=True)
class GPU(dataclasses.make_dataclass("_Columns", _FIELDS, frozen=True)):
    """One device: the columns of data/gpus.csv (`torch_names` a tuple), None where unknown.

    Peaks are dense and count a multiply-add as two; KB, MB are powers of 1024, GB/s of 1000;
    `memory_gb` is as sold or the driver's figure / 2^30. `part_of`: the whole card's name.
    """

    part_of: str | None = None

    @property
    def mig(self) -> bool:
        """True for a slice of a card that is split by MIG (multi-instance GPU)."""
        return _MIG.search(self.name) is not None

    @property
    def partial(self) -> bool:
        """True when only a part of a card's SMs is there: MIG, an MPS limit, a vGPU."""
        return self.mig or self.part_of is not None

    def peak_tflop_per_s(
        self, dtype, *, tensor_cores: bool = True, accumulator: str = "float32"
    ) -> float | None:
        """The highest dense matmul rate for `dtype`, in TFLOP/s (int8: TOP/s); None: unknown.

        `dtype` is a torch.dtype or one of `DTYPES`, else ValueError. "float32" means the ordinary
        lanes, as PyTorch multiplies unless told to use TF32, which is "tfloat32"; "float64" the
        better of lanes and tensor cores. `tensor_cores=False`: the ordinary lanes alone.
        `accumulator="float16"`: float16 or float8 summed in float16, as PyTorch does only if told.
        """
        name = re.sub(r"^float8_e[45]m[23]\w*$", "float8", str(dtype).removeprefix("torch."))
        if name not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        stem = _STEMS[name]
        if accumulator != "float32" and not (accumulator == "float16" and stem in ("fp16", "fp8")):
            raise ValueError(f"{name} does not sum in {accumulator!r}")
        if name == "float64":
            rates = [self.fp64_tflops, self.fp64_tensor_tflops if tensor_cores else None]
            return max(filter(None, rates), default=None)
        if name != "float32" and not tensor_cores:
            # Datasheets print the lanes' fp32 rate; the architecture gives the ratio to it.
            units = UNITS.get(self.compute_capability, {})
            known = f"lanes_{stem}" in units and self.fp32_tflops
            return self.fp32_tflops * units[f"lanes_{stem}"] / units["fp32"] if known else None
        faster = accumulator == "float16" and getattr(self, f"{stem}_fp16_accumulate_tflops")
        return faster or getattr(self, f"{stem}_tops" if name == "int8" else f"{stem}_tflops")

    def ridge_flop_per_byte(self, dtype, **choice) -> float | None:
        """FLOP per byte of traffic below which memory is the limit; `choice`: as for the peak."""
        peak, bandwidth = self.peak_tflop_per_s(dtype, **choice), self.memory_gb_per_s
        return peak * 1e12 / (bandwidth * 1e9) if peak and bandwidth else None


def table():
    """data/gpus.csv as a pandas frame, one product a row; numbers as numbers, NaN where empty."""
    import pandas as pd

    return pd.read_csv(GPUS, dtype=dict.fromkeys(TEXT, str))


@functools.cache
def gpus() -> tuple[GPU, ...]:
    """All products of data/gpus.csv, in the file's order."""
    rows = table().astype(object).to_dict("records")
    for row in rows:
        row["torch_names"] = tuple(row["torch_names"].split(";"))
    return tuple(GPU(**{k: v if v == v else None for k, v in row.items()}) for row in rows)  # NaN


_MIG = re.compile(r"\s+MIG\s+\S+$")  # "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


def _key(name: str) -> str:
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "amd", "tesla", "geforce"))


def find(name: str) -> GPU | None:
    """The product with that name or that PyTorch prints so, None when it is not listed.

    Only case, spaces, "-", "_" and the words NVIDIA, AMD, Tesla and GeForce do not matter.
    """
    known = {_key(label): gpu for gpu in gpus() for label in (gpu.name, *gpu.torch_names)}
    return known.get(_key(name))


def get(name: str) -> GPU:
    """`find`, or a KeyError with the closest names."""
    gpu = find(name)
    if gpu is None:
        keys = {_key(known.name): known.name for known in gpus()}
        close = [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=4, cutoff=0.4)]
        raise KeyError(f"no datasheet for {name!r}; the closest: {', '.join(close) or 'none'}")
    return gpu


def this_gpu() -> GPU | None:
    """The device that `helpers.device.device` names; None on a CPU.

    The datasheet's row when the name is listed and the SMs and the memory are that product's.
    Otherwise what the device itself says, the rest unknown; `source` says what was read.
    """
    if not machine.has_cuda():
        return None
    own = _driver_facts(torch.cuda.get_device_properties(machine.device()))
    whole = find(_MIG.sub("", own["name"]))
    if not (whole and own["sms"] and own["memory_gb"]):
        return _unlisted(own)
    if own["sms"] < whole.sms or _MIG.search(own["name"]):
        return _part(whole, own)
    # Error correction and the driver keep up to 9% of a card's memory.
    as_sold = own["sms"] == whole.sms and abs(own["memory_gb"] / whole.memory_gb - 1) <= 0.1
    return whole if as_sold else _unlisted(own)


def _driver_facts(properties) -> dict:
    def read(name: str, unit: int | None = None):
        # Names of device properties differ between torch versions and vendors.
        value = getattr(properties, name, None) or None
        return value / unit if value and unit else value

    capability = f"{read('major')}.{getattr(properties, 'minor', None)}"
    if torch.version.hip:
        capability = str(read("gcnArchName")).split(":")[0]
    return {
        "name": read("name") or "unknown GPU",
        "compute_capability": None if "None" in capability else capability,
        "sms": read("multi_processor_count"),
        "boost_mhz": machine.sensors().get("sm_max_mhz") or read("clock_rate", 1000),
        "memory_gb": read("total_memory", 2**30),
        "l2_mb": read("L2_cache_size", 2**20),
        "shared_kb_per_sm": read("shared_memory_per_multiprocessor", 1024),
        "registers_kb_per_sm": read("regs_per_multiprocessor", 256),  # of 4 bytes each
    }


def _part(whole: GPU, own: dict) -> GPU:
    peaks = {c: getattr(whole, c) for c in COLUMNS if c.endswith(("_tflops", "_tops"))}
    changes = {c: peak and peak * own["sms"] / whole.sms for c, peak in peaks.items()}
    changes |= {c: own[c] for c in ("name", "sms", "memory_gb", "l2_mb")}
    # A slice gets a share of the memory's width; how large, only a measurement tells.
    changes |= dict.fromkeys(("memory_bus_bits", "memory_mtps", "memory_gb_per_s", "power_w"))
    source = "name, SMs, memory and L2 are what the driver reports; peaks, by the number of SMs, "
    source += f"{own['sms']}/{whole.sms} of the {whole.name}'s: {whole.source}; bandwidth unknown"
    changes |= {"torch_names": (), "source": source, "part_of": whole.name}
    return dataclasses.replace(whole, **changes)


def _unlisted(own: dict) -> GPU:
    units = UNITS.get(own["compute_capability"], {})
    per_unit = (own["sms"] or 0) * 2 * (own["boost_mhz"] or 0) / 1e6
    peaks = {f"{c}_tflops": per_unit * units[c] for c in ("fp64", "fp32") if units and per_unit}
    source = "no product of data/gpus.csv, or not as sold: what the driver reports"
    source += "; fp64 and fp32 peaks are SMs x lanes x 2 x its highest clock" if peaks else ""
    source += "; tensor-core peaks and memory bandwidth unknown"
    return GPU(
        torch_names=(), architecture=units.get("architecture"), source=source, **own, **peaks
    )
