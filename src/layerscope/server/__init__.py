"""The live page: the runs below a folder, each to look at, compared with each other, followed while they grow.

    from layerscope.server.live_server import serve
    serve("runs", port=8800)

It needs starlette and uvicorn, the extra `web`. The README beside this file says how it is kept to its user.
"""

__all__ = ["application", "comparisons", "guard", "live_server", "pages", "runs"]
