#include "torus/ops/attention/mask.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace torus {

namespace {

using detail::Atom;
using detail::Candidates;
using detail::MaskRule;
using detail::MaskShape;
using detail::OwnerOrder;
using detail::PackedDocuments;
using detail::PredicateRule;
using detail::Side;
using Range = Candidates::Range;

int64_t lowest(std::span<const int64_t> tokens) { return *std::min_element(tokens.begin(), tokens.end()); }
int64_t highest(std::span<const int64_t> tokens) { return *std::max_element(tokens.begin(), tokens.end()); }

std::string text(Align align) { return align == Align::top_left ? "Align::top_left" : "Align::bottom_right"; }

// Masks that compare places in two sequences say how those align where the lengths differ.
class Alignment {
 public:
  Alignment(const char* op, std::optional<Align> align) : op_(op), align_(align) {}
  void check_shape(const MaskShape& s) const {
    check(align_ || s.queries == s.keys, Error::Kind::Shape, "[", op_, "] ", s.queries, " queries and ",
          s.keys, " keys need an alignment: ", text(Align::top_left), " or ", text(Align::bottom_right));
  }
  /// Query q is level with key q + shift.
  int64_t shift(const MaskShape& s) const { return align_ == Align::bottom_right ? s.keys - s.queries : 0; }

 private:
  const char* op_;
  std::optional<Align> align_;
};

class FullRule final : public PredicateRule<FullRule> {
 public:
  bool sees(const Query&, const Key&, const MaskShape&) const { return true; }
  void check_shape(const MaskShape&) const override {}
  Candidates candidates(Side side, std::span<const int64_t>, const MaskShape& shape) const override {
    return {{{0, shape.others(side), true}}, {}};
  }
};

// Where documents start, and where the last ends.
std::vector<int64_t> starts_of(std::span<const int64_t> lengths) {
  std::vector<int64_t> starts{0};
  for (int64_t length : lengths) {
    check(length >= 0, Error::Kind::Value, "[document] a length must be at least 0, got ", length);
    check(length <= detail::max_tokens - starts.back(), Error::Kind::Value,
          "[document] the documents have more than ", detail::max_tokens, " tokens");
    starts.push_back(starts.back() + length);
  }
  return starts;
}

size_t document_of(const std::vector<int64_t>& starts, int64_t token) {
  return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), token) - starts.begin()) - 1;
}

// Lists of one entry a batch element.
void check_batches(const char* op, const MaskShape& s, int64_t count) {
  check(s.batches < 0 ? s.batch < count : s.batches == count, Error::Kind::Shape, "[", op,
        "] expected lengths of ", s.batches < 0 ? s.batch + 1 : s.batches, " batch elements, got ", count);
}

void append(std::vector<Range>& ranges, const Range& range) {
  if (range.first >= range.last) return;
  if (!ranges.empty() && ranges.back().last == range.first && ranges.back().all == range.all)
    ranges.back().last = range.last;
  else
    ranges.push_back(range);
}

// Candidates of owners of which low ... high see others in `span_of(low, high)`, whose ends ascend with
// theirs, and all see those in `every`. The owners of a box lie in runs far apart: what lies between the
// spans of these is left out.
template <class SpanOf>
Candidates candidates_of_runs(std::span<const int64_t> owners, const Range& every, SpanOf&& span_of) {
  std::vector<int64_t> sorted(owners.begin(), owners.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Range> spans;
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    const Range span = span_of(sorted[i], sorted[end - 1]);
    if (!spans.empty() && span.first <= spans.back().last)
      spans.back().last = span.last;
    else
      spans.push_back(span);
    i = end;
  }
  Candidates result;
  for (const Range& span : spans) {
    const int64_t from = std::clamp(every.first, span.first, span.last),
                  to = std::clamp(every.last, from, span.last);
    for (const Range& part : {Range{span.first, from, false}, {from, to, true}, {to, span.last, false}})
      if (part.all || spans.size() == 1 || part.last - part.first >= detail::tile_size)
        append(result.ranges, part);
      else  // short ones share blocks
        for (int64_t token = part.first; token < part.last; ++token) result.list.push_back(token);
  }
  return result;
}

