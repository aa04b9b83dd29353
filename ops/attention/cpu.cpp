// The fused kernels on the CPU. 64 owners (queries in forward, keys in backward) lie on the lanes of vectors;
// the others pass by in blocks of up to 64 rows, reached through pointers, so any order of tokens costs the
// same. 16-bit operands are widened block by block.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "torus/core/parallel.h"
#include "torus/core/simd.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"

namespace torus::detail {

namespace {

using simd::load, simd::store, simd::splat, simd::multiply_panel, simd::Vector;

template <class T>
inline constexpr T infinity = std::numeric_limits<T>::infinity();

// Memory for one tile, aligned to a vector.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(
            ::operator new(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T), alignment))) {}
  ~Scratch() { ::operator delete(data_, alignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() { return data_; }

 private:
  static constexpr std::align_val_t alignment{64};
  T* data_;
};

template <class T>
int64_t padded(int64_t count) {
  return (count + simd::lanes<T> - 1) / simd::lanes<T> * simd::lanes<T>;
}

// One head: `tokens` rows, each contiguous.
template <class S>
struct Head {
  S* first;
  int64_t stride;
  S* row(int64_t token) const { return first + token * stride; }
};

template <class S>
Head<const S> read_head(const Tensor& x, int64_t b, int64_t h) {
  return {x.data<S>() + b * x.strides()[0] + h * x.strides()[1], x.strides()[2]};
}

// Rows of one block as the arithmetic wants them: in place, or widened.
template <class S>
class Rows {
 public:
  using T = Compute<S>;
  explicit Rows(int64_t width) : width_(width), wide_(std::is_same_v<S, T> ? 0 : tile_size * width) {}

  void set(const Head<const S>& head, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const S* row = head.row(first + i);
      if constexpr (std::is_same_v<S, T>) {
        pointers_[i] = row;
      } else {
        T* to = wide_ + i * width_;
        for (int64_t d = 0; d < width_; ++d) to[d] = row[d];
        pointers_[i] = to;
      }
    }
    count_ = count;
  }
  const T* const* pointers() const { return pointers_; }
  const T* operator[](int64_t i) const { return pointers_[i]; }
  bool finite() const {
    return std::all_of(pointers_, pointers_ + count_,
                       [&](const T* row) { return simd::all_finite(row, width_); });
  }

 private:
  int64_t width_, count_ = 0;
  Scratch<T> wide_;
  const T* pointers_[tile_size];
};

// to[d][lane] = row lane, 0 beyond `count`.
template <class S, class T>
void pack_transposed(T* to, const Head<const S>& head, int64_t first, int64_t count, int64_t width) {
  for (int64_t d = 0; count < tile_size && d < width; ++d)
    std::fill(to + d * tile_size + count, to + (d + 1) * tile_size, T(0));
  simd::transpose(to, tile_size, head.row(first), head.stride, count, width);
}

// Calls f(first, count, bits) for each block of up to 64 others; `bits` has one word an other, nullptr: all
// allowed.
template <class F>
void for_each_block(const MaskMap& map, Side side, int64_t tile, F&& f) {
  for (const Visit& visit : map.side(side).of_tile(tile))
    for (int64_t at = 0; at < visit.count; at += tile_size) {
      const uint64_t* bits = nullptr;
      if (!visit.whole()) {
        const int32_t id = map.side(side).atom_ids[static_cast<size_t>(visit.atoms + at / tile_size)];
        bits = map.atoms[static_cast<size_t>(id)].data();
      }
      f(visit.first + at, std::min(tile_size, visit.count - at), bits);
    }
}

// c[i][lane] += sum over r of rows[r][i] * b[r][lane], over the allowed pairs (r, lane) alone: 0 times NaN is
// NaN, so where values are not finite a masked weight of 0 does not suffice.
template <class T>
void multiply_allowed(const T* const* rows, int64_t count, int64_t depth, const T* b, T* c,
                      const uint64_t* bits) {
  for (int64_t r = 0; r < depth; ++r)
    for (int64_t i = 0; i < count; ++i)
      for (int64_t lane = 0; lane < tile_size; ++lane)
        if (bits[r] >> lane & 1) c[i * tile_size + lane] += rows[r][i] * b[r * tile_size + lane];
}

// factors[lane] = 1 / (1 - p) for a kept weight, 0 for a dropped one.
template <class T, class RowWord, class Key>
void dropout_factors(T* factors, uint32_t threshold, T keep_scale, RowWord row_word, Key key) {
  for (uint32_t lane = 0; lane < tile_size; ++lane)
    factors[lane] = AttentionDropout::mix(row_word(lane), key(lane)) >= threshold ? keep_scale : T(0);
}

