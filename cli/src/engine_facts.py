"""What compiled code depends on in a Python environment, without importing its packages."""

import importlib.metadata
import json
import os
import sysconfig

# The second form of a name is that of builds for one version of CUDA.
PACKAGES = {
    "torch": ["torch"],
    "triton": ["triton", "pytorch-triton"],
    "vllm": ["vllm"],
    "cuda": ["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"],
}


def facts():
    """The facts by name; those of packages that are not installed are missing."""
    found = {"python": sysconfig.get_config_var("SOABI"), "libc": os.confstr("CS_GNU_LIBC_VERSION")}
    for fact, packages in PACKAGES.items():
        for package in packages:
            try:
                found[fact] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                pass
    return {fact: value for fact, value in found.items() if value}


if __name__ == "__main__":
    print(json.dumps(facts()))