// Keys q - left ... q + right of the key level with query q. Without a left end, it is causal.
class BandRule final : public PredicateRule<BandRule> {
 public:
  BandRule(const char* op, std::optional<int64_t> left, int64_t right, std::optional<Align> align)
      : left_(left), right_(std::min(right, far)), alignment_(op, align) {
    check(left.value_or(0) >= 0 && right >= 0, Error::Kind::Value, "[", op,
          "] left and right must be at least 0, got ", left.value_or(0), " and ", right);
    if (left_) left_ = std::min(*left_, far);
  }

  bool sees(const Query& q, const Key& k, const MaskShape& shape) const {
    const int64_t distance = k.token - q.token - alignment_.shift(shape);
    return distance <= right_ && (!left_ || distance >= -*left_);
  }
  void check_shape(const MaskShape& shape) const override { alignment_.check_shape(shape); }

  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    // The first and last other that an owner sees, not yet cut at the ends.
    const int64_t length = shape.others(side), shift = alignment_.shift(shape);
    const auto first = [&](int64_t owner) {
      if (side == Side::key) return owner - shift - right_;
      return left_ ? owner + shift - *left_ : 0;
    };
    const auto last = [&](int64_t owner) {
      if (side == Side::query) return owner + shift + right_;
      return left_ ? owner - shift + *left_ : length - 1;
    };
    const auto inside = [&](int64_t from, int64_t to) {
      return Range{std::clamp<int64_t>(from, 0, length), std::clamp<int64_t>(to + 1, 0, length), false};
    };
    return candidates_of_runs(owners, inside(first(highest(owners)), last(lowest(owners))),
                              [&](int64_t low, int64_t high) { return inside(first(low), last(high)); });
  }

 private:
  static constexpr int64_t far = 2 * detail::max_tokens;  // beyond any token

  std::optional<int64_t> left_;
  int64_t right_;
  Alignment alignment_;
};

class DocumentRule final : public MaskRule {
 public:
  DocumentRule(const std::vector<int64_t>& query_lengths, const std::vector<int64_t>& key_lengths)
      : starts_{starts_of(query_lengths), starts_of(key_lengths)} {
    check(query_lengths.size() == key_lengths.size(), Error::Kind::Value,
          "[document] expected as many documents of keys as of queries, got ", key_lengths.size(), " and ",
          query_lengths.size());
  }

  bool allows(const MaskShape&, int64_t query, int64_t key) const override {
    return document_of(of(Side::query), query) == document_of(of(Side::key), key);
  }
  Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
            const MaskShape&) const override {
    // The document of each token is searched once, not for each pair.
    std::array<size_t, detail::tile_size> mine;
    for (size_t i = 0; i < owners.size(); ++i) mine[i] = document_of(of(side), owners[i]);
    Atom result{};
    for (size_t j = 0; j < others.size(); ++j) {
      const size_t theirs = document_of(of(side == Side::query ? Side::key : Side::query), others[j]);
      for (size_t i = 0; i < owners.size(); ++i) result[j] |= uint64_t{mine[i] == theirs} << i;
    }
    return result;
  }
  void check_shape(const MaskShape& s) const override {
    for (Side side : {Side::query, Side::key})
      check(of(side).back() == s.owners(side), Error::Kind::Shape, "[document] the documents have ",
            of(side).back(), side == Side::query ? " queries, got " : " keys, got ", s.owners(side));
  }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape&) const override {
    const auto& others = of(side == Side::query ? Side::key : Side::query);
    const auto document = [&](int64_t owner) { return document_of(of(side), owner); };
    const size_t first = document(lowest(owners)), last = document(highest(owners));
    return candidates_of_runs(owners, {others[last], first == last ? others[last + 1] : others[last], true},
                              [&](int64_t low, int64_t high) {
                                return Range{others[document(low)], others[document(high) + 1], false};
                              });
  }

 private:
  const std::vector<int64_t>& of(Side side) const { return starts_[side == Side::key]; }

  std::array<std::vector<int64_t>, 2> starts_;
};

