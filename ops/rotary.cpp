#include <cmath>
#include <numbers>

#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// y = x, its pairs turned by the codes, or back. x [..., N, D], y and codes contiguous, codes in Compute<T>.
void rotary_cpu(Tensor& y, const Tensor& x, const Tensor& codes, bool back) {
  if (y.numel() == 0) return;
  const int64_t tokens = codes.size(1), pairs = codes.size(2);
  dispatch_floating(x.dtype(), "rotary", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const C* const cosines = codes.data<C>();
    const C* const sines = cosines + tokens * pairs;
    T* const y_data = y.mutable_data<T>();
    const T* const x_data = x.data<T>();
    const C sign = back ? C(-1) : C(1);
    Shape rows = y.shape();
    rows[-1] = 1;
    for_each_run<2>(rows, {y.strides(), x.strides()}, elementwise_grain / pairs + 1,
                    [=](const auto& offset, const auto& step, int64_t count) {
                      for (int64_t row = 0; row < count; ++row) {
                        T* const to = y_data + offset[0] + row * step[0];
                        const T* const from = x_data + offset[1] + row * step[1];
                        const int64_t token = (to - y_data) / (2 * pairs) % tokens;
                        const C *const c = cosines + token * pairs, *const s = sines + token * pairs;
#pragma omp simd
                        for (int64_t j = 0; j < pairs; ++j) {
                          const C a = from[j], b = from[j + pairs], turn = sign * s[j];
                          to[j] = static_cast<T>(a * c[j] - b * turn);
                          to[j + pairs] = static_cast<T>(b * c[j] + a * turn);
                        }
                      }
                    });
  });
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&, bool)> rotary_kernel{"rotary", rotary_cpu};

Tensor turned(const Tensor& x, const Tensor& codes, bool back) {
  return mapped(rotary_kernel, x.strides()[x.dim() - 1] == 1 ? x : x.contiguous(), codes, back);
}

// Codes [2, N, pairs] of angle(n, j), computed in double.
template <class F>
Tensor codes_of(int64_t tokens, int64_t pairs, DType dtype, F angle) {
  Tensor codes = Tensor::empty({2, tokens, pairs}, f64);
  double* const cosines = codes.mutable_data<double>();
  double* const sines = cosines + tokens * pairs;
  for (int64_t n = 0; n < tokens; ++n)
    for (int64_t j = 0; j < pairs; ++j) {
      const double turn = angle(n, j);
      cosines[n * pairs + j] = std::cos(turn);
      sines[n * pairs + j] = std::sin(turn);
    }
  return codes.to(dtype);
}

void check_codes(const char* op, int64_t width, const RotaryOptions& options) {
  check(width > 0 && width % 2 == 0, Error::Kind::Shape, "[", op, "] width must be even and positive, got ",
        width);
  check(options.base > 0, Error::Kind::Value, "[", op, "] base must be positive, got ", options.base);
  check(is_floating(options.dtype), Error::Kind::DType, "[", op, "] dtype must be floating, got ",
        options.dtype);
}

// Radians a place, of pairs that share one axis.
std::vector<double> frequencies(double base, int64_t pairs) {
  std::vector<double> result;
  for (int64_t j = 0; j < pairs; ++j)
    result.push_back(std::pow(base, -static_cast<double>(j) / static_cast<double>(pairs)));
  return result;
}

// Turns a round of a periodic axis: from 1 to length / 2, evenly spread in the logarithm.
std::vector<int64_t> turns(int64_t length, int64_t pairs) {
  const double most = static_cast<double>(std::max<int64_t>(length / 2, 1));
  std::vector<int64_t> result;
  for (int64_t j = 0; j < pairs; ++j)
    result.push_back(std::llround(
        std::pow(most, static_cast<double>(j) / static_cast<double>(std::max<int64_t>(pairs - 1, 1)))));
  return result;
}

}  // namespace

Variable rotary(const Variable& x, const Tensor& codes) {
  const ProfileScope scope("rotary", ScopeKind::forward);
  check_floating("rotary", x);
  check(x.dim() >= 2 && x.size(-1) % 2 == 0, Error::Kind::Shape,
        "[rotary] expected x [..., N, D] with D even, got ", x.shape());
  const Shape expected{2, x.size(-2), x.size(-1) / 2};
  check(codes.shape() == expected, Error::Kind::Shape, "[rotary] codes must be ", expected, " for x ",
        x.shape(), ", got ", codes.shape());
  check(is_floating(codes.dtype()), Error::Kind::DType, "[rotary] codes must be floating, got ",
        codes.dtype());
  check(codes.device() == x.device(), Error::Kind::Device, "[rotary] codes must be on ", x.device(),
        " as x, got ", codes.device());
  const Tensor table = codes.to(x.dtype() == f64 ? f64 : f32).contiguous();
  // Saved: the codes only; the gradient turns back.
  return record("rotary", {x}, turned(x.value(), table, false),
                [saved = Saved(table)](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {turned(grads[0], saved.get(), true)};
                });
}

Tensor rotary_codes(int64_t tokens, int64_t width, const RotaryOptions& options) {
  check_codes("rotary_codes", width, options);
  check(tokens >= 0, Error::Kind::Shape, "[rotary_codes] tokens must be at least 0, got ", tokens);
  const int64_t pairs = width / 2;
  const std::vector<double> frequency = frequencies(options.base, pairs);
  return codes_of(tokens, pairs, options.dtype, [&](int64_t n, int64_t j) {
    return static_cast<double>(options.offset + n) * frequency[static_cast<size_t>(j)];
  });
}

Tensor rotary_grid_codes(const Shape& grid, int64_t width, const std::vector<bool>& periodic,
                         const RotaryOptions& options) {
  check_codes("rotary_grid_codes", width, options);
  const int axes = grid.dim();
  const int64_t pairs = width / 2;
  check(axes > 0 && static_cast<int>(periodic.size()) == axes, Error::Kind::Shape,
        "[rotary_grid_codes] expected one of periodic an axis, got ", periodic.size(), " for grid ", grid);
  check(pairs >= axes, Error::Kind::Shape, "[rotary_grid_codes] width must be at least ", 2 * axes,
        ", a pair an axis of grid ", grid, ", got ", width);
  Shape shape{2};
  for (int64_t length : grid) shape.push_back(length);
  shape.push_back(pairs);
  Tensor codes = Tensor::empty(shape, options.dtype);
  for (int axis = 0, first = 0; axis < axes; ++axis) {
    const int share = static_cast<int>(pairs / axes + (axis < pairs % axes));
    const int64_t length = grid[axis];
    const bool round = periodic[static_cast<size_t>(axis)];
    const std::vector<double> frequency = frequencies(options.base, share);
    const std::vector<int64_t> turn = turns(length, share);
    const Tensor along = codes_of(length, share, f64, [&](int64_t n, int64_t j) {
      const auto pair = static_cast<size_t>(j);
      // Whole rounds are taken off as integers, so that going around is exactly nothing.
      return round ? 2 * std::numbers::pi * static_cast<double>(turn[pair] * n % length) /
                         static_cast<double>(length)
                   : static_cast<double>(n) * frequency[pair];
    });
    Shape stretched{2};
    for (int other = 0; other < axes; ++other) stretched.push_back(other == axis ? length : 1);
    stretched.push_back(share);
    codes.slice(-1, first, first + share).copy_(along.reshape(stretched));
    first += share;
  }
  return codes.reshape({2, grid.numel(), pairs});
}

}  // namespace torus
