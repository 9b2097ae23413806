"""An allocator that looks right and is not: `foredraft check allocator examples.blocks:Blocks --capability misuse`."""

from bisect import insort


class Blocks:
    """Blocks by number, the lowest free one first."""

    def __init__(self, config):
        self.blocks = list(range(config.num_pages))
        self.held = set()

    def num_free(self):
        return len(self.blocks)

    def can_allocate(self, n):
        return 0 <= n <= len(self.blocks)

    def alloc(self, n):
        if not self.can_allocate(n):
            return None
        taken, self.blocks = self.blocks[:n], self.blocks[n:]
        self.held.update(taken)
        return taken

    def free(self, blocks):
        for block in blocks:
            if block not in self.held:
                raise ValueError(f"block {block} is not held")
            self.held.discard(block)
            insort(self.blocks, block)