// Documents packed into each sequence; the tokens after the last belong to none.
class PackedRule final : public PredicateRule<PackedRule> {
 public:
  /// `starts`: of the documents of each batch element, then the end of the last; one element for all unless
  /// `per_batch`.
  PackedRule(std::vector<std::vector<int64_t>> starts, bool per_batch, bool causal)
      : PredicateRule(per_batch, false), starts_(std::move(starts)), causal_(causal) {}

  bool sees(const Query& q, const Key& k, const MaskShape& shape) const {
    const auto& starts = of(shape);
    return std::max(q.token, k.token) < starts.back() && (!causal_ || k.token <= q.token) &&
           document_of(starts, q.token) == document_of(starts, k.token);
  }
  void check_shape(const MaskShape& s) const override {
    for (const auto& starts : starts_)
      check(starts.back() <= s.queries, Error::Kind::Shape, "[document] the documents have ", starts.back(),
            " tokens, got ", s.queries);
  }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    const auto& starts = of(shape);
    const int64_t low = lowest(owners), high = std::min(highest(owners), starts.back() - 1);
    if (low > high) return {};
    const size_t first = document_of(starts, low), last = document_of(starts, high);
    const int64_t from = starts[first], to = starts[last + 1];
    const bool whole = first == last && high == highest(owners);
    if (!causal_) return {{{from, to, whole}}, {}};
    if (side == Side::query) return {{{from, low + 1, whole}, {low + 1, high + 1, false}}, {}};
    return {{{low, high, false}, {high, to, whole}}, {}};
  }

 private:
  const std::vector<int64_t>& of(const MaskShape& shape) const {
    return starts_.at(per_batch() ? static_cast<size_t>(shape.batch) : 0);
  }

  std::vector<std::vector<int64_t>> starts_;
  bool causal_;
};

// The same with lengths that may change: asks their mask of the moment.
class TensorDocumentRule final : public MaskRule {
 public:
  TensorDocumentRule(const Tensor& lengths, bool causal) : MaskRule(lengths.dim() == 2, false) {
    documents_.lengths = lengths;
    documents_.causal = causal;
  }
  const PackedDocuments* packed() const override { return &documents_; }

  void check_shape(const MaskShape& s) const override {
    check(s.queries == s.keys, Error::Kind::Shape, "[document] expected as many keys as queries, got ",
          s.keys, " and ", s.queries);
    if (per_batch()) check_batches("document", s, documents_.lengths.size(0));
  }
  bool allows(const MaskShape& shape, int64_t q, int64_t k) const override {
    return documents_.settled().allows(q, k, shape.queries, shape.keys, shape.batch, shape.head);
  }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    return documents_.settled().rule().candidates(side, owners, shape);
  }
  Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
            const MaskShape& shape) const override {
    return documents_.settled().rule().bits(side, owners, others, shape);
  }

 private:
  PackedDocuments documents_;
};

class PaddingRule final : public PredicateRule<PaddingRule> {
 public:
  explicit PaddingRule(std::vector<int64_t> lengths)
      : PredicateRule(true, false), lengths_(std::move(lengths)) {}

