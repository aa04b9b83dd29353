// What is particular to single ops: errors, special values, accuracy, memory. The op table tests what they
// share.
#include "torus/ops/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

#include "torus/autograd/gradcheck.h"
#include "torus/core/memory.h"
#include "torus/core/profiler.h"
#include "torus/ops/attention/attention.h"

namespace torus {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

Variable ones(const Shape& shape, DType dtype = f32) { return Tensor::full(shape, 1, dtype); }

// The gradient of sum(f(x)) at x.
Tensor gradient(const std::function<Variable(const Variable&)>& f, const Tensor& x) {
  Tape tape;
  const Variable leaf(x, true);
  const Variable y = f(leaf);
  tape.backward(y, {.seed = Tensor::full(y.shape(), 1, y.dtype())});
  return leaf.grad();
}

// ------------------------------------------------------------------------------------------------ errors

void expect_error(Error::Kind kind, const std::string& message, const std::function<void()>& f) {
  try {
    f();
    ADD_FAILURE() << "expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), message);
    EXPECT_EQ(error.kind(), kind) << message;
  }
}

TEST(Ops, ErrorsSayWhatWasExpectedAndWhatCame) {
  const auto shape = Error::Kind::Shape, dtype = Error::Kind::DType, value = Error::Kind::Value;
  const Variable x = ones({2, 3}), wide = ones({2, 3}, f64), whole = Tensor::zeros({2, 3}, i64);
  expect_error(shape, "[add] shapes [2, 3] and [2] do not broadcast: axis -1 has 3 and 2",
               [&] { x + ones({2}); });
  expect_error(dtype, "[mul] expected one dtype, got f32 and f64", [&] { x* wide; });
  expect_error(dtype, "[sub] expected a floating dtype, got i64", [&] { whole - whole; });
  expect_error(dtype, "[mul] expected a floating dtype, got i64", [&] { whole * 2.0; });
  expect_error(dtype, "[div] expected a floating dtype, got i64", [&] { 2.0 / whole; });
  expect_error(dtype, "[gelu] expected a floating dtype, got i64", [&] { gelu(whole); });
  expect_error(dtype, "[masked_fill] mask must be bool, got f32", [&] { masked_fill(x, x.value(), 0); });
  expect_error(value, "[masked_fill] expected an integer to fill i64 with, got inf",
               [&] { masked_fill(whole, Tensor::zeros({}, boolean), infinity); });
  expect_error(value, "[masked_fill] expected an integer to fill i64 with, got 2.5",
               [&] { masked_fill(whole, Tensor::zeros({}, boolean), 2.5); });
  expect_error(value, "[one_hot] expected classes of at least 0, got -1",
               [&] { one_hot(Tensor::zeros({0}, i64), -1); });
  expect_error(shape, "[masked_fill] mask [4, 2, 3] must broadcast to x [2, 3]", [&] {
    masked_fill(x, Tensor::zeros({4, 2, 3}, boolean), 0);
  });
  expect_error(shape, "[where] shapes [2, 3] and [2] do not broadcast: axis -1 has 3 and 2",
               [&] { where(Tensor::zeros({3}, boolean), x, ones({2})); });
  expect_error(dtype, "[where] condition must be bool, got i64", [&] { where(whole.value(), x, x); });
  expect_error(dtype, "[where] expected one dtype, got f32 and f64",
               [&] { where(Tensor::zeros({}, boolean), x, wide); });
  expect_error(value, "[clamp] expected low <= high, got 1 and 0", [&] { clamp(x, 1, 0); });
  expect_error(value, "[clamp] expected low <= high, got nan and 0", [&] { clamp(x, nan, 0); });
  expect_error(dtype, "[pow] expected one dtype, got f32 and f64", [&] { pow(x, wide); });
  expect_error(value, "[dropout] p must be in [0, 1], got 1.5", [&] { dropout(x, 1.5); });
  expect_error(value, "[dropout] p must be in [0, 1], got nan", [&] { dropout(x, std::nan("")); });

  expect_error(shape, "[matmul] the columns of a must be the rows of b, got [2, 3] and [2, 3]",
               [&] { matmul(x, x); });
  expect_error(shape, "[matmul] expected matrices, got [2, 3] and [3]", [&] { matmul(x, ones({3})); });
  expect_error(dtype, "[matmul] a and b must share a floating dtype, got f32 and f64",
               [&] { matmul(x, transpose(wide, 0, 1)); });
  expect_error(shape, "[matmul] shapes [2] and [3] do not broadcast: axis -1 has 2 and 3", [&] {
    matmul(ones({2, 4, 3}), ones({3, 3, 4}));
  });
  const auto sum_of = [&](const std::string& equation) { return [=] { einsum(equation, x, x); }; };
  for (std::string text : {"ij", "ij,ij", "ij->ij"})
    expect_error(value, "[einsum] expected an equation like \"bij,bjk->bik\", got \"" + text + "\"",
                 sum_of(text));
  expect_error(value, "[einsum] axes must be letters, got '.' in \"..i,ij->i\"", sum_of("..i,ij->i"));
  expect_error(value, "[einsum] 'i' comes twice in one term of \"ii,ij->i\"", sum_of("ii,ij->i"));
  expect_error(value, "[einsum] 'k' of the result is in neither operand of \"ij,ij->k\"", sum_of("ij,ij->k"));
  expect_error(shape, "[einsum] \"ijk\" needs 3 axes, got [2, 3]", sum_of("ij,ijk->i"));
  expect_error(shape, "[einsum] 'j' must have one size, got 3 in [2, 3] and 2 in [2, 3]",
               sum_of("ij,jk->ik"));
  expect_error(shape, "[linear] weight must have 3 columns (last dimension of x), got 4", [&] {
    linear(x, ones({5, 4}));
  });
  expect_error(shape, "[linear] bias must be [5] (rows of weight), got [3]", [&] {
    linear(x, ones({5, 3}), ones({3}));
  });

  expect_error(shape, "[sum] axis must be in [-2, 2), got 2", [&] { sum(x, {2}); });
  expect_error(shape, "[mean] axis 1 comes twice", [&] { mean(x, {1, -1}); });
  expect_error(shape, "[mean] expected at least one element to average, got shape [0, 3]", [&] {
    mean(ones({0, 3}), {0});
  });
  expect_error(shape, "[max] expected at least one element along axis 0, got shape [0, 3]", [&] {
    max(ones({0, 3}), 0);
  });
  expect_error(shape, "[argmax] expected at least one element along axis 1, got shape [2, 0]", [&] {
    argmax(ones({2, 0}), -1);
  });
  expect_error(shape, "[var] expected 0 <= correction < 1 (elements reduced of shape [2, 1]), got 1", [&] {
    var(ones({2, 1}), {1});
  });
  expect_error(shape, "[var] expected 0 <= correction < 6 (elements reduced of shape [2, 3]), got -1",
               [&] { var(x, {}, false, -1); });
  expect_error(dtype, "[sum] expected a floating dtype, got i64", [&] { sum(whole); });
  expect_error(shape, "[softmax] axis must be in [-2, 2), got -3", [&] { softmax(x, -3); });

  expect_error(shape, "[layer_norm] weight must have 3 elements (last dimension of x), got 2",
               [&] { layer_norm(x, ones({2})); });
  expect_error(shape, "[rms_norm] weight must have one axis, got shape [2, 3]", [&] { rms_norm(x, x); });
  expect_error(value, "[embedding] index 2 at position 1 is outside [0, 2)", [&] {
    embedding(x, Tensor::from<int64_t>({1, 2}));
  });
  expect_error(dtype, "[embedding] indices must be i64, got f32", [&] { embedding(x, x.value()); });
  expect_error(value, "[cross_entropy] target 3 at position 0 is outside [0, 3) and not ignore_index -100",
               [&] {
                 cross_entropy(x, Tensor::from<int64_t>({3, 0}));
               });
  expect_error(shape, "[cross_entropy] expected logits [..., V] and targets [...], got [2, 3] and [3]",
               [&] { cross_entropy(x, Tensor::zeros({3}, i64)); });

  expect_error(value, "[cross_entropy] smoothing must be in [0, 1), got 1",
               [&] { cross_entropy(x, Tensor::zeros({2}, i64), ignore_none, 1); });

  const Tensor indices = Tensor::from<int64_t>({0, 2, 3}).reshape({1, 3});
  expect_error(value, "[gather] index 3 at position 2 is outside [0, 3)", [&] { gather(x, 1, indices); });
  expect_error(value, "[index_select] index -1 at position 0 is outside [0, 2)",
               [&] { index_select(x, 0, Tensor::from<int64_t>({-1})); });
  expect_error(shape, "[index_select] index must have one axis, got [1, 3]",
               [&] { index_select(x, 0, indices); });
  expect_error(dtype, "[gather] index must be i64, got f32", [&] { gather(x, 1, x.value()); });
  expect_error(shape, "[gather] index must have the sizes of [2, 3] or 1 but along axis 1, got [3, 1]", [&] {
    gather(x, 1, Tensor::zeros({3, 1}, i64));
  });
  expect_error(shape, "[scatter_add] source must have the sizes of x [2, 3] but along axis 0, got [2, 2]",
               [&] {
                 scatter_add(x, 0, indices, ones({2, 2}));
               });
  expect_error(shape, "[scatter_add] index must have the size of source 2 along axis 0, got 1", [&] {
    scatter_add(x, 0, Tensor::zeros({1, 3}, i64), x);
  });
  expect_error(value, "[one_hot] index 3 at position 2 is outside [0, 3)", [&] { one_hot(indices, 3); });

  expect_error(shape, "[reshape] [2, 3] has 6 elements, [4] has 4", [&] { reshape(x, {4}); });
  expect_error(shape, "[permute] axis 0 comes twice", [&] { permute(x, {0, 0}); });
  expect_error(shape, "[slice] [1, 5) is outside axis 1 of [2, 3]", [&] { slice(x, 1, 1, 5); });
  expect_error(shape, "[expand] [2, 3] does not expand to [4, 3]", [&] { expand(x, {4, 3}); });
  expect_error(shape, "[cat] expected at least one part, got none", [&] { cat({}, 0); });
  expect_error(shape, "[cat] parts must agree but for axis 0, got [2, 3] and [2, 4] in part 1", [&] {
    cat({x, ones({2, 4})}, 0);
  });
  expect_error(shape, "[cat] parts must agree but for axis 0, got [2, 3] and [3] in part 1", [&] {
    cat({x, ones({3})}, 0);
  });
  expect_error(dtype, "[cat] expected one dtype, got f32 and f64 in part 1", [&] { cat({x, wide}, 0); });
  expect_error(shape, "[stack] expected one shape, got [2, 3] and [3] in part 1", [&] {
    stack({x, ones({3})}, 0);
  });
  expect_error(shape, "[stack] expected at least one part, got none", [&] { stack({}, 0); });
  expect_error(shape, "[pad] margins must be at least 0, got -1 and 2 on axis 1; use slice to shorten", [&] {
    pad(x, {{-1, 2}}, {1});
  });
  expect_error(shape, "[pad] axis 0 of [0, 3] is empty: there is nothing to go around", [&] {
    pad(ones({0, 3}), {{1, 0}}, {0}, Padding::circular);
  });
  expect_error(shape, "[pad] expected one of margins an axis, got 1 for 2 axes", [&] {
    pad(x, {{1, 1}}, {0, 1});
  });
  expect_error(shape, "[roll] axis 1 comes twice", [&] { roll(x, {1, 1}, {1, -1}); });
  expect_error(shape, "[unfold] patches [2, 2] [2, 2] apart do not fill the grid [4, 3] exactly: axis 1",
               [&] {
                 unfold(ones({1, 1, 4, 3}), {2, 2});
               });
  expect_error(shape, "[unfold] expected x [B, C, grid...], got [2, 3]", [&] { unfold(x, {1}); });
  expect_error(shape,
               "[unfold] expected a grid of 1 to 3 axes, and a patch and a stride for each, got grid [4], "
               "patch [2, 2], stride [2, 2]",
               [&] {
                 unfold(ones({1, 1, 4}), {2, 2});
               });
  expect_error(shape, "[fold] tokens must be [B, 2, C * 3] for grid [6] in patches [3], got [1, 2, 4]", [&] {
    fold(ones({1, 2, 4}), {6}, {3});
  });
  expect_error(shape, "[fft] expected complex numbers, a last axis of 2, got [2, 3]", [&] { fft(x); });
  expect_error(shape, "[fft] expected axes before the last of [3, 2], each once, got 0 again or the last",
               [&] {
                 fft(ones({3, 2}), {0, -2});
               });
  expect_error(shape, "[rotary] codes must be [2, 2, 2] for x [2, 4], got [2, 3, 2]", [&] {
    rotary(ones({2, 4}), rotary_codes(3, 4));
  });
  expect_error(shape, "[rotary] expected x [..., N, D] with D even, got [2, 3]",
               [&] { rotary(x, rotary_codes(2, 4)); });
  expect_error(shape, "[rotary_codes] width must be even and positive, got 3", [&] { rotary_codes(2, 3); });
  expect_error(shape, "[rotary_grid_codes] width must be at least 4, a pair an axis of grid [2, 3], got 2",
               [&] {
                 rotary_grid_codes({2, 3}, 2, {true, false});
               });
  expect_error(shape, "[rotary_grid_codes] expected one of periodic an axis, got 1 for grid [2, 3]", [&] {
    rotary_grid_codes({2, 3}, 8, {true});
  });
  expect_error(shape, "[split] sizes must add up to 3 (axis 1 of [2, 3]), got 4", [&] {
    split(x, {1, 3}, 1);
  });
  expect_error(shape, "[split] sizes must be at least 0, got -1", [&] { split(x, {4, -1}, 1); });
}

// An operand that is not optional, left out: the op and the operand are named.
TEST(Ops, UndefinedOperandsAreNamed) {
  const Variable none, x = ones({2, 4}), row = ones({4}), heads = ones({1, 1, 2, 4});
  const Tensor index = Tensor::zeros({2, 4}, i64), targets = Tensor::zeros({2}, i64),
               mask = Tensor::zeros({2, 4}, boolean);
  const struct {
    const char *op, *operand;
    std::function<void()> call;
  } rows[] = {
      {"add", "a", [&] { none + x; }},
      {"add", "b", [&] { x + none; }},
      {"add", "x", [&] { none + 1.0; }},
      {"sub", "b", [&] { x - none; }},
      {"mul", "a", [&] { none* x; }},
      {"mul", "x", [&] { 2.0 * none; }},
      {"div", "b", [&] { x / none; }},
      {"div", "x", [&] { 1.0 / none; }},
      {"neg", "x", [&] { -none; }},
      {"pow", "x", [&] { pow(none, 2); }},
      {"pow", "b", [&] { pow(x, none); }},
      {"exp", "x", [&] { exp(none); }},
      {"relu", "x", [&] { relu(none); }},
      {"abs", "x", [&] { abs(none); }},
      {"gelu", "x", [&] { gelu(none); }},
      {"silu", "x", [&] { silu(none); }},
      {"clamp", "x", [&] { clamp(none, 0, 1); }},
      {"where", "a", [&] { where(mask, none, x); }},
      {"where", "b", [&] { where(mask, x, none); }},
      {"masked_fill", "x", [&] { masked_fill(none, mask, 0); }},
      {"matmul", "a", [&] { matmul(none, x); }},
      {"matmul", "b", [&] { matmul(x, none); }},
      {"einsum", "a", [&] { einsum("ij,jk->ik", none, x); }},
      {"einsum", "b", [&] { einsum("ij,jk->ik", x, none); }},
      {"linear", "x", [&] { linear(none, x); }},
      {"linear", "weight", [&] { linear(x, none); }},
      {"mlp", "x", [&] { mlp(none, x, {}, x, {}); }},
      {"mlp", "up", [&] { mlp(x, none, {}, x, {}); }},
      {"mlp", "down", [&] { mlp(x, x, {}, none, {}); }},
      {"sum", "x", [&] { sum(none); }},
      {"mean", "x", [&] { mean(none); }},
      {"max", "x", [&] { max(none, 0); }},
      {"argmax", "x", [&] { argmax(none, 0); }},
      {"var", "x", [&] { var(none); }},
      {"softmax", "x", [&] { softmax(none); }},
      {"log_softmax", "x", [&] { log_softmax(none); }},
      {"logsumexp", "x", [&] { logsumexp(none); }},
      {"cumsum", "x", [&] { cumsum(none, 0); }},
      {"layer_norm", "x", [&] { layer_norm(none, row); }},
      {"layer_norm", "weight", [&] { layer_norm(x, none); }},
      {"rms_norm", "x", [&] { rms_norm(none, row); }},
      {"rms_norm", "weight", [&] { rms_norm(x, none); }},
      {"embedding", "weight", [&] { embedding(none, index); }},
      {"cross_entropy", "logits", [&] { cross_entropy(none, targets); }},
      {"gather", "x", [&] { gather(none, 0, index); }},
      {"index_select", "x", [&] { index_select(none, 0, targets); }},
      {"scatter_add", "x", [&] { scatter_add(none, 0, index, x); }},
      {"scatter_add", "source", [&] { scatter_add(x, 0, index, none); }},
      {"dropout", "x", [&] { dropout(none, 0.5); }},
      {"reshape", "x", [&] { reshape(none, {2}); }},
      {"transpose", "x", [&] { transpose(none, 0, 1); }},
      {"permute", "x",
       [&] {
         permute(none, {0, 1});
       }},
      {"slice", "x", [&] { slice(none, 0, 0, 1); }},
      {"expand", "x", [&] { expand(none, {2}); }},
      {"cat", "parts",
       [&] {
         cat({x, none}, 0);
       }},
      {"split", "x", [&] { split(none, {1}, 0); }},
      {"stack", "parts",
       [&] {
         stack({none, x}, 0);
       }},
      {"cast", "x", [&] { cast(none, f64); }},
      {"pad", "x",
       [&] {
         pad(none, {{1, 1}}, {0});
       }},
      {"roll", "x", [&] { roll(none, {1}, {0}); }},
      {"unfold", "x", [&] { unfold(none, {2}); }},
      {"fold", "x", [&] { fold(none, {2}, {2}); }},
      {"fft", "x", [&] { fft(none); }},
      {"data_consistency", "measured", [&] { data_consistency(x, none, mask); }},
      {"rotary", "x", [&] { rotary(none, rotary_codes(2, 4)); }},
      {"attention", "q", [&] { attention(none, heads, heads); }},
      {"attention", "k", [&] { attention(heads, none, heads); }},
      {"attention", "v", [&] { attention(heads, heads, none); }},
      {"split_heads", "x", [&] { split_heads(none, 2); }},
      {"join_heads", "x", [&] { join_heads(none); }},
  };
  for (const auto& [op, operand, call] : rows) {
    std::string message("[");
    message.append(op).append("] expected ").append(operand).append(", got an undefined variable");
    expect_error(Error::Kind::Value, message, call);
  }
}

// A write to what an op saved is caught; a write to what it did not save is nobody's business.
TEST(Ops, WritesToSavedTensorsAreCaught) {
  const auto touched = [](const std::function<Variable(const Variable&)>& f, bool write_input) {
    Tape tape;
    Tensor x = Tensor::full({3}, 0.5);
    Variable leaf(x, true);
    const Variable y = f(leaf);
    Tensor target = write_input ? x : y.value();
    target.fill_(2);
    tape.backward(sum(y));
  };
  EXPECT_THROW(touched([](auto& x) { return x * x; }, true), Error);
  EXPECT_THROW(touched([](auto& x) { return log(x); }, true), Error);
  EXPECT_THROW(touched([](auto& x) { return gelu(x); }, true), Error);
  EXPECT_THROW(touched([](auto& x) { return exp(x); }, false), Error);
  EXPECT_THROW(touched([](auto& x) { return relu(x); }, false), Error);
  EXPECT_THROW(touched([](auto& x) { return softmax(x); }, false), Error);
  EXPECT_NO_THROW(touched([](auto& x) { return exp(x); }, true));
  EXPECT_NO_THROW(touched([](auto& x) { return gelu(x); }, false));
  EXPECT_NO_THROW(touched([](auto& x) { return x + x; }, true));
  EXPECT_THROW(touched([](auto& x) { return sigmoid(x); }, true), Error);
  EXPECT_THROW(touched([](auto& x) { return pow(x, 2); }, true), Error);
  EXPECT_THROW(touched([](auto& x) { return var(x); }, true), Error);
  EXPECT_NO_THROW(touched([](auto& x) { return roll(x, {1}, {0}); }, true));
  EXPECT_NO_THROW(touched([](auto& x) { return cumsum(x, 0); }, true));
  // The other operand wants no gradient.
  EXPECT_NO_THROW(touched([](auto& x) { return x * ones({3}); }, true));
  EXPECT_NO_THROW(touched([](auto& x) { return x / ones({3}); }, true));
  EXPECT_NO_THROW(touched([](auto& x) { return matmul(reshape(x, {1, 3}), ones({3, 1})); }, true));
  EXPECT_NO_THROW(touched([](auto& x) { return linear(reshape(x, {1, 3}), ones({2, 3})); }, true));
  EXPECT_NO_THROW(touched([](auto& x) { return x * 2.0; }, true));
}

TEST(Ops, SoftmaxInPlace) {
  for (DType dtype : {f64, f32, f16, bf16})
    for (int axis : {0, 1, -1}) {
      Tensor x = randn({3, 70, 9}, 0, 3, dtype);
      const auto expected = softmax(x, axis).value().to_vector<double>();
      EXPECT_EQ(&softmax_(x, axis), &x);
      EXPECT_EQ(x.to_vector<double>(), expected) << dtype << axis;
    }
  Tensor turned = Tensor::zeros({2, 3}).transpose(0, 1);
  expect_error(Error::Kind::Shape, "[softmax_] x must be contiguous, got strides [1, 3]",
               [&] { softmax_(turned); });
}

TEST(Ops, MaskedFillInPlaceWritesOnlyWhereNoTapeIsWrong) {
  Tensor x = Tensor::from<float>({1, 2, 3, 4}).reshape({2, 2});
  const Tensor mask = Tensor::from<bool>({true, false});
  const uint64_t version = x.version();
  EXPECT_EQ(&masked_fill_(x, mask, 9), &x);
  EXPECT_EQ(x.to_vector<double>(), (std::vector<double>{9, 2, 9, 4}));
  EXPECT_GT(x.version(), version);
  Tensor turned = x.transpose(0, 1), whole = Tensor::zeros({2}, i64);
  EXPECT_EQ(masked_fill_(turned, mask, 7).to_vector<double>(), (std::vector<double>{7, 9, 7, 4}));
  EXPECT_EQ(masked_fill_(whole, mask, 5).to_vector<int64_t>(), (std::vector<int64_t>{5, 0}));
  Tensor expanded = Tensor::zeros({1}).expand({2});
  expect_error(Error::Kind::Shape,
               "[masked_fill_] x must have its own memory for each element, but axis 0 is expanded",
               [&] { masked_fill_(expanded, mask, 1); });
  expect_error(Error::Kind::Shape, "[masked_fill_] mask [3, 2] must broadcast to x [2]", [&] {
    masked_fill_(whole, Tensor::zeros({3, 2}, boolean), 0);
  });

  const std::string refusal =
      "[masked_fill_] writing in place would make the gradient of x wrong; use masked_fill";
  Variable leaf(Tensor::zeros({2}), true), plain(Tensor::zeros({2}));
  masked_fill_(leaf, mask, 1);  // no tape
  EXPECT_EQ(leaf.value().to_vector<double>(), (std::vector<double>{1, 0}));
  Tape tape;
  masked_fill_(plain, mask, 1);
  EXPECT_EQ(plain.value().to_vector<double>(), (std::vector<double>{1, 0}));
  expect_error(Error::Kind::Value, refusal, [&] { masked_fill_(leaf, mask, 2); });
  Variable y = leaf + 1;
  const NoGrad off;
  expect_error(Error::Kind::Value, refusal, [&] { masked_fill_(y, mask, 2); });
  masked_fill_(leaf, mask, 3);
  EXPECT_EQ(leaf.value().to_vector<double>(), (std::vector<double>{3, 0}));
}

// ---------------------------------------------------------------------------------------------- accuracy

// The largest relative error in f32 of f over [low, high].
double worst_error(const std::function<Variable(const Variable&)>& f, double low, double high,
                   const std::function<double(double)>& exact) {
  const int64_t count = 100001;
  Tensor x = Tensor::empty({count});
  for (int64_t i = 0; i < count; ++i)
    x.mutable_data<float>()[i] =
        static_cast<float>(low + (high - low) * static_cast<double>(i) / static_cast<double>(count - 1));
  const auto got = f(x).value().to_vector<double>(), at = x.to_vector<double>();
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double expected = exact(at[i]);
    if (got[i] != expected) worst = std::max(worst, std::abs(got[i] - expected) / std::abs(expected));
  }
  return worst;
}

