// Ops on a CUDA device against the CPU where the op table does not go: infinities and NaN, every way that a
// kernel splits its work, indices out of range. Skipped without a device.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "core/expect_error.h"
#include "torus/autograd/tape.h"
#include "torus/core/memory.h"
#include "torus/ops/gelu.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

class CudaOps : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  }
};

using Tensors = std::vector<Tensor>;
using Variables = std::vector<Variable>;
using Function = std::function<Variable(const Variables&)>;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
const auto floating = {f64, f32, f16, bf16};

// The output and the gradients of all floating inputs, on a device.
Tensors results(const Function& op, const Tensors& inputs, Device device) {
  Tape tape;
  Variables leaves;
  for (const Tensor& input : inputs) leaves.emplace_back(input.to(device), is_floating(input.dtype()));
  const Variable output = op(leaves);
  Tensors all{output.value()};
  if (!output.requires_grad()) return all;
  Generator generator(5);
  tape.backward({output}, {randn(output.shape(), 0, 1, output.dtype(), generator).to(device)});
  for (const Variable& leaf : leaves)
    if (leaf.requires_grad()) all.push_back(leaf.grad());
  return all;
}

// What rounding to `dtype` may cost, relative to the value.
double precision(DType dtype) {
  return dtype == f64 ? 1e-14 : dtype == f32 ? 3e-6 : dtype == f16 ? 2e-3 : 1.6e-2;
}

// That each element agrees: NaN with NaN, infinities exactly, others to `scale` roundings of their own, or of
// the norm where `by_norm`.
void expect_same(const Function& op, const Tensors& inputs, bool by_norm = false, double scale = 1) {
  const Tensors expected = results(op, inputs, cpu), got = results(op, inputs, cuda);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t t = 0; t < got.size(); ++t) {
    ASSERT_EQ(got[t].defined(), expected[t].defined());
    if (!got[t].defined()) continue;  // a gradient of zero
    const DType dtype = expected[t].dtype();
    ASSERT_EQ(got[t].dtype(), dtype);
    ASSERT_EQ(got[t].shape(), expected[t].shape());
    const auto a = got[t].to_vector<double>(), b = expected[t].to_vector<double>();
    double norm = 0, finite = 1;
    for (double value : b)
      if (std::isfinite(value)) norm += value * value, ++finite;
    const double typical = by_norm ? std::sqrt(norm / finite) : 0, tiny = dtype == f16 ? 2e-7 : 1e-37;
    int shown = 0;
    for (size_t i = 0; i < a.size() && shown < 5; ++i) {
      if (std::isnan(b[i]) && std::isnan(a[i])) continue;
      const double bound =
          is_floating(dtype) ? scale * precision(dtype) * std::max(std::abs(b[i]), typical) + tiny : 0;
      if (a[i] == b[i] || std::abs(a[i] - b[i]) <= bound) continue;
      ADD_FAILURE() << (t == 0 ? "output" : "gradient ") << (t == 0 ? "" : std::to_string(t - 1))
                    << " element " << i << " of " << dtype << ' ' << got[t].shape() << ": " << a[i]
                    << ", expected " << b[i];
      ++shown;
    }
  }
}

Tensor random_tensor(const Shape& shape, DType dtype, double low = -2, double high = 2, uint64_t seed = 1) {
  Generator generator(seed);
  return rand(shape, low, high, f64, generator).to(dtype);
}
Tensor random_indices(const Shape& shape, int64_t bound) {
  Generator generator(2);
  return randint(shape, 0, bound, generator);
}

const std::vector<double> special{0.,   -0.,   infinity, -infinity, nan,  1,     -1,    2,    -2,    0.5,
                                  -0.5, 1e-30, -1e-30,   1e-40,     17.5, -17.5, 100.5, -100, 60000, -60000,
                                  3e38, -3e38, 0.75,     -6,        6,    3,     -3,    -88};

