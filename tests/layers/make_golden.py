"""Writes golden_gpt.h5, what PyTorch computes for small GPTs in double precision, and golden_optim.h5, what
PyTorch and the published formulas in NumPy give for optimizers and schedules.

usage: python3 make_golden.py     (needs torch, numpy and h5py)

Each case of golden_gpt.h5 holds its tokens and targets [steps, B, T], and, with all parameters one after another in the order of
NAMES: the initial values, the gradients of the first step before clipping, and the values after five steps of
AdamW with clipping and a learning rate for each step. Also the logits of the first step and the loss of every one.
"""
import os
from dataclasses import dataclass

import h5py
import numpy as np
import torch
import torch.nn.functional as F

V, T, LAYERS, HEADS, C, B, STEPS = 11, 7, 2, 2, 8, 3, 5
RATES = [0.004, 0.01, 0.008, 0.005, 0.001]
MAX_NORM, DECAY, BETAS, EPS = 0.5, 0.1, (0.9, 0.95), 1e-8


@dataclass
class Case:
    tied: bool = True
    bias: bool = True
    kv_heads: int = HEADS
    rms: bool = False
    post_norm: bool = False
    swiglu: bool = False
    rotary: bool = False

    @property
    def hidden(self):
        return 24 if self.swiglu else 4 * C  # 8/3 C, up to a multiple of 8


def names(case):
    def with_bias(name):
        has_bias = case.bias and not (case.rms and "norm" in name)
        return [name + ".weight"] + ([name + ".bias"] if has_bias else [])

    result = ["tokens.weight"] + ([] if case.rotary else ["positions.weight"])
    for i in range(LAYERS):
        for part in ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down"):
            result += with_bias(f"blocks.{i}.{part}")
    return result + ([] if case.post_norm else with_bias("norm")) + ([] if case.tied else ["head.weight"])


def shape(name, case):
    qkv = (HEADS + 2 * case.kv_heads) * (C // HEADS)
    rows = {"tokens": V, "head": V, "positions": T, "qkv": qkv, "up": case.hidden * (2 if case.swiglu else 1)}
    module = name.split(".")[-2]
    if name.endswith("bias") or "norm" in module:
        return (rows.get(module, C),)
    return (rows.get(module, C), case.hidden if module == "down" else C)


def rotate(x):
    """Rotary codes on x [B, H, N, D]: pairs (j, j + D / 2)."""
    pairs = x.shape[-1] // 2
    turns = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    a, b = x[..., :pairs], x[..., pairs:]
    return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


def logits(p, tokens, case):
    def linear(x, name):
        return F.linear(x, p[name + ".weight"], p.get(name + ".bias"))

    def norm(x, name):
        if case.rms:
            return F.rms_norm(x, (C,), p[name + ".weight"], 1e-6)
        return F.layer_norm(x, (C,), p[name + ".weight"], p.get(name + ".bias"), 1e-5)

    def attention(x, name):
        d = C // HEADS
        parts = linear(x, name + ".qkv").split([C, case.kv_heads * d, case.kv_heads * d], -1)
        q, k, v = (y.unflatten(-1, (-1, d)).transpose(1, 2) for y in parts)
        if case.rotary:
            q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(HEADS // case.kv_heads, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).flatten(2), name + ".out")

    def mlp(x, name):
        y = linear(x, name + ".up")
        if case.swiglu:
            gate, y = y.chunk(2, -1)
            return linear(F.silu(gate) * y, name + ".down")
        return linear(F.gelu(y), name + ".down")

    x = p["tokens.weight"][tokens]
    if not case.rotary:
        x = x + p["positions.weight"][: tokens.shape[1]]
    for i in range(LAYERS):
        block = f"blocks.{i}."
        if case.post_norm:
            x = norm(x + attention(x, block + "attention"), block + "norm1")
            x = norm(x + mlp(x, block + "mlp"), block + "norm2")
        else:
            x = x + attention(norm(x, block + "norm1"), block + "attention")
            x = x + mlp(norm(x, block + "norm2"), block + "mlp")
    if not case.post_norm:
        x = norm(x, "norm")
    return x @ p.get("head.weight", p["tokens.weight"]).T


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).numpy()


def write_case(group, case):
    p = {}
    for name in names(case):
        value = 0.3 * torch.randn(shape(name, case))
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
        y = logits(p, tokens[step], case)
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


OPTIM_SHAPES = {"w.weight": (6, 4), "u.weight": (3, 5), "head.weight": (4, 2), "b": (5,)}
OPTIM_STEPS = 12


def torch_optimizer(make):
    """Trajectory by torch.optim: matrices decay by DECAY, vectors do not."""

    def run(values, grads, rates):
        p = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
        groups = [
            {"params": [x for x in p.values() if (x.dim() == 2) == decays], "weight_decay": DECAY * decays}
            for decays in (True, False)
        ]
        optimizer = make(groups)
        for grad, rate in zip(grads, rates):
            for name, x in p.items():
                x.grad = torch.tensor(grad[name])
            for options in optimizer.param_groups:
                options["lr"] = rate
            optimizer.step()
        return {name: x.detach().numpy() for name, x in p.items()}

    return run


def lion(values, grads, rates):
    """Algorithm 2 of Chen et al., 2023."""
    p = {name: value.copy() for name, value in values.items()}
    m = {name: np.zeros_like(value) for name, value in values.items()}
    for grad, rate in zip(grads, rates):
        for name, g in grad.items():
            c = 0.9 * m[name] + (1 - 0.9) * g
            decay = DECAY if g.ndim == 2 else 0
            p[name] -= rate * (np.sign(c) + decay * p[name])
            m[name] = 0.99 * m[name] + (1 - 0.99) * g
    return p


def newton_schulz(g):
    """https://kellerjordan.github.io/posts/muon/, in double precision."""
    x = g / (np.linalg.norm(g) + 1e-7)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(values, grads, rates):
    """Muon for w and u; AdamW, at 0.015 times the rate, for head and b."""
    hidden = ("w.weight", "u.weight")
    p = {name: value.copy() for name, value in values.items()}
    m = {name: np.zeros_like(value) for name, value in values.items()}
    for grad, rate in zip(grads, rates):
        for name in hidden:
            g = grad[name]
            m[name] = 0.95 * m[name] + g
            o = newton_schulz(g + 0.95 * m[name])
            p[name] *= 1 - rate * DECAY
            p[name] -= rate * max(1, g.shape[0] / g.shape[1]) ** 0.5 * o
    adam = torch_optimizer(lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10))
    rest = {name: value for name, value in values.items() if name not in hidden}
    p.update(adam(rest, [{n: g[n] for n in rest} for g in grads], [0.015 * rate for rate in rates]))
    return p


