"""Compares the machine code of two folders of cubins: sass.py BEFORE AFTER. The folders are what `QKV_CUBINS=DIR QKV_EVERY_CASE=1
cargo test -p qkv-cuda every_program_compiles` writes. Kernels are compared by code, so that renamed ones are found."""
import hashlib, os, struct, sys


def kernels(path):
    """Digests of the code sections of an ELF file, and sizes of its parameter blocks."""
    elf = open(path, "rb").read()
    at, size, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, at + i * size) for i in range(count)]
    found = []
    for s in sections:
        start = sections[names][4] + s[0]
        name = elf[start:elf.index(b"\0", start)].decode()
        if name.startswith(".text."):
            found.append(hashlib.sha256(elf[s[4]:s[4] + s[5]]).hexdigest()[:16])
        elif name.startswith(".nv.constant0."):
            found.append(f"{s[5]} bytes")
    return sorted(found)


before, after = sys.argv[1:3]
differ = 0
for name in sorted(set(os.listdir(before)) | set(os.listdir(after))):
    paths = [os.path.join(folder, name) for folder in (before, after)]
    if not all(map(os.path.exists, paths)):
        print("only in one folder:", name)
    elif kernels(paths[0]) != kernels(paths[1]):
        differ += 1
        print("differs:", name)
print(differ, "programs differ")
sys.exit(differ > 0)