TEST_F(CudaOps, FunctionsOfSpecialNumbers) {
  const std::vector<std::pair<const char*, Function>> functions{
      {"exp", [](auto& x) { return exp(x[0]); }},
      {"log", [](auto& x) { return log(x[0]); }},
      {"sqrt", [](auto& x) { return sqrt(x[0]); }},
      {"tanh", [](auto& x) { return tanh(x[0]); }},
      {"abs", [](auto& x) { return abs(x[0]); }},
      {"sigmoid", [](auto& x) { return sigmoid(x[0]); }},
      {"relu", [](auto& x) { return relu(x[0]); }},
      {"gelu", [](auto& x) { return gelu(x[0]); }},
      {"gelu tanh", [](auto& x) { return gelu(x[0], Gelu::tanh); }},
      {"silu", [](auto& x) { return silu(x[0]); }},
      {"clamp", [](auto& x) { return clamp(x[0], -1, 2); }},
      {"neg", [](auto& x) { return -x[0]; }},
      {"1 / x", [](auto& x) { return 1.0 / x[0]; }},
      {"x / 3", [](auto& x) { return x[0] / 3; }}};
  for (const auto& [name, op] : functions) {
    SCOPED_TRACE(name);
    for (DType dtype : floating) {
      const auto count = static_cast<int64_t>(special.size());
      // Far out, what is nearly nothing loses its digits to the rounding of its argument.
      expect_same(op, {Tensor::from(special, {count}).to(dtype)}, false, dtype == f64 ? 1e3 : 20);
      expect_same(op, {random_tensor({3, 4099}, dtype, -8, 8)}, true, 2);
    }
  }
}

// By packs, also along rows that broadcast, with what is less than a pack, and one by one.
TEST_F(CudaOps, ElementwiseOfEveryLayout) {
  const auto product_of_both = [](auto& x) { return x[0] * x[1]; };
  for (DType dtype : floating) {
    const Tensor x = random_tensor({3, 40, 64}, dtype);
    for (const Shape& other :
         {Shape{3, 40, 64}, {40, 64}, {64}, {3, 1, 64}, {3, 40, 1}, {1, 40, 1}, {1}, {2, 1, 1, 1}})
      expect_same(product_of_both, {x, random_tensor(other, dtype)}, true, 4);
    for (int64_t first : {0, 1, 8, 16}) {
      const auto of_slices = [=](auto& in) { return slice(in[0], 2, first, first + 40) * in[1]; };
      expect_same(of_slices, {x, random_tensor({3, 40, 40}, dtype)}, true, 4);
      expect_same(of_slices, {x, random_tensor({40}, dtype)}, true, 4);
    }
    for (int64_t count : {1, 7, 8, 9, 4095, 4096, 4097, 8193, 3000000})
      expect_same(product_of_both, {random_tensor({count}, dtype), random_tensor({count}, dtype)}, true, 4);
  }
}

// The gradients of biases too: rows in one part and in many, with widths of whole packs and others.
TEST_F(CudaOps, MlpOfManyRows) {
  for (DType dtype : floating)
    for (Gelu form : {Gelu::exact, Gelu::tanh})
      for (const auto& [rows, hidden] : {std::array<int64_t, 2>{1, 32},
                                         {15, 128},
                                         {16, 136},
                                         {65, 260},
                                         {1000, 100},
                                         {1700, 1032},
                                         {9000, 8}})
        expect_same([form](auto& x) { return mlp(x[0], x[1], x[2], x[3], x[4], x[5], form); },
                    {random_tensor({rows, 24}, dtype), random_tensor({hidden, 24}, dtype, -0.5, 0.5, 2),
                     random_tensor({hidden}, dtype), random_tensor({24, hidden}, dtype, -0.2, 0.2, 3),
                     random_tensor({24}, dtype), random_tensor({rows, 24}, dtype)},
                    true, 8);
}

