"""The device and the precision to compute in, and whether this build of PyTorch runs on the card at all."""

import re
import sys

import torch

from konkanivani.base.config import MemoryConfig
from konkanivani.base.errors import ResourceError, UsageError

TORCH_RANGE = ">=2.10,<2.12"  # that of setup.cfg; a test holds the two together
OLDEST_OF_DEFAULT_BUILD = (7, 5)  # CUDA 13 ends below Turing; the CUDA 12.6 build reaches back to Maxwell
OLDEST_OF_ALL_BUILDS = (5, 0)


def choose_device(asked: str) -> torch.device:
    """The device to train on; a ResourceError or UsageError says why the asked one cannot be had."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise UsageError("--device cuda: PyTorch finds no usable NVIDIA GPU. Use --device cpu, or repair the driver.")
    if asked == "cpu" or not has_cuda:
        return torch.device("cpu")
    check_gpu_architecture(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list(), torch.__version__
    )
    torch.set_float32_matmul_precision("high")  # TF32 where the card has it
    # cuDNN creates a plan for each new shape: nine tenths of a step, and 55 MiB of host memory (docs/experiments.md).
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", torch.cuda.current_device())  # PyTorch's limit of a card's memory asks for its number


def choose_precision(config: MemoryConfig, device: torch.device) -> torch.dtype | None:
    """The autocast format, None for full precision."""
    if not config.mixed_precision:
        return None
    if device.type == "cpu":
        return torch.bfloat16
    # torch.cuda.is_bf16_supported() is also true where PyTorch only emulates it.
    if config.amp_dtype == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UsageError(
            f"--amp_dtype bf16: {torch.cuda.get_device_name(device)} does not support bf16 (compute capability "
            "below 8.0). Use fp16."
        )
    return torch.bfloat16 if config.amp_dtype == "bf16" else torch.float16


def check_gpu_architecture(
    name: str, capability: tuple[int, int], architectures: list[str], torch_version: str
) -> None:
    """Raises ResourceError if the installed PyTorch holds no code that runs on this card.

    `capability` and `architectures` are what torch.cuda.get_device_capability() and torch.cuda.get_arch_list() return.
    Without this check the first kernel fails with "no kernel image is available", and says not what to do.
    """
    if any(_runs_on(architecture, capability) for architecture in architectures):
        return
    held = " ".join(architectures) or "no GPU code at all"
    what = (
        f"{name} has architecture sm_{capability[0]}{capability[1]}; the installed PyTorch {torch_version} "
        f"contains {held}."
    )
    raise ResourceError(f"{what} {_remedy(capability)}")


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for e.g. "sm_86", "sm_90a" or "compute_120" runs on a card.

    A binary (sm) runs within its major version on its own or a later minor one, PTX (compute) on all later ones;
    code ending in "a" runs on its own architecture only.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if parts is None:
        return False
    kind, built_for, suffix = parts[1], (int(parts[2]), int(parts[3])), parts[4]
    if suffix == "a":
        return capability == built_for
    is_later = built_for <= capability
    return is_later and (built_for[0] == capability[0] or (kind == "compute" and not suffix))


def _remedy(capability: tuple[int, int]) -> str:
    """What to do about it, with the exact command."""
    if capability < OLDEST_OF_ALL_BUILDS:
        return "No PyTorch build supports this GPU any more: use --device cpu, or another GPU."
    install = f'{sys.executable} -m pip install --force-reinstall "torch{TORCH_RANGE}" "torchaudio{TORCH_RANGE}"'
    if capability < OLDEST_OF_DEFAULT_BUILD:
        return f"Install the build for older GPUs: {install} --index-url https://download.pytorch.org/whl/cu126"
    return (
        f"Install the default build, which is for newer GPUs and needs NVIDIA driver 580 or newer: {install}. "
        "If that build does not support the GPU either, the GPU is newer than this release of KonkaniVani: "
        "use --device cpu."
    )
