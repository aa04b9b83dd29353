#include <torus/torus.h>

#include <cstdio>

int main() {
  using namespace torus;
  manual_seed(1);
  // Repeat what came three tokens before: a task for attention.
  Tensor text = randint({16, 33}, 0, 10);
  for (int64_t i = 3; i < 33; ++i) text.slice(1, i, i + 1).copy_(text.slice(1, i - 3, i - 2));
  const Tensor tokens = text.slice(1, 0, 32), targets = text.slice(1, 1, 33);

  GPT model({.vocab_size = 10, .context = 32, .layers = 2, .heads = 2, .width = 32});
  AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
  for (int step = 0; step <= 200; ++step) {
    Tape tape;
    const Variable loss = model.loss(tokens, targets);
    if (step % 100 == 0) std::printf("step %d loss %.3f\n", step, loss.item());
    tape.backward(loss);
    clip_grad_norm(model.parameters(), 1.0);
    optimizer.step();
    model.zero_grad();
  }
}