// Calls f(std::true_type or std::false_type), so that its loops do not ask again and again.
template <class F>
void with_bool(bool value, F&& f) {
  if (value)
    f(std::true_type{});
  else
    f(std::false_type{});
}

// Lanes `lane`... of `allowed` where `word` has a bit, `otherwise` elsewhere.
template <class T>
Vector<T> select(uint64_t word, int64_t lane, Vector<T> allowed, T otherwise) {
  return simd::lanes_of_bits<T>(word >> lane) ? allowed : splat(otherwise);
}

// ------------------------------------------------------------------------------------------------- forward

template <class S>
class Forward {
 public:
  using T = Compute<S>;

  Forward(const AttentionProblem& problem, Tensor& out, Tensor& lse)
      : p_(problem),
        map_(problem.mask.rule().map(problem.queries(), problem.keys())),
        out_(out),
        out_data_(out.mutable_data<S>()),
        lse_data_(lse.mutable_data<T>()) {}

  void run() {
    const int64_t tiles = (p_.queries() + tile_size - 1) / tile_size;
    // Backwards: under a causal mask the last tiles take longest, and short tasks at the end balance the
    // threads.
    parallel_tasks(tiles * p_.batch() * p_.heads(),
                   [&](int64_t task) { tile(task / tiles, tiles - 1 - task % tiles); });
  }

 private:
  void tile(int64_t bh, int64_t index) {
    constexpr int lanes = simd::lanes<T>;
    const int64_t b = bh / p_.heads(), h = bh % p_.heads(), kv = h / (p_.heads() / p_.kv_heads());
    const int64_t first = index * tile_size, owners = std::min(tile_size, p_.queries() - first);
    const int64_t width = p_.width(), value_width = p_.value_width(), used = padded<T>(owners);
    const auto k = read_head<S>(p_.k, b, kv), v = read_head<S>(p_.v, b, kv);
    const T scale = static_cast<T>(p_.scale);

    Scratch<T> q(width * tile_size), acc(value_width * tile_size), s(tile_size * tile_size);
    alignas(64) T top[tile_size], total[tile_size], factor[tile_size];
    uint32_t row_words[tile_size] = {};
    pack_transposed(static_cast<T*>(q), read_head<S>(p_.q, b, h), first, owners, width);
    std::fill(acc + 0, acc + value_width * tile_size, T(0));
    std::fill(top, top + tile_size, -infinity<T>);
    std::fill(total, total + tile_size, T(0));
    if (p_.dropout.active())
      for (int64_t i = 0; i < owners; ++i) row_words[i] = p_.dropout.row_word(bh, first + i);
    Rows<S> keys(width), values(value_width);

    for_each_block(*map_, Side::query, index, [&](int64_t other, int64_t count, const uint64_t* bits) {
      keys.set(k, other, count);
      values.set(v, other, count);
      multiply_panel<T, simd::Rows::by_output>(keys.pointers(), count, width, q, tile_size, s, tile_size,
                                               used, false);
      bool rescale = false;
      with_bool(bits, [&](auto masked) {
        for (int64_t lane = 0; lane < used; lane += lanes)
          rescale |= online_softmax<masked>(s + lane, count, bits, lane, scale, top + lane, total + lane,
                                            factor + lane);
      });
      if (p_.dropout.active()) drop(s, row_words, other, count, used);
      if (rescale)
        for (int64_t d = 0; d < value_width; ++d)
          for (int64_t lane = 0; lane < used; lane += lanes) {
            T* at = acc + d * tile_size + lane;
            store(at, load(at) * load(factor + lane));
          }
      if (bits && !values.finite())
        multiply_allowed<T>(values.pointers(), value_width, count, s, acc, bits);
      else
        multiply_panel<T, simd::Rows::by_sum>(values.pointers(), value_width, count, s, tile_size, acc,
                                              tile_size, used, true);
    });

    for (int64_t lane = 0; lane < used; lane += lanes) {
      const Vector<T> inverse = 1 / load(total + lane);
      const auto empty = load(top + lane) == -infinity<T>;
      for (int64_t d = 0; d < value_width; ++d) {
        T* at = acc + d * tile_size + lane;
        store(at, empty ? Vector<T>{} : load(at) * inverse);
      }
    }
    simd::transpose(out_data_ + b * out_.strides()[0] + h * out_.strides()[1] + first * out_.strides()[2],
                    out_.strides()[2], static_cast<T*>(acc), tile_size, value_width, owners);
    T* lse = lse_data_ + bh * p_.queries() + first;
    for (int64_t i = 0; i < owners; ++i)
      lse[i] = top[i] == -infinity<T> ? top[i] : top[i] + std::log(total[i]);
  }

