#include "torus/layers/grid.h"

#include <algorithm>

#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

const NeighborhoodAttentionOptions& checked(const NeighborhoodAttentionOptions& o) {
  check(o.heads > 0 && o.channels > 0 && o.channels % o.heads == 0, Error::Kind::Shape,
        "[neighborhood_attention] ", o.channels, " channels do not divide into ", o.heads, " heads");
  check(!o.window.empty(), Error::Kind::Value,
        "[neighborhood_attention] expected a window for each axis, got none");
  for (Boundary boundary : o.boundary)
    check(boundary != Boundary::valid, Error::Kind::Value,
          "[neighborhood_attention] valid needs more keys than queries; a layer has as many");
  // The rest is the mask's to check, on a grid of any size.
  neighborhood({.grid = std::vector<int64_t>(o.window.size(), 1),
                .window = o.window,
                .dilation = o.dilation,
                .boundary = o.boundary});
  return o;
}

}  // namespace

NeighborhoodAttention::NeighborhoodAttention(const NeighborhoodAttentionOptions& options,
                                             Generator& generator)
    : qkv(checked(options).channels, 3 * options.channels, {options.bias, options.dtype}, generator),
      out(options.channels, options.channels, {options.bias, options.dtype}, generator),
      options_(options),
      dropout_(options.dropout) {
  add("qkv", qkv);
  add("out", out);
  Shape sizes{options.heads};
  for (size_t a = 0; a < options.window.size(); ++a) {
    wrapped_.push_back(detail::axis_entry(options.boundary, a, Boundary::shift) == Boundary::wrap);
    // A shifted window reaches all its length to one side.
    const int64_t steps = wrapped_.back() ? options.window[a] / 2 : options.window[a] - 1,
                  dilation = detail::axis_entry<int64_t>(options.dilation, a, 1);
    if (!options.relative_bias) continue;
    check(steps <= detail::max_tokens / dilation, Error::Kind::Value, "[neighborhood_attention] axis ", a,
          ": a relative bias reaches at most ", detail::max_tokens, " tokens, got window ", options.window[a],
          " and dilation ", dilation);
    sizes.push_back(2 * steps * dilation + 1);
  }
  if (options.relative_bias) table = Parameter(Tensor::zeros(sizes, options.dtype));
  add("table", table);
  add("dropout", dropout_);
}

NeighborhoodAttention::Place NeighborhoodAttention::place(const std::vector<int64_t>& grid,
                                                          Device device) const {
  constexpr size_t most_grids = 8;  // a model that meets ever new ones must not grow
  const auto found =
      std::find_if(places_.begin(), places_.end(), [&](const auto& known) { return known.first == grid; });
  if (found != places_.end()) {
    std::rotate(places_.begin(), found, found + 1);
    Place& known = places_.front().second;
    if (options_.rotary) known.codes = known.codes.to(device);  // where the module now is
    return known;
  }
  Place made{neighborhood({.grid = grid,
                           .window = options_.window,
                           .dilation = options_.dilation,
                           .boundary = options_.boundary}),
             {}};
  if (options_.rotary)
    made.codes = rotary_grid_codes(Shape(std::span(grid)), options_.channels / options_.heads, wrapped_,
                                   {.dtype = options_.dtype})
                     .to(device);
  if (places_.size() == most_grids) places_.pop_back();
  return places_.emplace_front(grid, std::move(made)).second;
}

Variable NeighborhoodAttention::operator()(const Variable& x, const Variable& residual) const {
  const int axes = static_cast<int>(options_.window.size());
  check(x.dim() == axes + 2 && x.size(-1) == options_.channels, Error::Kind::Shape,
        "[neighborhood_attention] expected x [B, ", axes, " grid axes, ", options_.channels, "], got ",
        x.shape());
  const std::vector<int64_t> grid(x.shape().begin() + 1, x.shape().begin() + 1 + axes);
  const Place here = place(grid, x.device());
  const int64_t batch = x.size(0), tokens = x.shape().slice(1, axes + 1).numel();
  const auto in_line = [&](const Variable& y) { return reshape(y, {batch, tokens, options_.channels}); };
  const auto parts = split(qkv(in_line(x)), {options_.channels, options_.channels, options_.channels}, -1);
  const auto heads = [&](const Variable& part) { return split_heads(part, options_.heads); };
  const auto turned = [&](const Variable& part) { return options_.rotary ? rotary(part, here.codes) : part; };
  AttentionOptions how{.mask = here.mask, .dropout = training() ? options_.dropout : 0};
  if (options_.relative_bias) how.bias.push_back(relative_bias(table, grid, wrapped_));
  const Variable mixed =
      torus::attention(turned(heads(parts[0])), turned(heads(parts[1])), heads(parts[2]), how).out;
  return reshape(dropout_.after(out, join_heads(mixed), residual.defined() ? in_line(residual) : residual),
                 x.shape());
}

