// Mask: which keys a query may see. One predicate; the map of tiles that kernels walk is derived from it.
#pragma once

#include <cstdint>
#include <memory>

#include "torus/core/shape.h"

namespace torus {

namespace detail {
class MaskRule;
}

/// An immutable rule that says which (query, key) pairs attention uses. Copies share the rule and what was
/// derived from it. Make one with the functions below.
class Mask {
 public:
  /// Every query sees every key.
  Mask();
  explicit Mask(std::shared_ptr<const detail::MaskRule> rule) : rule_(std::move(rule)) {}

  /// Whether query token q may see key token k, among Nq queries and Nk keys.
  bool allows(int64_t q, int64_t k, int64_t queries, int64_t keys) const;
  const detail::MaskRule& rule() const { return *rule_; }

 private:
  std::shared_ptr<const detail::MaskRule> rule_;
};

/// Every query sees every key.
Mask full();

/// Where the diagonal lies when there are not as many keys as queries: from the first token of both, or
/// ending at the last of both.
enum class Align { top_left, bottom_right };
/// Query q sees key k if k <= q (top_left), or k - Nk <= q - Nq (bottom_right).
Mask causal(Align align);
/// The same for as many keys as queries, where both alignments agree; other lengths throw.
Mask causal();

}  // namespace torus
