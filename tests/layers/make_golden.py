"""Writes golden_gpt.h5: what PyTorch computes for two small GPTs in double precision.

usage: python3 make_golden.py     (needs torch and h5py)

Each case holds its tokens and targets [steps, B, T], and, with all parameters one after another in the order of
NAMES: the initial values, the gradients of the first step before clipping, and the values after five steps of
AdamW with clipping and a learning rate for each step. Also the logits of the first step and the loss of every one.
"""
import os

import h5py
import torch
import torch.nn.functional as F

V, T, LAYERS, HEADS, C, B, STEPS = 11, 7, 2, 2, 8, 3, 5
RATES = [0.004, 0.01, 0.008, 0.005, 0.001]
MAX_NORM, DECAY, BETAS, EPS = 0.5, 0.1, (0.9, 0.95), 1e-8


def names(tied, bias):
    def with_bias(name):
        return [name + ".weight"] + ([name + ".bias"] if bias else [])

    result = ["tokens.weight", "positions.weight"]
    for i in range(LAYERS):
        for part in ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down"):
            result += with_bias(f"blocks.{i}.{part}")
    return result + with_bias("norm") + ([] if tied else ["head.weight"])


def shape(name):
    rows = {"tokens": V, "head": V, "positions": T, "qkv": 3 * C, "up": 4 * C}
    module = name.split(".")[-2]
    if name.endswith("bias") or "norm" in module:
        return (rows.get(module, C),)
    return (rows.get(module, C), 4 * C if module == "down" else C)


def logits(p, tokens):
    def linear(x, name):
        return F.linear(x, p[name + ".weight"], p.get(name + ".bias"))

    def norm(x, name):
        return F.layer_norm(x, (C,), p[name + ".weight"], p.get(name + ".bias"), 1e-5)

    x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    for i in range(LAYERS):
        block = f"blocks.{i}."
        q, k, v = (
            y.unflatten(-1, (HEADS, C // HEADS)).transpose(1, 2)
            for y in linear(norm(x, block + "norm1"), block + "attention.qkv").split(C, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), block + "attention.out")
        x = x + linear(F.gelu(linear(norm(x, block + "norm2"), block + "mlp.up")), block + "mlp.down")
    return norm(x, "norm") @ p.get("head.weight", p["tokens.weight"]).T


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).numpy()


def write_case(group, tied, bias):
    p = {}
    for name in names(tied, bias):
        value = 0.3 * torch.randn(shape(name))
        if "norm" in name and name.endswith("weight"):
            value += 1
        p[name] = value.requires_grad_()
    tokens = torch.randint(0, V, (STEPS, B, T))
    targets = torch.randint(0, V, (STEPS, B, T))
    group["tokens"], group["targets"] = tokens.numpy(), targets.numpy()
    group["initial"] = flat(p.values())
    matrices = [x for x in p.values() if x.dim() == 2]
    vectors = [x for x in p.values() if x.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], betas=BETAS, eps=EPS
    )
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        y = logits(p, tokens[step])
        loss = F.cross_entropy(y.flatten(0, 1), targets[step].flatten())
        loss.backward()
        if step == 0:
            group["logits"] = y.detach().numpy()
            group["gradients"] = flat(x.grad for x in p.values())
        losses.append(loss.item())
        norm = torch.linalg.vector_norm(torch.cat([x.grad.flatten() for x in p.values()]))
        norms.append(norm.item())
        for x in p.values():  # not clip_grad_norm_, which adds 1e-6 to the norm
            x.grad *= min(1.0, MAX_NORM / norm.item())
        for options in optimizer.param_groups:
            options["lr"] = RATES[step]
        optimizer.step()
    group["losses"], group["norms"] = losses, norms
    group["final"] = flat(p.values())


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden_gpt.h5")
    with h5py.File(path, "w") as file:
        write_case(file.create_group("tied"), tied=True, bias=True)
        write_case(file.create_group("untied"), tied=False, bias=False)