TEST(Ops, FloatFunctionsKeepTheirRelativeAccuracy) {
  const auto normal = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  const auto slope = [](auto f) {
    return [f](const Variable& x) { return Variable(gradient(f, x.value())); };
  };
  const auto gelu_exact = [](const Variable& x) { return gelu(x); };
  const auto gelu_tanh = [](const Variable& x) { return gelu(x, Gelu::tanh); };
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto tanh_argument = [](double x) {
    return std::sqrt(8 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
  };
  EXPECT_LE(worst_error([](auto& x) { return exp(x); }, -86, 88, [](double x) { return std::exp(x); }), 3e-7);
  EXPECT_LE(worst_error([](auto& x) { return log(x); }, 0.01, 5, [](double x) { return std::log(x); }), 3e-7);
  EXPECT_LE(worst_error([](auto& x) { return log(x); }, 0, 1e-38, [](double x) { return std::log(x); }),
            3e-7);
  EXPECT_LE(worst_error([](auto& x) { return log(x); }, 1, 3e38, [](double x) { return std::log(x); }), 3e-7);
  EXPECT_LE(worst_error([](auto& x) { return tanh(x); }, -10, 10, [](double x) { return std::tanh(x); }),
            3e-7);
  EXPECT_LE(worst_error([](auto& x) { return torus::sigmoid(x); }, -80, 80, sigmoid), 3e-7);
  EXPECT_LE(worst_error(slope([](auto& x) { return torus::sigmoid(x); }), -80, 80,
                        [&](double x) { return sigmoid(x) * sigmoid(-x); }),
            5e-7);
  EXPECT_LE(worst_error([](auto& x) { return silu(x); }, -80, 80, [&](double x) { return x * sigmoid(x); }),
            5e-7);
  EXPECT_LE(worst_error(gelu_exact, -8, 8, [&](double x) { return x * normal(x); }), 3e-6);
  EXPECT_LE(worst_error(gelu_exact, -1, 8, [&](double x) { return x * normal(x); }), 5e-7);
  EXPECT_LE(worst_error(gelu_tanh, -5, 8, [&](double x) { return x * sigmoid(tanh_argument(x)); }), 5e-6);
  EXPECT_LE(worst_error(gelu_tanh, -1, 8, [&](double x) { return x * sigmoid(tanh_argument(x)); }), 5e-7);
  // Slopes, where they are not near zero.
  EXPECT_LE(worst_error(slope(gelu_exact), 0, 20,
                        [&](double x) {
                          return normal(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
                        }),
            5e-7);
  EXPECT_LE(worst_error(slope([](auto& x) { return silu(x); }), 0, 100,
                        [&](double x) { return sigmoid(x) * (1 + x * sigmoid(-x)); }),
            5e-7);
  EXPECT_LE(worst_error(slope(gelu_tanh), 0, 100,
                        [&](double x) {
                          const double s = sigmoid(tanh_argument(x)), c = sigmoid(-tanh_argument(x));
                          return s + x * s * c * std::sqrt(8 / std::acos(-1.0)) * (1 + 3 * 0.044715 * x * x);
                        }),
            5e-7);
}

TEST(Ops, SumsAreAccurate) {
  const Tensor x = rand({1 << 21}), wide = x.to(f64);
  EXPECT_NEAR(sum(x).item() / sum(wide).item(), 1, 2e-7);
  EXPECT_NEAR(mean(x).item() / mean(wide).item(), 1, 2e-7);
  // Down the columns, as gradients of biases are, and across transposed ones.
  const Tensor table = rand({20000, 65}), turned = rand({65, 20000}).transpose(0, 1);
  for (const Tensor& tensor : {table, turned}) {
    const auto got = sum_to(tensor, {65}).to_vector<double>();
    std::vector<double> expected(65, 0);
    const auto values = tensor.to_vector<double>();
    for (size_t i = 0; i < values.size(); ++i) expected[i % 65] += values[i];
    for (size_t j = 0; j < 65; ++j) EXPECT_NEAR(got[j] / expected[j], 1, 4e-7);
  }
  // 16-bit floats sum in float: in themselves they would stop at 2048 and at 256, and overflow.
  EXPECT_EQ(sum(ones({5000}, f16)).item(), 5000);
  EXPECT_EQ(sum(ones({40, 512}, bf16), {0}).value().to_vector<double>(), std::vector<double>(512, 40));
  EXPECT_EQ(mean(Tensor::full({4096}, 60000, f16)).item(), 60000);
}

TEST(Ops, RunningSumsAndVariancesAreAccurate) {
  const Tensor x = rand({1 << 20}), wide = x.to(f64);
  const auto got = cumsum(x, 0).value().to_vector<double>();
  const auto expected = cumsum(wide, 0).value().to_vector<double>();
  for (size_t i = 0; i < got.size(); i += 1001) EXPECT_NEAR(got[i] / expected[i], 1, 1e-7);
  EXPECT_EQ(cumsum(ones({1000}, bf16), 0).value().to_vector<double>()[999], 1000);
  // A mean far from zero.
  const Tensor far = (Variable(wide) + 1000).value().to(f32),
               coarse = (Variable(wide) + 100).value().to(bf16);
  EXPECT_NEAR(var(far).item() / var(far.to(f64)).item(), 1, 1e-6);
  EXPECT_NEAR(var(coarse).item() / var(coarse.to(f64)).item(), 1, 4e-3);
  // More of a row than bf16 can count.
  const Tensor zeros = Tensor::zeros({1}, bf16), index = Tensor::zeros({1000}, i64);
  EXPECT_EQ(scatter_add(zeros, 0, index, ones({1000}, bf16)).item(), 1000);
  EXPECT_EQ(gradient([&](auto& v) { return index_select(v, 0, index); }, zeros).item(), 1000);
  EXPECT_EQ(gradient(
                [](auto& v) {
                  return pad(v, {{500, 499}}, {0}, Padding::circular);
                },
                zeros)
                .item(),
            1000);
}

TEST(Ops, LayerNormOfALargeMeanKeepsItsDigits) {
  const Tensor noise = randn({8, 64}, 0, 1, f64);
  const Tensor x = (Variable(noise) + 1e4).value().to(f32);
  const Variable w = ones({64});
  const auto got = layer_norm(x, w).value().to_vector<double>();
  const auto expected = layer_norm(x.to(f64), ones({64}, f64)).value().to_vector<double>();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4);
}

// ---------------------------------------------------------------------------------------- special values

TEST(Ops, SpecialValues) {
  const auto at = [](Variable (*f)(const Variable&), double x) { return f(Tensor::scalar(x)).item(); };
  EXPECT_EQ(at(exp, 89), infinity);
  EXPECT_EQ(at(exp, -infinity), 0);
  EXPECT_GT(at(exp, -100), 0);  // subnormal
  EXPECT_EQ(at(log, 0), -infinity);
  EXPECT_EQ(at(log, infinity), infinity);
  EXPECT_TRUE(std::isnan(at(log, -1)));
  EXPECT_EQ(at(tanh, infinity), 1);
  for (auto f : {exp, log, sqrt, tanh, relu, silu}) EXPECT_TRUE(std::isnan(at(f, nan)));
  for (Gelu form : {Gelu::exact, Gelu::tanh}) {
    EXPECT_TRUE(std::isnan(gelu(Tensor::scalar(nan), form).item()));
    for (double far : {-1e30, -200.0, 200.0, 1e30}) {
      const Tensor x = Tensor::scalar(far);
      EXPECT_EQ(gelu(x, form).item(), far > 0 ? static_cast<double>(static_cast<float>(far)) : 0);
      EXPECT_EQ(gradient([&](auto& v) { return gelu(v, form); }, x).item(), far > 0 ? 1 : 0);
    }
  }
  // Dividing by what would overflow if squared.
  EXPECT_NEAR(gradient([](auto& b) { return 1e30 / b; }, Tensor::scalar(1e25)).item(), -1e-20, 1e-26);
  // A filled element passes no gradient on, not even NaN.
  const Tensor odd = Tensor::from<float>({std::nanf(""), 1});
  EXPECT_EQ(gradient(
                [](auto& x) {
                  return masked_fill(x, Tensor::from<bool>({true, false}), 0);
                },
                odd)
                .to_vector<double>(),
            (std::vector<double>{0, 1}));
}

TEST(Ops, MaxTakesTheFirst) {
  const Tensor x = Tensor::from<float>({1, 3, 3, 2, 3, 3}).reshape({2, 3});
  const auto last = [](const Variable& v) { return max(v, 1); };
  EXPECT_EQ(last(x).value().to_vector<double>(), (std::vector<double>{3, 3}));
  EXPECT_EQ(gradient(last, x).to_vector<double>(), (std::vector<double>{0, 1, 0, 0, 1, 0}));
  EXPECT_EQ(gradient([](auto& v) { return max(v, 0); }, x).to_vector<double>(),
            (std::vector<double>{0, 1, 1, 1, 0, 0}));
  EXPECT_TRUE(std::isnan(max(Tensor::from<float>({1, std::nanf(""), 3}), 0).item()));
  EXPECT_EQ(max(Tensor::from<double>({-infinity, -infinity}), 0).item(), -infinity);
}

TEST(Ops, SpecialValuesOfTheRest) {
  const auto at = [](const std::function<Variable(const Variable&)>& f, double x) {
    return f(Tensor::scalar(x)).item();
  };
  const auto slope = [](const std::function<Variable(const Variable&)>& f, double x) {
    return gradient(f, Tensor::scalar(x)).item();
  };
  const auto clamped = [](const Variable& x) { return clamp(x, -1, 2); };
  EXPECT_EQ(at(sigmoid, infinity), 1);
  EXPECT_EQ(at(sigmoid, -infinity), 0);
  EXPECT_TRUE(std::isnan(at(sigmoid, nan)));
  EXPECT_TRUE(std::isnan(at(clamped, nan)));
  EXPECT_EQ(at(clamped, infinity), 2);
  EXPECT_EQ(slope(clamped, 2), 1);
  EXPECT_EQ(slope(clamped, 2.5), 0);
  EXPECT_EQ(slope(abs, 0), 0);
  EXPECT_EQ(slope(abs, -3), -1);
  // Powers of 0, of a negative number, and the exponent 0.
  EXPECT_EQ(slope([](auto& x) { return pow(x, 2); }, 0), 0);
  EXPECT_EQ(slope([](auto& x) { return pow(x, 0.5); }, 0), infinity);
  EXPECT_EQ(at([](auto& x) { return pow(x, 3); }, -2), -8);
  EXPECT_TRUE(std::isnan(at([](auto& x) { return pow(x, 1.7); }, -2)));
  EXPECT_FALSE(gradient([](auto& x) { return pow(x, 0); }, Tensor::scalar(0)).defined());
  for (double p : {0.0, 2.0}) {
    const Variable power(Tensor::scalar(p)), zero(Tensor::scalar(0));
    EXPECT_EQ(slope([&](auto& x) { return pow(x, power); }, 0), 0);
    EXPECT_EQ(slope([&](auto& e) { return pow(zero, e); }, p), 0);
  }

  // What is not chosen passes no gradient on, not even NaN; integers can be chosen.
  const Tensor odd = Tensor::from<float>({std::nanf(""), 1});
  const Tensor second = Tensor::from<bool>({false, true});
  EXPECT_EQ(gradient([&](auto& x) { return where(second, log(x), x * 0.0); }, odd).to_vector<double>()[1], 1);
  EXPECT_EQ(where(second, Tensor::from<int64_t>({1, 2}), Tensor::scalar(7, i64)).value().to_vector<int64_t>(),
            (std::vector<int64_t>{7, 2}));

  const Tensor x = Tensor::from<double>({3, 1, 1, 0, 1, 1}).reshape({2, 3});
  EXPECT_EQ(gradient([](auto& v) { return min(v, 1); }, x).to_vector<double>(),
            (std::vector<double>{0, 1, 0, 1, 0, 0}));
  EXPECT_TRUE(std::isnan(min(Tensor::from<float>({1, std::nanf(""), 0}), 0).item()));
  EXPECT_EQ(argmax(x, 1).to_vector<int64_t>(), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(argmax(x, 0, true).shape(), (Shape{1, 3}));
  EXPECT_EQ(argmax(Tensor::from<float>({1, std::nanf(""), 3}), 0).item(), 1);

  const Tensor none = Tensor::full({2, 3}, -infinity);
  EXPECT_EQ(logsumexp(none).value().to_vector<double>(), (std::vector<double>{-infinity, -infinity}));
  for (int axis : {0, 1})
    EXPECT_EQ(gradient([=](auto& v) { return logsumexp(v, axis); }, none).to_vector<double>(),
              std::vector<double>(6, 0));
  EXPECT_EQ(logsumexp(ones({2, 0})).value().to_vector<double>(), (std::vector<double>{-infinity, -infinity}));
  EXPECT_NEAR(logsumexp(Tensor::from<float>({1000, 1000})).item(), 1000 + std::log(2.0), 1e-4);
  EXPECT_EQ(logsumexp(Tensor::from<double>({infinity, 0})).item(), infinity);

  const Tensor hot = one_hot(Tensor::from<int64_t>({2, 0}).reshape({2, 1}), 3, boolean);
  EXPECT_EQ(hot.shape(), (Shape{2, 1, 3}));
  EXPECT_EQ(hot.to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 1, 1, 0, 0}));
  EXPECT_EQ(one_hot(Tensor::zeros({0}, i64), 3).shape(), (Shape{0, 3}));
}

