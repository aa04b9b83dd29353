"""PyTorch's side of compare_pytorch_cuda.sh, and the table of both.

usage: compare_pytorch_cuda.py attention [REGEX]   times PyTorch, problems whose names match; one line a measurement,
                                                   as JSON
       compare_pytorch_cuda.py train               the same of training steps
       compare_pytorch_cuda.py table DIRECTORY     reads what both wrote there, prints ratios
"""
import contextlib
import datetime
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

@contextlib.contextmanager
def deterministic_algorithms():
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # which would take time
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


chosen = re.compile("")  # names of the problems that are timed


def measured(name, backend, attend, tensors, in_order=None):
    """Forward, backward, and the memory that both take beside the operands. What cannot run says so. `in_order`: True if
    backward gives the same bits each time, or the same attention whose backward does under deterministic_algorithms."""
    import torch

    if not chosen.search(name):
        return

    def backward(out):
        return milliseconds(lambda: torch.autograd.grad(out, tensors, seed, retain_graph=True))

    entry = {"name": name, "backend": backend}
    try:
        with torch.no_grad():
            entry["forward"] = milliseconds(lambda: attend(*tensors))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = attend(*tensors)
        seed = torch.randn_like(out)
        gradients = torch.autograd.grad(out, tensors, seed, retain_graph=True)
        torch.cuda.synchronize()
        entry["MiB"] = (torch.cuda.max_memory_allocated() - held - seed.nbytes) / 2**20
        del gradients
        entry["backward"] = backward(out)
        if in_order is True:
            entry["in order"] = entry["backward"]
        elif in_order is not None:
            with deterministic_algorithms():
                entry["in order"] = backward(in_order(*tensors))
    except Exception as error:  # it refuses, or there is no memory
        entry["refused"] = str(error).split("\n")[0][:100]
    say(**entry)
    torch.cuda.empty_cache()


