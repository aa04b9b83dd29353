// Mask: which keys a query may see. One predicate; the map of tiles that kernels walk is derived from it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torus/core/tensor.h"
#include "torus/ops/attention/mask_rule.h"

namespace torus {

struct MaskOptions {
  std::vector<int64_t> grid = {};      // sizes of the grid that the tokens lie on, row-major; empty: no grid
  std::vector<int64_t> key_grid = {};  // of the keys, if it is another; may have other axes
  bool per_batch = false;              // the predicate reads `batch`: each element gets its own map
  bool per_head = false;               // the predicate reads `head`
};

/// An immutable rule that says which (query, key) pairs attention uses. Copies share the rule and what was
/// derived from it. Combine masks with &, | and !.
class Mask {
 public:
  /// Every query sees every key.
  Mask();
  explicit Mask(std::shared_ptr<const detail::MaskRule> rule) : rule_(std::move(rule)) {}

  /// A mask that did not exist before: `predicate(Query, Key)` returns whether the pair is allowed. It must
  /// be pure: it runs on several threads, about twice for each pair, when a new problem size is first met.
  /// With a grid, `coord` holds a token's place on it, and kernels work on boxes of the grid.
  template <class Predicate>
  static Mask from(Predicate predicate, const MaskOptions& options = {});

  /// Whether query token q may see key token k, among Nq queries and Nk keys, of one batch element and head.
  /// Throws Error{Shape} if the mask does not fit these sizes, or the pair does not lie in them.
  bool allows(int64_t q, int64_t k, int64_t queries, int64_t keys, int64_t batch = 0, int64_t head = 0) const;
  const detail::MaskRule& rule() const { return *rule_; }

 private:
  std::shared_ptr<const detail::MaskRule> rule_;
};

/// The pairs that both allow, that either allows, that it does not allow.
Mask operator&(const Mask& a, const Mask& b);
Mask operator|(const Mask& a, const Mask& b);
Mask operator!(const Mask& a);

/// Every query sees every key.
Mask full();

/// Where the diagonal lies when there are not as many keys as queries: from the first token of both, or
/// ending at the last of both.
enum class Align { top_left, bottom_right };
/// Query q sees key k if k <= q (top_left), or k - Nk <= q - Nq (bottom_right).
Mask causal(Align align);
/// The same for as many keys as queries, where both alignments agree; other lengths throw.
Mask causal();

/// Query q sees keys q - left to q + right, both at least 0. As for `causal`, other lengths need an
/// alignment.
Mask sliding_window(int64_t left, int64_t right);
Mask sliding_window(int64_t left, int64_t right, Align align);

/// Documents packed one after another: a token sees those of its own document. `key_lengths`: of the keys, if
/// they are others (cross-attention); as many documents.
Mask document(std::vector<int64_t> lengths, std::vector<int64_t> key_lengths = {});
/// The same with lengths in a tensor [D] or, for each batch element its own, [B, D], of i64 or i32, that may
/// change from one use to the next: a CUDA device makes the map itself each time, also in a captured step. As
/// many keys as queries; a length of 0 is no document, and tokens after the last one see nothing and are seen
/// by none. Combines with causal() alone. Lengths below 0, or of more than all tokens together, throw (on a
/// device when the host next waits).
Mask document(const Tensor& lengths);
/// In batch element b, every query sees the first lengths[b] keys.
Mask padding(std::vector<int64_t> lengths);
/// Every query sees the first `length` keys, and further ones up to its own place. As many keys as queries.
Mask prefix(int64_t length);

/// What a window does at the ends of an axis of length L. The keys of centre q lie at q + j d for w values of
/// j from -(w/2) on (so an even window has one more below); d is the dilation; a key counts once.
enum class Boundary {
  wrap,    // modulo L: the axis is a circle
  shift,   // slides inward, keeping its size, within the keys of one residue modulo d (NATTEN's rule)
  shrink,  // loses what lies outside
  causal,  // keys q - j d, j = 0 ... w - 1, inside
  valid  // the key axis is longer by (w - 1) d, and the window of query q starts at key q: nothing is outside
};
inline constexpr Boundary wrap = Boundary::wrap, shift = Boundary::shift, shrink = Boundary::shrink,
                          valid = Boundary::valid;

/// One entry an axis; `window`, `dilation` and `boundary` may hold one for all axes, and the last two none
/// (1; shift). The keys lie on the same grid, on a longer one if axes are `valid`, or queries are where
/// `centers` says.
struct NeighborhoodOptions {
  std::vector<int64_t> grid = {};    // of the queries
  std::vector<int64_t> window = {};  // w >= 1
  std::vector<int64_t> dilation = {};
  std::vector<Boundary> boundary = {};
  std::vector<int64_t> key_grid = {};  // if it is another than `grid`
  Tensor centers = {};  // [Nq, axes] i64 on the key grid, instead of a grid of queries; not on valid axes
};

/// A window around each token of a grid of any number of axes up to 6. Masks of equal options share their
/// maps. Throws Error{Value, Shape} naming the axis.
Mask neighborhood(const NeighborhoodOptions& options);

/// What attention does under a mask.
struct MaskCosts {
  int64_t fewest_keys = 0, most_keys = 0;  // of a query
  int64_t needed = 0, visited = 0;  // scores: allowed pairs, and pairs in the tiles that forward visits
  int64_t intervals = 0, runs = 0, gathers = 0;  // visits of forward, by kind
  int64_t atoms = 0;                             // distinct 64 x 64 patterns of bits
  int64_t bytes = 0;                             // of the map, both passes
};
MaskCosts mask_costs(const Mask& mask, int64_t queries, int64_t keys, int64_t batch = 0, int64_t head = 0);

namespace detail {

struct PackedDocuments {
  Tensor lengths;  // [D] or [B, D], contiguous
  bool causal = false;
  /// The mask of the lengths that the tensor now holds, and that no longer change. Waits for their device.
  Mask settled() const;
  int64_t documents() const { return lengths.size(-1); }
  bool per_batch() const { return lengths.dim() == 2; }

