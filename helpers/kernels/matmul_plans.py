"""Which matmul kernel runs, and with which tiles: by the GPU's generation, dtype and shape."""

import dataclasses
import functools
from collections.abc import Sequence

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers import device as machine
from helpers import specs, waves
from helpers.bench import in_turn
from helpers.kernels.matmul_persistent import (
    UNIT_BYTES,
    can_be_written,
    has_descriptor,
    launch_persistent,
    sms,
)
from helpers.kernels.matmul_pingpong import launch_pingpong
from helpers.kernels.matmul_tiles import Config, launch_tiles
from helpers.triton_mode import on_device_of

LAUNCHES = {"tiles": launch_tiles, "persistent": launch_persistent, "pingpong": launch_pingpong}
TUNED_FROM = 2**33  # multiply-adds: smaller matmuls end before a choice could pay
MOST_TRIED, TRIAL_ROUNDS, TRIAL_MS = 6, 5, 5

try:
    from triton.runtime.errors import OutOfResources
except ImportError:  # no Triton, no launch

    class OutOfResources(Exception):
        """Stands for Triton's."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel, a key of `LAUNCHES`, and its configuration.

    rate: how fast it computes one large tile after another, beside the best on its generation.
    """

    kernel: str
    config: Config
    rate: float

    def __str__(self) -> str:
        c = self.config
        return f"{self.kernel} {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.warps} warps, {c.stages} stages"


# Rates: from runs of these tiles, or of such as these, on an H200, rounded; elsewhere an estimate.
HOPPER = (
    Plan("pingpong", Config(128, 128, 64, 8, 4, 6), 1.0),
    Plan("pingpong", Config(128, 128, 64, 8, 4, 5), 0.99),
    Plan("persistent", Config(128, 256, 64, 8, 8, 3), 0.99),
    Plan("persistent", Config(128, 256, 64, 8, 8, 4), 0.98),
    Plan("persistent", Config(128, 128, 64, 8, 4, 3, per_sm=2), 0.95),
    Plan("pingpong", Config(64, 128, 64, 8, 4, 8), 0.9),
    Plan("persistent", Config(64, 64, 64, 8, 4, 6, per_sm=2), 0.7),
)
BLACKWELL = tuple(plan for plan in HOPPER if plan.kernel == "persistent")
TILES_16_BITS = (
    Plan("tiles", Config(128, 256, 64, 8, 8, 3), 1.0),
    Plan("tiles", Config(128, 128, 64, 8, 4, 3), 0.94),
    Plan("tiles", Config(128, 128, 32, 8, 4, 4), 0.78),
    Plan("tiles", Config(64, 128, 32, 8, 4, 4), 0.59),
    Plan("tiles", Config(64, 64, 32, 8, 4, 4), 0.43),
)
TILES_TF32 = (
    Plan("tiles", Config(128, 128, 32, 8, 8, 3), 1.0),
    Plan("tiles", Config(128, 64, 32, 8, 4, 3), 1.0),
    Plan("tiles", Config(64, 64, 32, 8, 4, 3), 0.6),
)
# Elsewhere its registers spill.
HOPPER_TF32 = (Plan("tiles", Config(256, 128, 32, 8, 8, 3), 1.0),)
TILES_FP32 = (
    Plan("tiles", Config(64, 128, 32, 8, 4, 2), 1.0),
    Plan("tiles", Config(64, 64, 32, 8, 4, 2), 0.97),
)
TURING = (Plan("tiles", Config(64, 64, 32, 8, 4, 2), 1.0),)
INTERPRETED = Plan("tiles", Config(256, 256, 64), 1.0)  # few steps: each takes milliseconds


def plans(capability: tuple[int, int], dtype: torch.dtype, precision: str, described: bool):
    """The plans for a GPU of this compute capability, those that are fastest at large sizes first.

    described: `has_descriptor` holds of both factors, `can_be_written` of the product. What a block
    needs in shared memory is within the limit of the generation (`specs.UNITS`).
    """
    if capability < (8, 0):
        return TURING
    if dtype == torch.float32:
        if precision == "tf32" and capability == (9, 0):
            return HOPPER_TF32
        return _that_fit(TILES_FP32 if precision == "ieee" else TILES_TF32, capability, 4)
    if described and capability == (9, 0):
        return HOPPER
    if described and capability[0] == 10:
        return BLACKWELL
    return _that_fit(TILES_16_BITS, capability, 2)


def _that_fit(found: Sequence[Plan], capability: tuple[int, int], itemsize: int) -> tuple:
    limit = shared_limit_bytes(capability)
    asynchronous = capability[0] in (9, 10)
    return tuple(plan for plan in found if ring_bytes(plan.config, itemsize, asynchronous) <= limit)


