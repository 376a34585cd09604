"""What an error of CUDA's runtime or driver means for the person who reads it: the smallest thing that helps."""

from __future__ import annotations

import os

OLD_DRIVER = (
    "there is no NVIDIA driver, or one that is too old for the installed CUDA packages: update it (CUDA 13 needs 580, "
    "CUDA 12 needs 525 or later), or install 'glint-llm[cuda12]' in place of 'glint-llm[cuda13]'"
)
OLD_DRIVER_FOR_CODE = (
    "the driver is older than the compiler: update the driver, or install an NVRTC that is no newer than it "
    "(nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12)"
)
HELP = {  # by number, which runtime and driver share where both have the error
    2: "the GPU's memory is full: end what else runs on it (nvidia-smi lists it)",
    3: "the driver does not start in this process: if it was forked from one that had used CUDA (multiprocessing with "
    "'fork', gunicorn with --preload), start it with 'spawn', or make the engine before anything uses CUDA; if not, "
    "check that nvidia-smi works here, in a container that it was started with its GPUs",
    35: OLD_DRIVER,
    46: "another process has the GPU for itself: end it, or set the compute mode to Default (nvidia-smi -c 0)",
    100: "no GPU is visible: check CUDA_VISIBLE_DEVICES and that nvidia-smi lists one",
    101: "there is no GPU of this number: check CUDA_VISIBLE_DEVICES",
    200: "a file of the kernel cache is damaged: delete the folder glint/kernels in ~/.cache or $XDG_CACHE_HOME",
    209: "this GPU cannot run what was compiled: delete the kernel cache, and say which GPU it is",
    218: OLD_DRIVER_FOR_CODE,
    221: "the driver's compiler is missing (libnvidia-ptxjitcompiler): install the whole driver",
    222: OLD_DRIVER_FOR_CODE,
    802: "the system is not ready: on machines with NVSwitch start nvidia-fabricmanager",
    803: "libcuda and the loaded kernel module are of different versions: reboot after a driver update; in a container "
    "take away a libcuda that it brings itself",
    804: "the libcuda that was found is one for compatibility, which this GPU is not served by: take its folder out of "
    "LD_LIBRARY_PATH, or update the driver",
}


def explain(status: int, words: str, versions: str = "") -> str:
    """A message: the error in CUDA's own words, the versions that were found, what helps.

    Args:
        status: the number of a cudaError_t or CUresult.
        words: what CUDA says of it.
        versions: such as "driver CUDA 12.4, packages CUDA 13.0".
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [part for part in (versions, "" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}") if part]
    about = f" ({', '.join(found)})" if found else ""
    return f"{words}{about}" + (f"; {HELP[status]}" if status in HELP else "")
