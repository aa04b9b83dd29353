"""PyTorch's side of compare_pytorch.sh, and the table of both. Float32, CPU.

usage: compare_pytorch.py run                  times PyTorch, prints one JSON object {name: milliseconds, ...}
       compare_pytorch.py peak PROGRAM [ARG...]   runs it, prints the most memory that it held, in MiB
       compare_pytorch.py table DIRECTORY         reads torus-*.json, pytorch-*.json and peak-* there, prints the ratios
"""
import glob
import json
import os
import resource
import statistics
import subprocess
import sys
import time


def run():
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch.manual_seed(1)
    times = {}

    def timed(name, call, prepare=lambda: ()):
        samples, start = [], time.perf_counter()
        while len(samples) < 5 or time.perf_counter() - start < 1.0:
            arguments = prepare()
            begin = time.perf_counter()
            call(*arguments)
            samples.append(1e3 * (time.perf_counter() - begin))
        times[name] = statistics.median(samples[1:])

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            shape = x.shape[:2] + (self.heads, -1)
            q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self, vocabulary, context, layers, heads, width):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def loss(self, tokens, targets):
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            logits = self.head(self.norm(self.blocks(x)))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for name, context, layers, heads, width, batch in (
        ("nano", 64, 4, 4, 128, 12), ("toy", 128, 4, 4, 128, 32), ("char", 256, 6, 6, 384, 8)):
        model = GPT(65, context, layers, heads, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        tokens, targets = (torch.randint(0, 65, (batch, context)) for _ in range(2))

        def step():
            model.loss(tokens, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        timed("train/" + name, step)

    def attention(name, heads, tokens, width, **options):
        q, k, v = (torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3))
        d_out = torch.randn(1, heads, tokens, width)
        call = lambda: F.scaled_dot_product_attention(q, k, v, **options)
        timed(name + "/forward", call)
        timed(name + "/backward", lambda out: torch.autograd.grad(out, (q, k, v), d_out), lambda: (call(),))

    a = torch.randn(2048, 2048)
    timed("product/2048", lambda: a @ a)
    attention("full/2048", 8, 2048, 64)
    attention("causal/2048", 8, 2048, 64, is_causal=True)
    attention("full/4096", 8, 4096, 64)
    side, reach = 16, 2
    axis = torch.arange(side)
    near = ((axis[:, None] - axis[None] + reach) % side) <= 2 * reach
    mask = near[:, None, None, :, None, None] & near[None, :, None, None, :, None] & near[None, None, :, None, None, :]
    attention("wrapped/16x16x16", 4, side**3, 32, attn_mask=mask.reshape(side**3, side**3))
    times["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(times))


def peak(command):
    code = subprocess.call(command, stdout=subprocess.DEVNULL)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
    sys.exit(code)


def table(directory):
    ours, theirs, rates, shares = {}, {}, {}, {}
    for path in sorted(glob.glob(directory + "/torus-*.json")):
        with open(path) as file:
            for entry in json.load(file)["benchmarks"]:
                name = entry["name"].removesuffix("/real_time")
                ours.setdefault(name, []).append(entry["real_time"])
                rates.setdefault(name, []).append(entry["GFLOP/s"])
                for part in filter(None, entry.get("label", "").split(", ")):  # "mlp backward 31.2 %"
                    op, share, _ = part.rsplit(" ", 2)
                    shares.setdefault(op, {}).setdefault(name, []).append(float(share))
    for path in glob.glob(directory + "/pytorch-*.json"):
        with open(path) as file:
            for name, value in json.load(file).items():
                theirs.setdefault(name, []).append(value)
    print(f"{'':34}{'torus ms':>10}{'GFLOP/s':>9}{'of product':>12}{'PyTorch ms':>12}{'PyTorch / torus':>17}")
    product = statistics.median(rates["product/2048"])
    for name, values in ours.items():
        mine, rate = statistics.median(values), statistics.median(rates[name])
        other = statistics.median(theirs[name]) if name in theirs else None
        print(f"{name:34}{mine:10.2f}{rate:9.1f}{100 * rate / product:10.0f} %"
              + (f"{other:12.2f}{other / mine:16.2f}x" if other else ""))
    peaks = []
    for path in glob.glob(directory + "/peak-*"):
        with open(path) as file:
            peaks.append(float(file.read()))
    print(f"{'peak resident MiB, all of the above':35}{max(peaks):9.0f}{max(theirs['peak MiB']):33.0f}")
    steps = [name for name in ours if name.startswith("train/")]
    print(f"\n{'share of a training step, %':35}" + "".join(f"{name.removeprefix('train/'):>9}" for name in steps))
    medians = {op: {name: statistics.median(values) for name, values in of.items()} for op, of in shares.items()}
    for op, of in sorted(medians.items(), key=lambda item: -max(item[1].values())):
        print(f"{op:35}" + "".join(f"{of[name]:9.1f}" if name in of else f"{'<0.5':>9}" for name in steps))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run()
    elif sys.argv[1:2] == ["peak"]:
        peak(sys.argv[2:])
    elif sys.argv[1:2] == ["table"]:
        table(sys.argv[2])
    else:
        sys.exit(__doc__)
