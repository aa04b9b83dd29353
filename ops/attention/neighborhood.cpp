// Grids, and windows on them.
#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <tuple>

#include "torus/ops/attention/mask.h"

namespace torus {

namespace detail {

Grid::Grid(const char* op, std::vector<int64_t> sizes) : sizes_(std::move(sizes)) {
  check(sizes_.size() <= max_grid_axes, Error::Kind::Value, "[", op, "] a grid has at most ", max_grid_axes,
        " axes, got ", sizes_.size());
  for (size_t axis = 0; axis < sizes_.size(); ++axis)
    check(sizes_[axis] > 0, Error::Kind::Value, "[", op, "] axis ", axis,
          " of the grid must be at least 1, got ", sizes_[axis]);
  int64_t count = 1;
  for (int64_t size : sizes_) {
    check(size <= max_tokens / count, Error::Kind::Value, "[", op, "] a grid has at most ", max_tokens,
          " tokens, got ", text());
    count *= size;
  }
}

std::string Grid::text() const {
  std::string sides;
  for (int64_t size : sizes_) sides += (sides.empty() ? "" : " x ") + std::to_string(size);
  return sides;
}

int64_t Grid::tokens() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}

std::array<int64_t, max_grid_axes> Grid::coord(int64_t token) const {
  std::array<int64_t, max_grid_axes> result{};
  for (int axis = axes() - 1; axis >= 0; --axis) {
    result[static_cast<size_t>(axis)] = token % size(axis);
    token /= size(axis);
  }
  return result;
}

void Grid::check_tokens(const char* op, int64_t count, const char* what) const {
  if (tokens() != count)
    fail(Error::Kind::Shape, "[", op, "] a grid of ", text(), " has ", tokens(), " tokens, got ", count, " ",
         what);
}

OwnerOrder Grid::boxes(const std::vector<int64_t>& reach) const {
  // Double the side whose box + reach grows least, while 64 tokens suffice.
  const auto n = static_cast<size_t>(axes());
  std::vector<int64_t> box(n, 1);
  const auto seen = [&](const std::vector<int64_t>& sides) {
    double volume = 1;
    for (size_t a = 0; a < n; ++a)
      volume *= static_cast<double>(std::min(sizes_[a], sides[a] + reach[a] - 1));
    return volume;
  };
  for (;;) {
    double best = 0;
    size_t axis = n;
    int64_t tokens = std::accumulate(box.begin(), box.end(), int64_t{1}, std::multiplies<>());
    for (size_t a = 0; a < n; ++a) {
      if (box[a] >= sizes_[a] || tokens / box[a] * std::min(2 * box[a], sizes_[a]) > tile_size) continue;
      auto grown = box;
      grown[a] = std::min(2 * box[a], sizes_[a]);
      // Keys a query of the box.
      const double cost = seen(grown) / static_cast<double>(grown[a]) * static_cast<double>(box[a]);
      if (axis == n || cost < best) best = cost, axis = a;
    }
    if (axis == n) break;
    box[axis] = std::min(2 * box[axis], sizes_[axis]);
  }

  // Boxes of nearly equal sides, in row-major order.
  std::vector<int64_t> counts(n);
  int64_t boxes = 1;
  for (size_t a = 0; a < n; ++a) boxes *= counts[a] = (sizes_[a] + box[a] - 1) / box[a];
  OwnerOrder result;
  result.first.push_back(0);
  for (int64_t b = 0; b < boxes; ++b) {
    std::vector<int64_t> from(n), to(n);
    int64_t rest = b;
    for (size_t a = n; a-- > 0; rest /= counts[a]) {
      from[a] = rest % counts[a] * sizes_[a] / counts[a];
      to[a] = (rest % counts[a] + 1) * sizes_[a] / counts[a];
    }
    append_box(result.tokens, from, to, false);
    result.first.push_back(static_cast<int64_t>(result.tokens.size()));
  }
  return result;
}

// Halves along the longest side, one after the other, the second backwards: so any few tokens that follow
// each other lie close together, and so do neighbouring groups of them.
void Grid::append_box(std::vector<int64_t>& tokens, std::vector<int64_t> from, std::vector<int64_t> to,
                      bool backwards) const {
  size_t longest = 0;
  for (size_t a = 0; a < from.size(); ++a)
    if (to[a] - from[a] > to[longest] - from[longest]) longest = a;
  if (from.empty() || to[longest] - from[longest] == 1) {
    int64_t token = 0;
    for (size_t a = 0; a < from.size(); ++a) token = token * sizes_[a] + from[a];
    tokens.push_back(token);
    return;
  }
  const int64_t middle = from[longest] + (to[longest] - from[longest] + 1) / 2;
  auto low_to = to, high_from = from;
  low_to[longest] = high_from[longest] = middle;
  append_box(tokens, backwards ? high_from : from, backwards ? to : low_to, false);
  append_box(tokens, backwards ? from : high_from, backwards ? low_to : to, true);
}

NamedGrids::NamedGrids(std::vector<int64_t> grid, std::vector<int64_t> key_grid)
    : query_grid_("mask", std::move(grid)) {
  check(key_grid.empty() || query_grid_.axes() > 0, Error::Kind::Value,
        "[mask] a key_grid needs the grid of the queries, got none");
  key_grid_ = key_grid.empty() ? query_grid_ : Grid("mask", std::move(key_grid));
}

void NamedGrids::check_shape(const MaskShape& shape) const {
  if (query_grid_.axes() > 0) query_grid_.check_tokens("mask", shape.queries, "queries");
  if (key_grid_.axes() > 0) key_grid_.check_tokens("mask", shape.keys, "keys");
}

const Grid* NamedGrids::of(Side side) const {
  const Grid& grid = side == Side::query ? query_grid_ : key_grid_;
  return grid.axes() > 0 ? &grid : nullptr;
}

OwnerOrder NamedGrids::order(Side side) const {
  // Nobody knows how far it reaches; a window of 5 is as good a guess as any for the shape of the boxes.
  const Grid* grid = of(side);
  return grid ? grid->boxes(std::vector<int64_t>(static_cast<size_t>(grid->axes()), 5)) : OwnerOrder{};
}

Candidates NamedGrids::candidates(Side side, const MaskShape& shape) const {
  const int64_t others = shape.others(side);
  if (!of(side)) return {{{0, others, false}}, {}};
  Candidates result;
  result.list.resize(static_cast<size_t>(others));
  std::iota(result.list.begin(), result.list.end(), 0);
  return result;
}

}  // namespace detail

