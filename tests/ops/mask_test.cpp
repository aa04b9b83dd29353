// Masks: which pairs they allow, the maps derived from them, and the same fused kernels under all of them.
#include "torus/ops/attention/mask.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
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

// Windows of several axes, each by itself, around tokens or explicit centres.
TEST(Mask, SeveralAxesAllowTheProductOfTheirKeys) {
  Generator g(21);
  for (int round = 0; round < 60; ++round) {
    const size_t axes = static_cast<size_t>(2 + g.below(4));
    const bool centers = round % 2 == 1;
    NeighborhoodOptions o;
    int64_t queries = 1, keys = 1;
    for (size_t a = 0; a < axes; ++a) {
      o.window.push_back(1 + g.below(5));
      o.dilation.push_back(1 + g.below(2));
      o.boundary.push_back(static_cast<Boundary>(g.below(centers ? 4 : 5)));
      const bool longer = o.boundary.back() == valid;
      o.grid.push_back(1 + g.below(std::min<int64_t>(longer ? 2 : 9, 1 + 200 / keys)));
      o.key_grid.push_back(o.grid.back() + (longer ? (o.window.back() - 1) * o.dilation.back() : 0));
      queries *= o.grid.back(), keys *= o.key_grid.back();
    }
    std::vector<std::vector<int64_t>> places;
    if (centers) queries = 1 + g.below(40);
    for (int64_t q = 0; q < queries; ++q) {
      std::vector<int64_t> place(axes);
      int64_t rest = q;
      for (size_t a = axes; a-- > 0; rest /= o.grid[a])
        place[a] = centers ? g.below(o.grid[a]) : rest % o.grid[a];
      places.push_back(place);
    }
    if (centers) {
      o.centers = Tensor::empty({queries, static_cast<int64_t>(axes)}, i64);
      int64_t* at = o.centers.mutable_data<int64_t>();
      for (const auto& place : places) at = std::copy(place.begin(), place.end(), at);
      o.grid.clear();
    }
    const Mask mask = neighborhood(o);
    int64_t needed = 0, fewest = keys, most = 0;
    for (int64_t q = 0; q < queries; ++q) {
      std::vector<std::set<int64_t>> seen;
      int64_t count = 1;
      for (size_t a = 0; a < axes; ++a) {
        seen.push_back(keys_of(o.boundary[a], places[static_cast<size_t>(q)][a], o.window[a], o.dilation[a],
                               o.key_grid[a]));
        count *= static_cast<int64_t>(seen.back().size());
      }
      for (int64_t k = 0, rest = 0; k < keys; ++k) {
        bool expected = true;
        rest = k;
        for (size_t a = axes; a-- > 0; rest /= o.key_grid[a])
          expected &= seen[a].contains(rest % o.key_grid[a]);
        ASSERT_EQ(mask.allows(q, k, queries, keys), expected) << round << ": " << q << ", " << k;
      }
      needed += count, fewest = std::min(fewest, count), most = std::max(most, count);
    }
    const MaskCosts costs = mask_costs(mask, queries, keys);
    EXPECT_EQ(costs.needed, needed) << round;
    EXPECT_EQ(costs.fewest_keys, fewest) << round;
    EXPECT_EQ(costs.most_keys, most) << round;
  }
}

