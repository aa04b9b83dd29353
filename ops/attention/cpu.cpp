// The fused kernels on the CPU. Up to 64 owners (queries in forward, keys in backward) lie on the lanes of
// vectors; the others pass by in blocks of up to 64 rows, reached through pointers, so any order of tokens
// costs the same. Where bits leave much of a block out, its rows are sorted into panels by the vectors of
// lanes that need them. 16-bit operands are widened block by block.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "torus/core/parallel.h"
#include "torus/core/vector_math.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/cpu_bias.h"
#include "torus/ops/attention/cpu_tiles.h"

namespace torus::detail {

namespace {

// ------------------------------------------------------------------------------------------------- forward

// What weights of each lane are relative to, about its largest score so far, and their sum.
template <class T>
struct OnlineSums {
  T *base, *total;
};

// N vectors of lanes of a panel: scores become weights relative to the base of their lane; `shrink` is what
// all before must be multiplied by. Returns whether that matters anywhere.
template <class T, bool masked, int N>
bool online_softmax(T* s, const Panel& panel, int64_t lane, T scale, OnlineSums<T> sums, T* shrink) {
  constexpr int lanes = simd::lanes<T>;
  // A base follows the largest score only if that grew by more, which is rare after the first panel.
  constexpr T slack = 8;
  Vector<T> largest[N], base[N], sum[N] = {};
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) largest[j] = splat(-infinity<T>);
  for (int64_t r = 0; r < panel.count; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      T* at = s + r * tile_size + j * lanes;
      Vector<T> score = load(at) * scale;
      if constexpr (masked) {
        score = simd::select(panel.words[r] >> (lane + j * lanes), score, -infinity<T>);
        store(at, score);
      }
      largest[j] = simd::larger(score, largest[j]);
    }
  bool matters = false;
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    const Vector<T> before = load(sums.base + j * lanes);
    const Vector<T> after = largest[j] > before + slack ? largest[j] : before;
    base[j] = after == -infinity<T> ? Vector<T>{} : after;  // no key yet
    const Vector<T> factor = simd::exp(before - base[j]);
    matters |= simd::any((factor != T(1)) & (before != -infinity<T>));
    store(sums.base + j * lanes, after);
    store(shrink + j * lanes, factor);
  }
  for (int64_t r = 0; r < panel.count; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      T* at = s + r * tile_size + j * lanes;
      // Rounded: fused with the subtraction, the product would be another score.
      const Vector<T> score = masked ? load(at) : simd::rounded(load(at) * scale);
      const Vector<T> weight = simd::exp(score - base[j]);
      store(at, weight);
      sum[j] += weight;
    }
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j)
    store(sums.total + j * lanes, load(sums.total + j * lanes) * load(shrink + j * lanes) + sum[j]);
  return matters;
}

template <class S>
class Forward {
 public:
  using T = Compute<S>;

  Forward(const AttentionProblem& problem, Tensor& out, Tensor& lse)
      : p_(problem),
        maps_(problem),
        scores_(problem),
        out_(out),
        out_data_(out.mutable_data<S>()),
        lse_data_(lse.mutable_data<T>()) {}

  void run() {
    if (maps_.any_bits()) finite_ = finite_heads<S>(p_.v);
    const int64_t tiles = maps_.tiles(Side::query);
    // Backwards: under a causal mask the last tiles take longest, and short tasks at the end balance the
    // threads.
    parallel_tasks(tiles * p_.batch() * p_.heads(),
                   [&](int64_t task) { tile(task / tiles, tiles - 1 - task % tiles); });
  }