// In one kernel or in two: the same bits, also where dx takes the place of dy.
TEST_F(CudaOps, GeluBackwardAndSums) {
  for (DType dtype : floating)
    for (Gelu form : {Gelu::exact, Gelu::tanh})
      for (const Shape& shape : {Shape{1, 8},
                                 {3, 24},
                                 {33, 136},
                                 {129, 7},
                                 {1700, 1032},
                                 {40000, 8},
                                 {9000, 384},
                                 {16384, 1536},
                                 {0, 16},
                                 {16, 0}}) {
        const Tensor dy = random_tensor(shape, dtype).to(cuda),
                     x = random_tensor(shape, dtype, -4, 4).to(cuda);
        Tensor alone = Tensor::empty(shape, dtype, cuda), dx = Tensor::empty(shape, dtype, cuda),
               in_place = dy.clone();
        gelu_backward(alone, dy, x, form);
        const auto slopes = alone.to_vector<double>(), sums = sum_to(alone, {shape[1]}).to_vector<double>();
        EXPECT_EQ(gelu_backward_and_sums(dx, dy, x, form).to_vector<double>(), sums) << dtype << shape;
        EXPECT_EQ(dx.to_vector<double>(), slopes) << dtype << shape;
        EXPECT_EQ(gelu_backward_and_sums(in_place, in_place, x, form).to_vector<double>(), sums)
            << dtype << shape;
        EXPECT_EQ(in_place.to_vector<double>(), slopes) << dtype << shape;
      }
}

TEST_F(CudaOps, PowersOfSpecialNumbers) {
  const std::vector<double> bases{0., -0., 1, -1, 2, -2, 0.5, -0.5, 2.5, infinity, -infinity, nan};
  const std::vector<double> exponents{0, 1, 2, 3, -1, 0.5, -0.5, 1.7, -2, 4, 1.5, -3};
  const Tensor x = Tensor::from(bases, {static_cast<int64_t>(bases.size()), 1});
  const Tensor p = Tensor::from(exponents, {static_cast<int64_t>(exponents.size())});
  for (DType dtype : floating) {
    for (double exponent : exponents) {
      SCOPED_TRACE(exponent);
      expect_same([=](auto& in) { return pow(in[0], exponent); }, {x.to(dtype)});
    }
    const Shape shape{x.size(0), p.size(0)};
    expect_same([](auto& in) { return pow(in[0], in[1]); },
                {x.expand(shape).clone().to(dtype), p.expand(shape).clone().to(dtype)});
  }
}

TEST_F(CudaOps, SoftmaxOfEveryLength) {
  const std::vector<std::pair<const char*, Function>> functions{
      {"softmax", [](auto& x) { return softmax(x[0], 1); }},
      {"log_softmax", [](auto& x) { return log_softmax(x[0], 1); }},
      {"logsumexp", [](auto& x) { return logsumexp(x[0], 1); }}};
  for (const auto& [name, op] : functions)
    for (DType dtype : floating) {
      SCOPED_TRACE(std::string(name) + ' ' + torus::name(dtype));
      for (int64_t length : {1,   2,    8,    31,   32,   33,   64,   127,  128,  250,   256,  257,
                             512, 1000, 1024, 1032, 2048, 4096, 4104, 5001, 8192, 16384, 50257})
        expect_same(op, {random_tensor({3, length}, dtype, -6, 6)}, true, 4);
      expect_same(op, {random_tensor({1000, 40}, dtype)}, true, 4);
      expect_same(op, {random_tensor({3, 7, 9}, dtype)}, true, 4);
      expect_same(op, {random_tensor({2, 300, 5}, dtype)}, true, 4);
      if (dtype == f32) expect_same(op, {random_tensor({2, 20, 140000}, dtype)}, true, 4);
    }
}

TEST_F(CudaOps, SoftmaxInPlaceHasTheSameBits) {
  for (DType dtype : floating)
    for (const Shape& shape : {Shape{3, 33}, {5, 1024}, {2, 50257}, {3, 7, 9}, {0, 4}})
      for (int axis : {0, -1}) {
        Tensor x = random_tensor(shape, dtype, -6, 6).to(cuda);
        const auto expected = softmax(x, axis).value().to_vector<double>();
        EXPECT_EQ(softmax_(x, axis).to_vector<double>(), expected) << dtype << shape << axis;
      }
}

TEST_F(CudaOps, SoftmaxOfInfinitiesAndNaN) {
  const double inf = infinity;
  for (int64_t length : {5, 64, 5000})
    for (int64_t inner : {1, 3}) {
      Tensor x = random_tensor({5, length, inner}, f32);
      x.select(0, 0).fill_(-inf);
      x.select(0, 1).slice(0, 0, length - 1).fill_(-inf);
      x.select(0, 2).select(0, length / 2).fill_(inf);
      x.select(0, 3).select(0, length - 1).fill_(nan);
      expect_same([](auto& in) { return softmax(in[0], 1); }, {x}, true);
      expect_same([](auto& in) { return log_softmax(in[0], 1); }, {x}, true);
      expect_same([](auto& in) { return logsumexp(in[0], 1); }, {x}, true);
    }
}