def attention(only=""):
    global chosen
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    chosen = re.compile(only)
    for limit in ("recompile_limit", "accumulated_recompile_limit"):  # beyond it, flex would run unfused
        setattr(torch._dynamo.config, limit, 1000)
    flex = torch.compile(flex_attention, dynamic=False)
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        flash_attn_func = None
        say(absent="FlashAttention-3 (flash_attn_interface)")
    try:
        import natten
    except ImportError:
        natten = None
        say(absent="NATTEN (natten)")

    def operands(batch, heads, queries, keys, width, dtype=torch.bfloat16):
        shapes = ((batch, heads, tokens, width) for tokens in (queries, keys, keys))
        return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]

    def flash3(name, tensors, **options):
        if flash_attn_func is None:
            return

        def attend(q, k, v, **more):  # [B, N, H, D]
            out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options, **more)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
        measured(name, "flash3", attend, tensors, lambda q, k, v: attend(q, k, v, deterministic=True))

    def fused(name, tensors, causal=False):
        for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            def attend(q, k, v):
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, is_causal=causal)
            measured(name, label, attend, tensors, attend if label == "flash" else None)
        flash3(name, tensors, causal=causal)

    def masked(name, label, allows, tensors, order=None):
        """`order`: the place in memory of each token, by which `allows` is asked."""
        if not chosen.search(name):
            return
        rule = allows if order is None else lambda b, h, i, j: allows(b, h, order[i], order[j])
        try:
            blocks = create_block_mask(rule, None, None, tensors[0].shape[2], tensors[1].shape[2], device="cuda")
        except Exception as error:
            return say(name=name, backend=label, refused=str(error).split("\n")[0][:100])
        def attend(q, k, v):
            return flex(q, k, v, block_mask=blocks)
        measured(name, label, attend, tensors, in_order=True)

    for causal in (False, True):
        for width in (64, 128):
            for tokens in (512, 2048, 8192, 16384):
                name = f"{'causal' if causal else 'full'} d{width} N{tokens}"
                tensors = operands(16384 // tokens, 2048 // width, tokens, tokens, width)
                fused(name, tensors, causal)
                if tokens == 8192 and not causal:
                    measured(name, "flex", flex, tensors, in_order=True)
                elif tokens == 8192:
                    masked(name, "flex", lambda b, h, i, j: j <= i, tensors)
        fused(f"{'causal' if causal else 'full'} d256 N8192", operands(2, 8, 8192, 8192, 256), causal)
    for queries, keys, width in ((4096, 4096, 40), (4096, 77, 40), (1024, 1024, 80), (256, 256, 160),
                                 (4096, 4096, 64), (4096, 77, 64)):
        fused(f"f16 {queries}x{keys} d{width}", operands(4, 8, queries, keys, width, torch.float16))
    for tokens, before, after in ((8192, 512, 511), (16384, 128, 127)):
        name = f"window {before + after + 1} d128 N{tokens}"
        tensors = operands(16384 // tokens, 16, tokens, tokens, 128)
        masked(name, "flex", lambda b, h, i, j: (i - j <= before) & (j - i <= after), tensors)
        flash3(name, tensors, window_size=(before, after))

    def blocks(b, h, i, j):
        i, j = i // 96, j // 96
        return (i == j) | ((i * 7919 + j * 104729) % 1013 % 4 == 0)

    lengths = torch.tensor([1900, 700, 2500, 300, 1100, 1692], device="cuda")
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    for width in (64, 128):
        tensors = operands(2, 2048 // width, 8192, 8192, width)
        masked(f"lambda d{width} N8192", "flex", blocks, tensors)
        masked(f"causal & document d{width} N8192", "flex",
               lambda b, h, i, j: (j <= i) & (document[i] == document[j]), tensors)
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
        if natten is not None:
            def padded(x):  # [B, X, Y, Z, H, D], each axis longer by what the windows of its ends reach
                x = x.transpose(1, 2).unflatten(1, (side, side, side))
                for axis in (1, 2, 3):
                    x = torch.cat([x.narrow(axis, side - reach, reach), x, x.narrow(axis, 0, reach)], axis)
                return x

            def attend(q, k, v):
                out = natten.na3d(padded(q), padded(k), padded(v), kernel_size=(window,) * 3)
                inner = slice(reach, side + reach)
                return out[:, inner, inner, inner].flatten(1, 3).transpose(1, 2)
            measured(name, "pad, natten", attend, tensors)


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

def watched(path):
    """What the watch of a part saw, by time: seconds, MHz of the SMs and of memory, W, C, MiB used."""
    samples = []
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                when, *fields = line.split(",")
                try:
                    seconds = datetime.datetime.strptime(when.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
                    numbers = [float(field) for field in fields]
                except ValueError:
                    continue  # "[N/A]", or a line that was cut
                if len(numbers) == 5:
                    samples.append((seconds, *numbers))
    return samples


def busy(samples):
    """Medians while the device worked; None without samples."""
    most = max((sample[3] for sample in samples), default=0)
    worked = [sample for sample in samples if sample[3] > 0.5 * most]
    return [statistics.median(column) for column in zip(*worked)] if worked else None


def table(directory):
    samples = {}

    def rows(part):
        """What a part printed, line by line, and the conditions while it did."""
        samples[part] = watched(os.path.join(directory, part + "-watch"))
        path = os.path.join(directory, part)
        if not os.path.exists(path):
            return
        before = 0.0
        with open(path) as file:
            for line in file:
                when, _, text = line.rstrip("\n").partition(" ")
                try:
                    now = float(when)
                except ValueError:
                    continue
                yield text, busy([sample for sample in samples[part] if before <= sample[0] <= now])
                before = now

    ours, theirs = {}, {}
    for text, conditions in rows("torus-attention"):
        found = re.match(r"(\S.*\S)\s+(cuda_\w+|hopper)((?:\s+[\d.]+){10})$", text)
        if found:
            n = [float(number) for number in found[3].split()]
            ours.setdefault(found[1], []).append(
                {"backend": found[2], "forward": n[0], "backward": n[3], "unordered": n[6], "MiB": n[9],
                 "visited": {"forward": n[2], "backward": n[5], "unordered": n[8]}, "conditions": conditions})
    for text, conditions in rows("torus-train"):
        found = re.match(r"(\w+)\s+([\d.]+) ms\s+([\d.]+) tok/s\s+([\d.]+) MiB", text)
        if found:
            ours["train " + found[1]] = [{"backend": "torus", "step": float(found[2]), "MiB": float(found[4]),
                                          "conditions": conditions}]
    for part in ("pytorch-attention", "pytorch-train"):
        for text, conditions in rows(part):
            if not text.startswith("{"):
                continue
            entry = json.loads(text)
            if "absent" in entry:
                print("not installed here:", entry["absent"])
            elif "name" in entry:
                theirs.setdefault(entry["name"], []).append({**entry, "conditions": conditions})

    def best(entries, what):
        there = [entry for entry in entries if what in entry]
        return min(there, key=lambda entry: entry[what]) if there else None

    def device(entry):
        return f"{entry['conditions'][1]:5.0f} {entry['conditions'][3]:4.0f}" if entry["conditions"] else "  n/a  n/a"

    # What of torus is set beside what of the others.
    pairs = (("forward", "forward"), ("unordered", "backward"), ("backward", "backward"), ("backward", "in order"),
             ("step", "step"))
    labels = {"unordered": "backward", "backward": "backward = each time"}
    print(f"{'':28} {'':20} {'torus, ms':>19} {'best of the others, ms':>22} {'ratio':>7} {'MiB':>8} {'MiB':>8} "
          f"{'MHz':>5} {'W':>4} {'MHz':>5} {'W':>4}")
    for name, entries in ours.items():
        for mine, their in pairs:
            ahead, other = best(entries, mine), best(theirs.get(name, []), their)
            if ahead is None or (other is None and their == "in order"):
                continue
            label = "both = each time" if their == "in order" else labels.get(mine, mine)
            text = f"{name:28} {label:20} {ahead[mine]:9.3f} {ahead['backend']:>9}"
            if other is not None:
                text += (f" {other[their]:9.3f} {other['backend']:>12} {other[their] / ahead[mine]:6.2f}x"
                         f" {ahead['MiB']:8.0f} {other.get('MiB', 0):8.0f} {device(ahead)} {device(other)}")
            print(text)
    print("ratio: the time of the others over that of torus. = each time: gives the same bits each time. MiB: held beside the "
          "operands, MHz and W: of torus, then of the others")
    refused = [(name, entry) for name, entries in theirs.items() for entry in entries if "refused" in entry]
    for name, entry in refused:
        print(f"{name:28} {entry['backend']} refused: {entry['refused']}")

    # Masks cost in proportion to what their tiles hold.
    print(f"{'':28} {'':9} TFLOP/s of all that is visited, and of the unmasked rate")
    for name, entries in ours.items():
        width = re.search(r" (d\d+) N\d+$", name)
        unmasked = ours.get(f"full {width[1]} N8192", []) if width and not name.startswith("full") else []
        for entry in entries:
            for full in unmasked:
                if full["backend"] == entry["backend"]:
                    print(f"{name:28} {entry['backend']:9} " + ", ".join(
                        f"{what} {rate:6.1f} {rate / full['visited'][what]:5.0%}"
                        for what, rate in entry["visited"].items()))
    for part, seen in samples.items():
        medians = busy(seen)
        if medians:
            print(f"{part:18} SM {medians[1]:.0f} MHz, memory {medians[2]:.0f} MHz, {medians[3]:.0f} W, {medians[4]:.0f} C, "
                  f"at most {max(sample[5] for sample in seen):.0f} MiB of the device used")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "attention" and len(arguments) <= 1:
        attention(*arguments)
    elif command == "train" and not arguments:
        train()
    elif command == "table" and len(arguments) == 1:
        table(arguments[0])
    else:
        sys.exit(__doc__)
