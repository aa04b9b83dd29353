"""PyTorch's side of compare_pytorch_cuda.sh, and the table of both.

usage: compare_pytorch_cuda.py attention|train         times PyTorch; one line a measurement, as JSON
       compare_pytorch_cuda.py table DIRECTORY         reads what both wrote there, prints ratios
"""
import json
import os
import re
import statistics
import sys
import time


def say(**entries):
    print(json.dumps(entries), flush=True)


def milliseconds(call):
    """The least mean of three rounds of about 20 ms, by events of the device."""
    import torch

    def mean(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    mean(3)
    count = min(200, max(3, int(20 / max(mean(1), 1e-3))))
    return min(mean(count) for _ in range(3))


# --------------------------------------------------------------------------------------------------- attention

def measured(name, backend, attend, q, k, v):
    """Forward, backward, and the memory that both take beside the operands. What cannot run says so."""
    import torch

    entry = {"name": name, "backend": backend}
    try:
        with torch.no_grad():
            entry["forward"] = milliseconds(lambda: attend(q, k, v))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = attend(q, k, v)
        seed = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), seed, retain_graph=True)
        torch.cuda.synchronize()
        entry["MiB"] = (torch.cuda.max_memory_allocated() - held - seed.nbytes) / 2**20
        del gradients
        entry["backward"] = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), seed, retain_graph=True))
    except Exception as error:  # a backend refuses, or there is no memory
        entry["refused"] = str(error).split("\n")[0][:100]
    say(**entry)
    torch.cuda.empty_cache()


