"""The plan of a run: what it takes of a machine's GPUs, main memory and disk, whether that is there, and what to change if not.

`dry_run=True` of a recipe prints it. What is taken comes from shapes and settings. Where no shape says it (a CUDA context, what
NCCL and the allocator keep), an allowance stands, and the table calls it so.
"""
