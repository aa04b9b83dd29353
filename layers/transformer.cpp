#include "torus/layers/transformer.h"

#include <algorithm>

#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// Rows of the queries', the keys' and the values' projections together.
int64_t projection_rows(int64_t channels, int64_t heads, int64_t kv_heads) {
  check(heads > 0 && channels > 0 && channels % heads == 0, Error::Kind::Shape, "[attention] ", channels,
        " channels do not divide into ", heads, " heads");
  check(kv_heads >= 0 && (kv_heads == 0 || heads % kv_heads == 0), Error::Kind::Shape, "[attention] ", heads,
        " query heads do not share ", kv_heads, " key heads evenly");
  return channels + 2 * (kv_heads == 0 ? heads : kv_heads) * (channels / heads);
}

int64_t hidden_channels(int64_t channels, const TransformerBlockOptions& options) {
  if (options.hidden != 0) return options.hidden;
  return options.swiglu ? (8 * channels + 23) / 24 * 8 : 4 * channels;
}

}  // namespace

MultiHeadAttention::MultiHeadAttention(int64_t channels, int64_t heads,
                                       const MultiHeadAttentionOptions& options, Generator& generator)
    : qkv(channels, projection_rows(channels, heads, options.kv_heads), {options.bias, options.dtype},
          generator),
      out(channels, channels, {options.bias, options.dtype}, generator),
      channels_(channels),
      kv_channels_((qkv.weight.size(0) - channels) / 2),
      head_channels_(channels / heads),
      rotary_(options.rotary),
      weight_dropout_(options.dropout),
      dropout_(options.dropout) {
  check(!rotary_ || head_channels_ % 2 == 0, Error::Kind::Shape,
        "[attention] expected heads of even width for rotary, got ", channels, " channels in ", heads,
        " heads");
  add("qkv", qkv);
  add("out", out);
  add("dropout", dropout_);
}

Variable MultiHeadAttention::operator()(const Variable& x, const Mask& mask, const Variable& residual) const {
  check(x.dim() == 3, Error::Kind::Shape, "[attention] expected x [B, N, ", channels_, "], got ", x.shape());
  const auto parts = split(qkv(x), {channels_, kv_channels_, kv_channels_}, -1);
  return attend(turned(heads(parts[0]), 0), turned(heads(parts[1]), 0), heads(parts[2]), mask, residual);
}

Variable MultiHeadAttention::operator()(const Variable& x, KeyValueCache& cache,
                                        const Variable& residual) const {
  check(x.dim() == 3, Error::Kind::Shape, "[attention] expected x [B, N, ", channels_, "], got ", x.shape());
  check(Tape::current() == nullptr, Error::Kind::Value,
        "[attention] a cache passes no gradients; use it inside NoGrad");
  const int64_t first = cache.length, last = first + x.size(1);
  check(last <= cache.capacity, Error::Kind::Value, "[attention] expected at most ", cache.capacity,
        " tokens in the cache, got ", last);
  const auto parts = split(qkv(x), {channels_, kv_channels_, kv_channels_}, -1);
  const Variable k = turned(heads(parts[1]), first), v = heads(parts[2]);
  if (!cache.keys.defined()) {
    const Shape shape{k.size(0), k.size(1), cache.capacity, k.size(3)};
    cache.keys = Tensor::empty(shape, k.dtype(), k.device());
    cache.values = Tensor::empty(shape, k.dtype(), k.device());
  }
  check(cache.keys.size(0) == x.size(0), Error::Kind::Shape, "[attention] expected x of batch ",
        cache.keys.size(0), " as in the cache, got ", x.shape());
  cache.keys.slice(2, first, last).copy_(k.value());
  cache.values.slice(2, first, last).copy_(v.value());
  cache.length = last;
  // One token sees all before it.
  return attend(turned(heads(parts[0]), first), Variable(cache.keys.slice(2, 0, last)),
                Variable(cache.values.slice(2, 0, last)),
                x.size(1) == 1 ? full() : causal(Align::bottom_right), residual);
}