namespace {

using detail::Atom;
using detail::Candidates;
using detail::Grid;
using detail::MaskShape;
using detail::OwnerOrder;
using detail::Side;
using detail::tile_size;

const char* name(Boundary boundary) {
  switch (boundary) {
    case Boundary::wrap:
      return "wrap";
    case Boundary::shift:
      return "shift";
    case Boundary::shrink:
      return "shrink";
    case Boundary::causal:
      return "causal";
    case Boundary::valid:
      return "valid";
  }
  return "unknown";
}

int64_t modulo(int64_t a, int64_t n) { return (a % n + n) % n; }

// The window along one axis: which keys in [0, keys) the centre c in [0, centers) sees.
struct Axis {
  Boundary boundary;
  int64_t window, dilation, centers, keys;
  std::vector<bool> reach = {};  // wrap: whether a key at this distance modulo `keys` is in the window

  /// How many keys `valid` needs, at most what int64_t holds.
  int64_t keys_of_valid() const {
    constexpr int64_t most = std::numeric_limits<int64_t>::max();
    return window - 1 > (most - centers) / dilation ? most : centers + (window - 1) * dilation;
  }

  void prepare() {
    // What is longer than the axis acts as this does, and sums of it do not overflow.
    window = std::min(window, 2 * keys);
    dilation = boundary == Boundary::wrap ? dilation % keys : std::min(dilation, keys);
    if (boundary != Boundary::wrap) return;
    reach.assign(static_cast<size_t>(keys), false);
    // After `keys` steps the residues repeat.
    for (int64_t j = 0; j < std::min(window, keys); ++j)
      reach[static_cast<size_t>(modulo((j - window / 2) % keys * dilation, keys))] = true;
  }

