"""What the libraries in a wheel ask of the system: `audit.py WHEEL manylinux_2_28`. Run by `python/wheel`.

Two opinions: the versions of the symbols and the names of the libraries, read from the files, and what auditwheel says.
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

# What each Linux with glibc has, all of glibc but the last, which comes with GCC.
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
    """The programs and libraries in it; there is at least one."""
    found = 0
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if (data := content.read(name)).startswith(b"\x7fELF"):
                found += 1
                yield name, ELFFile(io.BytesIO(data))
    if not found:
        sys.exit(f"{wheel} has no library in it, so there is nothing that could be for a platform")


def audit(name: str, elf: ELFFile, allowed: tuple[int, ...]) -> Iterator[str]:
    """Tells what it found, and gives what is wrong."""
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
            yield f"{name} asks {library} for symbols of GLIBC_{'.'.join(map(str, version))}"
    for library in sorted(libraries - EVERYWHERE):
        yield f"{name} asks for {library}, which not every Linux has"


def ask_auditwheel(wheel: str, allowed: tuple[int, ...]) -> list[str]:
    """What auditwheel has to say against it."""
    said = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
    words = " ".join(said.stdout.split())
    match = re.search(r'following platform tag: "(?:\w*\.)?(manylinux_(\d+)_(\d+)_\w+)"', words)
    if said.returncode or not match:
        return [f"auditwheel names no manylinux platform for it: {words or said.stderr.strip()}"]
    print(f"auditwheel: {match[1]}")
    return [] if (int(match[2]), int(match[3])) <= allowed else [f"auditwheel says that it is for {match[1]}"]


if __name__ == "__main__":
    main()