 private:
  mutable std::mutex mutex_;
  mutable std::optional<Mask> settled_;
  mutable uint64_t version_ = 0;  // of the lengths that these are
};

/// The entry of an axis in a list that holds one an axis, one for all, or none.
template <class T>
T axis_entry(const std::vector<T>& list, size_t axis, T fallback) {
  return list.empty() ? fallback : list.size() == 1 ? list[0] : list.at(axis);
}

template <class Predicate>
class LambdaRule final : public PredicateRule<LambdaRule<Predicate>> {
 public:
  LambdaRule(Predicate predicate, const MaskOptions& options)
      : PredicateRule<LambdaRule>(options.per_batch, options.per_head),
        predicate_(std::move(predicate)),
        grids_(options.grid, options.key_grid) {}

  bool sees(const Query& q, const Key& k, const MaskShape&) const { return predicate_(q, k); }
  void check_shape(const MaskShape& shape) const override { grids_.check_shape(shape); }
  OwnerOrder order(Side side, const MaskShape&) const override { return grids_.order(side); }
  Candidates candidates(Side side, std::span<const int64_t>, const MaskShape& shape) const override {
    return grids_.candidates(side, shape);
  }

 protected:
  const Grid* grid(Side side) const override { return grids_.of(side); }

 private:
  Predicate predicate_;
  NamedGrids grids_;
};

}  // namespace detail

template <class Predicate>
Mask Mask::from(Predicate predicate, const MaskOptions& options) {
  static_assert(std::is_invocable_r_v<bool, const Predicate&, const Query&, const Key&>,
                "the predicate of a mask is called as bool(Query, Key) and does not change");
  return Mask(std::make_shared<detail::LambdaRule<Predicate>>(std::move(predicate), options));
}

}  // namespace torus
