// Masks: which pairs they allow, the maps derived from them, and the same fused kernels under all of them.
#include "torus/ops/attention/mask.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "core/expect_error.h"
#include "ops/attention_cases.h"
#include "ops/measure.h"
#include "torus/autograd/gradcheck.h"
#include "torus/autograd/tape.h"
#include "torus/core/parallel.h"
#include "torus/ops/attention/attention.h"
#include "torus/ops/attention/map.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

using detail::MaskMap;
using detail::MaskShape;
using detail::Side;
using detail::Visit;

// Every pair that the predicate allows is visited once on each side, and no other; needed and visited are
// counted.
void expect_covers(const Mask& mask, const MaskShape& shape) {
  const auto map = mask.rule().map(shape);
  for (const Side side : {Side::query, Side::key}) {
    const bool by_query = side == Side::query;
    const int64_t owners = shape.owners(side);
    std::vector<int> seen(static_cast<size_t>(shape.queries * shape.keys), 0),
        owned(static_cast<size_t>(owners), 0);
    int64_t visited = 0;
    const detail::SideMap& m = map->side(side);
    for (int64_t tile = 0; tile < m.tiles; ++tile) {
      std::array<int64_t, 64> space;
      const auto tokens = m.owners(tile, owners, space);
      for (int64_t token : tokens) ++owned[static_cast<size_t>(token)];
      for (const Visit& visit : m.of_tile(tile))
        for (int64_t j = 0; j < visit.count; ++j) {
          const int64_t other = visit.kind == Visit::Kind::gather
                                    ? m.lists[static_cast<size_t>(visit.first + j)]
                                    : visit.first + j;
          visited += static_cast<int64_t>(tokens.size());
          for (size_t i = 0; i < tokens.size(); ++i) {
            if (visit.kind != Visit::Kind::interval) {
              const auto id = m.atom_ids[static_cast<size_t>(visit.atoms + j / 64)];
              if (id >= 0 && !(map->atoms[static_cast<size_t>(id)][static_cast<size_t>(j % 64)] >> i & 1))
                continue;
            }
            ++seen[static_cast<size_t>(by_query ? tokens[i] * shape.keys + other
                                                : other * shape.keys + tokens[i])];
          }
        }
    }
    for (int count : owned) ASSERT_EQ(count, 1);
    int64_t needed = 0;
    for (int64_t q = 0; q < shape.queries; ++q)
      for (int64_t k = 0; k < shape.keys; ++k) {
        const bool allowed = mask.rule().allows(shape, q, k);
        needed += allowed;
        ASSERT_EQ(seen[static_cast<size_t>(q * shape.keys + k)], allowed)
            << (by_query ? "query side: " : "key side: ") << q << ", " << k;
      }
    if (by_query) {
      EXPECT_EQ(map->needed, needed);
      EXPECT_EQ(map->visited, visited);
    }
  }
}

TEST(Mask, SequencesAllowWhatTheySay) {
  for (int64_t q = 0; q < 7; ++q)
    for (int64_t k = 0; k < 9; ++k) {
      EXPECT_TRUE(full().allows(q, k, 7, 9));
      EXPECT_EQ(causal(Align::top_left).allows(q, k, 7, 9), k <= q);
      EXPECT_EQ(causal(Align::bottom_right).allows(q, k, 7, 9), k - 9 <= q - 7);
      EXPECT_EQ(sliding_window(2, 1, Align::top_left).allows(q, k, 7, 9), q - 2 <= k && k <= q + 1);
      EXPECT_EQ(sliding_window(2, 1, Align::bottom_right).allows(q, k, 7, 9), q <= k && k <= q + 3);
      EXPECT_EQ(document({3, 0, 4}, {5, 2, 2}).allows(q, k, 7, 9), q < 3 ? k < 5 : k >= 7);
      EXPECT_EQ(padding({4, 9}).allows(q, k, 7, 9, 0), k < 4);
      EXPECT_TRUE(padding({4, 9}).allows(q, k, 7, 9, 1));
      EXPECT_EQ(prefix(3).allows(q, k, 9, 9), k < 3 || k <= q);
      EXPECT_EQ((!causal(Align::top_left)).allows(q, k, 7, 9), k > q);
      EXPECT_EQ((full() & prefix(2)).allows(q, k, 9, 9), k < 2 || k <= q);
      EXPECT_EQ((sliding_window(1, 1, Align::top_left) | padding({2})).allows(q, k, 7, 9),
                (q - 1 <= k && k <= q + 1) || k < 2);
    }
}

