"""Cases of the Rust conformance suite, exported with the engine's results, through Python: bit for bit the same.

`cargo run -p qkv-conformance --example export -- FILE` writes them; `QKV_CASES` names the file.
"""

import json
import os

import numpy as np
import pytest

from qkv import Attention

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
PATH = os.environ.get("QKV_CASES", "target/python/cases")


def cases():
    with open(PATH, "rb") as file:
        while line := file.readline():
            case = json.loads(line)
            tensors = {}
            for name, (dtype, shape) in case["tensors"].items():
                dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
                count = int(np.prod(shape))
                tensors[name] = np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype).reshape(shape)
            yield case["name"], case["type"], Attention.from_json(case["attention"]), tensors


@pytest.mark.skipif(not os.path.exists(PATH), reason="no exported conformance cases (`cargo xtask test` exports them)")
def test_every_exported_case_has_the_bits_of_the_engine():
    count = 0
    for name, dtype, attention, tensors in cases():
        count += 1
        given = {n: t for n, t in tensors.items() if "." not in n}
        upstream = {n: given.pop(n) for n in ("d_out", "d_lse", "d_entropy", "d_log_prob") if n in given}
        for pair in ("segments", "buckets"):
            if f"{pair}_q" in given:
                given[pair] = (given.pop(f"{pair}_q"), given.pop(f"{pair}_k"))
        out = attention.forward(**given, seed=99)
        grad = attention.backward(**given, out=out, **upstream, seed=99)
        for n, expected in tensors.items():
            side, _, field = n.partition(".")
            if side in ("out", "grad") and field:
                got = np.asarray(getattr(out if side == "out" else grad, field))
                same = got.reshape(expected.shape).tobytes() == expected.tobytes()
                assert same, f"{name} in {dtype}: {n}"
    assert count > 20
