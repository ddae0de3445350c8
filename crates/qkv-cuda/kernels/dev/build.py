"""Builds modules for sm_90a: build.py OUT_DIR [NAME-PREFIX | =NAME ... | missing]. Prints registers, spills and warnings of each.
FLAGS: further compiler options, such as -lineinfo for a profiler."""
import os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from variants import ALL

here, out = os.path.dirname(os.path.abspath(__file__)), sys.argv[1]
os.makedirs(out, exist_ok=True)


def build(name):
    source, defines = ALL[name]
    path = f"{here}/../hopper/{source}"
    if "decode" in source:
        path = f"{out}/{name}.cu"
        parts = [f"general/{x}.cuh" for x in ("element", "../generated/general", "philox", "mask", "tile", "score", "decode_scores")] + ["hopper/decode_tma.cuh"] * ("hopper" in source) + [source + ".cu", "general/merge.cu"]
        open(path, "w").write("".join(open(f"{here}/../{x}").read() for x in parts))
    flags = [f"-D{k}={v}" for k, v in defines.items()]
    r = subprocess.run([os.environ.get("NVCC", "nvcc"), "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin",
                        "-Xptxas", "-v", "-I", here + "/../hopper", "-I", here + "/..", *os.environ.get("FLAGS", "").split(), *flags, "-o", f"{out}/{name}.cubin", path],
                       capture_output=True, text=True)
    words = [l.strip() for l in (r.stdout + r.stderr).splitlines()
             if any(w in l for w in ("error", "C75", "spill", "Used")) and "0 bytes spill stores, 0 bytes spill loads" not in l and "C7519" not in l]
    return name, r.returncode, words


fresh = lambda n: os.path.exists(f"{out}/{n}.cubin")
names = [n for n in ALL if not fresh(n)] if sys.argv[2:] == ["missing"] else [n for n in ALL if len(sys.argv) < 3 or any(n == p[1:] if p[0] == "=" else n.startswith(p) for p in sys.argv[2:])]
with ThreadPoolExecutor(os.cpu_count()) as pool:
    for name, code, words in pool.map(build, names):
        print(name, "ok" if code == 0 else "FAILED", *words, sep="\n    " if code or any("spill" in w or "C75" in w for w in words) else " | ", flush=True)
