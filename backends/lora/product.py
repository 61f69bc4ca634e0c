"""Products with frozen weights, by the faster of the two libraries that torch has for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[T, I] times weight[O, I] transposed, plus bias[O]: [T, O]. Autograd does not see it.

    On a CPU torch gives float32 products to MKL, which keeps to AVX2 on processors that are not
    Intel's. oneDNN, in the same wheel, takes AVX-512 wherever it is (`backends/README.md`).
    """
    if _HAS_ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
