"""Which modules are built, by name: (source, defines). `c` names are for checks: a wait that hangs traps."""
FORWARD = {}
for d in (64, 128, 256):
    FORWARD[f"f{d}"] = dict(HEAD_DIM=d)
    FORWARD[f"f{d}b"] = dict(HEAD_DIM=d, BAND=1)
# Variants to be timed beside the first choice.
TRIALS = {
    "f128_n176": dict(HEAD_DIM=128, FWD_N=176),
    "f128_noturn": dict(HEAD_DIM=128, FWD_TURNS=0),
    "f128_simple": dict(HEAD_DIM=128, FWD_OVERLAP=0),
    "f128_eager": dict(HEAD_DIM=128, FWD_LAZY=0),
    "f128b_noturn": dict(HEAD_DIM=128, FWD_TURNS=0, BAND=1),
    "f128b_n176": dict(HEAD_DIM=128, FWD_N=176, BAND=1),
    "f64_noturn": dict(HEAD_DIM=64, FWD_TURNS=0),
    "f64_2n192": dict(HEAD_DIM=64, FWD_GROUPS=2, FWD_N=192),
    "f64_2n128": dict(HEAD_DIM=64, FWD_GROUPS=2, FWD_N=128),
    "f64b_noturn": dict(HEAD_DIM=64, FWD_TURNS=0, BAND=1),
    "f64b_2n128": dict(HEAD_DIM=64, FWD_GROUPS=2, FWD_N=128, BAND=1),
    "f256_noturn": dict(HEAD_DIM=256, FWD_TURNS=0),
    "f256b_noturn": dict(HEAD_DIM=256, FWD_TURNS=0, BAND=1),
    "f256_n64": dict(HEAD_DIM=256, FWD_N=64),
}
FORWARD.update(TRIALS)
CHECKS = {"c" + name: dict(x, WATCHDOG=1) for name, x in FORWARD.items() if "_" not in name or "n176" in name or "_3" in name or "simple" in name}
for d in (64, 128, 256):
    w = dict(HEAD_DIM=d, WATCHDOG=1)
    CHECKS[f"cf{d}len"] = dict(w, LENGTHS=1, BAND=1)
    CHECKS[f"cf{d}seg"] = dict(w, SEGMENTS=1, PLAN=1, BAND=1)
    CHECKS[f"cf{d}plan"] = dict(w, PLAN=1)
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
    "b128_late": dict(HEAD_DIM=128, BWD_EARLY=0),
    "b128_rounded": dict(HEAD_DIM=128, BWD_ROUNDED=1),
})
for d in (64, 128, 256):
    w = dict(HEAD_DIM=d, WATCHDOG=1)
    BACKWARD[f"cb{d}"] = dict(w)
    BACKWARD[f"cb{d}b"] = dict(w, BAND=1)
    BACKWARD[f"cb{d}b_free"] = dict(w, BAND=1, FREE_ORDER=1)
    BACKWARD[f"cb{d}len"] = dict(w, LENGTHS=1, BAND=1)
    BACKWARD[f"cb{d}seg"] = dict(w, SEGMENTS=1, PLAN=1, BAND=1)
    BACKWARD[f"cb{d}plan"] = dict(w, PLAN=1)
    BACKWARD[f"cb{d}shape"] = dict(w, SOFTCAP=1, ALIBI=1, BIAS=1, SINKS=1, BAND=1, D_BIAS=1)
    BACKWARD[f"cb{d}drop"] = dict(w, DROPOUT=1, BAND=1)
    BACKWARD[f"cb{d}half"] = dict(w, ELEMENT=1, BIAS=2)
ALL = {name: ("forward.cu", x) for name, x in FORWARD.items()} | {name: ("backward.cu", x) for name, x in BACKWARD.items()}
