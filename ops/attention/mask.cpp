#include "torus/ops/attention/mask.h"

#include <algorithm>
#include <optional>

#include "torus/ops/attention/map.h"

namespace torus {

namespace {

using detail::Side;

class FullRule final : public detail::PredicateRule<FullRule> {
 public:
  void check_lengths(int64_t, int64_t) const override {}
  bool allows(int64_t, int64_t, int64_t, int64_t) const override { return true; }
  std::vector<Range> candidates(Side side, int64_t, int64_t, int64_t queries, int64_t keys) const override {
    return {{0, side == Side::query ? keys : queries, true}};
  }
};

class CausalRule final : public detail::PredicateRule<CausalRule> {
 public:
  explicit CausalRule(std::optional<Align> align) : align_(align) {}

  void check_lengths(int64_t queries, int64_t keys) const override {
    check(align_ || queries == keys, Error::Kind::Shape, "[causal] ", queries, " queries and ", keys,
          " keys need an alignment: causal(Align::top_left) or causal(Align::bottom_right)");
  }

  bool allows(int64_t q, int64_t k, int64_t queries, int64_t keys) const override {
    return k <= q + shift(queries, keys);
  }

  std::vector<Range> candidates(Side side, int64_t first, int64_t last, int64_t queries,
                                int64_t keys) const override {
    const int64_t offset = shift(queries, keys);
    if (side == Side::query) {
      // The first owner sees keys up to `every`, the last up to `any`.
      const int64_t every = std::clamp<int64_t>(first + offset + 1, 0, keys);
      const int64_t any = std::clamp<int64_t>(last + offset, 0, keys);
      return {{0, every, true}, {every, any, false}};
    }
    // Queries from `any` on see the first of these keys, from `every` on the last too.
    const int64_t any = std::clamp<int64_t>(first - offset, 0, queries);
    const int64_t every = std::clamp<int64_t>(last - 1 - offset, 0, queries);
    return {{any, every, false}, {every, queries, true}};
  }

 private:
  int64_t shift(int64_t queries, int64_t keys) const {
    return align_ == Align::bottom_right ? keys - queries : 0;
  }

  std::optional<Align> align_;
};

}  // namespace

Mask::Mask() : Mask(full()) {}

bool Mask::allows(int64_t q, int64_t k, int64_t queries, int64_t keys) const {
  rule_->check_lengths(queries, keys);
  return rule_->allows(q, k, queries, keys);
}

Mask full() {
  static const Mask mask(std::make_shared<FullRule>());
  return mask;
}

// One rule each for the whole process, so that every layer shares its maps.
Mask causal(Align align) {
  static const Mask top_left(std::make_shared<CausalRule>(Align::top_left));
  static const Mask bottom_right(std::make_shared<CausalRule>(Align::bottom_right));
  return align == Align::top_left ? top_left : bottom_right;
}

Mask causal() {
  static const Mask mask(std::make_shared<CausalRule>(std::nullopt));
  return mask;
}

}  // namespace torus