TEST(Ops, KinksAreSkippedByGradcheck) {
  const auto report =
      gradcheck([](auto& x) { return std::vector{relu(x[0])}; }, {Tensor::from<double>({-1, 0, 2})});
  EXPECT_TRUE(report) << report;
  EXPECT_EQ(report.skipped, 3);  // a step in element 1, seen from each output
  const auto tie =
      gradcheck([](auto& x) { return std::vector{max(x[0], 0)}; }, {Tensor::from<double>({1, 2, 2})});
  EXPECT_TRUE(tie) << tie;
  EXPECT_EQ(tie.skipped, 2);
  const auto edges = gradcheck(
      [](auto& x) {
        return std::vector{clamp(x[0], -1, 2), abs(x[0])};
      },
      {Tensor::from<double>({-1, 0, 1, 2})});
  EXPECT_TRUE(edges) << edges;
  EXPECT_EQ(edges.skipped, 3 * 8);
}

TEST(Ops, SoftmaxOfExtremes) {
  const Tensor x = Tensor::from<float>({1000, 0, -INFINITY});
  EXPECT_EQ(softmax(x).value().to_vector<double>(), (std::vector<double>{1, 0, 0}));
  EXPECT_EQ(log_softmax(x).value().to_vector<double>(), (std::vector<double>{0, -1000, -infinity}));
  EXPECT_EQ(gradient([](auto& v) { return slice(softmax(v), 0, 0, 1); }, x).to_vector<double>(),
            (std::vector<double>{0, 0, 0}));
  for (double y : softmax(Tensor::full({4}, -infinity)).value().to_vector<double>())
    EXPECT_TRUE(std::isnan(y));
}