def attention():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    for limit in ("recompile_limit", "accumulated_recompile_limit"):  # beyond it, flex would run unfused
        setattr(torch._dynamo.config, limit, 1000)
    flex = torch.compile(flex_attention, dynamic=False)

    def operands(batch, heads, queries, keys, width, dtype=torch.bfloat16):
        shapes = ((batch, heads, tokens, width) for tokens in (queries, keys, keys))
        return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]

    def fused(name, tensors, causal=False):
        for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            def attend(q, k, v):
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, is_causal=causal)
            measured(name, label, attend, *tensors)

    def masked(name, label, allows, tensors, order=None):
        """`order`: the place in memory of each token, by which `allows` is asked."""
        rule = allows if order is None else lambda b, h, i, j: allows(b, h, order[i], order[j])
        try:
            blocks = create_block_mask(rule, None, None, tensors[0].shape[2], tensors[1].shape[2], device="cuda")
        except Exception as error:
            return say(name=name, backend=label, refused=str(error).split("\n")[0][:100])
        measured(name, label, lambda q, k, v: flex(q, k, v, block_mask=blocks), *tensors)

    for causal in (False, True):
        for width in (64, 128):
            for tokens in (512, 2048, 8192, 16384):
                name = f"{'causal' if causal else 'full'} d{width} N{tokens}"
                tensors = operands(16384 // tokens, 2048 // width, tokens, tokens, width)
                fused(name, tensors, causal)
                if tokens == 8192 and not causal:
                    measured(name, "flex", flex, *tensors)
                elif tokens == 8192:
                    masked(name, "flex", lambda b, h, i, j: j <= i, tensors)
        fused(f"{'causal' if causal else 'full'} d256 N8192", operands(2, 8, 8192, 8192, 256), causal)
    for tokens, before, after in ((8192, 512, 511), (16384, 128, 127)):
        masked(f"window {before + after + 1} d128 N{tokens}", "flex",
               lambda b, h, i, j: (i - j <= before) & (j - i <= after),
               operands(16384 // tokens, 16, tokens, tokens, 128))
    for side, window, batch, width in ((16, 5, 4, 64), (20, 5, 4, 64), (20, 5, 4, 128), (32, 5, 1, 64), (32, 9, 1, 64)):
        reach = window // 2

        def near(b, h, i, j):
            result = None
            for stride in (1, side, side * side):
                apart = (i // stride - j // stride + reach) % side  # both offsets from -reach to reach, around
                inside = apart <= 2 * reach
                result = inside if result is None else result & inside
            return result

        name = f"wrap {side}^3 w{window} B{batch} d{width}"
        tensors = operands(batch, 8, side**3, side**3, width)
        masked(name, "flex", near, tensors)
        box = (4, 4, 8)  # tokens in boxes of 128, so that blocks are near each other on all axes
        if all(side % length == 0 for length in box):
            places = torch.arange(side**3, device="cuda").reshape([n for b in box for n in (side // b, b)])
            masked(name, "flex boxes", near, tensors, places.permute(0, 2, 4, 1, 3, 5).flatten())
    for queries, keys, width in ((4096, 4096, 40), (4096, 77, 40), (1024, 1024, 80), (256, 256, 160),
                                 (4096, 4096, 64), (4096, 77, 64)):
        fused(f"f16 {queries}x{keys} d{width}", operands(4, 8, queries, keys, width, torch.float16))


# --------------------------------------------------------------------------------------------------- training

def train():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            heads = x.shape[:2] + (self.heads, -1)
            q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self, vocabulary, context, layers, heads, width):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens, targets):
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())

    cases = {"gpt2": (50304, 1024, 12, 12, 768, 32, 30), "char": (65, 256, 6, 6, 384, 64, 200),
             "toy": (65, 128, 4, 4, 128, 32, 300)}
    for name, (vocabulary, context, layers, heads, width, batch, steps) in cases.items():
        for label, mode in (("compile", "default"), ("compile, graphs", "reduce-overhead")):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            model = GPT(vocabulary, context, layers, heads, width).cuda()
            fast = torch.compile(model, mode=mode)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
            tokens, targets = (torch.randint(0, vocabulary, (batch, context), device="cuda") for _ in range(2))

            def step():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = fast(tokens, targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(10):
                step()
            best = float("inf")
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                torch.cuda.synchronize()
                best = min(best, 1e3 * (time.perf_counter() - start) / steps)
            say(name="train " + name, backend=label, step=best, tokens=1e3 * batch * context / best,
                MiB=(torch.cuda.max_memory_allocated() - held) / 2**20)
            del model, fast, optimizer, step
            torch._dynamo.reset()


# --------------------------------------------------------------------------------------------------- the table

def conditions(path):
    """Medians while the device worked, and the most memory used."""
    rows = []
    with open(path) as file:
        for line in file:
            try:
                rows.append([float(field) for field in line.split(",")])
            except ValueError:
                pass  # "[N/A]", or a line that was cut
    if not rows:
        return "clocks and power: n/a"
    busy = [row for row in rows if row[2] > 0.5 * max(r[2] for r in rows)]
    sm, memory, power, temperature = (statistics.median(row[i] for row in busy) for i in range(4))
    return (f"SM {sm:.0f} MHz, memory {memory:.0f} MHz, {power:.0f} W, {temperature:.0f} C, "
            f"at most {max(row[4] for row in rows):.0f} MiB of the device used")


def table(directory):
    def lines(name):
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            return []
        with open(path) as file:
            return file.read().splitlines()

    ours, theirs = {}, {}
    for line in lines("torus-attention"):
        found = re.match(r"(\S.*\S)\s+(cuda_\w+|hopper)((?:\s+[\d.]+){7,})$", line)
        if found:
            n = [float(number) for number in found[3].split()]
            ours.setdefault(found[1], []).append(
                {"backend": found[2], "forward": n[0], "backward": n[2], "unordered": n[4], "MiB": n[6]})
    for line in lines("torus-train"):
        found = re.match(r"(\w+)\s+([\d.]+) ms\s+([\d.]+) tok/s\s+([\d.]+) MiB", line)
        if found:
            ours["train " + found[1]] = [{"backend": "torus", "step": float(found[2]), "MiB": float(found[4])}]
    for file in ("pytorch-attention", "pytorch-train"):
        for line in lines(file):
            if line.startswith("{"):
                entry = json.loads(line)
                if "refused" not in entry:
                    theirs.setdefault(entry["name"], []).append(entry)

    def best(entries, what):
        there = [entry for entry in entries if what in entry]
        return min(there, key=lambda entry: entry[what]) if there else None

    print(f"{'':24} {'':9} {'torus':>22} {'PyTorch':>28} {'PyTorch / torus':>20} {'MiB':>17}")
    for name, entries in ours.items():
        for what in ("forward", "backward", "unordered", "step"):
            mine = best(entries, what)
            other = best(theirs.get(name, []), "backward" if what == "unordered" else what)
            if mine is None:
                continue
            text = f"{name:24} {what:9} {mine[what]:9.3f} ms {mine['backend']:>9}"
            if other is not None:
                value = other["backward" if what == "unordered" else what]
                text += f" {value:9.3f} ms {other['backend']:>15} {value / mine[what]:19.2f}x"
                text += f" {mine['MiB']:8.0f} {other['MiB']:8.0f}"
            print(text)
    print("backward: of torus the same bits each time; unordered: in any order, as PyTorch's. MiB: held beside the operands, "
          "by torus and PyTorch")
    for part in ("torus-attention", "pytorch-attention", "torus-train", "pytorch-train"):
        if lines(part + "-watch"):
            print(f"{part:18} {conditions(os.path.join(directory, part + '-watch'))}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command in ("attention", "train") and not arguments:
        globals()[command]()
    elif command == "table" and len(arguments) == 1:
        table(arguments[0])
    else:
        sys.exit(__doc__)