  bool sees(const Query&, const Key& k, const MaskShape& shape) const { return k.token < length(shape); }
  void check_shape(const MaskShape& s) const override {
    check_batches("padding", s, static_cast<int64_t>(lengths_.size()));
    for (size_t b = 0; b < lengths_.size(); ++b)
      check(lengths_[b] >= 0 && lengths_[b] <= s.keys, Error::Kind::Shape,
            "[padding] the length of batch element ", b, " must be in [0, ", s.keys, "], got ", lengths_[b]);
  }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    if (side == Side::query) return {{{0, length(shape), true}}, {}};
    return {{{0, lowest(owners) < length(shape) ? shape.queries : 0, highest(owners) < length(shape)}}, {}};
  }

 private:
  int64_t length(const MaskShape& shape) const { return lengths_.at(static_cast<size_t>(shape.batch)); }
  std::vector<int64_t> lengths_;
};

class PrefixRule final : public PredicateRule<PrefixRule> {
 public:
  explicit PrefixRule(int64_t length) : length_(length) {
    check(length >= 0, Error::Kind::Value, "[prefix] the length must be at least 0, got ", length);
  }

  bool sees(const Query& q, const Key& k, const MaskShape&) const {
    return k.token < length_ || k.token <= q.token;
  }
  void check_shape(const MaskShape& s) const override {
    check(s.queries == s.keys, Error::Kind::Shape, "[prefix] expected as many keys as queries, got ", s.keys,
          " and ", s.queries);
  }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    const int64_t n = shape.keys, low = lowest(owners), high = highest(owners);
    if (side == Side::query) {
      const int64_t every = std::min(n, std::max(length_, low + 1)),
                    any = std::min(n, std::max(length_, high + 1));
      return {{{0, every, true}, {every, any, false}}, {}};
    }
    if (high < length_) return {{{0, n, true}}, {}};
    return {{{low < length_ ? 0 : low, high, false}, {high, n, true}}, {}};
  }

 private:
  int64_t length_;
};

// -----------------------------------------------------------------------------------------------
// combinations

// The pieces between all ends of two sets of ranges, with what each set says of a piece: 0 no token is a
// candidate, 1 tokens are to be tried, 2 all.
template <class F>
void for_each_piece(const std::vector<Range>& a, const std::vector<Range>& b, int64_t length, F&& f) {
  std::vector<int64_t> ends{0, length};
  for (const auto* set : {&a, &b})
    for (const Range& range : *set) ends.push_back(range.first), ends.push_back(range.last);
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  size_t i = 0, j = 0;
  const auto level = [](const std::vector<Range>& set, size_t& at, int64_t token) {
    while (at < set.size() && set[at].last <= token) ++at;
    return at < set.size() && set[at].first <= token ? (set[at].all ? 2 : 1) : 0;
  };
  for (size_t e = 0; e + 1 < ends.size(); ++e) {
    const int of_a = level(a, i, ends[e]), of_b = level(b, j, ends[e]);
    f(ends[e], ends[e + 1], of_a, of_b);
  }
}

std::vector<Range> without_empty(const std::vector<Range>& ranges) {
  std::vector<Range> result;
  for (const Range& range : ranges) append(result, range);
  return result;
}

bool contains(const std::vector<Range>& ranges, int64_t token) {
  const auto after = std::upper_bound(ranges.begin(), ranges.end(), token,
                                      [](int64_t t, const Range& range) { return t < range.first; });
  return after != ranges.begin() && token < std::prev(after)->last;
}

std::vector<int64_t> filtered(const std::vector<int64_t>& list, const std::vector<Range>& ranges,
                              bool inside) {
  std::vector<int64_t> result;
  for (int64_t token : list)
    if (contains(ranges, token) == inside) result.push_back(token);
  return result;
}

enum class Combination { both, either };

class CombinedRule final : public MaskRule {
 public:
  CombinedRule(Combination how, Mask a, Mask b)
      : MaskRule(a.rule().per_batch() || b.rule().per_batch(), a.rule().per_head() || b.rule().per_head()),
        how_(how),
        a_(std::move(a)),
        b_(std::move(b)) {}