TEST(Ops, CrossEntropyOfExtremes) {
  const Tensor x = Tensor::from<float>({1e4f, -1e4f, 0, 5}).reshape({2, 2});
  const Tensor targets = Tensor::from<int64_t>({1, 1});
  const auto loss = [&](const Variable& v) { return cross_entropy(v, targets); };
  EXPECT_NEAR(loss(x).item(), (2e4 + std::log1p(std::exp(-5.0))) / 2, 1e-3);
  const auto grad = gradient(loss, x).to_vector<double>();
  const double p = 1 / (1 + std::exp(5.0));
  for (size_t i = 0; i < 4; ++i)
    EXPECT_NEAR(grad[i], (std::vector<double>{0.5, -0.5, p / 2, -p / 2})[i], 1e-7);
  // No target at all.
  const Tensor none = Tensor::full({2}, static_cast<double>(ignore_none), i64);
  EXPECT_EQ(cross_entropy(x, none).item(), 0);
  EXPECT_EQ(gradient([&](auto& v) { return cross_entropy(v, none); }, x).to_vector<double>(),
            std::vector<double>(4, 0));
}

TEST(Ops, LabelSmoothing) {
  const Tensor x = randn({5, 7}, 0, 3, f64), targets = Tensor::from<int64_t>({0, 6, 3, 1, 1});
  // The same as cross entropy with the target (1 - e) * one_hot + e / V.
  const Variable weights = Variable(one_hot(targets, 7, f64)) * 0.7 + 0.3 / 7;
  EXPECT_NEAR(cross_entropy(x, targets, ignore_none, 0.3).item(),
              -mean(sum(weights * log_softmax(x), {-1})).item(), 1e-12);
  // Masked vocabulary: impossible only if something wants it.
  const Tensor masked = Tensor::from<float>({1, -INFINITY}).reshape({1, 2});
  EXPECT_EQ(cross_entropy(masked, Tensor::from<int64_t>({0})).item(), 0);
  EXPECT_EQ(cross_entropy(masked, Tensor::from<int64_t>({0}), ignore_none, 0.1).item(), infinity);
  EXPECT_EQ(cross_entropy(masked, Tensor::from<int64_t>({1}), ignore_none, 0.1).item(), infinity);
}

