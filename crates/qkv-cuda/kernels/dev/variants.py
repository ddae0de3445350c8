"""Which modules are built, by name: (source, defines). `c` names are for checks: a wait that takes too long continues instead of hanging."""
FORWARD = {}
for d in (64, 128, 256):
    FORWARD[f"f{d}"] = dict(HEAD_DIM=d)
    FORWARD[f"f{d}b"] = dict(HEAD_DIM=d, BAND=1)
# Variants to be timed against the first choice.
TRIALS = {
    "f128_n176": dict(HEAD_DIM=128, FWD_N=176),
    "f128_n160": dict(HEAD_DIM=128, FWD_N=160),
    "f128_noturn": dict(HEAD_DIM=128, FWD_PINGPONG=0),
    "f128b_n160": dict(HEAD_DIM=128, FWD_N=160, BAND=1),
    "f64_noturn": dict(HEAD_DIM=64, FWD_PINGPONG=0),
    "f256_turn": dict(HEAD_DIM=256, FWD_PINGPONG=1),
}
FORWARD.update(TRIALS)
CHECKS = {"c" + name: dict(x, WATCHDOG=1) for name, x in FORWARD.items() if "_" not in name or "n176" in name or "n160" in name}
for d in (64, 128, 256):
    w = dict(HEAD_DIM=d, WATCHDOG=1)
    CHECKS[f"cf{d}len"] = dict(w, LENGTHS=1, BAND=1)
    CHECKS[f"cf{d}seg"] = dict(w, SEGMENTS=1, BAND=1)
    CHECKS[f"cf{d}plan"] = dict(w, TILE_LIST=1)
    CHECKS[f"cf{d}planlen"] = dict(w, TILE_LIST=1, LENGTHS=1)
    CHECKS[f"cf{d}planhalf"] = dict(w, TILE_LIST=1, ELEMENT=1, BIAS=2)
    CHECKS[f"cf{d}planall"] = dict(w, TILE_LIST=1, LENGTHS=1, SOFTCAP=1, ALIBI=1, BIAS=1, SINKS=1, DROPOUT=1)
    CHECKS[f"cf{d}shape"] = dict(w, SOFTCAP=1, ALIBI=1, BIAS=1, SINKS=1, BAND=1)
    CHECKS[f"cf{d}drop"] = dict(w, DROPOUT=1, BAND=1)
    CHECKS[f"cf{d}half"] = dict(w, ELEMENT=1, BIAS=2)
FORWARD.update(CHECKS)
BACKWARD = {}
for d in (64, 128, 256):
    BACKWARD[f"b{d}"] = dict(HEAD_DIM=d)
    BACKWARD[f"b{d}b"] = dict(HEAD_DIM=d, BAND=1)
    BACKWARD[f"b{d}_free"] = dict(HEAD_DIM=d, FREE_ORDER=1)
    BACKWARD[f"b{d}b_free"] = dict(HEAD_DIM=d, BAND=1, FREE_ORDER=1)
BACKWARD.update({
    "b64_late": dict(HEAD_DIM=64, BWD_SCORES_BEFORE_DQ=0),
})
for d in (64, 128, 256):
    w = dict(HEAD_DIM=d, WATCHDOG=1)
    BACKWARD[f"cb{d}"] = dict(w)
    BACKWARD[f"cb{d}b"] = dict(w, BAND=1)
    BACKWARD[f"cb{d}b_free"] = dict(w, BAND=1, FREE_ORDER=1)
    BACKWARD[f"cb{d}len"] = dict(w, LENGTHS=1, BAND=1)
    BACKWARD[f"cb{d}seg"] = dict(w, SEGMENTS=1, BAND=1)
    BACKWARD[f"cb{d}plan"] = dict(w, TILE_LIST=1)
    BACKWARD[f"cb{d}plan_free"] = dict(w, TILE_LIST=1, FREE_ORDER=1)
    BACKWARD[f"cb{d}planlen"] = dict(w, TILE_LIST=1, LENGTHS=1)
    BACKWARD[f"cb{d}planhalf"] = dict(w, TILE_LIST=1, ELEMENT=1, BIAS=2)
    BACKWARD[f"cb{d}planall"] = dict(w, TILE_LIST=1, LENGTHS=1, SOFTCAP=1, ALIBI=1, BIAS=1, SINKS=1, DROPOUT=1, D_BIAS=1)
    BACKWARD[f"cb{d}shape"] = dict(w, SOFTCAP=1, ALIBI=1, BIAS=1, SINKS=1, BAND=1, D_BIAS=1)
    BACKWARD[f"cb{d}drop"] = dict(w, DROPOUT=1, BAND=1)
    BACKWARD[f"cb{d}half"] = dict(w, ELEMENT=1, BIAS=2)
# Masks, timed per kept tile.
MASKS = {"band": dict(BAND=1), "seg": dict(SEGMENTS=1), "segb": dict(SEGMENTS=1, BAND=1), "plan": dict(TILE_LIST=1)}
for d in (64, 128):
    for mask, defines in MASKS.items():
        FORWARD[f"mf{d}{mask}"] = BACKWARD[f"mb{d}{mask}"] = dict(defines, HEAD_DIM=d)
# Decoding: stages and splits by name.
GENERAL = dict(ELEMENT=1, WIDTH=128, ROWS=64, COLS=64, QUERY_TILE=64, KEY_TILE=64)
DECODE = {"d128_s3": GENERAL}
DECODE_HOPPER = {"h128_s3": GENERAL}
DECODE_PLAIN = {f"p128_s{s}_b{b}_p{p}": dict(GENERAL, STAGES=s, BLOCKS=b, SPLIT_KEYS=p) for s, b, p in ((2, 3, 256), (2, 3, 512), (2, 3, 1024), (3, 2, 512), (6, 1, 512))}
ALL = {name: ("forward.cu", x) for name, x in FORWARD.items()} | {name: ("backward.cu", x) for name, x in BACKWARD.items()} | {name: ("decode", x) for name, x in DECODE.items()} | {name: ("hopper/decode", x) for name, x in DECODE_HOPPER.items()} | {name: ("hopper/decode_plain", x) for name, x in DECODE_PLAIN.items()}
