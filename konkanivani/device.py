"""Choice of device and precision, and the check that this PyTorch build supports the GPU."""

import re
import sys

import torch

from konkanivani.config import MemoryConfig
from konkanivani.errors import ResourceError, UsageError

TORCH_RANGE = ">=2.10,<2.12"  # as in setup.cfg; a test checks that they agree
OLDEST_OF_DEFAULT_BUILD = (7, 5)  # CUDA 13 supports Turing and later, the CUDA 12.6 build also Maxwell
OLDEST_OF_ALL_BUILDS = (5, 0)


def choose_device(asked: str) -> torch.device:
    """Return the device to train on.

    Raises UsageError if there is no usable GPU for --device cuda, and ResourceError if this PyTorch build does not
    support the GPU.
    """
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise UsageError("--device cuda: PyTorch finds no usable NVIDIA GPU. Use --device cpu, or repair the driver.")
    # auto falls back to the CPU.
    if asked == "cpu" or not has_cuda:
        return torch.device("cpu")
    check_gpu_architecture(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list(), torch.__version__
    )
    torch.set_float32_matmul_precision("high")  # TF32 if the GPU supports it
    # cuDNN builds a plan for each new shape: 90 % of the step time, and 55 MiB of host memory (docs/experiments.md).
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", torch.cuda.current_device())  # with index: PyTorch's memory limit needs it


def choose_precision(config: MemoryConfig, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype, or None for full precision."""
    if not config.mixed_precision:
        return None
    if device.type == "cpu":
        return torch.bfloat16
    # torch.cuda.is_bf16_supported() is also true if PyTorch only emulates bf16.
    if config.amp_dtype == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UsageError(
            f"--amp_dtype bf16: {torch.cuda.get_device_name(device)} does not support bf16 (compute capability "
            "below 8.0). Use fp16."
        )
    return torch.bfloat16 if config.amp_dtype == "bf16" else torch.float16


def check_gpu_architecture(
    name: str, capability: tuple[int, int], architectures: list[str], torch_version: str
) -> None:
    """Raise ResourceError if the installed PyTorch contains no code for this GPU.

    Args:
        name: GPU name, for the message.
        capability: as torch.cuda.get_device_capability() returns it.
        architectures: as torch.cuda.get_arch_list() returns them.
        torch_version: for the message.

    Without this check the first kernel fails with "no kernel image is available", without a remedy.
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
    """Return whether code for an architecture such as "sm_86", "sm_90a" or "compute_120" runs on a GPU.

    A binary (sm) runs on its own and later minor versions of its major version, PTX (compute) on all later versions;
    code ending in "a" runs on its own architecture only.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if parts is None:
        return False
    kind = parts[1]
    built_for = (int(parts[2]), int(parts[3]))
    suffix = parts[4]
    if suffix == "a":
        return capability == built_for
    # Suffix "f" (family) is treated like a binary: it does not reach the next major version.
    is_later = built_for <= capability
    return is_later and (built_for[0] == capability[0] or (kind == "compute" and not suffix))


def _remedy(capability: tuple[int, int]) -> str:
    """Return the remedy as a sentence, with the exact command."""
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