  // One vector of lanes of a block: scores become weights relative to the largest score so far; `shrink` is
  // what all before must be multiplied by. Returns whether that is other than 1 anywhere.
  template <bool masked>
  static bool online_softmax(T* s, int64_t count, const uint64_t* bits, int64_t lane, T scale, T* top,
                             T* total, T* shrink) {
    const Vector<T> before = load(top);
    Vector<T> now = before;
    for (int64_t j = 0; j < count; ++j) {
      Vector<T> score = load(s + j * tile_size) * scale;
      if constexpr (masked) score = select(bits[j], lane, score, -infinity<T>);
      store(s + j * tile_size, score);
      now = simd::larger(score, now);
    }
    const Vector<T> base = now == -infinity<T> ? Vector<T>{} : now;  // no key yet
    Vector<T> sum{};
    for (int64_t j = 0; j < count; ++j) {
      const Vector<T> weight = simd::exp(load(s + j * tile_size) - base);
      store(s + j * tile_size, weight);
      sum += weight;
    }
    const Vector<T> factor = simd::exp(before - base);
    store(total, load(total) * factor + sum);
    store(top, now);
    store(shrink, factor);
    bool other = false;
    for (int i = 0; i < simd::lanes<T>; ++i) other |= factor[i] != 1;
    return other;
  }

  void drop(T* weights, const uint32_t* row_words, int64_t other, int64_t count, int64_t used) {
    alignas(64) T factors[tile_size];
    for (int64_t j = 0; j < count; ++j) {
      dropout_factors(
          factors, p_.dropout.threshold(), static_cast<T>(p_.dropout.keep_scale()),
          [&](uint32_t lane) { return row_words[lane]; },
          [&](uint32_t) { return static_cast<uint32_t>(other + j); });
      for (int64_t lane = 0; lane < used; ++lane) weights[j * tile_size + lane] *= factors[lane];
    }
  }

  const AttentionProblem& p_;
  std::shared_ptr<const MaskMap> map_;
  const Tensor& out_;
  S* out_data_;
  T* lse_data_;
};

// ------------------------------------------------------------------------------------------------ backward

// The order in which the key tiles of one head add to dq: block by block, ascending, so that the bits do not
// depend on the threads. Tiles are started in ascending order; a tile waits until all tiles before it are
// past its block.
class Turns {
 public:
  explicit Turns(int64_t tiles) : done_(static_cast<size_t>(tiles)) {}

  /// Returns once every tile before `tile` has added all that it adds before position `end`.
  void wait(int64_t tile, int64_t end) {
    int64_t oldest = oldest_.load(std::memory_order_acquire);  // all tiles before it are finished
    while (oldest < tile && done(oldest) == finished) ++oldest;
    for (int64_t known = oldest_.load(); known < oldest && !oldest_.compare_exchange_weak(known, oldest);) {
    }
    for (int64_t t = tile - 1; t >= oldest; --t)
      while (done(t) < end) std::this_thread::yield();
  }
  void publish(int64_t tile, int64_t position) {
    done_[static_cast<size_t>(tile)].store(position, std::memory_order_release);
  }
  static constexpr int64_t finished = std::numeric_limits<int64_t>::max();

 private:
  int64_t done(int64_t tile) const {
    return done_[static_cast<size_t>(tile)].load(std::memory_order_acquire);
  }

  std::vector<std::atomic<int64_t>> done_;
  std::atomic<int64_t> oldest_{0};
};

template <class S>
class Backward {
 public:
  using T = Compute<S>;

  Backward(const AttentionProblem& problem, AttentionGradients& gradients)
      : p_(problem), g_(gradients), map_(problem.mask.rule().map(problem.queries(), problem.keys())) {}

