"""Initial weights with which attention copies from the first step on, instead of after millions of tokens.

The residual stream starts out divided: a constant, the token itself, and one slot for each of the tokens before it.
In layer 0, head h attends to the token h + 1 places back (by the fast rotary frequencies, of a constant query and key)
and writes it to slot h. In later layers, a query of the last tokens finds the place before which the same tokens stand
(by the slow rotary frequencies, which hardly turn over the whole context), and copies the token there: induction.
Nothing is fixed; training goes on from there.
"""

import torch
from torch import Tensor

from models.tiny.network import Attention, Network, Shape, frequencies

CONSTANT = 0
TOKEN = slice(1, 96)
SLOT = 40
"""Width of the slot of one earlier token."""

LOCAL_GAIN, MATCH_GAIN = 2.5, 2.0
"""Of the QK-norm: attention scores are at most gain² · √head_dim."""

SLOWEST_TURN = 0.45
"""A frequency is slow when it turns by less than this over the whole context, in radians."""


@torch.no_grad()
def initialise(network: Network, seed: int) -> None:
    """Sets all weights. The same for the same seed."""
    shape = network.shape
    torch.manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02 if "mlp" in name else 0.005)
    embedding = network.embed_tokens.weight
    embedding.zero_()
    embedding[:, CONSTANT] = 1.0
    embedding[:, TOKEN].normal_(0, 0.3)
    network.norm.weight.fill_(0.25)
    # what an earlier token looks like in its slot
    head_view = torch.linalg.qr(torch.randn(TOKEN.stop - TOKEN.start, shape.head_dim))[0].T
    slot_view = torch.linalg.qr(torch.randn(shape.head_dim, SLOT))[0].T
    layers = [layer.self_attn for layer in network.decoder()]
    _look_back(layers[0], shape, head_view, slot_view)
    for attention in layers[1:]:
        _match(attention, shape, slot_view @ head_view)


def _slot(back: int) -> slice:
    """Where the token `back` places back is written."""
    start = TOKEN.stop + SLOT * (back - 1)
    return slice(start, start + SLOT)


def _look_back(attention: Attention, shape: Shape, head_view: Tensor, slot_view: Tensor) -> None:
    weights = _focus(shape)
    angles = frequencies(shape)
    half, size = shape.head_dim // 2, shape.head_dim
    attention.q_norm.weight.fill_(LOCAL_GAIN)
    attention.k_norm.weight.fill_(LOCAL_GAIN)
    for head in range(shape.num_key_value_heads):
        attention.k_proj.weight[head * size : head * size + half, CONSTANT] = weights.sqrt().float()
        attention.v_proj.weight[head * size : (head + 1) * size, TOKEN] = head_view
    for head in range(shape.num_attention_heads):
        turned = angles * (head + 1)
        rows = attention.q_proj.weight[head * size : (head + 1) * size]
        rows[:half, CONSTANT] = (weights.sqrt() * turned.cos()).float()
        rows[half:, CONSTANT] = (-weights.sqrt() * turned.sin()).float()
        attention.o_proj.weight[_slot(head + 1), head * size : (head + 1) * size] = 0.2 * slot_view


@torch.enable_grad()
def _focus(shape: Shape) -> Tensor:
    """How much each frequency weighs [head_dim / 2] so that a head sees one distance and no other."""
    distances = torch.arange(-8, shape.max_position_embeddings, dtype=torch.float64)
    scores = torch.outer(distances[distances != 0], frequencies(shape)).cos()
    logits = torch.zeros(shape.head_dim // 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(400):
        spill = (LOCAL_GAIN**2 * shape.head_dim**0.5 * (scores @ logits.softmax(0) - 1)).logsumexp(0)
        optimizer.zero_grad()
        spill.backward()
        optimizer.step()
    return logits.detach().softmax(0)


def _match(attention: Attention, shape: Shape, slot_of_token: Tensor) -> None:
    half, size = shape.head_dim // 2, shape.head_dim
    slow = (frequencies(shape) * shape.max_position_embeddings < SLOWEST_TURN).nonzero()[:, 0]
    slow = torch.cat([slow, slow + half])
    parts = 3
    width = len(slow) // parts
    attention.q_norm.weight.fill_(MATCH_GAIN)
    attention.k_norm.weight.fill_(MATCH_GAIN)
    for kv_head in range(shape.num_key_value_heads):
        code = torch.linalg.qr(torch.randn(SLOT, width))[0].T
        for part in range(parts):
            rows = kv_head * size + slow[part * width : (part + 1) * width]
            attention.k_proj.weight[rows, _slot(part + 1)] = code
            for head in range(shape.num_attention_heads // shape.num_key_value_heads):
                query_rows = (
                    rows + (kv_head * (shape.num_attention_heads // shape.num_key_value_heads - 1) + head) * size
                )
                if part == 0:
                    attention.q_proj.weight[query_rows, TOKEN] = code @ slot_of_token
                else:
                    attention.q_proj.weight[query_rows, _slot(part)] = code
        view = torch.linalg.qr(torch.randn(TOKEN.stop - TOKEN.start, size))[0].T
        attention.v_proj.weight[kv_head * size : (kv_head + 1) * size, TOKEN] = view
        groups = shape.num_attention_heads // shape.num_key_value_heads
        for head in range(kv_head * groups, (kv_head + 1) * groups):
            attention.o_proj.weight[TOKEN, head * size : (head + 1) * size] = 0.3 * view.T
