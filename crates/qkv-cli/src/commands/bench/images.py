"""PyTorch's side of `qkv bench --images --against torch`: passes of ResNet-50, in a process that does nothing else.

    python -c SCRIPT IMAGES THREADS SECONDS    -> {"best_ms": .., "median_ms": .., "version": ".."}

The network is Keras's, whose blocks stride in their first convolution, with batch norms folded into convolutions. It is
measured in both orders of memory, channels first and channels last, and the faster one is the answer.
"""

images, threads, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(threads)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, inputs, inner, stride, projects):
        super().__init__()
        self.one = nn.Conv2d(inputs, inner, 1, stride)
        self.two = nn.Conv2d(inner, inner, 3, 1, 1)
        self.three = nn.Conv2d(inner, 4 * inner, 1)
        self.projection = nn.Conv2d(inputs, 4 * inner, 1, stride) if projects else nn.Identity()

    def forward(self, x):
        y = F.relu_(self.two(F.relu_(self.one(x))))
        return F.relu_(self.three(y).add_(self.projection(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 7, 2, 3)
        blocks, width = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for at in range(count):
                blocks.append(Block(width, 64 << stage, 2 if stage > 0 and at == 0 else 1, at == 0))
                width = 256 << stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu_(self.first(x)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


best = None
with torch.inference_mode():
    for order in (torch.contiguous_format, torch.channels_last):
        network = ResNet().eval().to(memory_format=order)
        x = torch.randn(images, 3, 224, 224).to(memory_format=order)
        for _ in range(2):
            network(x)
        times, begin = [], time.perf_counter()
        while not times or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            network(x)
            times.append(1e3 * (time.perf_counter() - start))
        if best is None or min(times) < min(best):
            best = times
answer(best_ms=min(best), median_ms=statistics.median(best), version=torch.__version__)