TEST(MaskMap, CoversEachAllowedPairOnce) {
  for (const Mask& mask : {full(), causal(Align::top_left), causal(Align::bottom_right)})
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{1, 1}, {63, 65}, {200, 130}, {130, 200}, {0, 5}, {5, 0}})
      expect_covers(mask, {queries, keys});
  for (uint64_t seed = 0; seed < 200; ++seed) {
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

TEST(Mask, EqualNeighborhoodsShareTheirMaps) {
  const NeighborhoodOptions o{.grid = {4, 5}, .window = {3}, .boundary = {wrap}};
  NeighborhoodOptions other = o;
  other.boundary = {shift};
  const Mask a = neighborhood(o), b = neighborhood(o), c = neighborhood(other);
  EXPECT_EQ(&a.rule(), &b.rule());
  EXPECT_NE(&a.rule(), &c.rule());
}

// A mask that counts how much of it is tried.
class CountingRule final : public detail::MaskRule {
 public:
  explicit CountingRule(Mask mask) : mask_(std::move(mask)) {}
  void check_shape(const MaskShape& shape) const override { mask_.rule().check_shape(shape); }
  bool allows(const MaskShape& shape, int64_t q, int64_t k) const override {
    return mask_.rule().allows(shape, q, k);
  }
  detail::OwnerOrder order(Side side, const MaskShape& shape) const override {
    return mask_.rule().order(side, shape);
  }
  detail::Candidates candidates(Side side, std::span<const int64_t> owners,
                                const MaskShape& shape) const override {
    auto result = mask_.rule().candidates(side, owners, shape);
    pairs_ += static_cast<int64_t>(result.list.size() + result.ranges.size());
    return result;
  }
  detail::Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
                    const MaskShape& shape) const override {
    pairs_ += static_cast<int64_t>(owners.size() * others.size());
    return mask_.rule().bits(side, owners, others, shape);
  }
  int64_t pairs() const { return pairs_; }

 private:
  Mask mask_;
  mutable std::atomic<int64_t> pairs_{0};
};

int64_t pairs_tried(const Mask& mask, int64_t n) {
  const auto rule = std::make_shared<const CountingRule>(mask);
  rule->map({n, n, 1});
  return rule->pairs();
}

TEST(MaskMap, CausalAtAMillionTokensIsSmall) {
  const int64_t n = 1 << 20;
  // As many pairs as two blocks of each tile and side, so well under a second: 0.1 s on two cores at rest.
  EXPECT_LE(pairs_tried(causal(), n / 8), 3 * 64 * n / 8);
  const auto map = causal().rule().map({n, n});
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
  const int64_t n = 1 << 13;
  const auto documents = [](int64_t tokens) {
    return document(std::vector<int64_t>(static_cast<size_t>(tokens / 64), 64));
  };
  const auto shared = [](const Mask& mask) { return [=](int64_t) { return mask; }; };
  for (const auto& make : std::vector<std::function<Mask(int64_t)>>{
           shared(full()), shared(causal()), shared(sliding_window(100, 3)), documents, shared(prefix(100)),
           shared(padding({1000})), shared(!sliding_window(100, 3)),
           [&](int64_t tokens) { return causal() & documents(tokens); },
           [&](int64_t tokens) { return sliding_window(9, 9) | documents(tokens); },
           [&](int64_t tokens) { return padding({1000}) | documents(tokens); }}) {
    const auto size = [&](int64_t tokens) { return make(tokens).rule().map({tokens, tokens, 1})->bytes(); };
    EXPECT_LE(size(8 * n), 8 * n * 64);
    EXPECT_LE(size(8 * n), 8.5 * static_cast<double>(size(n)));
  }
}