  void run() {
    const int64_t matrices = p_.batch() * p_.kv_heads(), tiles = (p_.keys() + tile_size - 1) / tile_size;
    if (!g_.d_out.defined())
      g_.d_out =
          empty_heads(p_.batch(), p_.heads(), p_.queries(), p_.value_width(), p_.q.dtype(), cpu).fill_(0);
    delta_ = Tensor::empty(g_.lse.shape(), dtype_of<T>);
    lse_data_ = g_.lse.data<T>();
    find_delta();
    if (g_.dq.defined()) {
      // Sums live in f32: in dq itself, or beside it for 16 bits.
      dq_ = dtype_of<S> == dtype_of<T> ? g_.dq : Tensor::empty(g_.dq.shape(), dtype_of<T>);
      dq_.fill_(0);
      dq_data_ = dq_.mutable_data<T>();
    }
    dk_data_ = g_.dk.defined() ? g_.dk.mutable_data<S>() : nullptr;
    dv_data_ = g_.dv.defined() ? g_.dv.mutable_data<S>() : nullptr;
    std::vector<std::unique_ptr<Turns>> turns;
    for (int64_t i = 0; i < matrices; ++i) turns.push_back(std::make_unique<Turns>(tiles));
    parallel_tasks(tiles * matrices, [&](int64_t task) {
      tile(*turns[static_cast<size_t>(task % matrices)], task % matrices, task / matrices);
    });
    if (g_.dq.defined() && dtype_of<S> != dtype_of<T>) g_.dq.copy_(dq_);
  }