  void check_shape(const MaskShape& shape) const override {
    a_.rule().check_shape(shape);
    b_.rule().check_shape(shape);
  }
  bool allows(const MaskShape& shape, int64_t q, int64_t k) const override {
    const bool first = a_.rule().allows(shape, q, k);
    if (first != (how_ == Combination::both)) return first;
    return b_.rule().allows(shape, q, k);
  }
  OwnerOrder order(Side side, const MaskShape& shape) const override {
    OwnerOrder first = a_.rule().order(side, shape);
    return first.linear() ? b_.rule().order(side, shape) : first;
  }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    Candidates a = a_.rule().candidates(side, owners, shape), b = b_.rule().candidates(side, owners, shape);
    a.ranges = without_empty(a.ranges), b.ranges = without_empty(b.ranges);
    Candidates result;
    for_each_piece(a.ranges, b.ranges, shape.others(side),
                   [&](int64_t first, int64_t last, int of_a, int of_b) {
                     if (how_ == Combination::both) {
                       if (of_a > 0 && of_b > 0) append(result.ranges, {first, last, of_a == 2 && of_b == 2});
                     } else if (of_a > 0 || of_b > 0) {
                       append(result.ranges, {first, last, of_a == 2 || of_b == 2});
                     }
                   });
    if (how_ == Combination::both) {
      // A token of a list is seen by both if the other has it in its list or its ranges.
      std::vector<int64_t> common;
      std::set_intersection(a.list.begin(), a.list.end(), b.list.begin(), b.list.end(),
                            std::back_inserter(common));
      result.list =
          merged(common, merged(filtered(a.list, b.ranges, true), filtered(b.list, a.ranges, true)));
    } else {
      result.list = filtered(merged(a.list, b.list), result.ranges, false);
    }
    return result;
  }
  Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
            const MaskShape& shape) const override {
    Atom result = a_.rule().bits(side, owners, others, shape);
    const Atom more = b_.rule().bits(side, owners, others, shape);
    for (size_t j = 0; j < result.size(); ++j)
      result[j] = how_ == Combination::both ? result[j] & more[j] : result[j] | more[j];
    return result;
  }

 private:
  static std::vector<int64_t> merged(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    std::vector<int64_t> result;
    std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
    return result;
  }

  Combination how_;
  Mask a_, b_;
};

class NotRule final : public MaskRule {
 public:
  explicit NotRule(Mask a) : MaskRule(a.rule().per_batch(), a.rule().per_head()), a_(std::move(a)) {}

  void check_shape(const MaskShape& shape) const override { a_.rule().check_shape(shape); }
  bool allows(const MaskShape& shape, int64_t q, int64_t k) const override {
    return !a_.rule().allows(shape, q, k);
  }
  OwnerOrder order(Side side, const MaskShape& shape) const override { return a_.rule().order(side, shape); }
  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const override {
    const Candidates a = a_.rule().candidates(side, owners, shape);
    std::vector<Range> listed;
    for (int64_t token : a.list) append(listed, {token, token + 1, false});
    Candidates result;
    for_each_piece(without_empty(a.ranges), listed, shape.others(side),
                   [&](int64_t first, int64_t last, int of_ranges, int of_list) {
                     const int level = std::max(of_ranges, of_list);
                     if (level < 2) append(result.ranges, {first, last, level == 0});
                   });
    return result;
  }
  Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
            const MaskShape& shape) const override {
    Atom result = a_.rule().bits(side, owners, others, shape);
    const uint64_t every = owners.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << owners.size()) - 1;
    for (size_t j = 0; j < others.size(); ++j) result[j] = ~result[j] & every;
    return result;
  }

 private:
  Mask a_;
};

template <class Rule, class... Args>
Mask make(Args&&... args) {
  return Mask(std::make_shared<Rule>(std::forward<Args>(args)...));
}

}  // namespace

Mask::Mask() : Mask(full()) {}

