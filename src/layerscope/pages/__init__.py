"""What a run looks like: its page, and the parts that commands, notebooks and the server share.

    from layerscope.pages.run import page
    html.save(page(open_run("runs/fp32"), "runs/fp32"), "report.html")

Nothing is imported here: a command's `--help` needs some of these files and not numpy.
"""

__all__ = ["adjacent", "alarms", "completeness", "run", "selection", "statistics", "training"]
