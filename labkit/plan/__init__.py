"""Arithmetic on shapes: memory, time and break-even points. Nothing here needs torch.

    kv, kv_formats     bytes of a KV cache
    hub_config, shapes a model's config.json, and the matrices that it describes
    weights, time      bytes of the weights; operations, bytes and seconds of a step
    units              bytes as people write them

`labkit.lab.plan.memory` adds them up to the answer of `labkit plan`.
"""
