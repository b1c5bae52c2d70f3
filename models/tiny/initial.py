"""Initial weights with which attention copies from the first step on, instead of after millions of tokens.

The residual stream is divided: a constant, nine slots for the codes of the token itself and of the eight before it, the
token as it is embedded, and room.

- Layer 0: head h attends to the token h + 1 places back (by the fast rotary frequencies, of a constant query and key)
  and writes its code to slot h + 1.
- Layer 1: the first head attends four places back and copies slots 1 to 4 of there to slots 5 to 8. The last one finds
  where the last three tokens stood before, as layer 2 does, and writes what followed to the room: so a count finds the
  number to end at, which eight tokens don't tell from those just counted.
- Layer 2: a query of the last eight tokens' codes finds the place before which the same tokens stand (by the slow
  rotary frequencies, which hardly turn over the whole context), and copies the token there: induction.
- The other heads, in layers 1 and 3, prefer what stands a short while ago, such as the question.

Training would spoil the first three layers before it had learnt anything, so what finds a place stays as it is: the
codes, the queries and keys of these heads, and the constant and the slots, to which nothing else writes. The rest is
trained.
"""

import torch
from torch import Tensor

from models.tiny.network import Attention, Network, Shape, frequencies

NEAR, FAR = 4, 8
"""Layer 0 sees so many tokens back, layers 0 and 1 together so many."""

CONSTANT = 0
CODE = 16
"""Width of a token's code, and so of a slot."""

KEPT = 1 + CODE * (FAR + 1)
"""Of the residual stream: the constant and the slots."""

TOKEN = slice(KEPT, KEPT + 128)
"""The token as it is embedded."""

LOCAL_GAIN, MATCH_GAIN, NEAR_GAIN = 2.5, 3.0, 2.0
"""Of the QK-norm: attention scores are at most gain² · √head_dim."""

KEY_WEIGHTS = (1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.6, 0.5)
QUERY_WEIGHTS = (0.8, 1.0, 1.0, 1.0, 0.4, 0.2, 0.1, 0.0), (0.8, 1.0, 1.0, 1.0, 0.6, 0.4, 0.3, 0.3)
"""Of the last tokens, when a place is looked for: the keys', and those of the queries of two heads that share them."""

NEAR_WEIGHTS = (1.0, 0.3, 0.2), (1.0, 0.6, 0.4)
"""The same for the two heads that look for the last tokens nearby, whose keys have equal weights."""

AGAIN_WEIGHTS = (1.0, 0.8, 0.5)
"""The same for the head that finds them however far away they are."""

NEARNESS = 0.4
"""How much a short distance counts, against what the tokens are."""

SLOWEST_TURN = 0.45
"""A frequency is slow when it turns by less than this over the whole context, in radians."""


@torch.no_grad()
def initialise(network: Network, seed: int) -> dict[str, Tensor]:
    """Sets all weights, the same for the same seed. Returns by name which are trained: 1, or 0 for those that stay."""
    shape = network.shape
    torch.manual_seed(seed)
    trained = {name: torch.ones_like(parameter) for name, parameter in network.named_parameters()}
    for name, parameter in network.named_parameters():
        if "down_proj" in name:
            parameter.zero_()
        elif parameter.dim() == 2:
            parameter.normal_(0, 0.05 if "mlp" in name else 0.02)
        if "o_proj" in name or "down_proj" in name or "input_layernorm" in name:
            trained[name][:KEPT] = 0
        if "o_proj" in name:
            parameter[:KEPT] = 0
    embedding = network.embed_tokens.weight
    embedding[:, :KEPT] = 0
    embedding[:, CONSTANT] = 1.0
    embedding[:, _slots(0, 0)].normal_(0, 0.3)
    embedding[:, TOKEN].normal_(0, 0.3)
    trained["embed_tokens.weight"][:, :KEPT] = 0
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
    """Where the codes of the tokens `first` to `last` places back stand."""
    return slice(1 + CODE * first, 1 + CODE * (last + 1))


def _look_back(attention: Attention, shape: Shape) -> None:
    """Lets each head write the code of one earlier token to its slot, scaled to what the norm took from it."""
    size = shape.head_dim
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    for kv_head in range(shape.num_key_value_heads):
        attention.v_proj.weight[kv_head * size : kv_head * size + CODE, _slots(0, 0)] = torch.eye(CODE)
    for head in range(NEAR):
        _attend_back(attention, shape, head, head + 1)
        attention.o_proj.weight[_slots(head + 1, head + 1), head * size : head * size + CODE] = 0.21 * torch.eye(CODE)


def _look_further(attention: Attention, shape: Shape) -> None:
    """Lets the first head copy the slots of four places back."""
    size = shape.head_dim
    _attend_back(attention, shape, 0, NEAR)
    attention.v_proj.weight[:size] = 0
    attention.v_proj.weight[:size, _slots(1, NEAR)] = torch.eye(size)
    attention.o_proj.weight[_slots(NEAR + 1, FAR), :size] = 0.25 * torch.eye(size)


def _attend_back(attention: Attention, shape: Shape, head: int, distance: int) -> None:
    """Lets a head attend to the token `distance` places back."""
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


def _stay_near(attention: Attention, shape: Shape, kv_head: int, gain: float) -> None:
    """Lets the heads of a group prefer what stands a short while ago."""
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
    """Lets the heads of a group that stays near find what followed the last tokens there, and copy some of it."""
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
    """Lets the last head find where the last tokens stood before, and write what followed to the room."""
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
    """The dimensions of a head that hardly turn."""
    slow = (frequencies(shape) * shape.max_position_embeddings < SLOWEST_TURN).nonzero()[:, 0]
    return torch.cat([slow, slow + shape.head_dim // 2])


def _match(attention: Attention, shape: Shape) -> None:
    """Lets all heads find where the last tokens stood before, and copy what followed; each group one half of it."""
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