 private:
  void tile(int64_t bh, int64_t index) {
    constexpr int lanes = simd::lanes<T>;
    const int64_t b = bh / p_.heads(), h = bh % p_.heads(), kv = h / (p_.heads() / p_.kv_heads());
    const PlannedMap& planned = maps_.of(b, h);
    const SideMap& side = planned.map->query;
    if (index >= side.tiles) return;
    std::array<int64_t, tile_size> space;
    const Tokens owners = side.owners(index, p_.queries(), space);
    const int64_t width = p_.width(), value_width = p_.value_width();
    const int64_t used = padded<T>(static_cast<int64_t>(owners.size()));
    const auto k = read_head<S>(p_.k, b, kv), v = read_head<S>(p_.v, b, kv);

    Scratch<T> q(width * tile_size), acc(value_width * tile_size), s(tile_size * tile_size);
    alignas(64) T base[tile_size], total[tile_size], factor[tile_size];
    uint32_t row_words[tile_size] = {};
    pack_transposed(static_cast<T*>(q), read_head<S>(p_.q, b, h), owners, width);
    std::fill(acc + 0, acc + value_width * tile_size, T(0));
    std::fill(base, base + tile_size, -infinity<T>);
    std::fill(total, total + tile_size, T(0));
    if (p_.dropout.active())
      for (size_t i = 0; i < owners.size(); ++i) row_words[i] = p_.dropout.row_word(bh, owners[i]);
    Rows<S> keys(width), values(value_width);

    const bool finite = !maps_.any_bits() || finite_[static_cast<size_t>(b * p_.kv_heads() + kv)];

    for_each_block<T>(planned, Side::query, index, [&](const Block& block) {
      keys.set(k, block);
      values.set(v, block);
      const uint64_t not_finite = block.bits && !finite ? values.not_finite(block.count) : 0;
      for_each_panel<T>(block, used, [&](const Panel& panel) {
        const int64_t first = panel.lane;
        multiply_panel<T, simd::Rows::by_output>(keys.of(panel), panel.count, width, q + first, tile_size, s,
                                                 tile_size, panel.lanes, false);
        if (scores_.finishes()) scores_.finish(s, nullptr, {block, panel, owners, Side::query}, b, h);
        bool rescale = false;
        with_bool(panel.masked, [&](auto masked) {
          int64_t lane = 0;
          const auto by_vectors = [&]<int N>(std::integral_constant<int, N>) {
            for (; lane + N * lanes <= panel.lanes; lane += N * lanes)
              rescale |= online_softmax<T, masked, N>(s + lane, panel, lane, scores_.scale(),
                                                      {base + first + lane, total + first + lane},
                                                      factor + first + lane);
          };
          by_vectors(std::integral_constant<int, 4>{});
          by_vectors(std::integral_constant<int, 2>{});
          by_vectors(std::integral_constant<int, 1>{});
        });
        if (p_.dropout.active()) drop(s, row_words + first, block, panel);
        if (rescale)
          for (int64_t d = 0; d < value_width; ++d)
            for (int64_t lane = first; lane < first + panel.lanes; lane += lanes) {
              T* at = acc + d * tile_size + lane;
              store(at, load(at) * load(factor + lane));
            }
        add_rows(values, not_finite, value_width, panel, s, acc + first);
      });
    });

    for (int64_t lane = 0; lane < used; lane += lanes) {
      const Vector<T> inverse = 1 / load(total + lane);
      const auto empty = load(base + lane) == -infinity<T>;
      for (int64_t d = 0; d < value_width; ++d) {
        T* at = acc + d * tile_size + lane;
        store(at, empty ? Vector<T>{} : load(at) * inverse);
      }
    }
    unpack_transposed(write_head(out_data_, out_, b, h), static_cast<T*>(acc), owners, value_width);
    for (size_t i = 0; i < owners.size(); ++i)
      lse_data_[bh * p_.queries() + owners[i]] =
          base[i] == -infinity<T> ? base[i] : base[i] + std::log(total[i]);
  }

  void drop(T* weights, const uint32_t* row_words, const Block& block, const Panel& panel) const {
    alignas(64) T factors[tile_size];
    for (int64_t r = 0; r < panel.count; ++r) {
      const auto key = static_cast<uint32_t>(block.tokens[panel.rows[r]]);
      dropout_factors(
          factors, panel.lanes, p_.dropout.threshold(), static_cast<T>(p_.dropout.keep_scale()),
          [&](int64_t lane) { return row_words[lane]; }, [&](int64_t) { return key; });
      for (int64_t lane = 0; lane < panel.lanes; ++lane) weights[r * tile_size + lane] *= factors[lane];
    }
  }

  const AttentionProblem& p_;
  const Maps<T> maps_;
  const Scores<S> scores_;
  std::vector<char> finite_;  // heads of v; asked only where there are bits
  const Tensor& out_;
  S* out_data_;
  T* lse_data_;
};

// ------------------------------------------------------------------------------------------------ backward