TEST(Ops, EmbeddingAddsUpRepeatedRows) {
  const Tensor indices = Tensor::from<int64_t>({2, 0, 2, 2});
  const auto grad = gradient([&](auto& w) { return embedding(w, indices); }, Tensor::zeros({3, 2}));
  EXPECT_EQ(grad.to_vector<double>(), (std::vector<double>{1, 1, 0, 0, 3, 3}));
}

// Of ops that add to the gradient that is there, also where both nearly cancel.
TEST(Ops, GradientsAreAddedBeforeTheyAreRounded) {
  manual_seed(3);
  const Tensor indices = randint({40}, 0, 7);
  const auto ones_like_rows = [](const Variable& x) { return Tensor::full({x.size(-1)}, 1, x.dtype()); };
  for (DType dtype : {f16, bf16}) {
    const Tensor table = randn({7, 24}, 0, 1, dtype), rows = randn({40, 24}, 0, 1, dtype);
    const auto of = [](const Tensor& x, const Variable& like) { return Variable(x.to(like.dtype())); };
    const std::vector<std::tuple<const char*, Tensor, std::function<Variable(const Variable&)>>> cases = {
        {"embedding", table, [&](auto& v) { return embedding(v, indices); }},
        {"linear, x", rows, [&](auto& v) { return linear(v, of(table, v)); }},
        {"linear, weight", table, [&](auto& v) { return linear(of(rows, v), v); }},
        {"layer_norm", rows, [&](auto& v) { return layer_norm(v, ones_like_rows(v)); }},
        {"rms_norm", rows, [&](auto& v) { return rms_norm(v, ones_like_rows(v)); }}};
    for (const auto& [name, value, f] : cases) {
      const Tensor seed = randn(f(value).shape(), 0, 1, dtype);
      const auto backward = [&f = f](Parameter& p, const Tensor& of_y) {
        Tape tape;
        tape.backward(f(p), {.seed = of_y});
        return p.grad().to_vector<double>();
      };
      Parameter wide(value.to(f64)), narrow(value);
      std::vector<double> exact = backward(wide, seed.to(f64)), there = exact;
      for (double& x : there) x = -x;
      narrow.mutable_grad() = Tensor::from(there, value.shape()).to(dtype);
      there = narrow.grad().to_vector<double>();
      const std::vector<double> got = backward(narrow, seed);
      double error = 0, norm = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        const double sum = exact[i] + there[i];
        error += std::pow(got[i] - sum, 2);
        norm += sum * sum;
      }
      EXPECT_LE(std::sqrt(error / norm), 0x1p-7) << name << ' ' << dtype;
    }
  }
}

