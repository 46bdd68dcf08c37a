"""Checks that a wheel's libraries run on a manylinux platform: `audit.py WHEEL manylinux_2_28`. Run by `python/wheel`.

Two independent checks: the symbol versions and library names in the ELF files, and the result of auditwheel.
"""

import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# The libraries that every Linux with glibc has: parts of glibc, and `libgcc_s`, which belongs to GCC.
EVERYWHERE = {
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libc.so.6",
    "libdl.so.2",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
}


def main() -> None:
    wheel, platform = sys.argv[1:]
    allowed = tuple(int(number) for number in platform.removeprefix("manylinux_").split("_"))
    complaints = [complaint for name, elf in elf_files(wheel) for complaint in audit(name, elf, allowed)]
    complaints += ask_auditwheel(wheel, allowed)
    if complaints:
        sys.exit("\n".join([f"{wheel} is not for {platform}:", *complaints]))


def elf_files(wheel: str) -> Iterator[tuple[str, ELFFile]]:
    """The ELF files in a wheel. Exits when there is none."""
    found = 0
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if (data := content.read(name)).startswith(b"\x7fELF"):
                found += 1
                yield name, ELFFile(io.BytesIO(data))
    if not found:
        sys.exit(f"{wheel} contains no library to check")


def audit(name: str, elf: ELFFile, allowed: tuple[int, ...]) -> Iterator[str]:
    """Prints a file's requirements, and yields a complaint for each one that the platform does not meet."""
    versions: dict[tuple[int, ...], str] = {}
    libraries = set()
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            libraries |= {tag.needed for tag in section.iter_tags("DT_NEEDED")}
        if isinstance(section, GNUVerNeedSection):
            for library, symbols in section.iter_versions():
                for symbol in symbols:
                    if match := re.fullmatch(r"GLIBC_([0-9.]+)", symbol.name):
                        versions[tuple(map(int, match[1].split(".")))] = library.name
    newest = max(versions, default=())
    text = ".".join(map(str, newest)) or "none"
    print(f"{name}: newest symbols of glibc: {text}; libraries: {', '.join(sorted(libraries))}")
    for version, library in sorted(versions.items()):
        if version > allowed:
            yield f"{name} needs symbols of GLIBC_{'.'.join(map(str, version))} from {library}"
    for library in sorted(libraries - EVERYWHERE):
        yield f"{name} needs {library}, which not every Linux has"


def ask_auditwheel(wheel: str, allowed: tuple[int, ...]) -> list[str]:
    """The complaints of auditwheel about the wheel."""
    result = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
    output = " ".join(result.stdout.split())
    match = re.search(r'following platform tag: "(?:\w*\.)?(manylinux_(\d+)_(\d+)_\w+)"', output)
    if result.returncode or not match:
        return [f"auditwheel names no manylinux platform for it: {output or result.stderr.strip()}"]
    print(f"auditwheel: {match[1]}")
    return [] if (int(match[2]), int(match[3])) <= allowed else [f"auditwheel says that it is for {match[1]}"]


if __name__ == "__main__":
    main()
