"""Compiles the Hopper kernels as the crate does, by NVRTC, on a machine without a GPU: nvrtc.py LIBNVRTC [SECONDS]. Prints how long each took."""
import ctypes as C, os, sys, time

lib = C.CDLL(sys.argv[1])
here = os.path.dirname(os.path.abspath(__file__)) + "/../hopper/"
read = lambda name: open(here + ("../" if "/" in name else "") + name, "rb").read()
MASKS = (["TILE_LIST=1"], ["SEGMENTS=1", "BAND=1"])
WANTED = [("forward.cu", []), ("forward.cu", ["BAND=1"]), ("backward.cu", []), ("backward.cu", ["BAND=1"]),
          *(("forward.cu", [*mask, "LENGTHS=1", "SOFTCAP=1", "ALIBI=1", "BIAS=1", "SINKS=1", "DROPOUT=1"]) for mask in MASKS),
          *(("backward.cu", [*mask, "LENGTHS=1", "SOFTCAP=1", "ALIBI=1", "BIAS=2", "D_BIAS=1", "SINKS=1", "DROPOUT=1", "ELEMENT=1"]) for mask in MASKS)]
for width in (64, 128, 256):
    for source, defines in WANTED:
        program = C.c_void_p()
        all = [x for x in sorted(os.listdir(here)) if x.endswith(".cuh")] + ["generated/hopper.cuh"]
        names, headers = (C.c_char_p * len(all))(*(x.encode() for x in all)), (C.c_char_p * len(all))(*map(read, all))
        assert lib.nvrtcCreateProgram(C.byref(program), read(source), source.encode(), len(all), headers, names) == 0
        options = [b"-arch=sm_90a", b"-std=c++17", f"-DHEAD_DIM={width}".encode()] + [b"-D" + d.encode() for d in defines]
        start = time.time()
        code = lib.nvrtcCompileProgram(program, len(options), (C.c_char_p * len(options))(*options))
        size = C.c_size_t()
        lib.nvrtcGetProgramLogSize(program, C.byref(size))
        log = C.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        print(source, width, *defines, "ok" if code == 0 else "FAILED", f"{time.time() - start:.1f} s", log.value.decode()[:2000] if code else "", flush=True)