  bool sees(int64_t c, int64_t k) const {
    if (boundary == Boundary::wrap) return reach[static_cast<size_t>(modulo(k - c, keys))];
    if ((k - c) % dilation != 0) return false;
    const int64_t j = (k - c) / dilation;
    switch (boundary) {
      case Boundary::shrink:
        return j >= -(window / 2) && j < window - window / 2;
      case Boundary::causal:
        return j <= 0 && j > -window;
      case Boundary::valid:
        return j >= 0 && j < window;
      default: {
        // Places within the class of one residue.
        const int64_t residue = c % dilation, length = (keys - residue + dilation - 1) / dilation;
        const int64_t size = std::min(window, length);
        const int64_t start = std::clamp<int64_t>(c / dilation - window / 2, 0, length - size);
        return k / dilation >= start && k / dilation < start + size;
      }
    }
  }

  // Appends what one token of `side` might see, unsorted; `sees` decides.
  void others(Side side, int64_t token, std::vector<int64_t>& into) const {
    const int64_t length = side == Side::query ? keys : centers;
    if (boundary == Boundary::wrap) {
      const int64_t sign = side == Side::query ? 1 : -1;
      for (int64_t j = 0; j < std::min(window, keys); ++j)
        into.push_back(modulo(token + sign * ((j - window / 2) % keys) * dilation, keys));
      return;
    }
    const int64_t steps = std::min(window - 1, std::max(keys, centers) / dilation + 1);
    for (int64_t j = -steps; j <= steps; ++j) {
      const int64_t other = token + j * dilation;
      if (other >= 0 && other < length && (side == Side::query ? sees(token, other) : sees(other, token)))
        into.push_back(other);
    }
  }
};

class NeighborhoodRule final : public detail::MaskRule {
 public:
  explicit NeighborhoodRule(const NeighborhoodOptions& o) {
    key_grid_ = Grid("neighborhood", o.key_grid.empty() ? o.grid : o.key_grid);
    const int axes = key_grid_.axes();
    check(axes > 0, Error::Kind::Value, "[neighborhood] expected a grid of at least one axis, got none");
    explicit_ = o.centers.defined();
    check(!explicit_ || o.grid.empty() || o.key_grid.empty(), Error::Kind::Value,
          "[neighborhood] centers lie on the grid of the keys: expected one of grid and key_grid, got both");
    check(explicit_ || static_cast<int>(o.grid.size()) == axes, Error::Kind::Value,
          "[neighborhood] expected a query grid of ", axes, " axes, as that of the keys, got ",
          o.grid.size());
    query_grid_ = Grid("neighborhood", explicit_ ? key_grid_.sizes() : o.grid);
    check(!o.window.empty(), Error::Kind::Value, "[neighborhood] expected a window, got none");
    const auto check_entries = [&](size_t size, const char* what) {
      check(size <= 1 || static_cast<int>(size) == axes, Error::Kind::Value, "[neighborhood] expected ", axes,
            " entries in ", what, ", one an axis, got ", size);
    };
    check_entries(o.window.size(), "window");
    check_entries(o.dilation.size(), "dilation");
    check_entries(o.boundary.size(), "boundary");
    for (int a = 0; a < axes; ++a) {
      const auto at = static_cast<size_t>(a);
      Axis axis{detail::axis_entry(o.boundary, at, Boundary::shift),
                detail::axis_entry<int64_t>(o.window, at, 1), detail::axis_entry<int64_t>(o.dilation, at, 1),
                query_grid_.size(a), key_grid_.size(a)};
      check(std::string(name(axis.boundary)) != "unknown", Error::Kind::Value, "[neighborhood] axis ", a,
            ": expected a boundary, got number ", static_cast<int>(axis.boundary));
      check(axis.window >= 1 && axis.dilation >= 1, Error::Kind::Value, "[neighborhood] axis ", a,
            ": window and dilation must be at least 1, got ", axis.window, " and ", axis.dilation);
      if (axis.boundary == Boundary::valid) {
        check(!explicit_, Error::Kind::Value, "[neighborhood] axis ", a,
              ": valid takes no centers, they follow from the grids");
        const int64_t expected = axis.keys_of_valid();
        check(axis.keys == expected, Error::Kind::Shape, "[neighborhood] axis ", a, ": valid with window ",
              axis.window, ", dilation ", axis.dilation, " and ", axis.centers, " queries needs ", expected,
              " keys, got ", axis.keys);
      } else {
        check(axis.centers == axis.keys, Error::Kind::Shape, "[neighborhood] axis ", a, ": ", axis.centers,
              " queries and ", axis.keys, " keys need centers (or the boundary valid), got ",
              name(axis.boundary));
      }
      axis.prepare();
      axes_.push_back(std::move(axis));
    }
    if (explicit_) place_queries(o.centers);
  }