// The keys of one centre by the text of Boundary, without any code of the masks.
std::set<int64_t> keys_of(Boundary boundary, int64_t q, int64_t w, int64_t d, int64_t length) {
  std::set<int64_t> keys;
  if (boundary == Boundary::shift) {
    std::vector<int64_t> all;
    int64_t place = 0;
    for (int64_t k = q % d; k < length; k += d) {
      if (k == q) place = static_cast<int64_t>(all.size());
      all.push_back(k);
    }
    const auto n = static_cast<int64_t>(all.size());
    int64_t first = place - w / 2;
    while (first + w > n) --first;
    while (first < 0) ++first;
    for (int64_t i = first; i < std::min(n, first + w); ++i) keys.insert(all[static_cast<size_t>(i)]);
    return keys;
  }
  for (int64_t i = 0; i < w; ++i) {
    int64_t k = q + (i - w / 2) * d;
    if (boundary == Boundary::causal) k = q - i * d;
    if (boundary == Boundary::valid) k = q + i * d;
    if (boundary == Boundary::wrap)
      while (k < 0) k += length;
    if (boundary == Boundary::wrap) k %= length;
    if (k >= 0 && k < length) keys.insert(k);
  }
  return keys;
}

TEST(Mask, EveryBoundaryAllowsWhatItSays) {
  for (Boundary boundary :
       {Boundary::wrap, Boundary::shift, Boundary::shrink, Boundary::causal, Boundary::valid})
    for (int64_t length = 1; length <= 13; ++length)
      for (int64_t w = 1; w <= 15; ++w)
        for (int64_t d = 1; d <= 5; ++d) {
          const int64_t keys = boundary == Boundary::valid ? length + (w - 1) * d : length;
          const Mask mask = neighborhood(
              {.grid = {length}, .window = {w}, .dilation = {d}, .boundary = {boundary}, .key_grid = {keys}});
          for (int64_t q = 0; q < length; ++q) {
            const auto expected = keys_of(boundary, q, w, d, keys);
            for (int64_t k = 0; k < keys; ++k)
              ASSERT_EQ(mask.allows(q, k, length, keys), expected.contains(k))
                  << "boundary " << static_cast<int>(boundary) << " L " << length << " w " << w << " d " << d
                  << " q " << q << " k " << k;
            if (boundary == Boundary::wrap) {
              ASSERT_EQ(static_cast<int64_t>(expected.size()), std::min(w, length / std::gcd(d, length)));
            }
          }
        }
}

TEST(MaskMap, CoversEachAllowedPairOnce) {
  for (const Mask& mask : {full(), causal(Align::top_left), causal(Align::bottom_right)})
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{1, 1}, {63, 65}, {200, 130}, {130, 200}, {0, 5}, {5, 0}})
      expect_covers(mask, {queries, keys});
  for (uint64_t seed = 0; seed < 300; ++seed) {
    MaskMaker maker(seed);
    const auto made = maker.any(2);
    SCOPED_TRACE(made.text + " seed " + std::to_string(seed));
    for (int64_t b = 0; b < 2; ++b)
      expect_covers(made.mask, {made.queries, made.keys, 2, b, made.mask.rule().per_head() ? b : 0});
    if (::testing::Test::HasFailure()) return;
  }
}