Variable MultiHeadAttention::operator()(const Variable& x, const Variable& context, const Mask& mask) const {
  check(x.dim() == 3 && context.dim() == 3, Error::Kind::Shape, "[attention] expected x [B, N, ", channels_,
        "] and context [B, M, ", channels_, "], got ", x.shape(), " and ", context.shape());
  const std::vector<int64_t> rows{channels_, 2 * kv_channels_};
  const auto weights = split(qkv.weight, rows, 0);
  const auto biases = qkv.bias.defined() ? split(qkv.bias, rows, 0) : std::vector<Variable>(2);
  const auto parts = split(linear(context, weights[1], biases[1]), {kv_channels_, kv_channels_}, -1);
  return attend(heads(linear(x, weights[0], biases[0])), heads(parts[0]), heads(parts[1]), mask, {});
}

Variable MultiHeadAttention::heads(const Variable& x) const {
  return split_heads(x, x.size(2) / head_channels_);
}

Variable MultiHeadAttention::turned(const Variable& x, int64_t first) const {
  if (!rotary_) return x;
  const int64_t last = first + x.size(2);
  if (!codes_.defined() || codes_.size(1) < last || codes_.device() != x.device())
    codes_ = rotary_codes(std::max(last, codes_.defined() ? 2 * codes_.size(1) : 0), head_channels_,
                          {.dtype = x.dtype() == f64 ? f64 : f32})
                 .to(x.device());
  return rotary(x, codes_.slice(1, first, last));
}

Variable MultiHeadAttention::attend(const Variable& q, const Variable& k, const Variable& v, const Mask& mask,
                                    const Variable& residual) const {
  const Variable mixed =
      torus::attention(q, k, v, {.mask = mask, .dropout = training() ? weight_dropout_ : 0}).out;
  return dropout_.after(out, join_heads(mixed), residual);
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
  check(x.dim() == 3 && x.size(2) == to_q.weight.size(1), Error::Kind::Shape,
        "[cross_attention] expected x [B, N, query_dim = ", to_q.weight.size(1), "], got ", x.shape());
  check(from.dim() == 3 && from.size(0) == x.size(0) && from.size(2) == to_k.weight.size(1),
        Error::Kind::Shape, "[cross_attention] expected context [", x.size(0),
        ", M, context_dim = ", to_k.weight.size(1), "], got ", from.shape());
  const auto heads = [&](const Variable& y) { return split_heads(y, options_.heads); };
  const Variable mixed =
      torus::attention(heads(to_q(x)), heads(to_k(from)), heads(to_v(from)), {.mask = mask}).out;
  return dropout_(to_out(join_heads(mixed)));
}

TransformerBlock::TransformerBlock(int64_t channels, int64_t heads, const TransformerBlockOptions& options,
                                   Generator& generator)
    : norm1(channels, {.kind = options.norm, .bias = options.bias, .dtype = options.dtype}),
      attention(channels, heads,
                {.kv_heads = options.kv_heads,
                 .dropout = options.dropout,
                 .bias = options.bias,
                 .rotary = options.rotary,
                 .dtype = options.dtype},
                generator),
      norm2(channels, {.kind = options.norm, .bias = options.bias, .dtype = options.dtype}),
      mlp(channels, hidden_channels(channels, options),
          {.dropout = options.dropout,
           .bias = options.bias,
           .swiglu = options.swiglu,
           .gelu = options.gelu,
           .dtype = options.dtype},
          generator),
      post_norm_(options.post_norm) {
  add("norm1", norm1);
  add("attention", attention);
  add("norm2", norm2);
  add("mlp", mlp);
}

template <class How>
Variable TransformerBlock::run(const Variable& x, How&& how) const {
  if (post_norm_) {
    const Variable y = norm1(attention(x, how, x));
    return norm2(mlp(y, y));
  }
  const Variable y = attention(norm1(x), how, x);
  return mlp(norm2(y), y);
}

Variable TransformerBlock::operator()(const Variable& x, const Mask& mask) const { return run(x, mask); }

Variable TransformerBlock::operator()(const Variable& x, KeyValueCache& cache) const { return run(x, cache); }

}  // namespace torus
