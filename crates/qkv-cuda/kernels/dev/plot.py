"""Draws `docs/h200.svg` from measurements of a GPU: plot.py ROWS.jsonl OUT.svg, where the rows are those of
`qkv bench --device cuda --against torch --json`."""
import json, sys

rows = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
for row in rows:
    row["b"], row["hq"], row["hk"], row["n"], row["m"], row["d"] = (int(x) for x in row["shape"].split(","))
    if row.get("torch_median_ms"):
        row["torch"] = row["tflops"] * row["median_ms"] / row["torch_median_ms"]
INK, GREY, LINE, OURS, THEIRS = "#1f2328", "#656d76", "#d0d7de", "#0969da", "#bc4c00"
W, H, LEFT, TOP, GAP = 250, 150, 46, 76, 34
out = []
text = lambda x, y, s, size=12, fill=INK, anchor="start", weight="normal": out.append(
    f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">{s}</text>')
text(LEFT, 22, "Attention on one H200, bf16: TFLOP/s against tokens", 15, weight="bold")
text(LEFT, 42, "16,384 tokens in all, heads × width 2,048. Blue: qkv. Orange: PyTorch's cuDNN. Solid: full; dashed: causal (half the operations).", 11, GREY)
ns = sorted({row["n"] for row in rows if row["direction"] != "decode"})
for r, direction in enumerate(("forward", "backward")):
    for c, d in enumerate((64, 128, 256)):
        x0, y0 = LEFT + c * (W + GAP), TOP + r * (H + 52)
        top = 800
        text(x0, y0 - 6, f"{direction}, width {d}", 12, weight="bold")
        for t in range(0, top + 1, 200):
            y = y0 + H - H * t / top
            out.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + W}" y2="{y:.1f}" stroke="{LINE}"/>')
            text(x0 - 6, y + 4, t, 10, GREY, "end")
        place = lambda n: x0 + 14 + (W - 28) * ns.index(n) / max(1, len(ns) - 1)
        for n in ns:
            text(place(n), y0 + H + 15, f"{n:,}", 10, GREY, "middle")
        for key, color in (("torch", THEIRS), ("tflops", OURS)):
            for causal in (False, True):
                some = sorted((row["n"], row[key]) for row in rows if row["direction"] == direction and row["d"] == d and row["causal"] == causal and key in row)
                at = [(place(n), y0 + H - H * v / top) for n, v in some]
                dash = ' stroke-dasharray="5 3"' if causal else ""
                out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
                out.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in at)
y0 = TOP + 2 * (H + 52) + 4
text(LEFT, y0 - 6, "decoding one token: GB/s of keys and values read (batch, query heads, key heads, keys; width 128)", 12, weight="bold")
width = 3 * W + 2 * GAP
for t in range(0, 5001, 1000):
    x = LEFT + 120 + (width - 120) * t / 5000
    out.append(f'<line x1="{x:.1f}" y1="{y0}" x2="{x:.1f}" y2="{y0 + 6 * 26}" stroke="{LINE}"/>')
    text(x, y0 + 6 * 26 + 14, f"{t:,}", 10, GREY, "middle")
for i, row in enumerate(row for row in rows if row["direction"] == "decode"):
    y = y0 + i * 26 + 3
    text(LEFT + 112, y + 13, f'{row["b"]}, {row["hq"]}, {row["hk"]}, {row["m"]:,}', 11, GREY, "end")
    for k, (value, color) in enumerate(((row["gbs"], OURS), (row["gbs"] * row["median_ms"] / row["torch_median_ms"] if row.get("torch_median_ms") else 0, THEIRS))):
        out.append(f'<rect x="{LEFT + 120}" y="{y + k * 10}" width="{(width - 120) * value / 5000:.1f}" height="9" fill="{color}"/>')
full = (LEFT + width + 16, y0 + 6 * 26 + 26)
open(sys.argv[2], "w").write(
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full[0]} {full[1]}" font-family="system-ui, sans-serif">\n'
    f'<rect width="{full[0]}" height="{full[1]}" fill="#ffffff"/>\n' + "\n".join(out) + "\n</svg>\n")
