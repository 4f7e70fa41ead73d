"""The gated delta net in its chunked form, all chunks of all rows at once.

Shapes: B rows, T tokens, H value heads, N chunks of C tokens, d head size. Formulas are those of
the chunked form of the gated delta rule; see `chunk_delta_rule`.
"""

from typing import Any

import torch

Tensor = Any

CHUNK = 64
BLOCK = 8  # inverted by doubling; larger ones are merged from smaller ones
RESET_DECAY = -20.0  # log decay at the first token of a document: forgets what was before


def block_inverse(lower: Tensor) -> Tensor:
    """Invert I + A for strictly lower triangular A [..., C, C]; no gradient.

    Blocks of BLOCK are inverted as (I - A)(I + A^2)(I + A^4), whose terms stay small for so few
    rows (at 16 they reach thousands, too much for the short mantissa of fast matrix products);
    then [[P, 0], [-Q A21 P, Q]] joins two neighbours, which is stable.
    """
    size = lower.shape[-1]
    count = size // BLOCK
    grid = lower.unflatten(-1, (count, BLOCK)).unflatten(-3, (count, BLOCK))
    diagonal = grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., count, BLOCK, BLOCK]
    eye = torch.eye(BLOCK, device=lower.device, dtype=lower.dtype)
    inverse, power = eye - diagonal, diagonal
    for _ in range(2):
        power = power @ power
        inverse = inverse + inverse @ power
    return merge_blocks(inverse, lower)


def merge_blocks(inverse: Tensor, lower: Tensor) -> Tensor:
    """Merge the inverses of diagonal blocks [..., n, b, b] until one is left, [..., C, C]."""
    while inverse.shape[-3] > 1:
        count, width = inverse.shape[-3] // 2, inverse.shape[-1]
        pairs = inverse.unflatten(-3, (count, 2))
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        grid = lower.unflatten(-1, (count, 2, width)).unflatten(-4, (count, 2, width))
        below = grid[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        corner = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        inverse = torch.cat([top, torch.cat([corner, second], -1)], -2)
    return inverse.squeeze(-3)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Invert I + A for strictly lower A [..., C, C], with gradient.

    One Newton step X <- 2X - X (I + A) X around the constant X found without gradient: its value
    is the inverse, and its derivative -X dA X is exactly that of the inverse.
    """
    with torch.no_grad():
        guess = block_inverse(lower)
    return 2 * guess - guess @ (guess + lower @ guess)


def chunk_states(transfer: Tensor, update: Tensor) -> Tensor:
    """Return the state before every chunk: S_0 = 0, S_{n+1} = M_n S_n + U_n.

    transfer [N, B, H, d, d], update [N, B, H, d, d] -> [N, B, H, d, d]; chunks come first, so that
    one chunk of all rows and heads lies in one piece.
    """
    flat_transfer, flat_update = transfer.flatten(1, 2), update.flatten(1, 2)
    states = [torch.zeros_like(flat_update[0])]
    for chunk in range(update.shape[0] - 1):
        states.append(torch.baddbmm(flat_update[chunk], flat_transfer[chunk], states[-1]))
    return torch.stack(states).view_as(update)


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Run the gated delta rule over rows.

    q, k, v [B, T, H, d] (q scaled, q and k of unit length), beta and log decay [B, T, H] float32
    -> [B, T, H, d]. With G the running sum of decays inside a chunk and S the state before it:
    A_ij = b_i (k_i k_j) exp(G_i - G_j) for j < i; T = (I + A)^-1; V' = T b (V - exp(G) K S);
    O_i = exp(G_i) q_i S + sum_{j <= i} (q_i k_j) exp(G_i - G_j) V'_j.
    """
    shape = v.shape
    q, k, v = (chunked(x) for x in (q, k, v))  # [N, B, H, C, d]
    beta, decay = (chunked(x[..., None])[..., 0] for x in (beta, decay))  # [N, B, H, C]
    total = decay.cumsum(-1)
    size = total.shape[-1]
    keep = torch.ones(size, size, device=q.device, dtype=torch.bool).tril()
    gaps = (total[..., :, None] - total[..., None, :]).masked_fill(~keep, float("-inf"))
    fading = gaps.exp()  # zero above the diagonal
    scores = (k @ k.transpose(-1, -2)).float()
    lower = (beta[..., None] * scores * fading).tril(-1)
    solve = unit_lower_inverse(lower).to(v.dtype)
    values = solve @ (beta[..., None] * v).to(v.dtype)
    keys = solve @ ((beta * total.exp())[..., None] * k).to(v.dtype)
    fading_keys = ((total[..., -1:] - total).exp()[..., None] * k).to(v.dtype).transpose(-1, -2)
    eye = torch.eye(k.shape[-1], device=q.device, dtype=torch.float32)
    transfer = total[..., -1].exp()[..., None, None] * eye - (fading_keys @ keys).float()
    states = chunk_states(transfer, (fading_keys @ values).float()).to(v.dtype)
    inside = ((q @ k.transpose(-1, -2)).float() * fading).to(v.dtype)
    queries = (total.exp()[..., None] * q).to(v.dtype)
    out = queries @ states + inside @ (values - keys @ states)
    return out.permute(1, 0, 3, 2, 4).reshape(shape)


def chunked(x: Tensor) -> Tensor:
    """Cut [B, T, H, d] into chunks, [N, B, H, C, d] in one piece."""
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def step_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Run the same rule token by token; the plain form that tests compare with."""
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)
