"""Weights over a network, by vLLM's weight-transfer protocol: from the trainer's memory to servers that share none with it.

    trainer                                          server, in vLLM's process
    courier.py ── order ──▶ sender_process.py  ────▶ worker.py
                            group.py (HTTP)          (begins, takes, finishes an update)
                            gloo or NCCL      ─────▶ the bytes, chunk by chunk (`Update`)

The trainer only writes its weights into memory, as for an engine of its own. A process beside it, the sender, opens that
memory and does all that may wait for another machine. When it is late it is killed, and no collective of ours ever runs in
the trainer.
"""