// Elements, rows and gradients beyond the 2^31st element.
TEST_F(CudaOps, PassesTwoToTheThirtyFirstElements) {
  using Values = std::vector<double>;
  const int64_t count = (int64_t{1} << 31) + 77;
  const auto last = [](const Tensor& x) {
    const Tensor flat = x.reshape({x.numel()});
    return flat.slice(0, x.numel() - 4, x.numel()).to_vector<double>();
  };
  {
    Tensor x = Tensor::zeros({count}, bf16, cuda);
    x.slice(0, count - 3, count).fill_(2);
    EXPECT_EQ(last((Variable(x) + Variable(x)).value()), (Values{0, 4, 4, 4}));
    EXPECT_EQ(last((Variable(x) * -3.0).value()), (Values{0, -6, -6, -6}));
    EXPECT_EQ(last(relu(Variable(x)).value()), (Values{0, 2, 2, 2}));
    add_into(x, Tensor::full({1}, 2, bf16, cuda));
    EXPECT_EQ(last(x), (Values{2, 4, 4, 4}));
  }
  release_cached_memory(cuda);
  {
    Tensor rows = Tensor::full({(int64_t{1} << 21) + 1, 1024}, 2, bf16, cuda);
    const Variable ones(Tensor::full({1024}, 1, bf16, cuda));
    EXPECT_EQ(last(rms_norm(Variable(rows), ones).value()), Values(4, 1));
    EXPECT_EQ(last(layer_norm(Variable(rows), ones).value()), Values(4, 0));
    EXPECT_EQ(last(softmax_(rows)), Values(4, 0x1p-10));
  }
  release_cached_memory(cuda);
  {  // 2^15 rows: a power of two, so that the gradient is a number of bf16
    const int64_t n = 1 << 15, vocabulary = 1 << 16;
    const Variable logits(Tensor::zeros({n + 1, vocabulary}, bf16, cuda), true);
    Tensor targets = Tensor::zeros({n + 1}, i64, cuda);
    targets.slice(0, 0, 1).fill_(-1);
    Tape tape;
    const Variable loss = cross_entropy(logits, targets, -1);
    EXPECT_NEAR(loss.item(), 16 * std::log(2.0), 1e-4);
    tape.backward(loss);
    EXPECT_EQ(last(logits.grad()), Values(4, 0x1p-31));
    EXPECT_EQ(logits.grad().select(0, n).select(0, 0).item(), -0x1p-15);
  }
  release_cached_memory(cuda);
}

TEST_F(CudaOps, ExtremesOfEveryLength) {
  const std::vector<std::pair<Shape, int>> cases{
      {{3, 1}, 1},   {{3, 31}, 1},     {{3, 33}, 1},     {{3, 2000}, 1}, {{3, 100000}, 1}, {{20000, 100}, 1},
      {{300, 7}, 0}, {{64, 70000}, 0}, {{2, 500, 3}, 1}, {{5000, 3}, 0}, {{1, 4097}, 1},   {{40, 3}, 1}};
  for (const auto& [shape, axis] : cases)
    for (DType dtype : {f64, f32, bf16}) {
      std::ostringstream trace;
      trace << shape << axis << dtype;
      SCOPED_TRACE(trace.str());
      // Whole numbers: the largest comes often. Then a NaN at one of 200 places.
      const Tensor ties = random_indices(shape, 40).to(dtype);
      const Tensor sound = random_indices(shape, 200).to(boolean);
      const Tensor with_nan = where(sound, ties, Tensor::full(shape, nan, dtype)).value();
      for (const Tensor& x : {ties, with_nan}) {
        expect_same([=, at = axis](auto& in) { return max(in[0], at); }, {x});
        expect_same([=, at = axis](auto& in) { return min(in[0], at); }, {x});
        EXPECT_EQ(argmax(x.to(cuda), axis).to_vector<int64_t>(), argmax(x, axis).to_vector<int64_t>());
      }
    }
}

