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


def version_of(packages):
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def facts():
    """The facts by name: `none` for packages that are not installed, which is compared like versions."""
    found = {"python": sysconfig.get_config_var("SOABI"), "libc": os.confstr("CS_GNU_LIBC_VERSION")}
    found.update((fact, version_of(packages)) for fact, packages in PACKAGES.items())
    return {fact: value or "none" for fact, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(facts()))
