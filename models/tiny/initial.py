"""Initial weights with which attention copies from the first training step, instead of after millions of tokens.

The residual stream is divided into a constant, nine slots for the codes of the token and of the eight tokens before it,
the token's embedding, and a free part.

- Layer 0: head h attends to the token h + 1 positions back (by the fast rotary frequencies of a constant query and key)
  and writes that token's code to slot h + 1.
- Layer 1: the first head attends four positions back and copies slots 1 to 4 there to slots 5 to 8. The last head finds
  an earlier occurrence of the last three tokens, as layer 2 does, and writes the token after it to the free part. With
  it a count finds the number to stop at, which eight tokens can't tell from the numbers just counted.
- Layer 2: a query of the last eight tokens' codes finds the position after an earlier occurrence of these tokens (by
  the slow rotary frequencies, which hardly rotate over the whole context), and copies the token there: induction.
- The other heads, in layers 1 and 3, prefer recent tokens, such as the question.

Training would destroy the first three layers before it learns anything. So the parts that find a position are fixed:
the codes, the queries and keys of these heads, the constant and the slots, to which nothing else writes. The rest is
trained.
"""

import torch
from torch import Tensor

from models.tiny.network import Attention, Network, Shape, frequencies

NEAR, FAR = 4, 8
"""Number of tokens back that layer 0 sees, and that layers 0 and 1 see together."""

CONSTANT = 0
CODE = 16
"""Width of a token's code and of a slot."""

FIXED = 1 + CODE * (FAR + 1)
"""Width of the residual stream's fixed part: the constant and the slots."""

TOKEN = slice(FIXED, FIXED + 128)
"""Part of the residual stream with the token's embedding."""

LOCAL_GAIN, MATCH_GAIN, NEAR_GAIN = 2.5, 3.0, 2.0
"""Gains of the QK-norm: attention scores are at most gain² · √head_dim."""

KEY_WEIGHTS = (1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.6, 0.5)
QUERY_WEIGHTS = (0.8, 1.0, 1.0, 1.0, 0.4, 0.2, 0.1, 0.0), (0.8, 1.0, 1.0, 1.0, 0.6, 0.4, 0.3, 0.3)
"""Weights of the last tokens in the keys, and in the queries of the two heads that share a key."""

NEAR_WEIGHTS = (1.0, 0.3, 0.2), (1.0, 0.6, 0.4)
"""Query weights of the two heads that look for the last tokens nearby; their keys have equal weights."""

AGAIN_WEIGHTS = (1.0, 0.8, 0.5)
"""Query weights of the head that finds the last tokens at any distance."""

NEARNESS = 0.4
"""Weight of a short distance, relative to matching tokens."""

SLOWEST_TURN = 0.45
"""A frequency is slow if it rotates by less than this over the whole context, in radians."""


@torch.no_grad()
def initialise(network: Network, seed: int) -> dict[str, Tensor]:
    """Sets all weights from a seed. Returns masks by parameter name: 1 for trained weights, 0 for fixed ones."""
    shape = network.shape
    torch.manual_seed(seed)
    trained = {name: torch.ones_like(parameter) for name, parameter in network.named_parameters()}
    for name, parameter in network.named_parameters():
        if "down_proj" in name:
            parameter.zero_()
        elif parameter.dim() == 2:
            parameter.normal_(0, 0.05 if "mlp" in name else 0.02)
        if "o_proj" in name or "down_proj" in name or "input_layernorm" in name:
            trained[name][:FIXED] = 0
        if "o_proj" in name:
            parameter[:FIXED] = 0
    embedding = network.embed_tokens.weight
    embedding[:, :FIXED] = 0
    embedding[:, CONSTANT] = 1.0
    embedding[:, _slots(0, 0)].normal_(0, 0.3)
    embedding[:, TOKEN].normal_(0, 0.3)
    trained["embed_tokens.weight"][:, :FIXED] = 0
    network.norm.weight.fill_(0.25)
    layers = [layer.self_attn for layer in network.decoder()]
    _look_back(layers[0], shape)
    _look_further(layers[1], shape)
    _match(layers[2], shape)
    _stay_near(layers[1], shape, 1, LOCAL_GAIN)
    _find_again(layers[1], shape)
    for kv_head in range(shape.num_key_value_heads):
        _stay_near(layers[3], shape, kv_head, NEAR_GAIN)
    _restate(layers[3], shape, 1)
    for name, weights in trained.items():
        if name.startswith("layers.0.self_attn"):
            weights.zero_()
        if name.startswith("layers.1.self_attn") and "o_proj" not in name:
            weights[: shape.head_dim] = 0
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weights[-shape.head_dim :] = 0
        if name.startswith(("layers.2.self_attn.q", "layers.2.self_attn.k")):
            weights.zero_()
    return trained


def _orthogonal(rows: int, columns: int) -> Tensor:
    columns_of_it: Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return columns_of_it.T


def _slots(first: int, last: int) -> slice:
    """Slots of the codes of the tokens `first` to `last` positions back."""
    return slice(1 + CODE * first, 1 + CODE * (last + 1))


def _look_back(attention: Attention, shape: Shape) -> None:
    """Lets each head write the code of one earlier token to its slot, scaled to undo the norm."""
    size = shape.head_dim
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    for kv_head in range(shape.num_key_value_heads):
        attention.v_proj.weight[kv_head * size : kv_head * size + CODE, _slots(0, 0)] = torch.eye(CODE)
    for head in range(NEAR):
        _attend_back(attention, shape, head, head + 1)
        attention.o_proj.weight[_slots(head + 1, head + 1), head * size : head * size + CODE] = 0.21 * torch.eye(CODE)


