"""Builds the part of NATTEN 0.21.7 that 3D neighborhood attention forward on Hopper needs, in minutes instead of hours.

    python benchmarks/natten_hopper/build.py OUT [--python PYTHON] [--jobs N]

OUT becomes a folder for PYTHONPATH that holds `natten`: its Python front end, and a libnatten made of six translation
units: the two bf16 head_dim-64 kernels, their entry, token_permute, token_unpermute, and our bindings (torch operators,
so no Python headers are needed). nvcc's flags are those of NATTEN's CMakeLists.txt for sm_90a. PYTHON is an interpreter
with the CUDA build of torch that the library will be loaded into (default: this one); no GPU is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSION = "0.21.7"
KERNELS = (  # the kernels NATTEN 0.21.7 has for bf16, head_dim 64, 3D, not causal; the first is its default
    "hopper_fna3d_bfloat16_64x128x64_Q4x4x4_KV4x4x8_causal0x0x0",
    "hopper_fna3d_bfloat16_64x128x64_Q4x4x4_KV2x8x8_causal0x0x0",
)
KERNEL_COUNT = 244  # of all dtypes, ranks and head dims: as many files, one kernel in each
DEFINES = (
    "NDEBUG",
    "WITH_CUDA",
    "NATTEN_WITH_CUTLASS",
    "NATTEN_WITH_HOPPER_FNA=1",
    "CUTLASS_ENABLE_TENSOR_CORE_MMA=1",
    "_GLIBCXX_USE_CXX11_ABI=1",
)
FLAGS = (
    *("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--use_fast_math", "--expt-relaxed-constexpr"),
    *("--extended-lambda", "-Xcompiler=-fPIC", "-Xcompiler=-fno-strict-aliasing", "-Xfatbin=-compress-all", "-w"),
)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run([str(c) for c in command], check=True, cwd=cwd, stdout=subprocess.PIPE, text=True).stdout


def fetch(work: Path, python: str) -> Path:
    """The unpacked sdist. pip reads its metadata through setup.py, which imports torch: hence no build isolation."""
    folder, archive = work / f"natten-{VERSION}", work / f"natten-{VERSION}.tar.gz"
    if not archive.exists():
        options = ("--no-binary", "natten", "--no-deps", "--no-build-isolation", "-d", work)
        try:
            run(python, "-m", "pip", "download", "-q", f"natten=={VERSION}", *options)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"pip could not fetch {archive.name}. It reads the sdist's metadata with torch, setuptools and wheel "
                f"of {python}: install those, or put the file into {work}"
            ) from error
    if not folder.exists():
        with tarfile.open(archive) as opened:
            opened.extractall(work, filter="data")
    return folder


def generate(sdist: Path, work: Path) -> tuple[Path, list[Path]]:
    """NATTEN's generated headers, and the sources to compile: the kernels wanted, and stubs for all others."""
    root = work / "generated"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    script = sdist / "scripts" / "autogen_hopper_fna.py"
    run(sys.executable, script, "-o", root, "--num-splits", str(KERNEL_COUNT), cwd=sdist)
    sources = []
    for path in sorted((root / "autogen/src/cuda/hopper_fna").glob("*.cu")):
        defined = re.findall(r"^void (\w+)\(", path.read_text(), re.M)
        if set(defined) & set(KERNELS):
            sources.append(path)
    if len(sources) != len(KERNELS):
        raise SystemExit(f"expected {len(KERNELS)} generated sources, found {sources}")
    headers = root / "autogen/include"
    declarations = re.findall(
        r"^void (\w+)(\([^;]*\));", (headers / "natten_autogen/cuda/hopper_fna/kernels.h").read_text(), re.M
    )
    stubs = ['#include "natten_autogen/cuda/hopper_fna/kernels.h"', "namespace natten::cuda::fna_hopper {"]
    for name, arguments in declarations:
        if name not in KERNELS:
            stubs.append(f'void {name}{arguments} {{ throw std::runtime_error("{name} was not built"); }}')
    stubs.append("}")
    stub_file = root / "stubs.cu"
    stub_file.write_text("\n".join(stubs) + "\n")
    return headers, [*sources, stub_file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter whose torch the library is built for")
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    parser.add_argument(
        "--work", type=Path, help="folder for sources and objects (default: OUT.build); what it holds is not made again"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options = parser.parse_args()
    out = options.out.absolute()
    work = (options.work or out.with_name(out.name + ".build")).absolute()
    work.mkdir(parents=True, exist_ok=True)

    sdist = fetch(work, options.python)
    headers, kernels = generate(sdist, work)
    torch_dir = Path(run(options.python, "-c", "import torch; print(torch.__path__[0])").strip())
    includes = [
        *(HERE / "include", sdist / "csrc/include", headers, sdist / "third_party/cutlass/include"),
        *(torch_dir / "include", torch_dir / "include/torch/csrc/api/include"),
        *sorted(torch_dir.parent.glob("nvidia/*/include")),  # cusparse.h and others, which torch's headers include
    ]
    entries = [sdist / "csrc/src" / n for n in ("hopper_fna_forward.cu", "token_permute.cu", "token_unpermute.cu")]

    def compile_one(source: Path) -> Path:
        target = work / (source.stem + ".o")
        if not target.exists():
            flags = [*FLAGS, *(f"-D{d}" for d in DEFINES), *(f"-I{i}" for i in includes)]
            temporary = target.with_suffix(".tmp.o")
            run(options.nvcc, *flags, "-c", source, "-o", temporary)
            temporary.replace(target)
            print("compiled", source.name, flush=True)
        return target

    with ThreadPoolExecutor(options.jobs) as pool:
        objects = list(pool.map(compile_one, [*kernels, *entries, HERE / "bindings.cu"]))

    package = out / "natten"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(sdist / "src/natten", package)
    shutil.copy(HERE / "libnatten.py", package)
    library = package / "libnatten_hopper.so"
    libraries = [f"-L{torch_dir / 'lib'}", *(f"-l{n}" for n in ("c10", "torch", "torch_cpu", "c10_cuda", "torch_cuda"))]
    run(options.nvcc, "-shared", "-gencode=arch=compute_90a,code=sm_90a", *objects, "-o", library, *libraries)
    run("strip", library)
    print(f"{library}: {library.stat().st_size / 2**20:.1f} MiB; use it with PYTHONPATH={out}")


if __name__ == "__main__":
    main()
