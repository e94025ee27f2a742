"""Compiles a DSL's witnesses for GPUs that need not be there: `python -m tests.witnesses.compile DSL ARCHS PROBLEM...`,
the architectures with commas between.

Prints a line of JSON a witness: how many bytes of machine code came out for each architecture, or what went wrong. TIRx
leaves CUDA source until a GPU is there, so that source is given to NVRTC here, with the headers of the CUDA packages
beside torch. One process for all, since importing a DSL costs as much as compiling a kernel.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path


def cute_compiler(archs: list[str]) -> Callable[[str, str], int]:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    # Read once, when the DSL is imported.
    os.environ.update(CUTE_DSL_ARCH=archs[0], CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
    from tests.witnesses.check import witness

    def compile_one(problem: str, arch: str) -> int:
        witness("cute", problem).compile_for(arch)
        made = list(Path(folder).glob(f"*{arch}*.cubin"))
        size = sum(path.stat().st_size for path in made)
        for path in made:
            path.unlink()
        return size

    return compile_one


def tirx_compiler() -> Callable[[str, str], int]:
    import nvidia

    toolkit = Path(next(iter(nvidia.__path__))) / "cu13"
    os.environ["CUDA_PATH"] = str(toolkit)
    from tvm.support import nvcc

    from tests.witnesses.check import witness

    def compile_one(problem: str, arch: str) -> int:
        size = 0
        for executable in as_list(witness("tirx", problem).compile_for(arch)):
            for module in executable.mod.imports:
                source = module.inspect_source()
                options = [f"-I{toolkit}/include/cccl"]
                size += len(nvcc.compile_cuda(source, "cubin", arch=arch, options=options, compiler="nvrtc"))
        return size

    return compile_one


def as_list(compiled: object) -> list:
    return list(compiled) if isinstance(compiled, list | tuple) else [compiled]


def main(dsl: str, archs: list[str], problems: list[str]) -> None:
    compile_one = cute_compiler(archs) if dsl == "cute" else tirx_compiler()
    for problem in problems:
        try:
            sizes = {arch: compile_one(problem, arch) for arch in archs}
            print(json.dumps({"problem": problem, "bytes": sizes}), flush=True)
        except Exception:
            print(json.dumps({"problem": problem, "error": traceback.format_exc()[-3000:]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), sys.argv[3:])