 private:
  // delta = rowsum(dO * O) - dLSE, and 0 for a row without keys.
  void find_delta() {
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
            for (int64_t d = 0; d < width; ++d) sum += static_cast<T>(out[d]) * static_cast<T>(d_out[d]);
            if (d_lse.defined()) sum -= d_lse.data<T>()[i];
            delta[i] = lse_data_[i] == -infinity<T> ? T(0) : sum;
          }
        });
    delta_data_ = delta;
  }

  void tile(Turns& turns, int64_t matrix, int64_t index) {
    struct Finish {  // also if an exception leaves, or the tiles behind would wait for ever
      Turns& turns;
      int64_t index;
      ~Finish() { turns.publish(index, Turns::finished); }
    } finish{turns, index};
    const int64_t b = matrix / p_.kv_heads(), kv = matrix % p_.kv_heads(), group = p_.heads() / p_.kv_heads();
    const int64_t first = index * tile_size, owners = std::min(tile_size, p_.keys() - first);
    const int64_t width = p_.width(), value_width = p_.value_width(), used = padded<T>(owners);
    const int64_t wide = padded<T>(width);
    const bool wants_q = g_.dq.defined(), wants_k = g_.dk.defined(), wants_v = g_.dv.defined();
    const bool wants_scores = wants_q || wants_k;

    Scratch<T> k(width * tile_size), v(value_width * tile_size), k_rows(wide * tile_size);
    Scratch<T> dk(width * tile_size), dv(value_width * tile_size), dq(wide * tile_size);
    Scratch<T> p(tile_size * tile_size), ds(tile_size * tile_size);
    const auto k_head = read_head<S>(p_.k, b, kv), v_head = read_head<S>(p_.v, b, kv);
    pack_transposed(static_cast<T*>(k), k_head, first, owners, width);
    pack_transposed(static_cast<T*>(v), v_head, first, owners, value_width);
    for (int64_t i = 0; i < owners; ++i) {
      const S* row = k_head.row(first + i);
      for (int64_t d = 0; d < wide; ++d) k_rows[i * wide + d] = d < width ? static_cast<T>(row[d]) : T(0);
    }
    const bool finite_keys = simd::all_finite(static_cast<T*>(k_rows), owners * wide);
    std::fill(dk + 0, dk + width * tile_size, T(0));
    std::fill(dv + 0, dv + value_width * tile_size, T(0));
    Rows<S> q_rows(width), d_out_rows(value_width);
    const T* ds_rows[tile_size];
    for (int64_t i = 0; i < tile_size; ++i) ds_rows[i] = ds + i * tile_size;

    for (int64_t member = 0; member < group; ++member) {
      const int64_t h = kv * group + member, bh = b * p_.heads() + h;
      const auto q_head = read_head<S>(p_.q, b, h), d_out_head = read_head<S>(g_.d_out, b, h);
      for_each_block(*map_, Side::key, index, [&](int64_t other, int64_t count, const uint64_t* bits) {
        q_rows.set(q_head, other, count);
        d_out_rows.set(d_out_head, other, count);
        multiply_panel<T, simd::Rows::by_output>(q_rows.pointers(), count, width, k, tile_size, p, tile_size,
                                                 used, false);
        if (wants_scores)
          multiply_panel<T, simd::Rows::by_output>(d_out_rows.pointers(), count, value_width, v, tile_size,
                                                   ds, tile_size, used, false);
        with_bool(bits, [&](auto masked) {
          with_bool(p_.dropout.active(), [&](auto drops) {
            weights<masked, drops>(p, ds, bh, other, count, first, used, bits, wants_scores);
          });
        });
        const bool guard = bits && (!finite_keys || !q_rows.finite() || !d_out_rows.finite());
        const auto add = [&](const Rows<S>& rows, int64_t channels, T* by, T* into) {
          if (guard)
            multiply_allowed<T>(rows.pointers(), channels, count, by, into, bits);
          else
            multiply_panel<T, simd::Rows::by_sum>(rows.pointers(), channels, count, by, tile_size, into,
                                                  tile_size, used, true);
        };
        if (wants_v) add(d_out_rows, value_width, p, dv);
        if (wants_k) add(q_rows, width, ds, dk);
        if (!wants_q) return;
        if (guard) {
          std::fill(dq + 0, dq + count * wide, T(0));
          for (int64_t r = 0; r < count; ++r)
            for (int64_t lane = 0; lane < owners; ++lane)
              if (bits[r] >> lane & 1)
                for (int64_t d = 0; d < width; ++d)
                  dq[r * wide + d] += ds[r * tile_size + lane] * k_rows[lane * wide + d];
        } else {
          // Only over real keys: lanes beyond them hold anything.
          multiply_panel<T, simd::Rows::by_output>(ds_rows, count, owners, k_rows, wide, dq, wide, wide,
                                                   false);
        }
        const int64_t position = member * p_.queries() + other;
        turns.wait(index, position + count);
        for (int64_t r = 0; r < count; ++r) {
          T* to = dq_data_ + b * dq_.strides()[0] + h * dq_.strides()[1] + (other + r) * dq_.strides()[2];
          for (int64_t d = 0; d < width; ++d) to[d] += dq[r * wide + d];
        }
        turns.publish(index, position + count);
      });
    }

    const auto write = [&](S* data, const Tensor& tensor, const T* from, int64_t channels) {
      simd::transpose(data + b * tensor.strides()[0] + kv * tensor.strides()[1] + first * tensor.strides()[2],
                      tensor.strides()[2], from, tile_size, channels, owners);
    };
    if (wants_k) write(dk_data_, g_.dk, dk, width);
    if (wants_v) write(dv_data_, g_.dv, dv, value_width);
  }

  // From the products q.k in `p` and dO.v in `ds`, for `count` queries from `other`: p becomes the dropped
  // weights, ds = P (Z dP - delta) scale.
  template <bool masked, bool drops>
  void weights(T* p, T* ds, int64_t bh, int64_t other, int64_t count, int64_t first, int64_t used,
               const uint64_t* bits, bool wants_scores) {
    constexpr int lanes = simd::lanes<T>;
    const T scale = static_cast<T>(p_.scale);
    alignas(64) T factors[tile_size];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = bh * p_.queries() + other + r;
      const T lse = lse_data_[row] == -infinity<T> ? infinity<T> : lse_data_[row];
      const T delta = delta_data_[row];
      if constexpr (drops) {
        const uint32_t word = p_.dropout.row_word(bh, other + r);
        dropout_factors(
            factors, p_.dropout.threshold(), static_cast<T>(p_.dropout.keep_scale()),
            [&](uint32_t) { return word; },
            [&](uint32_t lane) { return static_cast<uint32_t>(first) + lane; });
      }
      for (int64_t lane = 0; lane < used; lane += lanes) {
        T* p_at = p + r * tile_size + lane;
        T* ds_at = ds + r * tile_size + lane;
        // Rounded as in forward: fusing this product with the subtraction would not give the score that lse
        // is of.
        Vector<T> score = simd::rounded(load(p_at) * scale);
        if constexpr (masked) score = select(bits[r], lane, score, -infinity<T>);
        Vector<T> weight = simd::exp(score - lse);
        if (wants_scores) {
          Vector<T> d_weight = load(ds_at);
          if constexpr (drops) d_weight *= load(factors + lane);
          Vector<T> d_score = weight * (d_weight - delta) * scale;
          if constexpr (masked) d_score = select(bits[r], lane, d_score, T(0));
          store(ds_at, d_score);
        }
        if constexpr (drops) weight *= load(factors + lane);
        store(p_at, weight);
      }
    }
  }

  const AttentionProblem& p_;
  AttentionGradients& g_;
  std::shared_ptr<const MaskMap> map_;
  Tensor delta_, dq_;
  const T *lse_data_ = nullptr, *delta_data_ = nullptr;
  T* dq_data_ = nullptr;
  S *dk_data_ = nullptr, *dv_data_ = nullptr;
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

}  // namespace

const AttentionBackend cpu_attention{Backend::cpu, refusal, forward, backward};

}  // namespace torus::detail
