#include "torus/layers/transformer.h"

#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// Query and key heads together, checked before any size is computed from them.
int64_t checked_heads(int64_t channels, int64_t heads, int64_t kv_heads) {
  check(heads > 0 && channels > 0 && channels % heads == 0, Error::Kind::Shape, "[attention] ", channels,
        " channels do not divide into ", heads, " heads");
  check(kv_heads >= 0 && (kv_heads == 0 || heads % kv_heads == 0), Error::Kind::Shape, "[attention] ", heads,
        " query heads do not share ", kv_heads, " key heads evenly");
  return kv_heads == 0 ? heads : kv_heads;
}

}  // namespace

MultiHeadAttention::MultiHeadAttention(int64_t channels, int64_t heads,
                                       const MultiHeadAttentionOptions& options, Generator& generator)
    : qkv(channels, channels + 2 * checked_heads(channels, heads, options.kv_heads) * (channels / heads),
          {options.bias, options.dtype}, generator),
      out(channels, channels, {options.bias, options.dtype}, generator),
      channels_(channels),
      kv_channels_((qkv.weight.size(0) - channels) / 2),
      head_channels_(channels / heads),
      weight_dropout_(options.dropout),
      dropout_(options.dropout) {
  add("qkv", qkv);
  add("out", out);
  add("dropout", dropout_);
}

Variable MultiHeadAttention::operator()(const Variable& x, const Mask& mask) const {
  check(x.dim() == 3, Error::Kind::Shape, "[attention] expected x [B, N, ", channels_, "], got ", x.shape());
  const auto parts = split(qkv(x), {channels_, kv_channels_, kv_channels_}, -1);
  return attend(parts[0], parts[1], parts[2], mask);
}

Variable MultiHeadAttention::operator()(const Variable& x, const Variable& context, const Mask& mask) const {
  check(x.dim() == 3 && context.dim() == 3, Error::Kind::Shape, "[attention] expected x [B, N, ", channels_,
        "] and context [B, M, ", channels_, "], got ", x.shape(), " and ", context.shape());
  const std::vector<int64_t> rows{channels_, 2 * kv_channels_};
  const auto weights = split(qkv.weight, rows, 0);
  const auto biases = qkv.bias.defined() ? split(qkv.bias, rows, 0) : std::vector<Variable>(2);
  const auto parts = split(linear(context, weights[1], biases[1]), {kv_channels_, kv_channels_}, -1);
  return attend(linear(x, weights[0], biases[0]), parts[0], parts[1], mask);
}

Variable MultiHeadAttention::attend(const Variable& q, const Variable& k, const Variable& v,
                                    const Mask& mask) const {
  // [B, N, H * D] seen as [B, H, N, D]; attention's output is laid out so that the way back is a view, too.
  const auto heads = [&](const Variable& x) {
    return transpose(reshape(x, {x.size(0), x.size(1), x.size(2) / head_channels_, head_channels_}), 1, 2);
  };
  const Variable mixed = torus::attention(heads(q), heads(k), heads(v),
                                          {.mask = mask, .dropout = training() ? weight_dropout_ : 0})
                             .out;
  return dropout_(out(reshape(transpose(mixed, 1, 2), q.shape())));
}

CrossAttention::CrossAttention(const CrossAttentionOptions& o, Generator& generator)
    : to_q(o.query_dim, o.heads * o.head_dim, {.bias = false, .dtype = o.dtype}, generator),
      to_k(o.context_dim == 0 ? o.query_dim : o.context_dim, o.heads * o.head_dim,
           {.bias = false, .dtype = o.dtype}, generator),
      to_v(o.context_dim == 0 ? o.query_dim : o.context_dim, o.heads * o.head_dim,
           {.bias = false, .dtype = o.dtype}, generator),
      to_out(o.heads * o.head_dim, o.query_dim, {.bias = true, .dtype = o.dtype}, generator),
      options_(o),
      dropout_(o.dropout) {
  add("to_q", to_q);
  add("to_k", to_k);
  add("to_v", to_v);
  add("to_out", to_out);
  add("dropout", dropout_);
}

Variable CrossAttention::operator()(const Variable& x, const Variable& context, const Mask& mask) const {
  const Variable& from = context.defined() ? context : x;
  check(x.dim() == 3 && from.dim() == 3, Error::Kind::Shape,
        "[cross_attention] expected x and context of 3 axes, got ", x.shape(), " and ", from.shape());
  const auto heads = [&](const Variable& y) {
    return transpose(reshape(y, {y.size(0), y.size(1), options_.heads, options_.head_dim}), 1, 2);
  };
  const Variable mixed =
      torus::attention(heads(to_q(x)), heads(to_k(from)), heads(to_v(from)), {.mask = mask}).out;
  return dropout_(
      to_out(reshape(transpose(mixed, 1, 2), {x.size(0), x.size(1), options_.heads * options_.head_dim})));
}

TransformerBlock::TransformerBlock(int64_t channels, int64_t heads, const TransformerBlockOptions& options,
                                   Generator& generator)
    : norm1(channels, {.bias = options.bias, .dtype = options.dtype}),
      attention(channels, heads,
                {.kv_heads = options.kv_heads,
                 .dropout = options.dropout,
                 .bias = options.bias,
                 .dtype = options.dtype},
                generator),
      norm2(channels, {.bias = options.bias, .dtype = options.dtype}),
      mlp(channels, options.hidden == 0 ? 4 * channels : options.hidden,
          {.dropout = options.dropout, .bias = options.bias, .dtype = options.dtype}, generator) {
  add("norm1", norm1);
  add("attention", attention);
  add("norm2", norm2);
  add("mlp", mlp);
}

Variable TransformerBlock::operator()(const Variable& x, const Mask& mask) const {
  const Variable y = x + attention(norm1(x), mask);
  return y + mlp(norm2(y));
}

}  // namespace torus
