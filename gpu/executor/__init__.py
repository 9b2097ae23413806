"""Runs the steps of an engine on a torch device.

executor      `TorchExecutor.launch` queues a step; `collect` returns its result. A step has prompt chunks,
              decode rounds, or both
round         one decode round: `DecodeRound.begin` drafts and runs the target over the trees, `finish` accepts and
              prepares the next one
round_runner  the next round of a step: from a captured graph, or operation by operation
graphs        the same two functions, captured as CUDA graphs by batch size and shape
capture       one function as a CUDA graph
rows          what the device knows of each request: its slots, its sampling; whether it has ended
shaping       changed logits: which rows ask for them, tables on the device, masks of grammars
running       results on their way from the device to the host
relay         the cells through which one round leaves the next one its first token, on the device
outputs       what requests ask for beside tokens
parts         what an executor is made of: options, models with their pools, what prompts and rounds share
build         from an engine and its models to an executor
"""
