// Random problems of attention under masks of every kind, and what results must equal. For tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "ops/measure.h"
#include "torus/autograd/tape.h"
#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {

// Random masks of every kind and combination.
class MaskMaker {
 public:
  explicit MaskMaker(uint64_t seed) : g_(seed) {}
  int64_t below(int64_t bound) { return g_.below(bound); }
  double uniform() { return g_.uniform(); }

  struct Made {
    Mask mask;
    int64_t queries, keys;
    std::string text;
  };

  Made any(int64_t batch) {
    switch (below(4)) {
      case 0:
        return sequence(batch);
      case 1: {
        Made a = grid();
        const Mask other = linear(a.queries, a.keys, batch, a.text);
        a.mask = below(2) ? a.mask & other : a.mask | other;
        return a;
      }
      case 2: {
        Made a = grid();
        if (below(2)) {
          a.mask = !a.mask;
          a.text = "not " + a.text;
        }
        return a;
      }
      default:
        return grid();
    }
  }

  Made grid() {
    NeighborhoodOptions o;
    std::ostringstream text;
    const int64_t axes = 1 + below(4);
    int64_t queries = 1, keys = 1;
    for (int64_t a = 0; a < axes; ++a) {
      const int64_t length = 1 + below(axes == 1 ? 150 : std::clamp<int64_t>(220 / queries, 1, 13)),
                    w = 1 + below(7), d = 1 + below(3);
      auto boundary = static_cast<Boundary>(below(5));
      if (keys * (length + (w - 1) * d) > 2000) boundary = wrap;  // valid would have too many keys
      o.grid.push_back(length);
      o.window.push_back(w);
      o.dilation.push_back(d);
      o.boundary.push_back(boundary);
      o.key_grid.push_back(boundary == Boundary::valid ? length + (w - 1) * d : length);
      queries *= length;
      keys *= o.key_grid.back();
      text << "axis of " << length << " window " << w << " dilation " << d << " boundary "
           << static_cast<int>(boundary) << "; ";
    }
    if (below(4) == 0 &&
        std::find(o.boundary.begin(), o.boundary.end(), Boundary::valid) == o.boundary.end()) {
      queries = 1 + below(100);
      o.centers = Tensor::empty({queries, axes}, i64);
      for (int64_t i = 0; i < queries * axes; ++i)
        o.centers.mutable_data<int64_t>()[i] = below(o.key_grid[static_cast<size_t>(i % axes)]);
      o.grid.clear();
      text << "explicit centers; ";
    }
    return {neighborhood(o), queries, keys, text.str()};
  }

 private:
  Mask linear(int64_t queries, int64_t keys, int64_t batch, std::string& text) {
    switch (below(6)) {
      case 0:
        text += "causal";
        return causal(below(2) ? Align::top_left : Align::bottom_right);
      case 1:
        text += "window";
        return sliding_window(below(9), below(9), below(2) ? Align::top_left : Align::bottom_right);
      case 2: {
        text += "document";
        const int64_t q = below(queries + 1), k = below(keys + 1);
        return document({q, queries - q}, {k, keys - k});
      }
      case 3: {
        text += "padding";
        std::vector<int64_t> lengths;
        for (int64_t b = 0; b < batch; ++b) lengths.push_back(below(keys + 1));
        return padding(lengths);
      }
      case 4: {
        text += "lambda of the head";
        return Mask::from([](Query q, Key k) { return (q.token + k.token + q.head) % 3 != 0; },
                          {.per_head = true});
      }
      default: {
        text += "lambda";
        return Mask::from([](Query q, Key k) { return (q.token * 7 + k.token * 3) % 5 < 2; });
      }
    }
  }

  Made sequence(int64_t batch) {
    const int64_t queries = 1 + below(150), keys = below(2) ? queries : 1 + below(150);
    Made made{full(), queries, keys, ""};
    made.mask = linear(queries, keys, batch, made.text);
    const int64_t more = below(4);
    if (more == 0) made.mask = made.mask & linear(queries, keys, batch, made.text);
    if (more == 1) made.mask = made.mask | linear(queries, keys, batch, made.text);
    if (more == 2) made.mask = !made.mask;
    made.text += more == 0 ? " and" : more == 1 ? " or" : more == 2 ? " not" : "";
    return made;
  }

  Generator g_;
};

struct Case {
  int64_t batch = 1, heads = 1, kv_heads = 1, queries = 1, keys = 1, width = 1, value_width = 1;
  AttentionOptions options = {};
};