bool Mask::allows(int64_t q, int64_t k, int64_t queries, int64_t keys, int64_t batch, int64_t head) const {
  const MaskShape shape{.queries = queries, .keys = keys, .batch = batch, .head = head};
  check(q >= 0 && q < queries && k >= 0 && k < keys && batch >= 0 && head >= 0, Error::Kind::Shape,
        "[mask] expected a query below ", queries, ", a key below ", keys,
        " and a batch and head from 0 on, got ", q, ", ", k, ", ", batch, " and ", head);
  rule_->check_shape(shape);
  return rule_->allows(shape, q, k);
}

namespace {
void check_not_packed(std::initializer_list<const Mask*> masks) {
  for (const Mask* mask : masks)
    check(!mask->rule().packed(), Error::Kind::Value,
          "[document] lengths in a tensor combine with `& causal()` alone; others need them as numbers");
}
}  // namespace

Mask operator&(const Mask& a, const Mask& b) {
  for (const auto& [mask, other] : {std::pair(&a, &b), std::pair(&b, &a)})
    if (const auto* packed = mask->rule().packed(); packed && &other->rule() == &causal().rule())
      return make<TensorDocumentRule>(packed->lengths, true);
  check_not_packed({&a, &b});
  return make<CombinedRule>(Combination::both, a, b);
}
Mask operator|(const Mask& a, const Mask& b) {
  check_not_packed({&a, &b});
  return make<CombinedRule>(Combination::either, a, b);
}
Mask operator!(const Mask& a) {
  check_not_packed({&a});
  return make<NotRule>(a);
}

// Masks without parameters have one rule for the whole process, so that all layers share its maps.
Mask full() {
  static const Mask mask = make<FullRule>();
  return mask;
}

Mask causal(Align align) {
  static const Mask top_left = make<BandRule>("causal", std::nullopt, 0, Align::top_left);
  static const Mask bottom_right = make<BandRule>("causal", std::nullopt, 0, Align::bottom_right);
  return align == Align::top_left ? top_left : bottom_right;
}

Mask causal() {
  static const Mask mask = make<BandRule>("causal", std::nullopt, 0, std::nullopt);
  return mask;
}

Mask sliding_window(int64_t left, int64_t right) {
  return make<BandRule>("sliding_window", left, right, std::nullopt);
}

Mask sliding_window(int64_t left, int64_t right, Align align) {
  return make<BandRule>("sliding_window", left, right, align);
}

Mask document(std::vector<int64_t> lengths, std::vector<int64_t> key_lengths) {
  if (key_lengths.empty()) key_lengths = lengths;
  return make<DocumentRule>(lengths, key_lengths);
}

Mask document(const Tensor& lengths) {
  check(lengths.dtype() == i64 || lengths.dtype() == i32, Error::Kind::DType,
        "[document] lengths must be i64 or i32, got ", lengths.dtype());
  check(lengths.dim() == 1 || lengths.dim() == 2, Error::Kind::Shape,
        "[document] lengths must be [D] or [B, D], got ", lengths.shape());
  check(lengths.is_contiguous(), Error::Kind::Shape,
        "[document] lengths must be contiguous, as they are read again at each use");
  return make<TensorDocumentRule>(lengths, false);
}

Mask detail::PackedDocuments::settled() const {
  std::lock_guard lock(mutex_);
  // What replays of a captured step write to a device changes no version.
  if (settled_ && lengths.device() == cpu && version_ == lengths.version()) return *settled_;
  version_ = lengths.version();
  const auto values = lengths.to_vector<int64_t>();
  std::vector<std::vector<int64_t>> starts;
  for (int64_t b = 0; b < (per_batch() ? lengths.size(0) : 1); ++b)
    starts.push_back(starts_of({values.data() + b * documents(), static_cast<size_t>(documents())}));
  return settled_.emplace(make<PackedRule>(std::move(starts), per_batch(), causal));
}

Mask padding(std::vector<int64_t> lengths) { return make<PaddingRule>(std::move(lengths)); }

Mask prefix(int64_t length) { return make<PrefixRule>(length); }

}  // namespace torus