// ----------------------------------------------------------------------------------------------- dropout

TEST(Ops, DropoutKeepsTheRightShare) {
  const int64_t count = 200000;
  Generator generator(3);
  for (double p : {0.1, 0.5, 0.9}) {
    const auto y = dropout(ones({count}, f64), p, generator).value().to_vector<double>();
    int64_t dropped = 0;
    for (double v : y) {
      EXPECT_TRUE(v == 0 || v == 1 / (1 - p)) << v;
      dropped += v == 0;
    }
    const double deviation = std::sqrt(p * (1 - p) * static_cast<double>(count));
    EXPECT_NEAR(static_cast<double>(dropped), p * static_cast<double>(count), 5 * deviation);
  }
}

TEST(Ops, DropoutDrawsFromItsGenerator) {
  Generator a(5), b(5);
  const Variable x = ones({1000});
  const auto first = dropout(x, 0.5, a).value().to_vector<float>();
  const auto second = dropout(x, 0.5, a).value().to_vector<float>();
  EXPECT_EQ(dropout(x, 0.5, b).value().to_vector<float>(), first);
  EXPECT_NE(first, second);
  // The gradient is dropped where the value was.
  b = Generator(5);
  EXPECT_EQ(gradient([&](auto& v) { return dropout(v, 0.5, b); }, x.value()).to_vector<float>(), first);
  // p = 0 is x, and draws nothing; p = 1 is zero, even of NaN.
  const auto before = a.state();
  EXPECT_EQ(dropout(x, 0, a).value().storage(), x.value().storage());
  EXPECT_EQ(a.state(), before);
  EXPECT_EQ(dropout(Tensor::full({70}, nan), 1, a).value().to_vector<double>(), std::vector<double>(70, 0));
}

