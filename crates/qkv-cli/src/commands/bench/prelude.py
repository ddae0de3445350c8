"""What every script of `qkv bench --against torch` begins with: how it answers, and PyTorch, or an answer that there is none."""

import json
import statistics
import sys
import time
import warnings


def answer(**fields):
    print(json.dumps(fields), flush=True)


warnings.simplefilter("ignore")
try:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.functional import scaled_dot_product_attention
except Exception as error:
    answer(error=f"{type(error).__name__}: {error}", missing=True)
    sys.exit(1)

