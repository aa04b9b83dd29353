#include "torus/ops/dropout.h"

#include <algorithm>
#include <cmath>

#include "torus/core/kernel.h"
#include "torus/core/parallel.h"
#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

constexpr int64_t lanes = dropout_lanes, block = dropout_block;

uint32_t upper_product(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }

// words[k * lanes + i] = word k of the draw at start + i. As `philox`, with the lanes innermost, which
// vectorises.
void draw_block(uint32_t* words, uint64_t start, uint64_t key) {
  uint32_t *w0 = words, *w1 = w0 + lanes, *w2 = w1 + lanes, *w3 = w2 + lanes;
  for (int64_t i = 0; i < lanes; ++i) {
    const uint64_t position = start + static_cast<uint64_t>(i);
    w0[i] = static_cast<uint32_t>(position);
    w1[i] = static_cast<uint32_t>(position >> 32);
    w2[i] = w3[i] = 0;
  }
  auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int64_t i = 0; i < lanes; ++i) {
      // The halves of each product are taken apart, which vectorises where a 64-bit product does not.
      const uint32_t a = w0[i], b = w2[i];
      w0[i] = upper_product(0xCD9E8D57, b) ^ w1[i] ^ low;
      w1[i] = 0xCD9E8D57 * b;
      w2[i] = upper_product(0xD2511F53, a) ^ w3[i] ^ high;
      w3[i] = 0xD2511F53 * a;
    }
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
}

// y = x * scale where the element stays, else 0 whatever x is; plus residual, if defined; rounded to T once.
void dropout_cpu(Tensor& y, const Tensor& x, const Tensor& residual, DropoutDraws draws) {
  const Tensor in_order = x.contiguous(), added = residual.defined() ? residual.contiguous() : residual;
  dispatch_floating(y.dtype(), "dropout", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* to = y.mutable_data<T>();
    const T *from = in_order.data<T>(), *more = added.defined() ? added.data<T>() : nullptr;
    const int64_t count = y.numel();
    const C scale = static_cast<C>(draws.scale);
    parallel_for(0, (count + block - 1) / block, elementwise_grain / block, [&](int64_t first, int64_t last) {
      uint32_t words[block];
      for (int64_t b = first; b < last; ++b) {
        draw_block(words, draws.start + static_cast<uint64_t>(b * lanes), draws.seed);
        const int64_t at = b * block, size = std::min(block, count - at);
        const auto drop = [&](auto sum) {
          for (int64_t i = 0; i < size; ++i) {
            const C scaled = C(from[at + i]) * scale;  // outside the choice, so that the loop vectorises
            to[at + i] = static_cast<T>(sum(words[i] > draws.limit ? scaled : C(0), at + i));
          }
        };
        if (more)
          drop([&](C kept, int64_t i) { return kept + C(more[i]); });
        else
          drop([](C kept, int64_t) { return kept; });
      }
    });
  });
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&, DropoutDraws)> dropout_kernel{"dropout",
                                                                                       dropout_cpu};

}  // namespace

Variable dropout(const Variable& x, double p, Generator& generator, const Variable& residual) {
  const ProfileScope scope("dropout", ScopeKind::forward);
  check(p >= 0 && p <= 1, Error::Kind::Value, "[dropout] p must be in [0, 1], got ", p);
  check_floating("dropout", x);
  if (residual.defined()) {
    check(residual.shape() == x.shape(), Error::Kind::Shape, "[dropout] residual must be ", x.shape(),
          " as x, got ", residual.shape());
    check(residual.dtype() == x.dtype(), Error::Kind::DType, "[dropout] residual must be ", x.dtype(),
          " as x, got ", residual.dtype());
    check(residual.device() == x.device(), Error::Kind::Device, "[dropout] residual must be on ", x.device(),
          " as x, got ", residual.device());
  }
  if (p == 0) return residual.defined() ? x + residual : x;
  const uint64_t start = generator.reserve(static_cast<uint64_t>((x.numel() + block - 1) / block * lanes));
  const auto limit = static_cast<uint32_t>(std::max(std::ldexp(p, 32), 1.0) - 1);
  const DropoutDraws draws{generator.seed(), start, limit, p < 1 ? 1 / (1 - p) : 0};
  // Nothing is saved: backward draws again.
  return record("dropout", {x, residual},
                mapped(dropout_kernel, x.value(), residual.defined() ? residual.value() : Tensor(), draws),
                [draws](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {grads.wants(0) ? mapped(dropout_kernel, grads[0], Tensor(), draws) : Tensor(),
                          grads.wants(1) ? grads[0] : Tensor()};
                });
}

}  // namespace torus