GridTransformerBlock::GridTransformerBlock(const GridTransformerBlockOptions& options, Generator& generator)
    : norm1(options.attention.channels, {.bias = options.attention.bias, .dtype = options.attention.dtype}),
      attention(options.attention, generator),
      norm2(options.attention.channels, {.bias = options.attention.bias, .dtype = options.attention.dtype}),
      mlp(options.attention.channels, options.hidden == 0 ? 4 * options.attention.channels : options.hidden,
          {.dropout = options.attention.dropout,
           .bias = options.attention.bias,
           .dtype = options.attention.dtype},
          generator) {
  add("norm1", norm1);
  add("attention", attention);
  add("norm2", norm2);
  add("mlp", mlp);
}

Variable GridTransformerBlock::operator()(const Variable& x) const {
  const Variable y = attention(norm1(x), x);
  return mlp(norm2(y), y);
}

namespace {

int64_t points(const std::vector<int64_t>& patch) {
  int64_t count = 1;
  for (const int64_t size : patch) count *= size;
  return count;
}

const GridTransformerOptions& checked(const GridTransformerOptions& o) {
  const size_t axes = o.block.attention.window.size();
  check(o.inputs > 0 && o.outputs > 0 && o.layers >= 0 && o.patch.size() == axes && axes <= 3 &&
            std::all_of(o.patch.begin(), o.patch.end(), [](int64_t size) { return size > 0; }),
        Error::Kind::Value,
        "[grid_transformer] expected inputs, outputs, layers, and a patch for each of at most 3 axes, ",
        "got ", o.inputs, ", ", o.outputs, ", ", o.layers, " and patches on ", o.patch.size(), " of ", axes,
        " axes");
  return o;
}

}  // namespace

GridTransformer::GridTransformer(const GridTransformerOptions& options, Generator& generator)
    : embed(points(checked(options).patch) * options.inputs, options.block.attention.channels,
            {options.block.attention.bias, options.block.attention.dtype}, generator),
      norm(options.block.attention.channels,
           {.bias = options.block.attention.bias, .dtype = options.block.attention.dtype}),
      head(options.block.attention.channels, points(options.patch) * options.outputs,
           {options.block.attention.bias, options.block.attention.dtype}, generator),
      options_(options) {
  add("embed", embed);
  for (int64_t i = 0; i < options.layers; ++i)
    add("blocks." + std::to_string(i), blocks.emplace_back(options.block, generator));
  add("norm", norm);
  add("head", head);
  head.weight.mutable_value().copy_(randn(head.weight.shape(), 0, 0.02, head.weight.dtype(), generator));
}

Variable GridTransformer::operator()(const Variable& x) const {
  const int axes = static_cast<int>(options_.patch.size());
  bool fits = x.dim() == axes + 2 && x.size(-1) == options_.inputs;
  for (int a = 0; fits && a < axes; ++a) fits = x.size(a + 1) % options_.patch[static_cast<size_t>(a)] == 0;
  check(fits, Error::Kind::Shape, "[grid_transformer] expected x [B, ", axes, " axes of whole patches ",
        Shape(std::span(options_.patch)), ", ", options_.inputs, "], got ", x.shape());
  // Channels before the grid, as unfold has them, and back.
  std::vector<int> inward{0, axes + 1}, outward{0};
  std::vector<int64_t> sizes;
  Shape tokens{x.size(0)};
  for (int a = 0; a < axes; ++a) {
    inward.push_back(a + 1);
    outward.push_back(a + 2);
    sizes.push_back(x.size(a + 1));
    tokens.push_back(sizes.back() / options_.patch[static_cast<size_t>(a)]);
  }
  outward.push_back(1);
  tokens.push_back(options_.block.attention.channels);
  Variable y = reshape(embed(unfold(permute(x, inward), options_.patch)), tokens);
  for (const GridTransformerBlock& block : blocks) y = block(y);
  const Variable patches = head(norm(y));
  return permute(fold(reshape(patches, {x.size(0), -1, patches.size(-1)}), sizes, options_.patch), outward);
}

}  // namespace torus
