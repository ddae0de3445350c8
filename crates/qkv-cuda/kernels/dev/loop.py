"""Shows what the compiler made of the main loop: loop.py MODULE.cubin ... Prints its length, the instructions that betray code compiled for divergent lanes
(WARPSYNC, R2UR) or spilled registers (LDL, STL), and the order of products, barriers, waits and exponentials. NVDISASM: the disassembler."""
import collections, os, re, subprocess, sys

KINDS = "HGMMA R2UR WARPSYNC BSSY LDL STL R2P SHFL MUFU".split()
MARKS = re.compile(r"\b(HGMMA|BAR\.\w+|BRA|BSSY|VOTE|WARPGROUP\.\w+|SYNCS\.\w+|MUFU\.EX2)")


def instructions(path):
    """The instructions of the main kernel, each as text, and the positions of labels."""
    text = subprocess.run([os.environ.get("NVDISASM", "nvdisasm"), "-c", path], capture_output=True, text=True, check=True).stdout
    main = next(x for x in re.split(r"\n\s*\.section\s+", text) if re.match(r"\.text\.attention_(forward|backward),", x))
    found, labels = [], {}
    for line in main.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif word := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(word[1])
    return found, labels


for path in sys.argv[1:]:
    found, labels = instructions(path)
    back = ((labels[to[1]], at) for at, x in enumerate(found) if (to := re.search(r"BRA.*?(\.L_x_\d+)", x)) and labels.get(to[1], at + 1) <= at)
    # The first loop that has products is the innermost.
    first, last = next((a, b) for a, b in back if any("HGMMA" in x for x in found[a : b + 1]))
    body = found[first : last + 1]
    kinds = collections.Counter(re.sub(r"^@!?U?P\w+ ", "", x).split()[0].split(".")[0] for x in body)
    print(path, len(found), "instructions, the loop", len(body), *(f"{kind} {kinds[kind]}" for kind in KINDS))
    order = []
    for at, x in enumerate(body):
        if mark := MARKS.search(x):
            if order and order[-1][0] == mark[1]:
                order[-1][2] = at
            else:
                order.append([mark[1], at, at])
    print("   ", " ".join(f"{mark} {a}" + (f"-{b}" if b > a else "") for mark, a, b in order))