def _look_further(attention: Attention, shape: Shape) -> None:
    """Lets the first head copy the slots of four positions back."""
    size = shape.head_dim
    _attend_back(attention, shape, 0, NEAR)
    attention.v_proj.weight[:size] = 0
    attention.v_proj.weight[:size, _slots(1, NEAR)] = torch.eye(size)
    attention.o_proj.weight[_slots(NEAR + 1, FAR), :size] = 0.25 * torch.eye(size)


def _attend_back(attention: Attention, shape: Shape, head: int, distance: int) -> None:
    """Lets a head attend to the token `distance` positions back."""
    half, size = shape.head_dim // 2, shape.head_dim
    kv_head = head // (shape.num_attention_heads // shape.num_key_value_heads)
    weights = _focus(shape).sqrt()
    turned = frequencies(shape) * distance
    key = attention.k_proj.weight[kv_head * size : (kv_head + 1) * size]
    query = attention.q_proj.weight[head * size : (head + 1) * size]
    key.zero_()
    query.zero_()
    key[:half, CONSTANT] = weights.float()
    query[:half, CONSTANT] = (weights * turned.cos()).float()
    query[half:, CONSTANT] = (-weights * turned.sin()).float()
    attention.q_norm.weight.fill_(LOCAL_GAIN)
    attention.k_norm.weight.fill_(LOCAL_GAIN)


@torch.enable_grad()
def _focus(shape: Shape) -> Tensor:
    """Weight of each frequency [head_dim / 2] with which a head attends to one distance only."""
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


def _stay_near(attention: Attention, shape: Shape, kv_head: int, gain: float) -> None:
    """Lets the heads of a group prefer recent tokens."""
    size = shape.head_dim
    groups = shape.num_attention_heads // shape.num_key_value_heads
    angles = frequencies(shape)
    middle = ((angles > 1 / 150) & (angles < 1 / 10)).nonzero()[:, 0]
    attention.q_norm.weight.fill_(gain)
    attention.k_norm.weight.fill_(gain)
    attention.k_proj.weight[kv_head * size + middle, CONSTANT] = NEARNESS
    for head in range(kv_head * groups, (kv_head + 1) * groups):
        attention.q_proj.weight[head * size + middle, CONSTANT] = NEARNESS


def _restate(attention: Attention, shape: Shape, kv_head: int) -> None:
    """Lets the heads of a group that prefers recent tokens find and partly copy the token after a recent match."""
    size = shape.head_dim
    groups = shape.num_attention_heads // shape.num_key_value_heads
    slow = _slow(shape)
    code = _orthogonal(len(slow), CODE * len(NEAR_WEIGHTS[0]))
    view = _orthogonal(size, TOKEN.stop - TOKEN.start)
    attention.k_proj.weight[kv_head * size + slow, _slots(1, len(NEAR_WEIGHTS[0]))] = code
    attention.v_proj.weight[kv_head * size : (kv_head + 1) * size, TOKEN] = view
    for head, weights in enumerate(NEAR_WEIGHTS, kv_head * groups):
        weighted = code * torch.tensor(weights).repeat_interleave(CODE)
        attention.q_proj.weight[head * size + slow, _slots(0, len(weights) - 1)] = weighted
        attention.o_proj.weight[TOKEN, head * size : (head + 1) * size] = 0.5 * view.T


def _find_again(attention: Attention, shape: Shape) -> None:
    """Lets the last head find an earlier occurrence of the last tokens, and copy the next token to the free part."""
    size = shape.head_dim
    slow = _slow(shape)
    weights = torch.tensor(AGAIN_WEIGHTS).repeat_interleave(CODE)
    code = _orthogonal(len(slow), len(weights))
    query = attention.q_proj.weight[-size:]
    query.zero_()
    query[slow, _slots(0, len(AGAIN_WEIGHTS) - 1)] = code * weights
    attention.k_proj.weight[-size:][slow, _slots(1, len(AGAIN_WEIGHTS))] = code
    attention.v_proj.weight[-size:, TOKEN] = _orthogonal(size, TOKEN.stop - TOKEN.start)
    room = shape.hidden_size - TOKEN.stop
    attention.o_proj.weight[TOKEN.stop :, -size:] = 0.5 * _orthogonal(room, size)


def _slow(shape: Shape) -> Tensor:
    """Dimensions of a head with slow frequencies."""
    slow = (frequencies(shape) * shape.max_position_embeddings < SLOWEST_TURN).nonzero()[:, 0]
    return torch.cat([slow, slow + shape.head_dim // 2])


def _match(attention: Attention, shape: Shape) -> None:
    """Lets all heads find an earlier occurrence of the last tokens and copy the token after it, one half per group."""
    size = shape.head_dim
    slow = _slow(shape)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    attention.q_norm.weight.fill_(MATCH_GAIN)
    attention.k_norm.weight.fill_(MATCH_GAIN)
    views = _orthogonal(TOKEN.stop - TOKEN.start, TOKEN.stop - TOKEN.start)
    for kv_head in range(shape.num_key_value_heads):
        view = views[kv_head * size : (kv_head + 1) * size]
        code = _orthogonal(len(slow), CODE * FAR)
        weights = torch.tensor(KEY_WEIGHTS).repeat_interleave(CODE)
        attention.k_proj.weight[kv_head * size + slow, _slots(1, FAR)] = code * weights
        attention.v_proj.weight[kv_head * size : (kv_head + 1) * size, TOKEN] = view
        for head, query_weights in enumerate(QUERY_WEIGHTS, kv_head * len(QUERY_WEIGHTS)):
            weights = torch.tensor(query_weights).repeat_interleave(CODE)
            attention.q_proj.weight[head * size + slow, _slots(0, FAR - 1)] = code * weights
            attention.o_proj.weight[TOKEN, head * size : (head + 1) * size] = view.T