// Output, lse and all gradients of a backend on a device, against the composed computation on the CPU, by the
// rule that true zeros do not divide noise by noise.
inline void expect_fused_equals_reference(const Case& c, uint64_t seed, Backend fused = Backend::cpu,
                                          Device where = cpu) {
  Generator g(seed);
  // Heads beside each other in memory, or one after another.
  const auto make = [&](int64_t h, int64_t n, int64_t d) {
    return seed % 2 ? randn({c.batch, n, h, d}, 0, 1, f64, g).transpose(1, 2)
                    : randn({c.batch, h, n, d}, 0, 1, f64, g);
  };
  const Tensor q0 = make(c.heads, c.queries, c.width), k0 = make(c.kv_heads, c.keys, c.width),
               v0 = make(c.kv_heads, c.keys, c.value_width), d_out = make(c.heads, c.queries, c.value_width),
               d_lse = randn({c.batch, c.heads, c.queries}, 0, 1, f64, g);
  std::vector<std::vector<Tensor>> results;
  for (Backend backend : {fused, Backend::reference}) {
    const Device device = backend == fused ? where : cpu;
    // On a device as on the host: a copy there would be contiguous.
    const auto there = [&](const Tensor& x) {
      return seed % 2 ? x.transpose(1, 2).to(device).transpose(1, 2) : x.to(device);
    };
    Tape tape;
    const Variable q(there(q0), true), k(there(k0), true), v(there(v0), true);
    AttentionOptions options = c.options;
    Generator generator(3);
    options.generator = &generator;
    options.backend = backend;
    std::vector<Variable> leaves{q, k, v};
    for (AttentionBias& term : options.bias)
      if (term.kind() != AttentionBias::Kind::alibi) {
        leaves.emplace_back(term.value().value().to(device), true);
        term = term.with(leaves.back());
      }
    const auto [out, lse] = attention(q, k, v, options);
    if (out.requires_grad()) tape.backward({out, lse}, {there(d_out), d_lse.to(device)});
    results.push_back({out.value(), lse.value()});
    for (const Variable& leaf : leaves) results.back().push_back(leaf.grad());
  }
  const double scale = std::abs(c.options.scale.value_or(1 / std::sqrt(static_cast<double>(c.width))));
  const double common = 64 * std::numeric_limits<double>::epsilon() * norm(d_out) * norm(v0);
  const double floors[] = {0, 0, common * norm(k0) * scale, common * norm(q0) * scale, common};
  for (size_t i = 0; i < results[0].size(); ++i) {
    ASSERT_EQ(results[0][i].defined(), results[1][i].defined()) << i;
    if (!results[0][i].defined()) continue;
    const double floor = i < 5 ? floors[i] : common + 1e-12;
    EXPECT_LE(distance(results[0][i], results[1][i]), 1e-10 * norm(results[1][i]) + floor) << (const char*[]){
        "out", "lse", "dq", "dk", "dv", "first bias", "second bias", "third bias"}[std::min<size_t>(i, 7)];
  }
}

inline Case random_case(MaskMaker& maker, std::string& text) {
  Case c;
  c.batch = 1 + maker.below(2);
  const auto made = maker.any(c.batch);
  c.queries = made.queries, c.keys = made.keys;
  c.kv_heads = 1 + maker.below(2);
  c.heads = c.kv_heads * (1 + maker.below(2));
  const int64_t wide = maker.below(20);
  c.width = wide == 0 ? 128 : wide == 1 ? 64 : 1 + maker.below(40);
  c.value_width = maker.below(2) ? c.width : 1 + maker.below(40);
  c.options.mask = made.mask;
  text = made.text;
  if (maker.below(4) == 0) c.options.scale = 2 * maker.uniform() - 1;
  if (maker.below(8) == 0) c.options.scale = 0;
  if (maker.below(3) == 0) c.options.softcap = 1 + 3 * maker.uniform();
  if (maker.below(3) == 0) c.options.dropout = 0.6 * maker.uniform();
  Generator g(static_cast<uint64_t>(maker.below(1000)));
  const int64_t terms = maker.below(3) == 0 ? 1 + maker.below(2) : 0;
  for (int64_t i = 0; i < terms; ++i) {
    if (maker.below(3) == 0) {
      c.options.bias.push_back(alibi(alibi_slopes(c.heads, f64)));
      text += " alibi";
      continue;
    }
    const auto or_one = [&](int64_t n) { return maker.below(2) ? n : 1; };
    const Shape shape{or_one(c.batch), or_one(c.heads), or_one(c.queries), or_one(c.keys)};
    c.options.bias.push_back(AttentionBias(Variable(randn(shape, 0, 1, f64, g))));
    std::ostringstream bias;
    bias << " bias " << shape;
    text += bias.str();
  }
  return c;
}

// Windows on grids with tables of relative biases.
inline Case random_relative_case(uint64_t seed) {
  MaskMaker maker(5000 + seed);
  Generator g(seed);
  const int64_t axes = 1 + maker.below(3);
  std::vector<int64_t> grid, window;
  std::vector<bool> wrapped;
  std::vector<Boundary> boundary;
  Case c;
  c.heads = 1 + maker.below(3);
  Shape table{maker.below(2) ? c.heads : 1};
  c.queries = 1;
  for (int64_t a = 0; a < axes; ++a) {
    grid.push_back(1 + maker.below(axes == 1 ? 100 : 6));
    window.push_back(1 + maker.below(5));
    wrapped.push_back(maker.below(2));
    boundary.push_back(wrapped.back() ? wrap : shift);
    table.push_back(1 + 2 * maker.below(5));
    c.queries *= grid.back();
  }
  c.keys = c.queries;
  c.kv_heads = maker.below(2) ? c.heads : 1;
  c.batch = 1 + maker.below(2);
  c.width = 1 + maker.below(20), c.value_width = 1 + maker.below(20);
  c.options.mask =
      maker.below(3) ? neighborhood({.grid = grid, .window = window, .boundary = boundary}) : full();
  c.options.bias = {relative_bias(Variable(randn(table, 0, 1, f64, g)), grid, wrapped)};
  if (maker.below(2))
    c.options.bias.push_back(AttentionBias(Variable(randn({c.queries, c.keys}, 0, 1, f64, g))));
  if (maker.below(2)) c.options.softcap = 2;
  if (maker.below(2)) c.options.dropout = 0.2;
  return c;
}

}  // namespace torus
