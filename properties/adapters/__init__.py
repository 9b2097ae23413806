"""Components as the contracts see them: ours, and one that the suite was tried on and that is not ours."""

_PACKAGE = __name__

SUBJECTS: dict[str, tuple[str, ...]] = {
    "allocator": (
        f"{_PACKAGE}.kv_allocator:make",
        f"{_PACKAGE}.kv_store:make",
        f"{_PACKAGE.rpartition('.')[0]}.plain_allocator:make",
    ),
}
"""Contract -> what `foretoken check` looks at if nothing is named."""
