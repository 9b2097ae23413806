"""From a model's files and options to served text, in one process.

    plan           options, files and free memory → sizes, dtype, engine specification; nothing is loaded yet
    session        `DecodeSession.open` loads the models and makes engine and executor; `stream` serves requests
    text_session   what that has in common with a session over workers: tokens → text, counts, latencies
    loop           `DecodeLoop.turn`, one turn of `core.scheduler.driver.Driver`: the engine plans a step, the executor
                   runs it, the engine commits the result, and the requests' new tokens are sorted out

A step on the device is in `gpu.executor`: `TorchExecutor.launch` and `collect`, whose rounds are those of
`DecodeRound`.
"""
