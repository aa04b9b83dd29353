"""Times slices of volumes through Torus and through h5py, in turn on the same files, and prints seconds and ratios.

usage: /usr/bin/python3 tests/bench/compare_h5py.py build/tests/volume_bench [FOLDER]      (needs h5py)
"""
import os
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

COUNT = 1000
# Name, chunk (none: contiguous), filters; all of int16 [256, 256, 256], smooth with noise, as images are.
FILES = [
    ("contiguous", None, {}),
    ("deflate, chunks 32x32x32", (32, 32, 32), dict(compression="gzip", compression_opts=4, shuffle=True)),
    ("deflate, chunks 1x256x256", (1, 256, 256), dict(compression="gzip", compression_opts=4, shuffle=True)),
    ("lzf, chunks 16x64x64", (16, 64, 64), dict(compression="lzf", shuffle=True)),
]


def with_h5py(path):
    seconds = {}
    with h5py.File(path, "r") as file:
        volume = file["x"]
        into = np.empty((1,) + volume.shape[1:], "f4")
        random = np.random.default_rng(1).integers(0, volume.shape[0], COUNT)
        for name, indices in ("random", random), ("sequential", np.arange(COUNT) % volume.shape[0]):
            begin = time.perf_counter()
            for i in indices:
                volume.read_direct(into, np.s_[i : i + 1])
            seconds[name] = time.perf_counter() - begin
    return seconds


def with_torus(program, path):
    lines = subprocess.run([program, path, "x", str(COUNT)], check=True, capture_output=True, text=True).stdout
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines.splitlines())}


program = sys.argv[1]
folder = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()
rng = np.random.default_rng(0)
grid = np.linspace(-1, 1, 256)
ball = np.maximum(0, 1 - grid[:, None, None] ** 2 - grid[None, :, None] ** 2 - grid[None, None, :] ** 2)
values = (1000 * ball + 20 * rng.standard_normal(ball.shape) * (ball > 0)).astype("i2")
print(f"{'file':28} {'order':12} {'h5py s':>8} {'torus s':>8} {'times':>6}")
for name, chunk, filters in FILES:
    path = os.path.join(folder, "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunk, **filters)
    theirs, ours = with_h5py(path), with_torus(program, path)
    for order in "random", "sequential":
        print(f"{name:28} {order:12} {theirs[order]:8.2f} {ours[order]:8.2f} {theirs[order] / ours[order]:6.2f}")
    print(f"{name:28} training waits for {100 * ours['waited']:.1f} % of its time, with steps of 5 ms")
    os.remove(path)