// Lengths in a tensor: as the same documents of numbers, then as others.
TEST(Mask, DocumentsOfATensor) {
  Tensor lengths = Tensor::from<int64_t>({70, 0, 3, 130, 90, 60, 0, 0}, {2, 4});
  const int64_t n = 210;
  for (bool is_causal : {false, true}) {
    const Mask mask = is_causal ? causal() & document(lengths) : document(lengths);
    const auto check = [&](int64_t batch, const std::vector<int64_t>& expected, int64_t tokens) {
      SCOPED_TRACE(std::to_string(batch) + (is_causal ? " causal" : ""));
      expect_covers(mask, {n, n, 2, batch});
      const Mask same = document(expected);
      for (int64_t q = 0; q < n; ++q)
        for (int64_t k = 0; k < n; ++k)
          ASSERT_EQ(mask.allows(q, k, n, n, batch),
                    q < tokens && k < tokens && same.allows(q, k, n, n) && (!is_causal || k <= q));
    };
    lengths.copy_(Tensor::from<int64_t>({70, 0, 3, 130, 90, 60, 0, 0}, {2, 4}));
    check(0, {70, 3, 130, 7}, 203);
    check(1, {90, 60, 60}, 150);
    EXPECT_EQ(mask_costs(mask, n, n, 1).needed, is_causal ? 90 * 91 / 2 + 60 * 61 / 2 : 90 * 90 + 60 * 60);
    lengths.copy_(Tensor::from<int64_t>({64, 64, 64, 18, 0, 0, 0, 0}, {2, 4}));
    check(0, {64, 64, 64, 18}, 210);
    check(1, {210}, 0);
    lengths.fill_(60);
    EXPECT_EQ(message_of([&] {
                mask.rule().map({n, n, 2, 0});
              }),
              "[document] the documents have 240 tokens, got 210");
    lengths.fill_(-1);
    EXPECT_EQ(message_of([&] {
                mask.rule().map({n, n, 2, 0});
              }),
              "[document] a length must be at least 0, got -1");
  }
  const Mask mask = document(lengths);
  for (const auto& combined : {+[](const Mask& m) { return m & sliding_window(3, 3); },
                               +[](const Mask& m) { return full() | m; }, +[](const Mask& m) { return !m; }})
    EXPECT_EQ(message_of([&] { combined(mask); }),
              "[document] lengths in a tensor combine with `& causal()` alone; others need them as numbers");
  EXPECT_EQ(message_of([&] { document(lengths.to(f32)); }), "[document] lengths must be i64 or i32, got f32");
  EXPECT_EQ(message_of([&] { document(lengths.transpose(0, 1)); }),
            "[document] lengths must be contiguous, as they are read again at each use");
  EXPECT_EQ(message_of([&] {
              mask.rule().map({n, n, 3, 0});
            }),
            "[document] expected lengths of 3 batch elements, got 2");
}

TEST(Mask, AttentionFollowsLengthsOfATensor) {
  Tensor lengths = Tensor::from<int64_t>({40, 30, 100, 0}, {2, 2}).to(i32);
  Case c{.batch = 2, .heads = 2, .queries = 100, .keys = 100, .width = 5, .value_width = 4};
  c.options.mask = document(lengths) & causal();
  expect_fused_equals_reference(c, 1);
  lengths.fill_(33);
  expect_fused_equals_reference(c, 2);
}

TEST(MaskMap, CausalAtAMillionTokensIsSmall) {
  const int64_t n = 1 << 20;
  const auto start = std::chrono::steady_clock::now();
  const auto map = causal().rule().map({n, n});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_LT(seconds, 5);
  EXPECT_LT(map->bytes(), 4 << 20);
  EXPECT_EQ(map->atoms.size(), 2u);  // one a side
  EXPECT_EQ(map->needed, n * (n + 1) / 2);
  EXPECT_LE(map->visited, map->needed + 64 * n);
  EXPECT_EQ(map, causal().rule().map({n, n})) << "cached";
}

TEST(MaskMap, GrowsWithTheTokens) {
  const auto bytes = [](int64_t side) {
    return neighborhood({.grid = {side, side, side}, .window = {5}, .boundary = {wrap}})
        .rule()
        .map({side * side * side, side * side * side})
        ->bytes();
  };
  EXPECT_LE(bytes(32), 8 * bytes(16) * 1.05);
  for (const Mask& mask : {sliding_window(100, 3), document(std::vector<int64_t>(1024, 64)), prefix(100)}) {
    const int64_t n = 1 << 16;
    EXPECT_LE(mask.rule().map({n, n})->bytes(), n * 64);
  }
}

// ----------------------------------------------------------------------------------- attention under masks

