"""The block size that vLLM really uses for a hybrid model. No I/O.

``Platform._align_hybrid_block_size`` of vLLM 0.33.0: an attention page must hold one state of
the linear-attention layers, and the block size is raised until it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KERNEL_BLOCK = 16
_CONV_BYTES = 2
_KEYS = (
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_PACKED4 = "int4_per_token_head"
_PACKED8 = ("int8_per_token_head", "fp8_per_token_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model's ``config.json`` says about its layers."""

    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    state_dtype: str = "float32"


def parse_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a hybrid model; None: it is none, or is described otherwise."""
    text = config.get("text_config")
    values = text if isinstance(text, Mapping) else config
    numbers = [values.get(key) for key in _KEYS]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        return None
    kv_heads, head_dim, key_heads, value_heads, key_dim, value_dim, conv = map(int, numbers)  # type: ignore[arg-type]
    return ModelShape(
        kv_heads=kv_heads,
        head_dim=head_dim,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=conv,
        state_dtype=str(values.get("mamba_ssm_dtype", "float32")),
    )


def token_bytes(shape: ModelShape, tensor_parallel: int, kv_dtype: str) -> int | None:
    """Bytes of one token in one layer on one card; None: a type whose layout is not known."""
    heads = max(1, shape.kv_heads // tensor_parallel)
    dim = shape.head_dim
    if kv_dtype in ("auto", "bfloat16", "float16"):
        content = 4 * dim
    elif kv_dtype == _PACKED4:
        content = dim + 8  # two packed halves, and a scale of four bytes for K and for V
    elif kv_dtype in _PACKED8:
        content = 2 * dim + 8
    elif kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        content = 2 * dim
    else:
        return None
    return heads * content


def state_bytes(shape: ModelShape, tensor_parallel: int, state_dtype: str) -> int:
    """Bytes of one state in one layer on one card, without speculative tokens."""
    dtype = shape.state_dtype if state_dtype == "auto" else state_dtype
    item = 4 if dtype == "float32" else 2
    key, value = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    conv = (shape.conv - 1) * (2 * key + value) // tensor_parallel * _CONV_BYTES
    heads = shape.value_heads // tensor_parallel
    return conv + heads * shape.value_dim * shape.key_dim * item


def aligned_block(
    shape: ModelShape,
    *,
    tensor_parallel: int,
    kv_dtype: str,
    state_dtype: str,
    block_size: int | None,
) -> int | None:
    """Tokens in a block once vLLM has aligned it; None: the type of the cache is not known."""
    page = token_bytes(shape, tensor_parallel, kv_dtype)
    if page is None:
        return None
    given = block_size or _KERNEL_BLOCK
    step = max(_KERNEL_BLOCK, given)
    state = state_bytes(shape, tensor_parallel, state_dtype)
    raised = step * -(-state // (step * page))
    return max(given, raised)