// Also where what is kept and what it is added to nearly cancel.
TEST(Ops, DropoutAddsBeforeItRounds) {
  for (DType dtype : {f16, bf16}) {
    const double half_unit = dtype == f16 ? 0x1p-11 : 0x1p-8;
    const Tensor x = randn({20000}, 0, 1, dtype), residual = randn({20000}, 0, 1, dtype);
    Generator narrow(3), wide(3);
    const auto y = dropout(x, 0.3, narrow, residual).value().to_vector<double>();
    const auto exact = dropout(x.to(f64), 0.3, wide, residual.to(f64)).value().to_vector<double>();
    const auto added = residual.to_vector<double>();
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i)
      worst = std::max(worst, std::abs(y[i] - exact[i]) /
                                  (half_unit * std::abs(exact[i]) + 1e-6 * (1 + std::abs(added[i]))));
    EXPECT_LE(worst, 1) << dtype;
  }
}

// ------------------------------------------------------------------------------------- position codes

// Scores of every query with every key, both turned by the codes.
std::vector<double> turned_scores(const Tensor& q, const Tensor& k, const Tensor& codes) {
  return einsum("nd,md->nm", rotary(q, codes), rotary(k, codes)).value().to_vector<double>();
}

TEST(Ops, RotaryScoresDependOnDistance) {
  // One query and one key, at every pair of positions.
  const Tensor row = randn({1, 8}, 0, 1, f64), other = randn({1, 8}, 0, 1, f64);
  const auto scores =
      turned_scores(row.expand({12, 8}), other.expand({12, 8}), rotary_codes(12, 8, {.dtype = f64}));
  for (size_t n = 1; n < 12; ++n)
    for (size_t m = 1; m < 12; ++m) EXPECT_NEAR(scores[n * 12 + m], scores[(n - 1) * 12 + m - 1], 1e-12);
  // A cache goes on where it stopped; far positions keep their digits in f32.
  const Tensor all = rotary_codes(10, 6, {.base = 500});
  EXPECT_EQ(rotary_codes(4, 6, {.base = 500, .offset = 6}).to_vector<float>(),
            all.slice(1, 6, 10).to_vector<float>());
  const auto far = rotary_codes(1, 2, {.offset = 1234567}).to_vector<double>();
  EXPECT_NEAR(far[0], std::cos(1234567.0), 1e-7);
  EXPECT_NEAR(far[1], std::sin(1234567.0), 1e-7);
}

// Impulses become waves, energy stays, the inverse comes back: at lengths of all kinds, to the last bits.
TEST(Fft, OfAnyLength) {
  for (int64_t n : {1, 2, 3, 4, 5, 16, 17, 30, 97, 128, 368, 640}) {
    const Tensor x = randn({n, 2}, 0, 1, f64);
    const Tensor y = fft(x).value();
    double before = 0, after = 0, error = 0;
    const auto a = x.to_vector<double>(), b = y.to_vector<double>(),
               c = fft(y, {}, true).value().to_vector<double>();
    for (size_t i = 0; i < a.size(); ++i) {
      before += a[i] * a[i];
      after += b[i] * b[i];
      error = std::max(error, std::abs(c[i] - a[i]));
    }
    EXPECT_NEAR(after / before, 1, 1e-13) << n;
    EXPECT_LT(error, 1e-13) << n;
    // A constant is an impulse in the middle, in f32 too.
    Tensor constant = Tensor::zeros({n, 2});
    constant.select(1, 0).fill_(1);
    const auto impulse = fft(constant).value().to_vector<float>();
    for (int64_t i = 0; i < n; ++i)
      EXPECT_NEAR(impulse[size_t(2 * i)], i == n / 2 ? std::sqrt(double(n)) : 0, 1e-6 * std::sqrt(double(n)))
          << n;
  }
}

TEST(Fft, RoundsSixteenBitsOnce) {
  for (DType dtype : {f16, bf16}) {
    const double half_unit = dtype == f16 ? 0x1p-11 : 0x1p-8;
    const Tensor x = randn({2, 6, 5, 8, 2}, 0, 1, dtype);
    for (bool inverse : {false, true}) {
      const auto got = fft(x, {1, 2, 3}, inverse).value().to_vector<double>(),
                 exact = fft(x.to(f64), {1, 2, 3}, inverse).value().to_vector<double>();
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_LE(std::abs(got[i] - exact[i]), half_unit * std::abs(exact[i]) + 1e-6) << dtype;
    }
  }
}

