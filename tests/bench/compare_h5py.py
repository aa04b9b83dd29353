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

GZIP = dict(compression="gzip", compression_opts=4, shuffle=True)
# Name, size of the three axes, chunk (none: contiguous), filters, slices read; of int16, smooth with noise, as images
# are. 256^3 lies in the cache of chunks (64 MiB) as a whole, 512^3 does not.
FILES = [
    ("contiguous", 256, None, {}, 1000),
    ("deflate, chunks 32x32x32", 256, (32, 32, 32), GZIP, 1000),
    ("deflate, chunks 1x256x256", 256, (1, 256, 256), GZIP, 1000),
    ("lzf, chunks 16x64x64", 256, (16, 64, 64), dict(compression="lzf", shuffle=True), 1000),
    ("deflate, chunks 32x64x64", 512, (32, 64, 64), GZIP, 60),
    ("deflate, chunks 1x512x512", 512, (1, 512, 512), GZIP, 300),
]


def image(size):
    grid = np.linspace(-1, 1, size)
    ball = np.maximum(0, 1 - grid[:, None, None] ** 2 - grid[None, :, None] ** 2 - grid[None, None, :] ** 2)
    noise = 20 * np.random.default_rng(0).standard_normal(ball.shape, "f4")
    return (1000 * ball + noise * (ball > 0)).astype("i2")


def with_h5py(path, count):
    seconds = {}
    with h5py.File(path, "r") as file:
        volume = file["x"]
        into = np.empty((1,) + volume.shape[1:], "f4")
        random = np.random.default_rng(1).integers(0, volume.shape[0], count)
        for name, indices in ("random", random), ("sequential", np.arange(count) % volume.shape[0]):
            begin = time.perf_counter()
            for i in indices:
                volume.read_direct(into, np.s_[i : i + 1])
            seconds[name] = time.perf_counter() - begin
    return seconds


def with_torus(program, path, count):
    lines = subprocess.run([program, path, "x", str(count)], check=True, capture_output=True, text=True).stdout
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines.splitlines())}


program = sys.argv[1]
print(f"{'file':32} {'order':12} {'h5py s':>8} {'torus s':>8} {'times':>6}")
with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
    path = os.path.join(folder, "x.h5")
    for name, size, chunk, filters, count in FILES:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=image(size), chunks=chunk, **filters)
        theirs, ours = with_h5py(path, count), with_torus(program, path, count)
        title = f"{size}^3 {name}"
        for order in "random", "sequential":
            print(f"{title:32} {order:12} {theirs[order]:8.2f} {ours[order]:8.2f} {theirs[order] / ours[order]:6.2f}")
        print(f"{title:32} training waits for {100 * ours['waited']:.1f} % of its time, with steps of 5 ms", flush=True)