  void check_shape(const MaskShape& shape) const override {
    key_grid_.check_tokens("neighborhood", shape.keys, "keys");
    if (!explicit_) return query_grid_.check_tokens("neighborhood", shape.queries, "queries");
    check(static_cast<int64_t>(cell_.size()) == shape.queries, Error::Kind::Shape, "[neighborhood] ",
          cell_.size(), " centers do not fit ", shape.queries, " queries");
  }

  bool allows(const MaskShape&, int64_t query, int64_t key) const override {
    const auto c = center(query), k = key_grid_.coord(key);
    for (size_t a = 0; a < axes_.size(); ++a)
      if (!axes_[a].sees(c[a], k[a])) return false;
    return true;
  }

  OwnerOrder order(Side side, const MaskShape&) const override {
    std::vector<int64_t> reach;
    for (const Axis& axis : axes_) reach.push_back(std::min(axis.window, axis.keys));
    OwnerOrder cells = (side == Side::query ? query_grid_ : key_grid_).boxes(reach);
    if (side == Side::key || !explicit_) return cells;
    // Queries whose centers lie in one box, up to 64 a tile.
    OwnerOrder result;
    result.first.push_back(0);
    for (size_t box = 0; box + 1 < cells.first.size(); ++box) {
      for (int64_t i = cells.first[box]; i < cells.first[box + 1]; ++i)
        for_each_query(cells.tokens[static_cast<size_t>(i)], [&](int64_t query) {
          if (static_cast<int64_t>(result.tokens.size()) - result.first.back() == tile_size)
            result.first.push_back(static_cast<int64_t>(result.tokens.size()));
          result.tokens.push_back(query);
        });
      if (result.first.back() < static_cast<int64_t>(result.tokens.size()))
        result.first.push_back(static_cast<int64_t>(result.tokens.size()));
    }
    return result;
  }

  Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape&) const override {
    // The product over the axes of what the owners' coordinates see: the exact hull of a box's windows.
    const Grid& grid = side == Side::query ? key_grid_ : query_grid_;
    std::vector<int64_t> cells{0};
    for (size_t a = 0; a < axes_.size(); ++a) {
      std::vector<int64_t> mine, seen, next;
      for (int64_t owner : owners)
        mine.push_back(side == Side::query ? center(owner)[a] : key_grid_.coord(owner)[a]);
      make_unique(mine);
      for (int64_t token : mine) axes_[a].others(side, token, seen);
      make_unique(seen);
      next.reserve(cells.size() * seen.size());
      for (int64_t cell : cells)
        for (int64_t c : seen) next.push_back(cell * grid.size(static_cast<int>(a)) + c);
      cells = std::move(next);
    }
    Candidates result;
    if (side == Side::key && explicit_) {
      for (int64_t cell : cells) for_each_query(cell, [&](int64_t query) { result.list.push_back(query); });
      std::sort(result.list.begin(), result.list.end());
      return result;
    }
    // Long runs of neighbours need no list.
    for (size_t i = 0; i < cells.size();) {
      size_t end = i + 1;
      while (end < cells.size() && cells[end] == cells[end - 1] + 1) ++end;
      if (end - i >= tile_size)
        result.ranges.push_back({cells[i], cells[end - 1] + 1, false});
      else
        result.list.insert(result.list.end(), cells.begin() + static_cast<int64_t>(i),
                           cells.begin() + static_cast<int64_t>(end));
      i = end;
    }
    return result;
  }