// What was measured stands, what was not stays, and a second step changes nothing.
TEST(DataConsistency, PutsInWhatWasMeasured) {
  const Tensor x = randn({2, 5, 12, 2}, 0, 1, f64), scan = randn({2, 5, 12, 2}, 0, 1, f64);
  Tensor mask = Tensor::zeros({2, 1, 12, 1}, boolean);
  mask.slice(2, 1, 12, 3).fill_(1);
  mask.select(0, 1).slice(1, 5, 8).fill_(1);
  const Variable y = data_consistency(Variable(x), Variable(scan), mask, {2});
  const auto before = fft(Variable(x), {2}).value().to_vector<double>(),
             after = fft(y, {2}).value().to_vector<double>(), measured = scan.to_vector<double>(),
             is_measured = mask.expand(x.shape()).to_vector<double>();
  for (size_t i = 0; i < after.size(); ++i)
    EXPECT_NEAR(after[i], is_measured[i] != 0 ? measured[i] : before[i], 1e-13) << i;
  const auto once = y.value().to_vector<double>(),
             twice = data_consistency(y, Variable(scan), mask, {2}).value().to_vector<double>();
  for (size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(twice[i], once[i], 1e-13);
  expect_error(
      Error::Kind::Shape,
      "[data_consistency] expected x and measured alike, got f64 [2, 5, 12, 2] and f64 [1, 5, 12, 2]",
      [&] { data_consistency(Variable(x), Variable(scan.slice(0, 0, 1)), mask, {2}); });
}

TEST(Ops, RotaryOnAGridIsPeriodicWhereAsked) {
  const Shape grid{3, 5, 4};
  const std::vector<bool> periodic{false, true, true};
  const int64_t tokens = grid.numel(), width = 22;
  const Tensor codes = rotary_grid_codes(grid, width, periodic, {.dtype = f64});
  // Rolled along a periodic axis, tokens have the scores they had; along another, they have not.
  const Tensor q = randn({tokens, width}, 0, 1, f64), k = randn({tokens, width}, 0, 1, f64);
  const auto rolled = [&](const Tensor& x, int axis) {
    return roll(reshape(x, {3, 5, 4, width}), {1}, {axis}).value().reshape({tokens, width});
  };
  const auto scores = Tensor::from<double>(turned_scores(q, k, codes), {3, 5, 4, 3, 5, 4});
  for (int axis = 0; axis < 3; ++axis) {
    const auto got = turned_scores(rolled(q, axis), rolled(k, axis), codes);
    const auto expected = roll(scores, {1, 1}, {axis, axis + 3}).value().to_vector<double>();
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
    if (periodic[static_cast<size_t>(axis)])
      EXPECT_LE(worst, 1e-12) << "axis " << axis;
    else
      EXPECT_GT(worst, 0.1);
  }
  // Pairs 0 to 3 are of axis 0 and turn as in a sequence; 4 to 7 of axis 1 by 1 or 2 rounds of 5.
  const Tensor sequence = rotary_codes(3, 8, {.dtype = f64});
  for (int64_t n = 0; n < tokens; ++n)
    for (int64_t part = 0; part < 2; ++part) {
      const auto code = [&](const Tensor& of, int64_t row, int64_t pair) {
        return of.select(0, part).select(0, row).select(0, pair).item();
      };
      for (int64_t j = 0; j < 4; ++j) EXPECT_EQ(code(codes, n, j), code(sequence, n / 20, j));
      for (int64_t j = 4; j < 8; ++j) {
        const double turns = j < 6 ? 1 : 2;
        const double angle = 2 * std::acos(-1.0) * turns * static_cast<double>(n / 4 % 5) / 5;
        EXPECT_NEAR(code(codes, n, j), part == 0 ? std::cos(angle) : std::sin(angle), 1e-14);
      }
    }
}

// --------------------------------------------------------------------------------------- shapes and casts

TEST(Ops, ViewsShareMemory) {
  const Variable x = ones({2, 3, 4});
  std::vector<Variable> views = split(x, {1, 2}, 1);
  views.insert(views.end(), {reshape(x, {6, 4}), transpose(x, 0, 2), permute(x, {1, 2, 0}),
                             slice(x, 2, 0, 4, 2), expand(x, {5, 2, 3, 4}), cast(x, f32)});
  for (const Variable& view : views) EXPECT_EQ(view.value().storage(), x.value().storage());
}

TEST(Ops, EinsumCopiesNothingThatLiesRight) {
  const Variable q = ones({2, 3, 4, 5}), k = ones({2, 6, 3, 5});  // k as a projection leaves it
  reset_peak_memory();
  const int64_t before = memory_stats().live_bytes;
  const Variable scores = einsum("bhqd,bkhd->bhqk", q, k);
  EXPECT_EQ(memory_stats().peak_bytes - before, scores.numel() * 4);
}

// The infinity with which a user pads is none of pad's.
TEST(Ops, AnomalyModeLetsPadFill) {
  const AnomalyMode on;
  for (double value : {infinity, -infinity, 1.0})
    EXPECT_EQ(pad(ones({1}), {{1, 0}}, {0}, Padding::constant, value).value().to_vector<double>(),
              (std::vector<double>{value, 1}));
  expect_error(Error::Kind::Value,
               "[pad] forward made NaN: output 0, f32 [2] holds it in 1 of 2 elements, first at [0] (not "
               "recorded, inputs f32 [1], outputs f32 [2])",
               [&] {
                 pad(ones({1}), {{1, 0}}, {0}, Padding::constant, nan);
               });
}

TEST(Ops, FoldUndoesUnfold) {
  const Tensor x = randn({2, 3, 4, 6, 2});
  EXPECT_EQ(fold(unfold(x, {2, 3, 1}), {4, 6, 2}, {2, 3, 1}).value().to_vector<float>(),
            x.to_vector<float>());
  // Where patches overlap, each element is counted as often as it is covered.
  EXPECT_EQ(fold(unfold(ones({1, 1, 5}), {3}, {1}), {5}, {3}, {1}).value().to_vector<double>(),
            (std::vector<double>{1, 2, 3, 2, 1}));
}

TEST(Ops, SplitFillsInMissingGradients) {
  const auto second = [](const Variable& x) { return split(x, {1, 2, 1}, 0)[1]; };
  EXPECT_EQ(gradient(second, Tensor::zeros({4})).to_vector<double>(), (std::vector<double>{0, 1, 1, 0}));
  EXPECT_EQ(split(ones({0, 3}), {}, 0).size(), 0u);
}

TEST(Ops, CastCarriesGradientsBetweenFloatsOnly) {
  Tape tape;
  const Variable x(Tensor::from<float>({1.75, -2.25}), true);
  const Variable whole = cast(x, i64);
  EXPECT_EQ(whole.value().to_vector<int64_t>(), (std::vector<int64_t>{1, -2}));
  EXPECT_FALSE(whole.requires_grad());
  EXPECT_FALSE(cast(whole, f64).requires_grad());
  tape.backward(sum(cast(x, bf16)));
  EXPECT_EQ(x.grad().dtype(), f32);
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{1, 1}));
}

// Ops that are made of others, or give no gradient, have their names too.
TEST(Ops, AreProfiledByTheirNames) {
  const Variable x(randn({3, 4, 2}));
  const Tensor mask = Tensor::full({3, 4, 2}, 1, boolean);
  Tensor memory = randn({3, 4});
  Profiler profiler;
  einsum("abc,dbc->ad", x, x);
  argmax(x, 1);
  one_hot(Tensor::zeros({2}, i64), 3);
  softmax_(memory);
  masked_fill_(memory, Tensor::full({3, 4}, 1, boolean), 2);
  data_consistency(x, x, mask, {0});
  recompute([](const Variable& v) { return v * v; }, x);
  const ProfileSummary summary = profiler.summary();
  for (const char* name : {"einsum", "argmax", "one_hot", "softmax_", "masked_fill_", "data_consistency"})
    EXPECT_EQ(summary.row(name, ScopeKind::forward).calls, 1) << name;
  // What runs inside is not counted twice, and its operations are the outer one's too.
  EXPECT_EQ(summary.row("einsum", ScopeKind::forward).flops, 2. * 3 * 3 * 8);
  EXPECT_EQ(summary.row("matmul", ScopeKind::forward).flops, 2. * 3 * 3 * 8);
  double share = 0;
  for (const auto& row : summary.rows) share += row.op.empty() ? row.share : 0;
  EXPECT_NEAR(share, 1, 1e-12);
}

// ------------------------------------------------------------------------------------------------ memory

// Bytes held after forward beyond the input, while the tape waits for backward.
int64_t held_bytes(const std::function<Variable(const Variable&)>& f, const Shape& shape) {
  Tape tape;
  const Variable x(rand(shape, 0.5, 1), true);
  const int64_t before = memory_stats().live_bytes;
  const Variable y = f(x);
  return memory_stats().live_bytes - before;
}

TEST(Ops, SaveOnlyWhatBackwardNeeds) {
  const Shape shape{64, 256};
  const int64_t one = 64 * 256 * 4, few = one / 16;
  EXPECT_EQ(held_bytes([](auto& x) { return relu(x); }, shape), one);
  EXPECT_EQ(held_bytes([](auto& x) { return gelu(x); }, shape), one);
  EXPECT_EQ(held_bytes([](auto& x) { return dropout(x, 0.5); }, shape), one);
  EXPECT_EQ(held_bytes([](auto& x) { return x * x; }, shape), one);
  EXPECT_EQ(held_bytes([](auto& x) { return softmax(x); }, shape), one);
  EXPECT_EQ(held_bytes([](auto& x) { return transpose(x, 0, 1); }, shape), 0);
  EXPECT_LE(held_bytes([](auto& x) { return layer_norm(x, ones({256})); }, shape), one + few);
  EXPECT_LE(held_bytes([](auto& x) { return cross_entropy(x, Tensor::zeros({64}, i64)); }, shape), few);
  // What only the gradient of a frozen weight would read is not kept.
  for (bool trained : {false, true}) {
    const Variable up(rand({512, 256}), trained), down(rand({256, 512}), trained);
    EXPECT_EQ(held_bytes([&](auto& x) { return linear(x, up); }, shape), 2 * one);
    EXPECT_EQ(held_bytes([&](auto& x) { return mlp(x, up, {}, down, {}); }, shape),
              trained ? 5 * one : 3 * one);
  }
}

}  // namespace
}  // namespace torus
