// A step through all layers of a decoder, made of the stages in the other files.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "rows.h"

namespace cpd {

// Weights of one layer. Biases and head norms are null if the model has none. A layer whose router has data has experts,
// whose weights are in place of the MLP's.
template <typename T>
struct Layer {
  const T* input_norm;
  Weight qkv;
  const T *qkv_bias, *q_norm, *k_norm;
  Weight o;
  const T *o_bias, *post_norm;
  Weight gate_up;
  const T* gate_up_bias;
  Weight down;
  const T* down_bias;
  Pages<T> pages;
  Weight router;
  size_t attention;  // index of its `Run::attention`
};

template <typename T>
struct Decoder {
  std::vector<Layer<T>> layers;
  const T* norm;  // final norm
  Weight head;    // LM head
  const float* cos_sin;  // [positions, head dim]
  int64_t* progress;     // Counter of computed layers, which other threads read.
  int64_t hidden, heads, intermediate, vocab;
  float eps, scale;
  ExpertsShape experts;
};

template <typename T>
struct Step {
  int64_t tokens;
  const int32_t *positions, *slots;
  const int32_t* rows;  // Tokens whose logits to compute, ascending; null for all.
  int64_t num_rows;
  T* residual;  // [tokens, hidden], initially the embeddings
  T* logits;    // [num_rows, vocab]
};

// Activations between the stages.
template <typename T>
struct Activations {
  T *normed, *qkv, *attention, *residual_rows, *gate_up, *product;
  T* router;            // [tokens, experts]
  uint32_t* quantized;  // input of a linear layer whose weight is quantised
};

// The attention of all layers with the same window.
template <typename T>
struct PlannedAttention {
  AttentionPlan plan;
  std::vector<Tile> wanted;  // tiles of the step's rows, for the last layer
  AttentionMemory<T> memory;
};

// Everything that a step needs.
template <typename T>
struct Run {
  Decoder<T> model;
  Step<T> step;
  Activations<T> buffer;
  std::vector<PlannedAttention<T>> attention;
  ExpertMemory<T> experts;
  std::unique_ptr<Routed> routed;  // of `experts`
};

// Called on every thread of the team.
template <typename T>
void run_layers(Team& team, const Run<T>& run) {
  const Decoder<T>& model = run.model;
  const Step<T>& step = run.step;
  const Activations<T>& buffer = run.buffer;
  const Pages<T>& pages = model.layers[0].pages;
  const int64_t hidden = model.hidden, heads_width = model.heads * pages.dim;
  const int64_t qkv_width = heads_width + 2 * pages.heads * pages.dim;
  T *residual = step.residual, *attention = buffer.attention;
  int64_t tokens = step.tokens;
  auto multiply = [&](const T* x, int64_t k, const Weight& weight, int64_t n, const T* bias, T* y) {
    linear(team, x, tokens, k, weight, n, bias, y, buffer.quantized);
  };
  rms_norm(team, residual, tokens, hidden, model.layers[0].input_norm, model.eps, buffer.normed);
  for (size_t index = 0; index < model.layers.size(); ++index) {
    const Layer<T>& layer = model.layers[index];
    const bool last = index + 1 == model.layers.size();
    multiply(buffer.normed, hidden, layer.qkv, qkv_width, layer.qkv_bias, buffer.qkv);
    rope_store(team, buffer.qkv, tokens, model.heads, step.positions, step.slots, model.cos_sin, layer.q_norm,
               layer.k_norm, model.eps, layer.pages);
    if (last && step.num_rows == 0) return;
    const PlannedAttention<T>& planned = run.attention[layer.attention];
    Attention<T>(planned.plan, planned.memory, layer.pages, model.scale)
        .run(team, last ? planned.wanted : planned.plan.tiles, buffer.qkv, qkv_width, attention);
    if (last && step.rows) {  // From here on nothing depends on the other tokens.
      tokens = step.num_rows;
      gather_rows(team, attention, step.rows, tokens, heads_width, buffer.qkv);
      gather_rows(team, residual, step.rows, tokens, hidden, buffer.residual_rows);
      attention = buffer.qkv;
      residual = buffer.residual_rows;
    }
    multiply(attention, heads_width, layer.o, hidden, layer.o_bias, buffer.normed);
    add_rms_norm(team, buffer.normed, tokens, hidden, residual, layer.post_norm, model.eps, buffer.normed);
    if (layer.router.data) {
      multiply(buffer.normed, hidden, layer.router, model.experts.count, nullptr, buffer.router);
      run_experts(team, buffer.normed, tokens, hidden, buffer.router, model.experts, layer.gate_up, layer.down, run.experts,
                  buffer.normed);
    } else {
      multiply(buffer.normed, hidden, layer.gate_up, 2 * model.intermediate, layer.gate_up_bias, buffer.gate_up);
      silu_mul(team, buffer.gate_up, tokens, model.intermediate, buffer.product);
      multiply(buffer.product, model.intermediate, layer.down, hidden, layer.down_bias, buffer.normed);
    }
    add_rms_norm(team, buffer.normed, tokens, hidden, residual, last ? model.norm : model.layers[index + 1].input_norm,
                 model.eps, buffer.normed);
    if (team.id() == 0) std::atomic_ref(*model.progress).fetch_add(1, std::memory_order_relaxed);
  }
  multiply(buffer.normed, hidden, model.head, model.vocab, nullptr, step.logits);
}

}  // namespace cpd
