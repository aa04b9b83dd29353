// Text, or any tokens, from a GPT.
#pragma once

#include "torus/layers/gpt.h"

namespace torus {

struct GenerateOptions {
  int64_t count = 100;     // tokens to add
  double temperature = 1;  // the logits are divided by it; 0 takes the likeliest token, the first of equals
  Generator* generator = nullptr;  // default_generator() if null; one draw a token and row, none if greedy
};

/// Continues prompts [B, T] (i64, T >= 1): [B, T + count]. The model sees the last `context` tokens. Dropout
/// is as model.train() set it. Throws Error{Value} if the logits are not finite.
Tensor generate(const GPT& model, const Tensor& prompts, const GenerateOptions& options = {});

}  // namespace torus