  // A pair is allowed if all axes allow it; an axis answers once for each pair of coordinates.
  Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
            const MaskShape&) const override {
    std::array<std::array<int64_t, max_grid_axes>, tile_size> mine, theirs;
    for (size_t i = 0; i < owners.size(); ++i)
      mine[i] = side == Side::query ? center(owners[i]) : key_grid_.coord(owners[i]);
    for (size_t j = 0; j < others.size(); ++j)
      theirs[j] = side == Side::query ? key_grid_.coord(others[j]) : center(others[j]);
    Atom result{};
    for (size_t a = 0; a < axes_.size(); ++a) {
      // Coordinates of owners with the bits of those that have them; of others, with the bits of who sees
      // them.
      Words owned, seen;
      for (size_t i = 0; i < owners.size(); ++i) owned.at(mine[i][a]) |= uint64_t{1} << i;
      for (size_t j = 0; j < others.size(); ++j) {
        const int64_t c = theirs[j][a];
        const size_t known = seen.size;
        uint64_t& word = seen.at(c);
        if (seen.size > known)
          for (size_t i = 0; i < owned.size; ++i) {
            const int64_t owner = owned.keys[i];
            if (side == Side::query ? axes_[a].sees(owner, c) : axes_[a].sees(c, owner))
              word |= owned.words[i];
          }
        result[j] = a == 0 ? word : result[j] & word;
      }
    }
    return result;
  }

 private:
  // A few numbers, mostly asked for in order, with a word each.
  struct Words {
    std::array<int64_t, tile_size> keys;
    std::array<uint64_t, tile_size> words;
    size_t size = 0, last = 0;

    /// 0 for a new number.
    uint64_t& at(int64_t key) {
      if (size > 0 && keys[last] == key) return words[last];
      for (last = 0; last < size && keys[last] != key;) ++last;
      if (last == size) keys[size] = key, words[size++] = 0;
      return words[last];
    }
  };

  static void make_unique(std::vector<int64_t>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
  }

  // Where the window of a query is: on the axes' own scale of centers.
  std::array<int64_t, max_grid_axes> center(int64_t query) const {
    return query_grid_.coord(explicit_ ? cell_[static_cast<size_t>(query)] : query);
  }

  void place_queries(const Tensor& centers) {
    const int64_t axes = key_grid_.axes();
    check(centers.dtype() == i64 && centers.dim() == 2 && centers.size(1) == axes, Error::Kind::Shape,
          "[neighborhood] expected centers [Nq, ", axes, "] of i64, got ", centers.dtype(), " ",
          centers.shape());
    const auto values = centers.to_vector<int64_t>();
    first_query_.assign(static_cast<size_t>(key_grid_.tokens() + 1), 0);
    for (int64_t q = 0; q < centers.size(0); ++q) {
      int64_t cell = 0;
      for (int64_t a = 0; a < axes; ++a) {
        const int64_t c = values[static_cast<size_t>(q * axes + a)],
                      length = key_grid_.size(static_cast<int>(a));
        check(c >= 0 && c < length, Error::Kind::Value, "[neighborhood] axis ", a, ": the center of query ",
              q, " must be in [0, ", length, "), got ", c);
        cell = cell * length + c;
      }
      cell_.push_back(cell);
      ++first_query_[static_cast<size_t>(cell + 1)];
    }
    std::partial_sum(first_query_.begin(), first_query_.end(), first_query_.begin());
    auto next = first_query_;
    query_of_cell_.resize(cell_.size());
    for (size_t q = 0; q < cell_.size(); ++q)
      query_of_cell_[static_cast<size_t>(next[static_cast<size_t>(cell_[q])]++)] = static_cast<int64_t>(q);
  }

  template <class F>
  void for_each_query(int64_t cell, F&& f) const {
    for (int64_t i = first_query_[static_cast<size_t>(cell)]; i < first_query_[static_cast<size_t>(cell + 1)];
         ++i)
      f(query_of_cell_[static_cast<size_t>(i)]);
  }

  Grid query_grid_, key_grid_;  // explicit centers: both are the grid of the keys
  std::vector<Axis> axes_;
  bool explicit_ = false;
  std::vector<int64_t> cell_;                         // of each query
  std::vector<int64_t> first_query_, query_of_cell_;  // queries by cell
};

}  // namespace

Mask neighborhood(const NeighborhoodOptions& o) {
  if (o.centers.defined()) return Mask(std::make_shared<NeighborhoodRule>(o));
  using Windows = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>,
                             std::vector<Boundary>, std::vector<int64_t>>;
  static std::mutex mutex;
  static std::map<Windows, std::weak_ptr<const NeighborhoodRule>> rules;
  const Windows windows{o.grid, o.window, o.dilation, o.boundary, o.key_grid};
  std::lock_guard lock(mutex);
  if (const auto found = rules.find(windows); found != rules.end())
    if (const auto rule = found->second.lock()) return Mask(rule);
  const auto rule = std::make_shared<const NeighborhoodRule>(o);
  std::erase_if(rules, [](const auto& entry) { return entry.second.expired(); });
  rules[windows] = rule;
  return Mask(rule);
}

}  // namespace torus
