#include "torus/core/gemm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/expect_error.h"
#include "torus/core/parallel.h"
#include "torus/core/random.h"

namespace torus {
namespace {

double element(const Tensor& x, std::initializer_list<int64_t> index) {
  Tensor at = x;
  for (int64_t i : index) at = at.select(0, i);
  return at.item();
}

// Plain loops in double over c [B, M, N].
void expect_product(const Tensor& c, const Tensor& a, const Tensor& b, const Tensor& bias,
                    const Tensor& before, double tolerance) {
  const Shape left{c.size(0), a.size(-2), a.size(-1)}, right{c.size(0), b.size(-2), b.size(-1)};
  const std::vector<double> x = a.expand(left).to_vector<double>(), y = b.expand(right).to_vector<double>(),
                            got = c.to_vector<double>();
  const int64_t m = left[1], k = left[2], n = right[2];
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < c.size(0); ++i)
    for (int64_t row = 0; row < m; ++row)
      for (int64_t column = 0; column < n; ++column) {
        double sum = bias.defined() ? element(bias, {column}) : 0;
        if (before.defined()) sum += element(before, {i, row, column});
        for (int64_t r = 0; r < k; ++r)
          sum += x[static_cast<size_t>((i * m + row) * k + r)] *
                 y[static_cast<size_t>((i * k + r) * n + column)];
        difference += std::pow(sum - got[static_cast<size_t>((i * m + row) * n + column)], 2);
        norm += sum * sum;
      }
  EXPECT_LE(std::sqrt(difference), tolerance * std::sqrt(norm)) << a.shape() << " " << b.shape();
}

// The same matrices, laid out in one of several ways.
Tensor laid_out(const Tensor& x, int way) {
  switch (way) {
    case 0:
      return x;
    case 1:
      return x.transpose(-1, -2).contiguous().transpose(-1, -2);
    case 2: {  // every other row and column of a larger one: no unit stride
      Shape wide = x.shape();
      wide[-1] *= 2, wide[-2] *= 2;
      Tensor view = Tensor::full(wide, NAN, x.dtype()).slice(-1, 0, wide[-1], 2).slice(-2, 0, wide[-2], 2);
      return view.copy_(x);
    }
    default: {  // a unit stride inside longer rows
      Shape wide = x.shape();
      wide[-1] += 3;
      Tensor view = Tensor::full(wide, NAN, x.dtype()).slice(-1, 1, wide[-1] - 2);
      return view.copy_(x);
    }
  }
}

TEST(Gemm, MatchesPlainLoopsInAnyLayout) {
  const std::vector<std::array<int64_t, 4>> sizes = {
      {1, 1, 1, 1},    {2, 3, 5, 4}, {3, 1, 7, 2}, {1, 70, 9, 33}, {2, 5, 130, 1}, {1, 1, 1, 9},
      {1, 140, 67, 3}, {2, 4, 0, 3}, {0, 2, 2, 2}, {1, 0, 3, 2},   {1, 3, 2, 0}};
  for (const auto& [batch, m, k, n] : sizes)
    for (int way = 0; way < 16; ++way)
      for (DType dtype : {f64, f32}) {
        const double tolerance = dtype == f64 ? 1e-14 : 1e-5;
        const Tensor a = laid_out(randn({batch, m, k}, 0, 1, dtype), way % 4);
        const Tensor b = laid_out(randn({batch, k, n}, 0, 1, dtype), way / 4);
        const Tensor bias = randn({n}, 0, 1, dtype);
        Tensor c = laid_out(Tensor::full({batch, m, n}, NAN, dtype), (way + way / 4) % 4);
        product(c, a, b);
        expect_product(c, a, b, {}, {}, tolerance);
        product(c, a, b, {.bias = bias});
        expect_product(c, a, b, bias, {}, tolerance);
        const Tensor before = c.clone();
        product(c, a, b, {.accumulate = true, .bias = bias});
        expect_product(c, a, b, bias, before, tolerance);
      }
}

// Longer than every block that the product is cut into, with remainders.
TEST(Gemm, JoinsItsBlocks) {
  for (int way : {0, 1})
    for (DType dtype : {f64, f32}) {
      const Tensor a = laid_out(randn({1, 31, 1283}, 0, 1, dtype), way);
      const Tensor b = laid_out(randn({1, 1283, 530}, 0, 1, dtype), 1 - way);
      const Tensor bias = randn({530}, 0, 1, dtype), before = randn({1, 31, 530}, 0, 1, dtype);
      Tensor c = before.clone();
      product(c, a, b, {.accumulate = true, .bias = bias});
      expect_product(c, a, b, bias, before, dtype == f64 ? 1e-14 : 2e-6);
    }
}

TEST(Gemm, BroadcastsLeadingAxes) {
  const Tensor a = randn({4, 5}, 0, 1, f64), b = randn({3, 5, 6}, 0, 1, f64),
               wide = randn({1, 1, 6}, 0, 1, f64);
  Tensor c = Tensor::empty({3, 4, 6}, f64);
  product(c, a, b);
  expect_product(c, a, b, {}, {}, 1e-14);
  product(c, b.transpose(1, 2).slice(1, 0, 4), wide.expand({3, 5, 6}));  // rows with stride 0
  expect_product(c, b.transpose(1, 2).slice(1, 0, 4), wide.expand({3, 5, 6}), {}, {}, 1e-14);
  Tensor deep = Tensor::empty({2, 3, 4, 6}, f64);
  product(deep, a, b);
  for (int64_t i = 0; i < 2; ++i) expect_product(deep.select(0, i), a, b, {}, {}, 1e-14);
}

// 16-bit operands are summed in float: the only error left is that of rounding the result.
TEST(Gemm, SixteenBits) {
  for (DType dtype : {f16, bf16}) {
    const Tensor a = randn({1, 7, 300}).to(dtype), b = randn({1, 300, 5}).to(dtype);
    Tensor c = Tensor::empty({1, 7, 5}, dtype);
    product(c, a, b);
    expect_product(c, a, b, {}, {}, dtype == f16 ? 0x1p-11 : 0x1p-8);
  }
}

TEST(Gemm, AddsAMatrix) {
  manual_seed(1);
  for (DType dtype : {f64, f32, f16, bf16})
    for (const auto& [m, k, n] : {std::array<int64_t, 3>{5, 7, 3}, {64, 40, 72}, {4, 0, 2}})
      for (int way = 0; way < 4; ++way) {
        const double tolerance = dtype == f64 ? 1e-14 : dtype == f32 ? 1e-5 : dtype == f16 ? 2e-3 : 2e-2;
        const Tensor a = laid_out(randn({1, m, k}).to(dtype), way), b = randn({1, k, n}).to(dtype),
                     bias = randn({n}).to(dtype), addend = laid_out(randn({1, m, n}).to(dtype), way);
        Tensor c = Tensor::empty({1, m, n}, dtype);
        product(c, a, b, {.bias = bias, .addend = addend});
        expect_product(c, a, b, bias, addend, tolerance);
      }
}

// Where the product and what is added nearly cancel, a rounding between them would be all that is left.
TEST(Gemm, SixteenBitsAddBeforeTheyRound) {
  manual_seed(2);
  for (DType dtype : {f16, bf16})
    for (const auto& [m, k, n] : {std::array<int64_t, 3>{5, 7, 3}, {64, 40, 72}, {31, 400, 33}})
      for (int way = 0; way < 4; ++way) {
        const auto expect = [&](const Tensor& a, const Tensor& b, const ProductOptions& options,
                                const Tensor& start) {
          Tensor c = laid_out(start.defined() ? start.clone() : Tensor::full({1, m, n}, NAN, dtype), way);
          product(c, a, b, options);
          SCOPED_TRACE(::testing::Message() << dtype << ' ' << way << ' ' << options.bias.defined()
                                            << options.addend.defined() << options.accumulate);
          expect_product(c, a, b, options.bias, start.defined() ? start : options.addend, 0x1p-8);
        };
        // -(a @ b + bias), rounded.
        const Tensor b = laid_out(randn({1, k, n}, 0, 1, dtype), way);
        const auto opposite = [&](const Tensor& a, const Tensor& bias) {
          Tensor sum = Tensor::empty({1, m, n}, f64);
          product(sum, a.to(f64), b.to(f64), {.bias = bias.defined() ? bias.to(f64) : bias});
          std::vector<double> values = sum.to_vector<double>();
          for (double& value : values) value = -value;
          return Tensor::from(values, {1, m, n}).to(dtype);
        };
        const Tensor a = laid_out(randn({1, m, k}, 0, 1, dtype), way);
        for (const Tensor& bias : {Tensor(), randn({n}, 0, 1, dtype)}) {
          const Tensor other = opposite(a, bias);
          expect(a, b, {.bias = bias, .addend = laid_out(other, way)}, {});
          expect(a, b, {.accumulate = true, .bias = bias}, other);
        }
        // A bias cancels what all rows have in common.
        const Tensor alike = laid_out(randn({1, 1, k}, 0, 1, dtype).expand({1, m, k}).clone(), way);
        expect(alike, b, {.bias = opposite(alike, {}).select(0, 0).select(0, 0)}, {});
      }
}

TEST(Gemm, InfinityAndNaNStayWhereTheyBelong) {
  Tensor a = Tensor::zeros({2, 2}), b = Tensor::full({2, 2}, 1);
  a.select(0, 0).fill_(INFINITY);
  Tensor c = Tensor::full({2, 2}, NAN);  // what was there does not matter
  product(c, a, b);
  EXPECT_EQ(c.to_vector<float>(), (std::vector<float>{INFINITY, INFINITY, 0, 0}));
}

TEST(Gemm, BitsDoNotDependOnThreads) {
  const int threads = num_threads();
  for (const auto& [m, k, n] : {std::array<int64_t, 3>{257, 129, 65}, {3, 500, 700}, {1000, 64, 5}}) {
    const Tensor a = randn({2, m, k}), b = randn({2, n, k}).transpose(1, 2);
    std::vector<std::vector<float>> results;
    for (int count : {1, 2, 3, 8}) {
      set_num_threads(count);
      Tensor c = Tensor::empty({2, m, n});
      product(c, a, b);
      results.push_back(c.to_vector<float>());
    }
    for (const auto& result : results) EXPECT_EQ(result, results[0]);
  }
  set_num_threads(threads);
}

TEST(Gemm, Errors) {
  Tensor c = Tensor::zeros({2, 4});
  EXPECT_ERROR(product(c, Tensor::zeros({2, 3}), Tensor::zeros({5, 4})), Shape,
               "[2, 3] times [5, 4] does not give [2, 4]");
  EXPECT_ERROR(product(c, Tensor::zeros({2}), Tensor::zeros({2, 4})), Shape, "expected matrices");
  EXPECT_ERROR(product(c, Tensor::zeros({2, 3}, f64), Tensor::zeros({3, 4}, f64)), DType,
               "one floating dtype");
  EXPECT_ERROR(product(c, Tensor::zeros({2, 3}), Tensor::zeros({3, 4}), {.bias = Tensor::zeros({3})}), Shape,
               "bias must be [4]");
}

}  // namespace
}  // namespace torus