// Building a map tries about as many pairs as the windows hold, however masks are combined.
TEST(MaskMap, IsBuiltFromFewPairs) {
  const auto window = [](int64_t side) {
    return neighborhood({.grid = {side, side, side}, .window = {3}, .boundary = {wrap}});
  };
  const auto documents = [](int64_t n) {
    return document(std::vector<int64_t>(static_cast<size_t>(n / 64), 64));
  };
  const auto n = [](int64_t side) { return side * side * side; };
  for (const auto& [name, make] :
       {std::pair<const char*, std::function<Mask(int64_t)>>{"alone", window},
        {"not", [&](int64_t side) { return !window(side); }},
        {"or a band", [&](int64_t side) { return window(side) | sliding_window(3, 3); }},
        {"or documents", [&](int64_t side) { return window(side) | documents(n(side)); }},
        {"and a band", [&](int64_t side) { return window(side) & sliding_window(100, 100); }},
        {"and documents", [&](int64_t side) { return window(side) & documents(n(side)); }},
        {"and not a band", [&](int64_t side) { return window(side) & !sliding_window(3, 3); }},
        {"and causal", [&](int64_t side) { return window(side) & causal(); }},
        {"or padding", [&](int64_t side) { return window(side) | padding({100}); }},
        {"not, or a band", [&](int64_t side) { return !(window(side) | sliding_window(3, 3)); }}}) {
    SCOPED_TRACE(name);
    const int64_t small = pairs_tried(make(12), n(12)), large = pairs_tried(make(24), n(24));
    EXPECT_LE(large, 16 * small) << "8 if linear in the tokens, 64 if in their pairs";
    EXPECT_LE(large, 16 * pairs_tried(window(24), n(24)));
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

// What users of kernels without wrapping do, in ordinary ops: pad circularly, attend in a band, crop.
TEST(MaskedAttention, EqualsPaddingAndCropping) {
  for (const auto& [n, w, dilation] :
       {std::array<int64_t, 3>{23, 5, 1}, {7, 7, 1}, {30, 6, 1}, {16, 4, 3}, {64, 9, 2}, {5, 1, 1}}) {
    SCOPED_TRACE(std::to_string(n) + " window " + std::to_string(w) + " dilation " +
                 std::to_string(dilation));
    const int64_t heads = 2, d = 7, reach = w / 2 * dilation, padded = n + 2 * reach;
    Generator g(4);
    const auto make = [&] { return randn({1, heads, n, d}, 0, 1, f64, g); };
    const Tensor q0 = make(), k0 = make(), v0 = make(), d_out = make();
    Tensor band = Tensor::full({padded, padded}, -std::numeric_limits<double>::infinity(), f64);
    for (int64_t q = 0; q < padded; ++q)
      for (int64_t j = -(w / 2); j < w - w / 2; ++j)
        if (const int64_t k = q + j * dilation; k >= 0 && k < padded)
          band.mutable_data<double>()[q * padded + k] = 0;
    std::vector<std::vector<Tensor>> results;
    for (bool fused : {true, false}) {
      Tape tape;
      const Variable q(q0, true), k(k0, true), v(v0, true);
      Variable out;
      if (fused) {
        out = attention(q, k, v,
                        {.mask = neighborhood(
                             {.grid = {n}, .window = {w}, .dilation = {dilation}, .boundary = {wrap}})})
                  .out;
      } else {
        const auto pad = [&](const Variable& x) {
          return cat({slice(x, 2, n - reach, n), x, slice(x, 2, 0, reach)}, 2);
        };
        const Variable scores =
            matmul(pad(q), transpose(pad(k), 2, 3)) * (1 / std::sqrt(static_cast<double>(d)));
        out = slice(matmul(softmax(scores + Variable(band)), pad(v)), 2, reach, n + reach);
      }
      tape.backward({out}, {d_out});
      results.push_back({out.value(), q.grad(), k.grad(), v.grad()});
    }
    const double one_key = w == 1 ? 1e-14 * norm(d_out) : 0;  // then the gradients of q and k are truly 0
    for (size_t i = 0; i < 4; ++i)
      EXPECT_LE(distance(results[0][i], results[1][i]), 1e-12 * norm(results[1][i]) + one_key) << i;
  }
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

// What a query may not see changes no bit of it, though a tile holds both.
TEST(MaskedAttention, NanInMaskedKeysIsHarmless) {
  const int64_t n = 90, poisoned = 37;
  for (const Mask& mask :
       {neighborhood({.grid = {9, 10}, .window = {3, 3}, .boundary = {wrap, shift}}), document({30, 40, 20}),
        sliding_window(5, 2), !sliding_window(20, 20), prefix(7), causal(), padding({50}),
        Mask::from([](Query q, Key k) { return q.token * k.token % 3 != 1; })})
    for (const DType dtype : {f64, f32, bf16})
      for (const double poison : {std::nan(""), std::numeric_limits<double>::infinity(), 123.0})
        for (const bool of_query : {false, true}) {
          SCOPED_TRACE(std::string(name(dtype)) + (of_query ? " query " : " key ") + std::to_string(poison));
          Generator g(8);
          const auto make = [&] { return randn({1, 1, n, 6}, 0, 1, f64, g).to(dtype); };
          const Tensor q0 = make(), k0 = make(), v0 = make(), d_out0 = make();
          const auto run = [&](bool poisons) {
            const auto copy = [&](const Tensor& x, bool poisons_it) {
              Tensor result = x.clone();
              if (poisons && poisons_it) result.select(2, poisoned).fill_(poison);
              return result;
            };
            Tape tape;
            const Variable q(copy(q0, of_query), true), k(copy(k0, !of_query), true),
                v(copy(v0, !of_query), true);
            const auto [out, lse] = attention(q, k, v, {.mask = mask, .backend = Backend::cpu});
            tape.backward({out}, {copy(d_out0, of_query)});
            return std::vector<Tensor>{out.value(), lse.value().unsqueeze(3), q.grad(), k.grad(), v.grad()};
          };
          const auto clean = run(false), dirty = run(true);
          const auto sees = [&](int64_t query, int64_t key) { return mask.allows(query, key, n, n); };
          int64_t compared = 0;
          for (int64_t token = 0; token < n; ++token) {
            // A query is touched if it sees the key, or is the poisoned one; a key, if one of those sees it.
            const auto query_touched = [&](int64_t query) {
              return of_query ? query == poisoned : sees(query, poisoned);
            };
            bool key_touched = false;
            for (int64_t query = 0; query < n; ++query)
              key_touched |= sees(query, token) && query_touched(query);
            for (size_t i = 0; i < clean.size(); ++i) {
              if (i < 3 ? query_touched(token) : key_touched || (!of_query && token == poisoned)) continue;
              ++compared;
              EXPECT_EQ(clean[i].select(2, token).to_vector<double>(),
                        dirty[i].select(2, token).to_vector<double>())
                  << i << " of token " << token;
            }
          }
          EXPECT_GT(compared, n / 3);
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
  const Mask documents = document(std::vector<int64_t>(32, 1024));
  for (const Mask& mask : {sliding_window(30, 2), documents, padding({200}), !(!sliding_window(9, 9)),
                           sliding_window(9, 9) & documents, sliding_window(9, 9) | padding({100})})
    EXPECT_LE(peak(mask, 1 << 15), 8.1 * static_cast<double>(small));
  // Those that allow about all pairs, at fewer tokens.
  for (const Mask& mask : {full(), causal(), prefix(100), !sliding_window(9, 9)})
    EXPECT_LE(peak(mask, 1 << 12), 8.1 * static_cast<double>(peak(mask, 1 << 9)));
  EXPECT_LE(status_kilobytes("VmHWM:") - resident, 1500 * 1024)
      << "scores of 64^3 x 64^3 would be 256 GiB, of 2^15 x 2^15 4 GiB";
}

TEST(Mask, CostsOfOneBatchElement) {
  EXPECT_EQ(mask_costs(padding({3, 5}), 4, 6, 0).needed, 12);
  EXPECT_EQ(mask_costs(padding({3, 5}), 4, 6, 1).needed, 20);
  EXPECT_EQ(message_of([] {
              mask_costs(padding({3, 5}), 4, 6, 2);
            }),
            "[padding] expected lengths of 3 batch elements, got 2");
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
  EXPECT_EQ(map(padding({2, 3}), {6, 6, 3}), "[padding] expected lengths of 3 batch elements, got 2");
  EXPECT_EQ(
      map(sliding_window(2, 2), {6, 7}),
      "[sliding_window] 6 queries and 7 keys need an alignment: Align::top_left or Align::bottom_right");
  EXPECT_EQ(message_of([] { mask_costs(full(), -4, 4); }),
            "[mask] expected 0 to 2147483647 tokens a side, got -4 queries and 4 keys");
  EXPECT_EQ(message_of([] { mask_costs(full(), 4, 4, -1); }),
            "[mask] batch and head must be at least 0, got -1 and 0");
  EXPECT_EQ(
      message_of([] {
        neighborhood({.grid = {2, 2},
                      .window = {1},
                      .key_grid = {4, 4},
                      .centers = Tensor::from<int64_t>({0, 0}, {1, 2})});
      }),
      "[neighborhood] centers lie on the grid of the keys: expected one of grid and key_grid, got both");
  EXPECT_EQ(message_of([] {
              neighborhood({.grid = {4, 4}, .window = {3}, .boundary = {wrap, static_cast<Boundary>(9)}});
            }),
            "[neighborhood] axis 1: expected a boundary, got number 9");
  EXPECT_EQ(message_of([] {
              Mask::from([](Query, Key) { return true; }, {.key_grid = {2, 2}});
            }),
            "[mask] a key_grid needs the grid of the queries, got none");
}

TEST(Mask, AnswersOnlyForPairsOfItsSizes) {
  const auto allows = [](const Mask& mask, int64_t q, int64_t k, int64_t n, int64_t batch = 0) {
    return message_of([&] { mask.allows(q, k, n, n, batch); });
  };
  EXPECT_EQ(allows(document({2, 3}), 9, 9, 10), "[document] the documents have 5 queries, got 10");
  EXPECT_EQ(
      allows(document({2, 3}), 5, 0, 5),
      "[mask] expected a query below 5, a key below 5 and a batch and head from 0 on, got 5, 0, 0 and 0");
  EXPECT_EQ(
      allows(full(), 0, -1, 5),
      "[mask] expected a query below 5, a key below 5 and a batch and head from 0 on, got 0, -1, 0 and 0");
  EXPECT_EQ(allows(padding({3}), 0, 0, 5, 7), "[padding] expected lengths of 8 batch elements, got 1");
  EXPECT_EQ(allows(neighborhood({.grid = {3}, .window = {1}}), 0, 0, 4),
            "[neighborhood] a grid of 3 has 3 tokens, got 4 keys");
}

// Numbers of any size act as the mathematics says, or are refused in a line.
TEST(Mask, NumbersOfAnySize) {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t n = 70;
  for (const int64_t far : {n, most / 2, most - 1, most}) {
    SCOPED_TRACE(far);
    const auto expect_equal = [&](const Mask& mask, const Mask& expected) {
      expect_covers(mask, {n, n});
      for (int64_t q = 0; q < n; ++q)
        for (int64_t k = 0; k < n; ++k) ASSERT_EQ(mask.allows(q, k, n, n), expected.allows(q, k, n, n));
    };
    expect_equal(sliding_window(0, far), sliding_window(0, 0) | !causal());
    expect_equal(sliding_window(far, 0), causal());
    expect_equal(sliding_window(far, far, Align::bottom_right), full());
    expect_equal(prefix(far), full());
    const auto window = [&](int64_t w, int64_t d, Boundary boundary) {
      return neighborhood({.grid = {n}, .window = {w}, .dilation = {d}, .boundary = {boundary}});
    };
    for (const Boundary boundary : {shift, shrink, Boundary::causal}) {
      expect_equal(window(3, far, boundary), sliding_window(0, 0));
      expect_equal(window(far, far, boundary), sliding_window(0, 0));
    }
    expect_equal(window(2 * n, far, wrap), window(2 * n, far % n + n, wrap));
    expect_equal(window(far, 1, wrap), full());
    expect_equal(window(far, 1, shift), full());
    if (far > n) expect_equal(window(far, 1, shrink), full());
    expect_equal(window(far, 1, Boundary::causal), causal());
    EXPECT_EQ(
        mask_costs(neighborhood({.grid = {n}, .window = {1}, .dilation = {far}, .boundary = {valid}}), n, n)
            .needed,
        n);
    if (far == n) continue;
    EXPECT_EQ(message_of([&] {
                neighborhood({.grid = {n}, .window = {far}, .dilation = {far}, .boundary = {valid}});
              }),
              "[neighborhood] axis 0: valid with window " + std::to_string(far) + ", dilation " +
                  std::to_string(far) + " and 70 queries needs " + std::to_string(most) + " keys, got 70");
  }
  EXPECT_EQ(message_of([&] {
              document({most, most, 12});
            }),
            "[document] the documents have more than 2147483647 tokens");
  EXPECT_EQ(message_of([&] {
              document(Tensor::from<int64_t>({most, most, 12}, {3})).allows(0, 0, 10, 10);
            }),
            "[document] the documents have more than 2147483647 tokens");
  EXPECT_EQ(message_of([&] { padding({most}).allows(0, 0, 10, 10); }),
            "[padding] the length of batch element 0 must be in [0, 10], got 9223372036854775807");
  const int64_t large = int64_t{1} << 32;
  EXPECT_EQ(message_of([&] {
              neighborhood({.grid = {large, large}, .window = {3}});
            }),
            "[neighborhood] a grid has at most 2147483647 tokens, got 4294967296 x 4294967296");
  EXPECT_EQ(message_of([&] {
              Mask::from([](Query, Key) { return true; }, {.grid = {large, large}});
            }),
            "[mask] a grid has at most 2147483647 tokens, got 4294967296 x 4294967296");
}

}  // namespace
}  // namespace torus
