#include <algorithm>

#include "torus/core/profiler.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

using Letters = std::string;

bool holds(const Letters& letters, char letter) { return letters.find(letter) != Letters::npos; }

struct Equation {
  Letters a, b, result;
};

Equation parsed(const std::string& text) {
  Letters plain;
  std::copy_if(text.begin(), text.end(), std::back_inserter(plain), [](char c) { return c != ' '; });
  const size_t comma = plain.find(','), arrow = plain.find("->");
  check(comma != Letters::npos && arrow != Letters::npos && comma < arrow, Error::Kind::Value,
        "[einsum] expected an equation like \"bij,bjk->bik\", got \"", text, "\"");
  const Equation equation{plain.substr(0, comma), plain.substr(comma + 1, arrow - comma - 1),
                          plain.substr(arrow + 2)};
  for (const Letters& term : {equation.a, equation.b, equation.result})
    for (char letter : term) {
      check((letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z'), Error::Kind::Value,
            "[einsum] axes must be letters, got '", letter, "' in \"", text, "\"");
      check(std::count(term.begin(), term.end(), letter) == 1, Error::Kind::Value, "[einsum] '", letter,
            "' comes twice in one term of \"", text, "\"");
    }
  for (char letter : equation.result)
    check(holds(equation.a, letter) || holds(equation.b, letter), Error::Kind::Value, "[einsum] '", letter,
          "' of the result is in neither operand of \"", text, "\"");
  return equation;
}

Variable permuted(const Variable& x, const Letters& from, const Letters& to) {
  if (from == to) return x;
  std::vector<int> order;
  for (char letter : to) order.push_back(static_cast<int>(from.find(letter)));
  return permute(x, order);
}

Variable reshaped(const Variable& x, const Shape& shape) {
  return x.shape() == shape ? x : reshape(x, shape);
}

// Sums x over the letters that nothing else holds.
Variable without_lone(const Variable& x, Letters& letters, const Equation& equation, const Letters& other) {
  std::vector<int> lone;
  Letters kept;
  for (size_t i = 0; i < letters.size(); ++i) {
    if (holds(other, letters[i]) || holds(equation.result, letters[i]))
      kept.push_back(letters[i]);
    else
      lone.push_back(static_cast<int>(i));
  }
  letters = kept;
  return lone.empty() ? x : sum(x, lone);
}

}  // namespace

Variable einsum(const std::string& equation, const Variable& a, const Variable& b) {
  check_defined("einsum", "a", a);
  check_defined("einsum", "b", b);
  ProfileScope scope("einsum", ScopeKind::forward);
  scope.show(a.value());
  scope.show(b.value());
  const Equation wanted = parsed(equation);
  for (const auto& [letters, operand] : {std::pair(wanted.a, a), std::pair(wanted.b, b)})
    check(static_cast<int>(letters.size()) == operand.dim(), Error::Kind::Shape, "[einsum] \"", letters,
          "\" needs ", letters.size(), " axes, got ", operand.shape());
  for (size_t i = 0; i < wanted.a.size(); ++i) {
    const size_t j = wanted.b.find(wanted.a[i]);
    if (j == Letters::npos) continue;
    const int64_t of_a = a.size(static_cast<int>(i)), of_b = b.size(static_cast<int>(j));
    check(of_a == of_b, Error::Kind::Shape, "[einsum] '", wanted.a[i], "' must have one size, got ", of_a,
          " in ", a.shape(), " and ", of_b, " in ", b.shape());
  }
  Letters a_letters = wanted.a, b_letters = wanted.b;
  const Variable left = without_lone(a, a_letters, wanted, wanted.b);
  const Variable right = without_lone(b, b_letters, wanted, wanted.a);

  // The letters of each part of a product [batch..., rows, depth] @ [batch..., depth, columns], and their
  // sizes.
  Letters batch, rows, depth, columns;
  Shape batch_shape, row_shape, depth_shape, column_shape;
  const auto size = [&](char letter) {
    const size_t at = a_letters.find(letter);
    return at == Letters::npos ? right.size(static_cast<int>(b_letters.find(letter)))
                               : left.size(static_cast<int>(at));
  };
  for (char letter : wanted.result) {
    const bool in_a = holds(a_letters, letter), in_b = holds(b_letters, letter);
    (in_a && in_b ? batch : in_a ? rows : columns).push_back(letter);
    (in_a && in_b ? batch_shape : in_a ? row_shape : column_shape).push_back(size(letter));
  }
  for (char letter : a_letters)
    if (!holds(wanted.result, letter)) {
      depth.push_back(letter);
      depth_shape.push_back(size(letter));
    }
  const int64_t row_count = row_shape.numel(), depth_count = depth_shape.numel(),
                column_count = column_shape.numel();
  const auto with = [&](Shape shape, std::initializer_list<int64_t> more) {
    for (int64_t size_of_axis : more) shape.push_back(size_of_axis);
    return shape;
  };
  const Variable product = matmul(
      reshaped(permuted(left, a_letters, batch + rows + depth), with(batch_shape, {row_count, depth_count})),
      reshaped(permuted(right, b_letters, batch + depth + columns),
               with(batch_shape, {depth_count, column_count})));
  Shape shape = batch_shape;
  for (const Shape& part : {row_shape, column_shape})
    for (int64_t size_of_axis : part) shape.push_back(size_of_axis);
  return permuted(reshaped(product, shape), batch + rows + columns, wanted.result);
}

}  // namespace torus