def write_optimizers(file):
    rng = np.random.default_rng(2)
    values = {name: rng.standard_normal(shape) for name, shape in OPTIM_SHAPES.items()}
    grads = [{name: rng.standard_normal(shape) for name, shape in OPTIM_SHAPES.items()} for _ in range(OPTIM_STEPS)]
    rates = 0.1 / np.arange(1, OPTIM_STEPS + 1)

    def joined(tensors):
        return np.concatenate([x.ravel() for x in tensors.values()])

    file["initial"] = joined(values)
    file["gradients"] = np.stack([joined(grad) for grad in grads])
    file["rates"] = rates
    sgd = torch.optim.SGD
    for name, run in {
        "sgd": torch_optimizer(sgd),
        "sgd_momentum": torch_optimizer(lambda groups: sgd(groups, momentum=0.9)),
        "sgd_nesterov": torch_optimizer(lambda groups: sgd(groups, momentum=0.9, nesterov=True)),
        "adamw": torch_optimizer(lambda groups: torch.optim.AdamW(groups, betas=BETAS, eps=EPS)),
        "lion": lion,
        "muon": muon,
    }.items():
        file[name] = joined(run(values, grads, rates))


def write_schedules(group):
    """Rates of steps 0 to 24: 5 of warm-up, the end at 20, the peak 0.3 and the floor 0.03."""
    schedulers = torch.optim.lr_scheduler
    warmup, total, peak, floor = 5, 20, 0.3, 0.03

    def rates(rest, milestones):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
        rise = schedulers.LinearLR(optimizer, 1 / (warmup + 1), 1, warmup)
        schedule = schedulers.SequentialLR(optimizer, [rise] + rest(optimizer), [warmup] + milestones)
        result = []
        for _ in range(25):
            result.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return result

    def constant(optimizer):
        return schedulers.ConstantLR(optimizer, 1, 1)

    def linear(optimizer, steps):
        return schedulers.LinearLR(optimizer, 1, floor / peak, steps)

    group["constant"] = rates(lambda o: [constant(o)], [])
    group["linear"] = rates(lambda o: [linear(o, total - warmup)], [])
    # PyTorch's cosine rises again after its end.
    group["cosine"] = rates(lambda o: [schedulers.CosineAnnealingLR(o, total - warmup, floor)], [])[: total + 1]
    group["stable_decay"] = rates(lambda o: [constant(o), linear(o, 4)], [total - 4])


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    folder = os.path.dirname(os.path.abspath(__file__))
    with h5py.File(os.path.join(folder, "golden_gpt.h5"), "w") as file:
        write_case(file.create_group("tied"), Case())
        write_case(file.create_group("untied"), Case(tied=False, bias=False))
        write_case(
            file.create_group("modern"), Case(tied=False, bias=False, kv_heads=1, rms=True, swiglu=True, rotary=True)
        )
        write_case(file.create_group("post_norm"), Case(post_norm=True))
    with h5py.File(os.path.join(folder, "golden_optim.h5"), "w") as file:
        write_optimizers(file)
        write_schedules(file.create_group("schedules"))