TEST_F(CudaOps, CumsumOfEveryLength) {
  const std::vector<std::pair<Shape, int>> cases{{{1, 100000}, 1}, {{5, 31}, 1},     {{5, 512}, 1},
                                                 {{5, 513}, 1},    {{20000, 40}, 1}, {{40, 70000}, 0},
                                                 {{200, 7}, 0},    {{3, 1000, 5}, 1}};
  for (const auto& [shape, axis] : cases)
    for (DType dtype : floating) {
      const Function op = [at = axis](auto& in) { return cumsum(in[0], at); };
      Tensor x = random_tensor(shape, dtype, -1, 1);
      expect_same(op, {x}, true, 10);
      x.select(axis, shape[axis] / 2).fill_(infinity);
      x.select(axis, shape[axis] - 1).fill_(nan);
      expect_same(op, {x}, true, 10);
    }
}

TEST_F(CudaOps, ScatterAddSumsEachWay) {
  struct Case {
    Shape x, source, index;
    int axis;
  };
  const std::vector<Case> cases{
      {{1000}, {100000}, {100000}, 0},             // sorted, a warp a run
      {{3}, {50000}, {50000}, 0},                  // long runs
      {{500, 64}, {3000, 64}, {3000, 1}, 0},       // sorted once for 64 columns
      {{500, 5}, {3000, 5}, {3000, 1}, 0},         // for 5
      {{7, 40, 30}, {7, 90, 30}, {7, 90, 1}, 1},   // lines that share and lines that do not
      {{7, 40, 30}, {7, 90, 30}, {1, 90, 30}, 1},  //
      {{40, 30}, {70, 30}, {70, 30}, 0},           // every index its own
      {{30, 20000}, {50, 20000}, {50, 20000}, 0},  // by line, coalesced
      {{9000, 11}, {9000, 3}, {9000, 3}, 1}};      // by line
  for (const auto& [x, source, index, axis] : cases)
    for (DType dtype : floating) {
      std::ostringstream trace;
      trace << x << source << index << dtype;
      SCOPED_TRACE(trace.str());
      const Tensor places = random_indices(index, x[axis]);
      const Tensors inputs{random_tensor(x, dtype), random_tensor(source, dtype, -2, 2, 3), places};
      const Function op = [at = axis](auto& in) { return scatter_add(in[0], at, in[2].value(), in[1]); };
      expect_same(op, inputs, true, 50);
      const Function picks = [at = axis](auto& in) { return gather(in[0], at, in[2].value()); };
      expect_same(picks, inputs, true, 50);
      const auto once = results(op, inputs, cuda), again = results(op, inputs, cuda);
      EXPECT_EQ(once[0].to_vector<float>(), again[0].to_vector<float>());
    }
}

TEST_F(CudaOps, IndicesOutOfRangeAreReportedAndHarmless) {
  const Tensor x = random_tensor({5, 4}, f32).to(cuda);
  const Tensor sources = random_tensor({6, 4}, f32).to(cuda);
  for (int64_t wrong : {int64_t{-1}, int64_t{5}, int64_t{1} << 40}) {
    const std::string text = "index " + std::to_string(wrong) + " is outside [0, 5)";
    const Tensor index = Tensor::from<int64_t>({0, 1, wrong, 3, 4, 4}).to(cuda);
    EXPECT_ERROR(index_select(x, 0, index).value().to(cpu), Value, "[index_select] " + text);
    EXPECT_ERROR(scatter_add(x, 0, index.reshape({6, 1}), sources).value().to(cpu), Value,
                 "[scatter_add] " + text);
    EXPECT_ERROR(one_hot(index, 5).to(cpu), Value, "[one_hot] " + text);
    EXPECT_ERROR(
        {
          gather(x, 0, index.reshape({6, 1}));
          synchronize(cuda);
        },
        Value, "[gather] " + text);
  }
  EXPECT_EQ(x.to_vector<float>(), x.to(cpu).to_vector<float>());  // the report is gone
}