TEST(MaskedAttention, FusedEqualsReference) {
  for (uint64_t seed = 0; seed < 250; ++seed) {
    MaskMaker maker(1000 + seed);
    std::string text;
    const Case c = random_case(maker, text);
    SCOPED_TRACE(text + " seed " + std::to_string(seed));
    expect_fused_equals_reference(c, seed);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(MaskedAttention, RelativeBiasOnGrids) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_fused_equals_reference(random_relative_case(seed), seed);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(MaskedAttention, EveryWidth) {
  for (int64_t width = 1; width <= 41; ++width) {
    Case c{.heads = 2,
           .kv_heads = 2,
           .queries = 60,
           .keys = 60,
           .width = width == 41 ? 128 : width,
           .value_width = width};
    c.options.mask = neighborhood({.grid = {5, 12}, .window = {3, 5}, .boundary = {wrap, shift}});
    SCOPED_TRACE(width);
    expect_fused_equals_reference(c, static_cast<uint64_t>(width));
  }
}

TEST(MaskedAttention, GradcheckOfRandomMasks) {
  int checked = 0;
  for (uint64_t seed = 0; checked < 25; ++seed) {
    MaskMaker maker(9000 + seed);
    std::string text;
    Case c = random_case(maker, text);
    if (c.queries > 12 || c.keys > 14) continue;
    c.width = 1 + c.width % 4, c.value_width = 1 + c.value_width % 3;
    SCOPED_TRACE(text + " seed " + std::to_string(seed));
    ++checked;
    Generator g(seed);
    std::vector<Tensor> inputs{randn({c.batch, c.heads, c.queries, c.width}, 0, 1, f64, g),
                               randn({c.batch, c.kv_heads, c.keys, c.width}, 0, 1, f64, g),
                               randn({c.batch, c.kv_heads, c.keys, c.value_width}, 0, 1, f64, g)};
    for (const AttentionBias& term : c.options.bias)
      if (term.kind() == AttentionBias::Kind::dense) inputs.push_back(term.value().value());
    const auto report = gradcheck(
        [&](const std::vector<Variable>& x) {
          AttentionOptions options = c.options;
          options.backend = Backend::cpu;
          size_t next = 3;
          for (AttentionBias& term : options.bias)
            if (term.kind() == AttentionBias::Kind::dense) term = term.with(x[next++]);
          const auto [out, lse] = attention(x[0], x[1], x[2], options);
          return std::vector<Variable>{out, lse};
        },
        inputs);
    EXPECT_TRUE(report) << report;
  }
}

// The example of the request for circular windows: SHI-Labs/NATTEN#142.
TEST(MaskedAttention, TheWindowThatWrapsAtTheCorner) {
  Tensor ones = Tensor::full({1, 1, 25, 1}, 1), v = Tensor::zeros({1, 1, 25, 1});
  v.mutable_data<float>()[0] = 1;
  const auto out = [&](std::vector<Boundary> boundary) {
    return attention(Variable(ones), Variable(ones), Variable(v),
                     {.mask = neighborhood({.grid = {5, 5}, .window = {3, 3}, .boundary = boundary})})
        .out.value()
        .to_vector<float>();
  };
  const auto both = out({wrap, wrap}), one = out({wrap, shift});
  for (int64_t row = 0; row < 5; ++row)
    for (int64_t column = 0; column < 5; ++column) {
      const auto i = static_cast<size_t>(row * 5 + column);
      const bool near_row = row == 0 || row == 1 || row == 4;
      EXPECT_FLOAT_EQ(both[i], near_row && (column == 0 || column == 1 || column == 4) ? 1.f / 9 : 0.f);
      // Shifted columns: the window of column 1, and that of column 0 slid inward, hold column 0.
      EXPECT_FLOAT_EQ(one[i], near_row && column <= 1 ? 1.f / 9 : 0.f);
    }
}

// What users of kernels without wrapping do: pad circularly, attend, crop.
TEST(MaskedAttention, EqualsPaddingAndCropping) {
  const int64_t n = 23, w = 5, heads = 2, d = 7;
  Generator g(4);
  const auto make = [&] { return randn({1, heads, n, d}, 0, 1, f64, g); };
  const Tensor q0 = make(), k0 = make(), v0 = make(), d_out = make();
  std::vector<std::vector<Tensor>> results;
  for (bool fused : {true, false}) {
    Tape tape;
    const Variable q(q0, true), k(k0, true), v(v0, true);
    Variable out;
    if (fused) {
      out = attention(q, k, v, {.mask = neighborhood({.grid = {n}, .window = {w}, .boundary = {wrap}})}).out;
    } else {
      const auto pad = [&](const Variable& x) {
        return cat({slice(x, 2, n - w / 2, n), x, slice(x, 2, 0, w / 2)}, 2);
      };
      const Mask band = Mask::from([=](Query a, Key b) { return std::abs(a.token - b.token) <= w / 2; });
      out = slice(attention(pad(q), pad(k), pad(v), {.mask = band, .backend = Backend::reference}).out, 2,
                  w / 2, n + w / 2);
    }
    tape.backward({out}, {d_out});
    results.push_back({out.value(), q.grad(), k.grad(), v.grad()});
  }
  for (size_t i = 0; i < 4; ++i)
    EXPECT_LE(distance(results[0][i], results[1][i]), 1e-12 * norm(results[1][i])) << i;
}

Tensor roll(const Tensor& x, const std::vector<int64_t>& grid, size_t axis, int64_t by) {  // of [1, H, N, D]
  Tensor result = Tensor::empty(x.shape(), x.dtype());
  int64_t inner = 1;
  for (size_t a = axis + 1; a < grid.size(); ++a) inner *= grid[a];
  for (int64_t token = 0; token < x.size(2); ++token) {
    const int64_t c = token / inner % grid[axis], to = token + ((c + by) % grid[axis] - c) * inner;
    result.slice(2, to, to + 1).copy_(x.slice(2, token, token + 1));
  }
  return result;
}

TEST(MaskedAttention, RollingAlongAWrappedAxisRollsEverything) {
  const std::vector<int64_t> grid{6, 5, 7};
  const int64_t n = 6 * 5 * 7;
  Generator g(6);
  const auto make = [&] { return randn({1, 2, n, 8}, 0, 1, f64, g); };
  const Tensor q0 = make(), k0 = make(), v0 = make(), d_out0 = make(),
               table = randn({2, 5, 3, 5}, 0, 1, f64, g);
  const auto run = [&](const std::function<Tensor(const Tensor&)>& change) {
    Tape tape;
    const Variable q(change(q0), true), k(change(k0), true), v(change(v0), true);
    const auto out =
        attention(
            q, k, v,
            {.mask = neighborhood(
                 {.grid = grid, .window = {5, 3, 4}, .dilation = {1, 1, 2}, .boundary = {wrap, shift, wrap}}),
             .bias = {relative_bias(Variable(table), grid, {true, false, true})}})
            .out;
    tape.backward({out}, {change(d_out0)});
    return std::vector<Tensor>{out.value(), q.grad(), k.grad(), v.grad()};
  };
  const auto still = run([](const Tensor& x) { return x; });
  for (size_t axis : {size_t{0}, size_t{2}})
    for (int64_t by : {int64_t{1}, int64_t{3}}) {
      const auto rolled = run([&](const Tensor& x) { return roll(x, grid, axis, by); });
      for (size_t i = 0; i < still.size(); ++i)
        EXPECT_LE(distance(rolled[i], roll(still[i], grid, axis, by)), 1e-12 * norm(still[i]))
            << axis << ", " << by << ", " << i;
    }
  // And along the other it does not.
  const auto rolled = run([&](const Tensor& x) { return roll(x, grid, 1, 1); });
  EXPECT_GT(distance(rolled[0], roll(still[0], grid, 1, 1)), 1e-3 * norm(still[0]));
}

TEST(MaskedAttention, RowsWhoseBiasForbidsAll) {
  Case c{.queries = 70, .keys = 90, .width = 8, .value_width = 8};
  Tensor bias = Tensor::zeros({1, 1, 70, 90}, f64);
  bias.slice(2, 10, 13).fill_(-std::numeric_limits<double>::infinity());
  const Variable q(randn({1, 1, 70, 8}, 0, 1, f64), true), k(randn({1, 1, 90, 8}, 0, 1, f64), true),
      v(randn({1, 1, 90, 8}, 0, 1, f64), true), b(bias, true);
  Tape tape;
  const auto [out, lse] = attention(q, k, v, {.bias = {b}, .backend = Backend::cpu});
  tape.backward({out}, {Tensor::full(out.shape(), 1, f64)});
  EXPECT_EQ(norm(out.value().slice(2, 10, 13)), 0);
  EXPECT_EQ(norm(q.grad().slice(2, 10, 13)), 0);
  for (const Variable& x : {q, k, v, b})
    for (double value : x.grad().to_vector<double>()) ASSERT_TRUE(std::isfinite(value));
}

// What a query may not see changes nothing of it, though a tile holds both.
TEST(MaskedAttention, NanInMaskedKeysIsHarmless) {
  const int64_t n = 90, poisoned = 37;
  for (const Mask& mask :
       {neighborhood({.grid = {9, 10}, .window = {3, 3}, .boundary = {wrap, shift}}), document({30, 40, 20}),
        sliding_window(5, 2), !sliding_window(20, 20), prefix(7)}) {
    Generator g(8);
    const auto make = [&] { return randn({1, 1, n, 6}, 0, 1, f64, g); };
    const Tensor q0 = make(), k0 = make(), v0 = make(), d_out = make();
    const auto run = [&](bool poison) {
      Tensor k1 = k0.clone(), v1 = v0.clone();
      if (poison) k1.select(2, poisoned).fill_(std::nan("")), v1.select(2, poisoned).fill_(std::nan(""));
      Tape tape;
      const Variable q(q0, true), k(k1, true), v(v1, true);
      const auto [out, lse] = attention(q, k, v, {.mask = mask, .backend = Backend::cpu});
      tape.backward({out}, {d_out});
      return std::vector<Tensor>{out.value(), lse.value().unsqueeze(3), q.grad(), k.grad(), v.grad()};
    };
    const auto clean = run(false), dirty = run(true);
    const auto sees = [&](int64_t query, int64_t key) { return mask.allows(query, key, n, n); };
    int64_t compared = 0;
    for (int64_t token = 0; token < n; ++token) {
      // A query is untouched if it does not see the key; a key, if all that see it are.
      bool key_untouched = true;
      for (int64_t query = 0; query < n; ++query)
        key_untouched &= !sees(query, token) || !sees(query, poisoned);
      for (size_t i = 0; i < clean.size(); ++i) {
        if (i < 3 ? sees(token, poisoned) : !key_untouched) continue;
        ++compared;
        const Tensor a = clean[i].select(2, token), b = dirty[i].select(2, token);
        EXPECT_LE(distance(a, b), 1e-13 * (1 + norm(a))) << i << " of token " << token;
      }
    }
    EXPECT_GT(compared, n);
  }
}

TEST(MaskedAttention, LogitsOfTenThousand) {
  Case c{.heads = 2, .kv_heads = 2, .queries = 80, .keys = 80, .width = 16, .value_width = 16};
  c.options.scale = 1e4;
  c.options.mask = sliding_window(9, 9);
  expect_fused_equals_reference(c, 1);
}

TEST(MaskedAttention, SameBitsForAnyThreads) {
  const int before = num_threads();
  const std::vector<int64_t> grid{8, 9, 10};
  const auto run = [&] {
    Generator g(2);
    const auto make = [&] { return Variable(randn({1, 2, 720, 16}, 0, 1, f32, g), true); };
    const Variable q = make(), k = make(), v = make(), table(randn({2, 5, 5, 5}, 0, 1, f32, g), true),
                   bias(randn({720, 720}, 0, 1, f32, g), true);
    Tape tape;
    const auto out = attention(q, k, v,
                               {.mask = neighborhood({.grid = grid, .window = {5}, .boundary = {wrap}}),
                                .bias = {relative_bias(table, grid, {true, true, true}), bias}})
                         .out;
    tape.backward({out}, {Tensor::full(out.shape(), 1)});
    std::vector<std::vector<float>> bits{out.value().to_vector<float>()};
    for (const Variable& x : {q, k, v, table, bias}) bits.push_back(x.grad().to_vector<float>());
    return bits;
  };
  set_num_threads(1);
  const auto one = run();
  for (int threads : {2, 5}) {
    set_num_threads(threads);
    EXPECT_EQ(one, run()) << threads;
  }
  set_num_threads(before);
}

// By the allocator's count, and by the resident size of the process.
TEST(MaskedAttention, MemoryGrowsWithTheTokens) {
  const auto peak = [](const Mask& mask, int64_t n) {
    const Variable q(randn({1, 2, n, 8}), true), k(randn({1, 2, n, 8}), true), v(randn({1, 2, n, 8}), true);
    reset_peak_memory();
    const int64_t before = memory_stats().live_bytes;
    Tape tape;
    const Variable out = attention(q, k, v, {.mask = mask}).out;
    tape.backward({out}, {Tensor::full(out.shape(), 1)});
    return memory_stats().peak_bytes - before;
  };
  const auto window = [](int64_t side) {
    return neighborhood(
        {.grid = {side, side, side}, .window = {3}, .boundary = {wrap, shift, Boundary::shrink}});
  };
  const int64_t small = peak(window(16), 16 * 16 * 16), resident = status_kilobytes("VmRSS:");
  EXPECT_LE(peak(window(32), 32 * 32 * 32), 8.1 * static_cast<double>(small));
  EXPECT_LE(peak(window(64), 64 * 64 * 64), 64.8 * static_cast<double>(small));
  const std::vector<int64_t> documents(32, 1024);
  for (const Mask& mask :
       {sliding_window(30, 2), document(documents), sliding_window(9, 9) & document(documents)})
    EXPECT_LE(peak(mask, 1 << 15), 8.1 * static_cast<double>(small));
  EXPECT_LE(status_kilobytes("VmHWM:") - resident, 1500 * 1024)
      << "scores of 64^3 x 64^3 would be 256 GiB, of 2^15 x 2^15 4 GiB";
}

TEST(Mask, CostsOfOneBatchElement) {
  EXPECT_EQ(mask_costs(padding({3, 5}), 4, 6, 0).needed, 12);
  EXPECT_EQ(mask_costs(padding({3, 5}), 4, 6, 1).needed, 20);
  EXPECT_EQ(message_of([] {
              mask_costs(padding({3, 5}), 4, 6, 2);
            }),
            "[padding] expected 3 lengths, one a batch element, got 2");
}

TEST(Mask, RefusesWhatDoesNotFit) {
  const auto map = [](const Mask& mask, const MaskShape& shape) {
    return message_of([&] { mask.rule().map(shape); });
  };
  EXPECT_EQ(message_of([] {
              neighborhood({.grid = {4, 4}, .window = {3, 0}});
            }),
            "[neighborhood] axis 1: window and dilation must be at least 1, got 0 and 1");
  EXPECT_EQ(map(neighborhood({.grid = {4, 5}, .window = {3}}), {21, 21}),
            "[neighborhood] a grid of 4 x 5 has 20 tokens, got 21 keys");
  EXPECT_EQ(message_of([] {
              neighborhood({.grid = {4, 5}, .window = {3, 3}, .boundary = {wrap}, .key_grid = {4, 6}});
            }),
            "[neighborhood] axis 1: 5 queries and 6 keys need centers (or the boundary valid), got wrap");
  EXPECT_EQ(
      message_of([] { neighborhood({.grid = {4}, .window = {3}, .boundary = {valid}, .key_grid = {5}}); }),
      "[neighborhood] axis 0: valid with window 3, dilation 1 and 4 queries needs 6 keys, got 5");
  EXPECT_EQ(
      message_of([] {
        neighborhood({.window = {3}, .key_grid = {5}, .centers = Tensor::from<int64_t>({2, 5}, {2, 1})});
      }),
      "[neighborhood] axis 0: the center of query 1 must be in [0, 5), got 5");
  EXPECT_EQ(map(Mask::from([](Query q, Key) { return q.head == 0; }), {3, 3}),
            "[mask] the predicate reads head without declaring .per_head = true");
  EXPECT_EQ(map(Mask::from([](Query, Key) { return true; }, {.grid = {2, 2}}), {5, 5}),
            "[mask] a grid of 2 x 2 has 4 tokens, got 5 queries");
  EXPECT_EQ(map(document({2, 3}), {6, 6}), "[document] the documents have 5 queries, got 6");
  EXPECT_EQ(map(padding({2, 3}), {6, 6, 3}), "[padding] expected 3 lengths, one a batch element, got 2");
  EXPECT_EQ(
      map(sliding_window(2, 2), {6, 7}),
      "[sliding_window] 6 queries and 7 keys need an alignment: Align::top_left or Align::bottom_right");
}

}  // namespace
}  // namespace torus
