// Text, or any tokens, from a GPT.
#pragma once

#include "torus/layers/gpt.h"

namespace torus {

struct GenerateOptions {
  int64_t count = 100;     // tokens to add
  double temperature = 1;  // the logits are divided by it; 0 takes the likeliest token, the first of equals
  Generator* generator = nullptr;  // default_generator() if null; one draw a token and row, none if greedy
  int64_t top_k = 0;               // only the k likeliest tokens are drawn; 0: all
  // Only the likeliest tokens are drawn, as many as it takes for a probability of p (Holtzman et al., 2020).
  double top_p = 1;
};

/// Continues prompts [B, T] (i64, T >= 1): [B, T + count]. The model sees the last `context` tokens. Until
/// they are as many, each step computes one token a row and reads the others from a cache; then places shift
/// at every step, and all are computed anew. Dropout is as model.train() set it. Throws Error{Value} if the
/// logits are not finite.
Tensor generate(const GPT& model, const Tensor& prompts, const GenerateOptions& options = {});

}  // namespace torus
