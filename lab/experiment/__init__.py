"""Experiments on a local swarm of real nodes behind emulated links: a scenario, its run, and what every report needs.

`scenario` reads what is to happen; `scenario_events` carry themselves out on a `run`, in the `laboratory`; `metrics`
and `log_watch` see what comes of it. `lab.wan` measures such runs, `lab.chaos` judges them.
"""