TEST_F(CudaOps, PaddingAndRollingOfEveryDtype) {
  for (DType dtype : {f64, f32, f16, bf16, i64, i32, u8, boolean})
    for (const Shape& shape :
         {Shape{3, 4, 5, 6}, Shape{2, 3, 4, 16}, Shape{1, 5, 1, 32}, Shape{4, 6, 8, 3}}) {
      std::ostringstream trace;
      trace << shape << dtype;
      SCOPED_TRACE(trace.str());
      const Tensor x = random_indices(shape, 100).to(dtype);
      const auto same = [&](const std::function<Variable(const Variable&)>& op) {
        EXPECT_EQ(op(x.to(cuda)).value().to_vector<double>(), op(x).value().to_vector<double>());
        const Tensor turned = x.transpose(1, 3);
        EXPECT_EQ(op(x.to(cuda).transpose(1, 3)).value().to_vector<double>(),
                  op(turned).value().to_vector<double>());
        if (is_floating(dtype)) expect_same([&](auto& in) { return op(in[0]); }, {x}, true, 4);
      };
      same([](auto& v) { return roll(v, {1, -7, 2}, {1, 2, 0}); });
      same([](auto& v) { return roll(v, {4}, {-1}); });
      same([](auto& v) { return pad(v, {{1, 2}, {0, 3}}, {1, 2}, Padding::constant, 1); });
      same([](auto& v) { return pad(v, {{16, 0}, {0, 16}}, {3, 0}, Padding::constant, 1); });
      same([](auto& v) { return pad(v, {{9, 2}, {1, 0}, {0, 1}}, {2, 0, 3}, Padding::circular); });
    }
}

TEST_F(CudaOps, FoldingPatchesThatOverlap) {
  for (DType dtype : floating) {
    expect_same(
        [](auto& in) {
          return fold(in[0], {30, 21, 9}, {4, 5, 3}, {2, 4, 1});
        },
        {random_tensor({2, 14 * 5 * 7, 3 * 60}, dtype)}, true, 10);
    expect_same(
        [](auto& in) {
          return unfold(in[0], {4, 5, 3}, {2, 4, 1});
        },
        {random_tensor({2, 3, 30, 21, 9}, dtype)}, true, 10);
  }
}

TEST_F(CudaOps, RotaryInPacksAndOneByOne) {
  for (DType dtype : floating)
    for (int64_t width : {2, 6, 16, 64, 128}) {
      const Tensor codes = rotary_codes(37, width, {.dtype = f64});
      const Function op = [&](auto& in) { return rotary(in[0], codes.to(in[0].device())); };
      expect_same(op, {random_tensor({2, 3, 37, width}, dtype)}, true, 4);
      const Function heads_apart = [&](auto& in) {
        return rotary(transpose(reshape(in[0], {2, 37, 3, width}), 1, 2), codes.to(in[0].device()));
      };
      expect_same(heads_apart, {random_tensor({2, 37, 3 * width}, dtype)}, true, 4);
    }
}

TEST_F(CudaOps, ChoosingOfEveryDtype) {
  for (DType dtype : {f64, f32, f16, bf16, i64, i32, u8, boolean})
    for (int64_t width : {1, 7, 64, 4096}) {
      const Tensor a = random_indices({3, width}, 100).to(dtype), b = random_indices({3, width}, 2).to(dtype);
      const Tensor mask = random_indices({3, width}, 3).to(boolean);
      EXPECT_EQ(where(mask.to(cuda), a.to(cuda), b.to(cuda)).value().to_vector<double>(),
                where(mask, a, b).value().to_vector<double>());
      Tensor here = a.clone(), there = a.to(cuda);
      EXPECT_EQ(masked_fill(there, mask.to(cuda), 1).value().to_vector<double>(),
                masked_fill(here, mask, 1).value().to_vector<double>());
      EXPECT_EQ(masked_fill_(there, mask.to(cuda), 1).to_vector<double>(),
                masked_fill_(here, mask, 1).to_vector<double>());
      const Tensor classes = random_indices({5, 3}, width);
      EXPECT_EQ(one_hot(classes.to(cuda), width, dtype).to_vector<double>(),
                one_hot(classes, width, dtype).to_vector<double>());
    }
}

}  // namespace
}  // namespace torus