// Who may add next: tasks add in a fixed order, so that the bits do not depend on the threads. Tasks are
// started in ascending order, so waiting for earlier ones ends.
class Turns {
 public:
  explicit Turns(int64_t tasks) : done_(static_cast<size_t>(tasks)) {}
  static constexpr int64_t finished = std::numeric_limits<int64_t>::max();

  /// Returns once every task before `task` has added all that it adds before `position`.
  void wait(int64_t task, int64_t position) {
    int64_t oldest = oldest_.load(std::memory_order_acquire);  // all tasks before it are finished
    while (oldest < task && done(oldest) == finished) ++oldest;
    for (int64_t known = oldest_.load(); known < oldest && !oldest_.compare_exchange_weak(known, oldest);) {
    }
    for (int64_t t = task - 1; t >= oldest; --t)
      for (int tries = 0; done(t) < position;
           ++tries)  // mostly soon; yielding may take long on a busy machine
        if (tries > 20000) std::this_thread::yield();
  }
  void publish(int64_t task, int64_t position) {
    done_[static_cast<size_t>(task)].store(position, std::memory_order_release);
  }

  /// Publishes that a task is finished, also if an exception leaves: those behind must not wait for ever.
  struct Finish {
    Turns& turns;
    int64_t task;
    ~Finish() { turns.publish(task, finished); }
  };

 private:
  int64_t done(int64_t task) const {
    return done_[static_cast<size_t>(task)].load(std::memory_order_acquire);
  }

  std::vector<std::atomic<int64_t>> done_;
  std::atomic<int64_t> oldest_{0};
};

template <class S>
class Backward {
 public:
  using T = Compute<S>;

  Backward(const AttentionProblem& problem, AttentionGradients& gradients)
      : p_(problem), g_(gradients), maps_(problem), scores_(problem) {}

  void run() {
    if (!g_.d_out.defined())
      g_.d_out =
          empty_heads(p_.batch(), p_.heads(), p_.queries(), p_.value_width(), p_.q.dtype(), cpu).fill_(0);
    lse_data_ = g_.lse.data<T>();
    find_delta();
    if (maps_.any_bits()) finite_q_ = finite_heads<S>(p_.q), finite_d_out_ = finite_heads<S>(g_.d_out);
    if (g_.dq.defined()) {
      // Sums live in f32: in dq itself, or beside it for 16 bits.
      dq_ = dtype_of<S> == dtype_of<T> ? g_.dq : Tensor::empty(g_.dq.shape(), dtype_of<T>);
      dq_.fill_(0);
      dq_data_ = dq_.mutable_data<T>();
    }
    dk_data_ = g_.dk.defined() ? g_.dk.mutable_data<S>() : nullptr;
    dv_data_ = g_.dv.defined() ? g_.dv.mutable_data<S>() : nullptr;
    prepare_bias();

    // A task is one key tile of all matrices that share a gradient of a bias; mostly of one matrix.
    const int64_t matrices = p_.batch() * p_.kv_heads(), tiles = maps_.tiles(Side::key);
    const int64_t over_batch = shares_batch_ ? p_.batch() : 1, over_heads = shares_heads_ ? p_.kv_heads() : 1;
    const int64_t groups = matrices / std::max<int64_t>(1, over_batch * over_heads);
    for (int64_t i = 0; i < matrices; ++i) {
      turns_.push_back(std::make_unique<Turns>(tiles));
      prepare_sequence(i);
    }
    Turns commits(tiles * groups);
    parallel_tasks(tiles * groups, [&](int64_t task) {
      const Turns::Finish finish{commits, task};
      const int64_t position = task / groups, group = task % groups;
      const int64_t first_b = shares_batch_ ? 0 : group / (shares_heads_ ? 1 : p_.kv_heads());
      const int64_t first_h = shares_heads_ ? 0 : group % p_.kv_heads();
      std::vector<std::vector<T>> tables = empty_tables();
      for (int64_t b = first_b; b < first_b + over_batch; ++b)
        for (int64_t kv = first_h; kv < first_h + over_heads; ++kv) tile(b, kv, position, tables);
      if (tables.empty()) return;
      commits.wait(task, Turns::finished);
      for (size_t i = 0; i < tables.size(); ++i)
        for (size_t j = 0; j < tables[i].size(); ++j) d_bias_data_[i][j] += tables[i][j];
    });
    if (g_.dq.defined() && dtype_of<S> != dtype_of<T>) g_.dq.copy_(dq_);
    for (size_t i = 0; i < g_.d_bias.size(); ++i)
      if (g_.d_bias[i].defined() && dtype_of<S> != dtype_of<T>) g_.d_bias[i].copy_(d_bias_[i]);
  }

