"""The kernels of tree attention, a tile of queries and keys at a time: `tree_triton.py` launches them.

U rows, H head dim; Q and J are the queries and keys of one tile. The kernels of each direction walk their full tiles
without a mask and then the others, by two calls of one function. Source: FlashAttention-2 (algorithms 1 and 2).
"""

from __future__ import annotations

from radixtrain.kernels.triton_runtime import tl, triton

__all__ = ["delta_kernel", "dkdv_kernel", "dq_kernel", "forward_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware has a power of two: exp(x) = 2^(x log2 e)


@triton.jit
def _load_rows(
    x, row_R, row_stride, dim_stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, INSIDE: tl.constexpr
):
    """(R, H) of x; 0 past the last row, unless all are INSIDE, and past the last dim."""
    dim_H = tl.arange(0, BLOCK_H).to(tl.int64)
    at = x + row_R.to(tl.int64)[:, None] * row_stride + dim_H[None, :] * dim_stride
    if INSIDE and HEAD_DIM == BLOCK_H:
        tile = tl.load(at)
    elif INSIDE:
        tile = tl.load(at, mask=(dim_H < HEAD_DIM)[None, :], other=0)
    else:
        tile = tl.load(at, mask=(row_R < num_rows)[:, None] & (dim_H < HEAD_DIM)[None, :], other=0)
    return tile


@triton.jit
def _store_rows(x, tile, row_R, row_stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    dim_H = tl.arange(0, BLOCK_H)
    at = x + row_R.to(tl.int64)[:, None] * row_stride + dim_H[None, :]
    inside = (row_R < num_rows)[:, None] & (dim_H < HEAD_DIM)[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, subtree_ends, key_starts, num_full, key_blocks, num_rows, heads_in_group, scale,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, out_row, out_head,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: first its full tiles, then the others."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query_Q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_QH = _load_rows(q + head * q_head, query_Q, q_row, q_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    k += head // heads_in_group * k_head
    v += head // heads_in_group * v_head
    first, last = tl.load(key_starts + block), tl.load(key_starts + block + 1)
    middle = first + tl.load(num_full + block)
    top_Q = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    sum_Q = tl.full((BLOCK_Q,), 0, tl.float32)
    out_QH = tl.full((BLOCK_Q, BLOCK_H), 0, tl.float32)
    out_QH, top_Q, sum_Q = _forward_tiles(
        out_QH, top_Q, sum_Q, q_QH, query_Q, k, v, subtree_ends, key_blocks, first, middle, num_rows, scale,
        k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, True,
    )  # fmt: skip
    out_QH, top_Q, sum_Q = _forward_tiles(
        out_QH, top_Q, sum_Q, q_QH, query_Q, k, v, subtree_ends, key_blocks, middle, last, num_rows, scale,
        k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, False,
    )  # fmt: skip
    sum_Q = tl.where(sum_Q == 0, 1, sum_Q)  # rows past the last, which are not stored
    _store_rows(out + head * out_head, out_QH / sum_Q[:, None], query_Q, out_row, num_rows, HEAD_DIM, BLOCK_H)
    tl.store(lse + head * num_rows + query_Q, (top_Q + tl.log2(sum_Q)) / LOG2_E, mask=query_Q < num_rows)


@triton.jit
def _forward_tiles(
    out_QH, top_Q, sum_Q, q_QH, query_Q, k, v, subtree_ends, key_blocks, first, last, num_rows, scale,
    k_row, k_dim, v_row, v_dim,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum after the tiles [first, last) of the list."""
    for place in range(first, last):
        key_J = tl.load(key_blocks + place) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_JH = _load_rows(k, key_J, k_row, k_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        scores_QJ = tl.dot(q_QH, tl.trans(k_JH), input_precision=PRECISION) * (scale * LOG2_E)
        if not FULL:
            end_J = tl.load(subtree_ends + key_J, mask=key_J < num_rows, other=0)
            seen_QJ = (key_J[None, :] <= query_Q[:, None]) & (query_Q[:, None] < end_J[None, :])
            scores_QJ = tl.where(seen_QJ, scores_QJ, float("-inf"))
        before_Q = top_Q
        top_Q = tl.maximum(before_Q, tl.max(scores_QJ, 1))
        base_Q = top_Q
        if not FULL:
            base_Q = tl.where(top_Q == float("-inf"), 0, top_Q)  # nothing seen yet: -inf - -inf would be NaN
        shrink_Q = tl.exp2(before_Q - base_Q)
        p_QJ = tl.exp2(scores_QJ - base_Q[:, None])
        v_JH = _load_rows(v, key_J, v_row, v_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        sum_Q = sum_Q * shrink_Q + tl.sum(p_QJ, 1)
        out_QH = tl.dot(p_QJ.to(v_JH.dtype), v_JH, out_QH * shrink_Q[:, None], input_precision=PRECISION)
    return out_QH, top_Q, sum_Q


@triton.jit
def delta_kernel(
    dout, out, dlse, delta, num_rows,
    dout_row, dout_head, dout_dim, out_row, out_head, out_dim, dlse_head, dlse_row,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`rowsum(dout * out) - dlse` of a block of queries of one head."""
    row_Q, head = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.program_id(1).to(tl.int64)
    inside_Q = row_Q < num_rows
    dout_QH = _load_rows(dout + head * dout_head, row_Q, dout_row, dout_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    out_QH = _load_rows(out + head * out_head, row_Q, out_row, out_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    dlse_Q = tl.load(dlse + head * dlse_head + row_Q.to(tl.int64) * dlse_row, mask=inside_Q, other=0)
    delta_Q = tl.sum(dout_QH.to(tl.float32) * out_QH.to(tl.float32), 1) - dlse_Q
    tl.store(delta + head * num_rows + row_Q, delta_Q, mask=inside_Q)


@triton.jit
def dq_kernel(
    q, k, v, dout, lse, delta, dq, subtree_ends, key_starts, num_full, key_blocks,
    num_rows, heads_in_group, scale,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, dout_row, dout_head, dout_dim, dq_row, dq_head,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query_Q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_QH = _load_rows(q + head * q_head, query_Q, q_row, q_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    dout_QH = _load_rows(dout + head * dout_head, query_Q, dout_row, dout_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    inside_Q = query_Q < num_rows
    lse_Q = tl.load(lse + head * num_rows + query_Q, mask=inside_Q, other=0) * LOG2_E
    delta_Q = tl.load(delta + head * num_rows + query_Q, mask=inside_Q, other=0)
    k += head // heads_in_group * k_head
    v += head // heads_in_group * v_head
    first, last = tl.load(key_starts + block), tl.load(key_starts + block + 1)
    middle = first + tl.load(num_full + block)
    dq_QH = tl.full((BLOCK_Q, BLOCK_H), 0, tl.float32)
    dq_QH = _dq_tiles(
        dq_QH, q_QH, dout_QH, lse_Q, delta_Q, query_Q, k, v, subtree_ends, key_blocks, first, middle,
        num_rows, scale, k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, True,
    )  # fmt: skip
    dq_QH = _dq_tiles(
        dq_QH, q_QH, dout_QH, lse_Q, delta_Q, query_Q, k, v, subtree_ends, key_blocks, middle, last,
        num_rows, scale, k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, False,
    )  # fmt: skip
    _store_rows(dq + head * dq_head, dq_QH * scale, query_Q, dq_row, num_rows, HEAD_DIM, BLOCK_H)


@triton.jit
def _dq_tiles(
    dq_QH, q_QH, dout_QH, lse_Q, delta_Q, query_Q, k, v, subtree_ends, key_blocks, first, last, num_rows, scale,
    k_row, k_dim, v_row, v_dim,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """dq, but for the scale, after the tiles [first, last) of the list."""
    for place in range(first, last):
        key_J = tl.load(key_blocks + place) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_JH = _load_rows(k, key_J, k_row, k_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        v_JH = _load_rows(v, key_J, v_row, v_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        scores_QJ = tl.dot(q_QH, tl.trans(k_JH), input_precision=PRECISION) * (scale * LOG2_E)
        if not FULL:
            end_J = tl.load(subtree_ends + key_J, mask=key_J < num_rows, other=0)
            seen_QJ = (key_J[None, :] <= query_Q[:, None]) & (query_Q[:, None] < end_J[None, :])
            scores_QJ = tl.where(seen_QJ, scores_QJ, float("-inf"))
        p_QJ = tl.exp2(scores_QJ - lse_Q[:, None])
        dp_QJ = tl.dot(dout_QH, tl.trans(v_JH), input_precision=PRECISION)
        ds_QJ = p_QJ * (dp_QJ - delta_Q[:, None])
        dq_QH = tl.dot(ds_QJ.to(k_JH.dtype), k_JH, dq_QH, input_precision=PRECISION)
    return dq_QH


@triton.jit
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, subtree_ends, query_runs, num_rows, heads_in_group, scale,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, dout_row, dout_head, dout_dim, dk_row, dk_head,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key/value head: of each head of the group the full tiles, then those on either side.

    PARTS: a block of `query_runs` is walked as so many blocks of BLOCK_Q queries.
    """
    block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_J = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k_JH = _load_rows(k + group * k_head, key_J, k_row, k_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    v_JH = _load_rows(v + group * v_head, key_J, v_row, v_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    end_J = tl.load(subtree_ends + key_J, mask=key_J < num_rows, other=0)
    first, last = tl.load(query_runs + 4 * block) * PARTS, tl.load(query_runs + 4 * block + 1) * PARTS
    first_full, last_full = tl.load(query_runs + 4 * block + 2) * PARTS, tl.load(query_runs + 4 * block + 3) * PARTS
    dk_JH = tl.full((BLOCK_K, BLOCK_H), 0, tl.float32)
    dv_JH = tl.full((BLOCK_K, BLOCK_H), 0, tl.float32)
    for head in range(group * heads_in_group, (group + 1) * heads_in_group):
        dk_JH, dv_JH = _dkdv_tiles(
            dk_JH, dv_JH, k_JH, v_JH, key_J, end_J, q + head * q_head, dout + head * dout_head,
            lse + head * num_rows, delta + head * num_rows, first_full, last_full, last_full, last_full,
            num_rows, scale, q_row, q_dim, dout_row, dout_dim, HEAD_DIM, BLOCK_Q, BLOCK_H, PRECISION, True,
        )  # fmt: skip
        dk_JH, dv_JH = _dkdv_tiles(
            dk_JH, dv_JH, k_JH, v_JH, key_J, end_J, q + head * q_head, dout + head * dout_head,
            lse + head * num_rows, delta + head * num_rows, first, first_full, last_full, last,
            num_rows, scale, q_row, q_dim, dout_row, dout_dim, HEAD_DIM, BLOCK_Q, BLOCK_H, PRECISION, False,
        )  # fmt: skip
    _store_rows(dk + group * dk_head, dk_JH * scale, key_J, dk_row, num_rows, HEAD_DIM, BLOCK_H)
    _store_rows(dv + group * dk_head, dv_JH, key_J, dk_row, num_rows, HEAD_DIM, BLOCK_H)


@triton.jit
def _dkdv_tiles(
    dk_JH, dv_JH, k_JH, v_JH, key_J, end_J, q, dout, lse, delta, first, gap, after_gap, last, num_rows, scale,
    q_row, q_dim, dout_row, dout_dim,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """dk, but for the scale, and dv after the query blocks [first, gap) and [after_gap, last) of one head."""
    for place in range(first, last - after_gap + gap):
        block = tl.where(place < gap, place, place - gap + after_gap)
        query_Q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_QH = _load_rows(q, query_Q, q_row, q_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        dout_QH = _load_rows(dout, query_Q, dout_row, dout_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        lse_Q = tl.load(lse + query_Q, mask=query_Q < num_rows, other=0) * LOG2_E
        delta_Q = tl.load(delta + query_Q, mask=query_Q < num_rows, other=0)
        scores_JQ = tl.dot(k_JH, tl.trans(q_QH), input_precision=PRECISION) * (scale * LOG2_E)
        if not FULL:
            seen_JQ = (key_J[:, None] <= query_Q[None, :]) & (query_Q[None, :] < end_J[:, None])
            scores_JQ = tl.where(seen_JQ, scores_JQ, float("-inf"))
        p_JQ = tl.exp2(scores_JQ - lse_Q[None, :])
        dv_JH = tl.dot(p_JQ.to(dout_QH.dtype), dout_QH, dv_JH, input_precision=PRECISION)
        dp_JQ = tl.dot(v_JH, tl.trans(dout_QH), input_precision=PRECISION)
        ds_JQ = p_JQ * (dp_JQ - delta_Q[None, :])
        dk_JH = tl.dot(ds_JQ.to(q_QH.dtype), q_QH, dk_JH, input_precision=PRECISION)
    return dk_JH, dv_JH