def ring_bytes(config: Config, itemsize: int, asynchronous: bool) -> int:
    """What the tiles of A and B that are on their way or in use take of shared memory.

    asynchronous: products read shared memory, so that those in use need room as well (`wgmma`,
    `tcgen05`). Other generations first load them into registers.
    """
    slots = config.stages - (not asynchronous)
    return slots * (config.tile_m + config.tile_n) * config.tile_k * itemsize


def shared_limit_bytes(capability: tuple[int, int]) -> int:
    """The shared memory that one block may have; what the system keeps for itself is left out."""
    # Of unknown generations as little as the least of the known ones from Ampere on.
    units = specs.UNITS.get("{}.{}".format(*capability), specs.UNITS["8.6"])
    return (units["shared"] - (capability >= (8, 0))) * 1024


def by_model(m: int, n: int, found: Sequence[Plan], num_sms: int) -> list[Plan]:
    """The plans, that with the shortest predicted time first.

    The busiest SM computes one tile a wave, at a rate that grows with the tile.
    """

    def time(plan: Plan) -> float:
        c = plan.config
        tiles = waves.tiles(m, n, c.tile_m, c.tile_n)
        return waves.waves(tiles, num_sms) * c.tile_m * c.tile_n / plan.rate

    return sorted(found, key=time)


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """What `triton_matmul` multiplies in: "tf32" where PyTorch's switch allows it for fp32.

    Else "ieee", the dtype as it is. The switch is torch.set_float32_matmul_precision, or
    torch.backends.cuda.matmul; TF32 needs compute capability 8.0, and the interpreter has none.
    """
    if dtype != torch.float32 or device.type != "cuda" or machine.interpreting():
        return "ieee"
    matmul = torch.backends.cuda.matmul
    switch = getattr(matmul, "fp32_precision", None)  # from PyTorch 2.9 on
    allowed = switch == "tf32" if switch is not None else matmul.allow_tf32
    return "tf32" if allowed and torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


def launch_triton_matmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, activation: str | None = None
) -> None:
    """c = activation(a @ b) by the first of `plans_for` that the GPU has room for.

    Matrices as `launch_tiles` takes them, a and b of the dtypes that matmul takes.
    """
    with on_device_of(a):  # on which the plans are timed, too
        for plan in plans_for(a, b, c, activation):
            if run(plan, a, b, c, activation):
                return
    raise RuntimeError(f"no plan of this matmul fits {torch.cuda.get_device_name(a.device)}")


def run(plan: Plan, a, b, c, activation: str | None = None) -> bool:
    """Launch one plan; False when it asks for more than the GPU has, and nothing was launched."""
    more = {"precision": precision(a.dtype, a.device)} if plan.kernel == "tiles" else {}
    try:
        LAUNCHES[plan.kernel](a, b, c, plan.config, activation, **more)
    except OutOfResources:
        return False
    return True


def plans_for(a, b, c, activation: str | None = None) -> list[Plan]:
    """The plans for these matrices, the best first; arguments as for `launch_triton_matmul`.

    In the profile "full" the best `MOST_TRIED` by the model are timed once for each shape, dtype,
    layout and activation, from 2^33 multiply-adds on, though never while a CUDA graph is captured
    on this stream: all of the GPU has to finish first. Else the model alone decides. In the
    interpreter there is one plan.
    """
    if machine.interpreting():
        return [INTERPRETED]
    multiplied = precision(a.dtype, a.device)
    about = [(x.shape, x.stride(), x.data_ptr() % UNIT_BYTES) for x in (a, b, c)]
    kind = (*about, a.dtype, a.device, multiplied, activation)
    if kind in _fastest:
        return _fastest[kind]
    if kind not in _predicted:
        described = all(map(has_descriptor, (a, b))) and can_be_written(c)
        capability = torch.cuda.get_device_capability(a.device)
        found = plans(capability, a.dtype, multiplied, described)
        _predicted[kind] = by_model(*c.shape, found, sms(a.device))
    large = a.shape[0] * b.numel() >= TUNED_FROM
    if machine.profile() != "full" or not large or torch.cuda.is_current_stream_capturing():
        return _predicted[kind]
    _fastest[kind] = _timed(_predicted[kind], a, b, c, activation)
    return _fastest[kind]


_predicted: dict[tuple, list[Plan]] = {}
_fastest: dict[tuple, list[Plan]] = {}


def _timed(found: Sequence[Plan], a, b, c, activation: str | None) -> list[Plan]:
    """The first `MOST_TRIED` of these plans that the GPU has room for, the fastest first."""
    runs = {
        plan: functools.partial(run, plan, a, b, c, activation)
        for plan in found[:MOST_TRIED]
        if run(plan, a, b, c, activation)
    }
    times = in_turn(runs, TRIAL_ROUNDS, TRIAL_MS)
    return sorted(times, key=times.get)