 private:
  // delta = rowsum(dO * O) - dLSE, and 0 for a row without keys.
  void find_delta() {
    delta_ = Tensor::empty(g_.lse.shape(), dtype_of<T>);
    const int64_t rows = g_.lse.numel(), width = p_.value_width(),
                  queries = std::max<int64_t>(p_.queries(), 1);
    T* delta = delta_.mutable_data<T>();
    const Tensor d_lse = g_.d_lse.defined() ? g_.d_lse.contiguous() : Tensor();
    parallel_for(
        0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(width, 1)), [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i) {
            const int64_t bh = i / queries, b = bh / p_.heads(), h = bh % p_.heads(), token = i % queries;
            const S* out = read_head<S>(g_.out, b, h).row(token);
            const S* d_out = read_head<S>(g_.d_out, b, h).row(token);
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < width; ++d) sum += static_cast<T>(out[d]) * static_cast<T>(d_out[d]);
            if (d_lse.defined()) sum -= d_lse.data<T>()[i];
            delta[i] = lse_data_[i] == -infinity<T> ? T(0) : sum;
          }
        });
    delta_data_ = delta;
  }

  void prepare_bias() {
    for (size_t i = 0; i < g_.d_bias.size(); ++i) {
      Tensor& grad = g_.d_bias[i];
      d_bias_.push_back({});
      d_bias_data_.push_back(nullptr);
      if (!grad.defined()) continue;
      d_bias_[i] = dtype_of<S> == dtype_of<T> ? grad : Tensor::empty(grad.shape(), dtype_of<T>);
      d_bias_[i].fill_(0);
      d_bias_data_[i] = d_bias_[i].template mutable_data<T>();
      if (p_.bias[i].kind() == AttentionBias::Kind::relative) {
        has_tables_ = true;
      } else {
        shares_batch_ |= grad.size(0) == 1 && p_.batch() > 1;
        shares_heads_ |= grad.size(1) == 1 && p_.heads() > 1;
      }
    }
  }

  // What a task adds to the gradients of tables, before its turn. Empty if none is wanted.
  std::vector<std::vector<T>> empty_tables() const {
    std::vector<std::vector<T>> tables;
    if (!has_tables_) return tables;
    for (size_t i = 0; i < d_bias_.size(); ++i) {
      const bool table = d_bias_[i].defined() && p_.bias[i].kind() == AttentionBias::Kind::relative;
      tables.emplace_back(table ? static_cast<size_t>(d_bias_[i].numel()) : 0, T(0));
    }
    return tables;
  }

  // Tiles in the order of their colours, and where a colour starts.
  void prepare_sequence(int64_t matrix) {
    const SideMap& map = maps_.of(matrix / p_.kv_heads(), first_head(matrix)).map->key;
    if (static_cast<size_t>(matrix) > 0 && &map == sequence_of_) {
      sequences_.push_back(sequences_.back());
      return;
    }
    sequence_of_ = &map;
    Sequence sequence;
    if (!map.colour.empty()) {
      sequence.tiles.resize(static_cast<size_t>(map.tiles));
      std::iota(sequence.tiles.begin(), sequence.tiles.end(), 0);
      const auto colour = [&](int64_t tile) { return map.colour[static_cast<size_t>(tile)]; };
      std::stable_sort(sequence.tiles.begin(), sequence.tiles.end(),
                       [&](int64_t a, int64_t b) { return colour(a) < colour(b); });
      for (size_t i = 0; i < sequence.tiles.size(); ++i) {
        const bool starts = i == 0 || colour(sequence.tiles[i]) != colour(sequence.tiles[i - 1]);
        sequence.waits_for.push_back(starts ? static_cast<int64_t>(i) : sequence.waits_for.back());
      }
    }
    sequences_.push_back(std::make_shared<Sequence>(std::move(sequence)));
  }

  int64_t first_head(int64_t matrix) const { return matrix % p_.kv_heads() * (p_.heads() / p_.kv_heads()); }

  void tile(int64_t b, int64_t kv, int64_t position, std::vector<std::vector<T>>& tables) {
    const int64_t matrix = b * p_.kv_heads() + kv, group = p_.heads() / p_.kv_heads();
    Turns& turns = *turns_[static_cast<size_t>(matrix)];
    const Turns::Finish finish{turns, position};
    const bool one_map = !p_.mask.rule().per_head() || group == 1;
    const Sequence& sequence = *sequences_[static_cast<size_t>(matrix)];
    // Heads that share keys but not maps own tiles in one order: only their visits differ.
    const MaskMap& any_map = *maps_.of(b, kv * group).map;
    if (position >= any_map.key.tiles) return;
    const int64_t index =
        sequence.tiles.empty() || !one_map ? position : sequence.tiles[static_cast<size_t>(position)];
    std::array<int64_t, tile_size> space;
    const Tokens owners = any_map.key.owners(index, p_.keys(), space);
    const auto count = static_cast<int64_t>(owners.size());
    const int64_t width = p_.width(), value_width = p_.value_width(), used = padded<T>(count);
    const int64_t wide = padded<T>(width);
    const bool wants_q = g_.dq.defined(), wants_k = g_.dk.defined(), wants_v = g_.dv.defined();
    const bool wants_bias =
        std::any_of(d_bias_.begin(), d_bias_.end(), [](const Tensor& x) { return x.defined(); });
    const bool wants_scores = wants_q || wants_k || wants_bias;

    Scratch<T> k(width * tile_size), v(value_width * tile_size), k_rows(tile_size * wide);
    Scratch<T> dk(width * tile_size), dv(value_width * tile_size), dq(tile_size * wide),
        part(tile_size * wide);
    Scratch<T> p(tile_size * tile_size), ds(tile_size * tile_size);
    Scratch<T> slope(scores_.finishes() ? tile_size * tile_size : 0);
    const auto k_head = read_head<S>(p_.k, b, kv);
    pack_transposed(static_cast<T*>(k), k_head, owners, width);
    pack_transposed(static_cast<T*>(v), read_head<S>(p_.v, b, kv), owners, value_width);
    for (int64_t i = 0; i < count; ++i) {
      const S* row = k_head.row(owners[static_cast<size_t>(i)]);
      for (int64_t d = 0; d < wide; ++d) k_rows[i * wide + d] = d < width ? static_cast<T>(row[d]) : T(0);
    }
    // Keys that are not finite go to the queries that see them alone, as rows do: see add_rows.
    uint64_t not_finite_keys = 0;
    if (maps_.any_bits())
      for (int64_t i = 0; i < count; ++i)
        if (!simd::all_finite(k_rows + i * wide, wide)) {
          not_finite_keys |= uint64_t{1} << i;
          std::fill(k_rows + i * wide, k_rows + (i + 1) * wide, T(0));
        }
    std::fill(dk + 0, dk + width * tile_size, T(0));
    std::fill(dv + 0, dv + value_width * tile_size, T(0));
    Rows<S> q_rows(width), d_out_rows(value_width);
    const T* ds_rows[tile_size];
    const bool coloured = !any_map.key.colour.empty();
    bool has_turn = false;

    for (int64_t member = 0; member < group; ++member) {
      const int64_t h = kv * group + member, bh = b * p_.heads() + h;
      const auto q_head = read_head<S>(p_.q, b, h), d_out_head = read_head<S>(g_.d_out, b, h);
      const bool finite =
          !maps_.any_bits() || (finite_q_[static_cast<size_t>(bh)] && finite_d_out_[static_cast<size_t>(bh)]);
      for_each_block<T>(maps_.of(b, h), Side::key, index, [&](const Block& block) {
        q_rows.set(q_head, block);
        d_out_rows.set(d_out_head, block);
        const bool guard = block.bits && !finite;
        const uint64_t not_finite_q = guard ? q_rows.not_finite(block.count) : 0,
                       not_finite_d_out = guard ? d_out_rows.not_finite(block.count) : 0;
        if (wants_q && block.bits) std::fill(dq + 0, dq + block.count * wide, T(0));
        for_each_panel<T>(block, used, [&](const Panel& panel) {
          const Pairs pairs{block, panel, owners, Side::key};
          multiply_panel<T, simd::Rows::by_output>(q_rows.of(panel), panel.count, width, k + panel.lane,
                                                   tile_size, p, tile_size, panel.lanes, false);
          if (wants_scores)
            multiply_panel<T, simd::Rows::by_output>(d_out_rows.of(panel), panel.count, value_width,
                                                     v + panel.lane, tile_size, ds, tile_size, panel.lanes,
                                                     false);
          if (scores_.finishes()) scores_.finish(p, slope, pairs, b, h);
          with_bool(panel.masked, [&](auto masked) {
            with_bool(p_.dropout.active(),
                      [&](auto drops) { weights<masked, drops>(p, ds, bh, pairs, wants_scores); });
          });
          if (scores_.finishes() && wants_scores) {
            if (wants_bias) add_bias_gradients(ds, pairs, b, h, tables);
            for (int64_t r = 0; r < panel.count; ++r)
              for (int64_t lane = 0; lane < panel.lanes; ++lane) {
                T& d = ds[r * tile_size + lane];
                d = panel.masked && !(panel.words[r] >> lane & 1) ? T(0) : d * slope[r * tile_size + lane];
              }
          }
          if (wants_v) add_rows(d_out_rows, not_finite_d_out, value_width, panel, p, dv + panel.lane);
          if (wants_k) add_rows(q_rows, not_finite_q, width, panel, ds, dk + panel.lane);
          if (!wants_q) return;
          // Only over real keys: lanes beyond them hold anything.
          const int64_t depth = std::min(panel.lanes, count - panel.lane);
          for (int64_t r = 0; r < panel.count; ++r) ds_rows[r] = ds + r * tile_size;
          multiply_panel<T, simd::Rows::by_output>(ds_rows, panel.count, depth, k_rows + panel.lane * wide,
                                                   wide, block.bits ? part : dq, wide, wide, false);
          if (block.bits)
            for (int64_t r = 0; r < panel.count; ++r)
              for (int64_t d = 0; d < wide; ++d) dq[panel.rows[r] * wide + d] += part[r * wide + d];
          for (uint64_t rest = not_finite_keys >> panel.lane; rest; rest &= rest - 1) {
            const int64_t lane = std::countr_zero(rest);
            if (lane >= depth) break;
            const S* key = k_head.row(owners[static_cast<size_t>(panel.lane + lane)]);
            for (int64_t r = 0; r < panel.count; ++r)
              if (panel.allows(r, lane))
                for (int64_t d = 0; d < width; ++d)
                  dq[panel.rows[r] * wide + d] += ds[r * tile_size + lane] * static_cast<T>(key[d]);
          }
        });
        if (!wants_q) return;
        if (coloured || !one_map) {
          // Others of one colour share no query with this tile; heads with maps of their own go one by one.
          const int64_t before = one_map ? sequence.waits_for[static_cast<size_t>(position)] : position;
          if (!has_turn) turns.wait(before, Turns::finished);
          has_turn = true;
        } else {
          turns.wait(position, member * p_.queries() + block.tokens[0] + block.count);
        }
        const auto dq_head = write_head(dq_data_, dq_, b, h);
        for (int64_t r = 0; r < block.count; ++r) {
          T* to = dq_head.row(block.tokens[r]);
          for (int64_t d = 0; d < width; ++d) to[d] += dq[r * wide + d];
        }
        if (!coloured && one_map)
          turns.publish(position, member * p_.queries() + block.tokens[0] + block.count);
      });
    }
    if (wants_k) unpack_transposed(write_head(dk_data_, g_.dk, b, kv), static_cast<T*>(dk), owners, width);
    if (wants_v)
      unpack_transposed(write_head(dv_data_, g_.dv, b, kv), static_cast<T*>(dv), owners, value_width);
  }

  // From the products q.k (or finished scores) in `p` and dO.v in `ds`: p becomes the dropped weights, ds =
  // P (Z dP - delta), scaled unless the scores were finished.
  template <bool masked, bool drops>
  void weights(T* p, T* ds, int64_t bh, const Pairs& pairs, bool wants_scores) {
    constexpr int lanes = simd::lanes<T>;
    const T scale = scores_.scale();
    alignas(64) T factors[tile_size];
    for (int64_t r = 0; r < pairs.panel.count; ++r) {
      const int64_t query = pairs.row_token(r), row = bh * p_.queries() + query;
      const T lse = lse_data_[row] == -infinity<T> ? infinity<T> : lse_data_[row];
      const T delta = delta_data_[row];
      if constexpr (drops) {
        const uint32_t word = p_.dropout.row_word(bh, query);
        dropout_factors(
            factors, pairs.panel.lanes, p_.dropout.threshold(), static_cast<T>(p_.dropout.keep_scale()),
            [&](int64_t) { return word; },
            [&](int64_t lane) { return static_cast<uint32_t>(pairs.lane_token(lane)); });
      }
      for (int64_t lane = 0; lane < pairs.panel.lanes; lane += lanes) {
        T* p_at = p + r * tile_size + lane;
        T* ds_at = ds + r * tile_size + lane;
        // Rounded as in forward: fusing this product with the subtraction would not give the score that lse
        // is of.
        Vector<T> weight = simd::exp(simd::rounded(load(p_at) * scale) - lse);
        // Selected last: lse is NaN where a key that the query does see is.
        if constexpr (masked) weight = simd::select(pairs.panel.words[r] >> lane, weight, T(0));
        if (wants_scores) {
          Vector<T> d_weight = load(ds_at);
          if constexpr (drops) d_weight *= load(factors + lane);
          Vector<T> d_score = weight * (d_weight - delta) * scale;
          if constexpr (masked) d_score = simd::select(pairs.panel.words[r] >> lane, d_score, T(0));
          store(ds_at, d_score);
        }
        if constexpr (drops) weight *= load(factors + lane);
        store(p_at, weight);
      }
    }
  }

  void add_bias_gradients(const T* ds, const Pairs& pairs, int64_t b, int64_t h,
                          std::vector<std::vector<T>>& tables) {
    for (size_t i = 0; i < d_bias_.size(); ++i) {
      if (!d_bias_[i].defined()) continue;
      if (p_.bias[i].kind() == AttentionBias::Kind::relative) {
        scores_.bias.add_gradient(i, tables[i].data(), {}, ds, pairs, b, h);
      } else {
        // Strides of the gradient, 0 where the term is broadcast.
        Shape strides = d_bias_[i].strides();
        for (int a = 0; a < 4; ++a)
          if (d_bias_[i].size(a) == 1) strides[a] = 0;
        scores_.bias.add_gradient(i, d_bias_data_[i], strides, ds, pairs, b, h);
      }
    }
  }

  struct Sequence {
    std::vector<int64_t> tiles, waits_for;  // empty: in their own order, block by block
  };

  const AttentionProblem& p_;
  AttentionGradients& g_;
  const Maps<T> maps_;
  const Scores<S> scores_;
  std::vector<char> finite_q_, finite_d_out_;  // their heads; asked only where there are bits
  Tensor delta_, dq_;
  const T *lse_data_ = nullptr, *delta_data_ = nullptr;
  T* dq_data_ = nullptr;
  S *dk_data_ = nullptr, *dv_data_ = nullptr;
  std::vector<Tensor> d_bias_;
  std::vector<T*> d_bias_data_;
  bool has_tables_ = false, shares_batch_ = false, shares_heads_ = false;
  std::vector<std::unique_ptr<Turns>> turns_;
  std::vector<std::shared_ptr<const Sequence>> sequences_;
  const SideMap* sequence_of_ = nullptr;
};

std::string refusal(const AttentionProblem& problem) {
  return problem.q.device().kind == DeviceKind::cpu ? "" : "the tensors are not in host memory";
}

void forward(const AttentionProblem& problem, Tensor& out, Tensor& lse) {
  dispatch_floating(problem.q.dtype(), "attention",
                    [&](auto zero) { Forward<decltype(zero)>(problem, out, lse).run(); });
}

void backward(const AttentionProblem& problem, AttentionGradients& gradients) {
  dispatch_floating(problem.q.dtype(), "attention",
                    [&](auto zero) { Backward<decltype(zero)>(problem, gradients).run(); });
}

[[maybe_unused]] const RegisteredBackend registered{{Backend::cpu, refusal, forward, backward}};

}  // namespace

}  // namespace torus::detail
