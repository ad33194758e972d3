"""Compiles functions by LLVM to code that runs wherever it is mapped: `python FILE IN OUT...`.

A process of its own, so that LLVM's memory is not that of training. It imports llvmlite, and
nothing of ours. Of each text, which defines one function, the code and its constants are laid out
as they will lie in memory: then every reference within them is known, whatever the address.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from pathlib import Path
from struct import pack_into
from struct import unpack_from as unpack

OLDEST = 20  # LLVM that takes our texts: of llvmlite 0.45
ALLOCATED, PROGRAM, RELOCATIONS = 2, 1, 4  # of ELF: SHF_ALLOC, SHT_PROGBITS and RELA
RELATIVE = (2, 4)  # R_X86_64_PC32 and PLT32, of x86-64


def be_ended_first() -> None:
    """Where memory is short, have the kernel end this process, and not the one that started it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(source: str, *targets: str) -> None:
    """Compile the texts of a file, which zero bytes separate, each into one of the targets."""
    import llvmlite.binding as llvm

    if (version := llvm.llvm_version_info[0]) < OLDEST:
        sys.exit(f"its LLVM {version} is too old: {OLDEST} is needed")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    machine = llvm.Target.from_default_triple().create_target_machine(
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    for text, target in zip(Path(source).read_text().split("\0"), targets, strict=True):
        code = image(machine.emit_object(llvm.parse_assembly(text)))
        Path(target).write_bytes(code + hashlib.sha256(code).digest())


def image(elf: bytes) -> bytes:
    """The code of an object file with one function, at its start, and its constants."""
    (offset,), (size, count, names) = unpack("<Q", elf, 40), unpack("<HHH", elf, 58)
    headers = [unpack("<IIQQQQIIQQ", elf, offset + at * size) for at in range(count)]

    def follows(at: int) -> bool:
        return not elf.startswith(b".text\0", headers[names][4] + headers[at][0])

    laid, places = bytearray(), dict[int, int]()
    parts = [
        at for at, header in enumerate(headers) if header[1] == PROGRAM and header[2] & ALLOCATED
    ]
    for at in sorted(parts, key=follows):
        start, length, alignment = (headers[at][field] for field in (4, 5, 8))
        laid.extend(b"\0" * (-len(laid) % max(1, alignment)))
        places[at] = len(laid)
        laid.extend(elf[start : start + length])
    for _, kind, _, _, start, length, symbols, changed, _, _ in headers:
        if kind != RELOCATIONS or changed not in places:
            continue
        for at in range(start, start + length, 24):
            place, info, addend = unpack("<QQq", elf, at)
            symbol = headers[symbols][4] + 24 * (info >> 32)
            (section,), (value,) = unpack("<H", elf, symbol + 6), unpack("<Q", elf, symbol + 8)
            if info & 0xFFFFFFFF not in RELATIVE or section not in places:
                sys.exit(f"the code refers to something else (relocation {info & 0xFFFFFFFF})")
            place += places[changed]
            pack_into("<i", laid, place, places[section] + value + addend - place)
    return bytes(laid)


if __name__ == "__main__":
    be_ended_first()
    main(*sys.argv[1:])
