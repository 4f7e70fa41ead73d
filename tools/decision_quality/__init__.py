"""How good the embedded model's decisions are at raw, L0 and L1: the tables of docs/decisions.md.

    python -m tools.decision_quality read DATA SAMPLES [--seconds 150] [--task NAME]
    python -m tools.decision_quality show SAMPLES
    python -m tools.decision_quality priors DATA

DATA is the prepared data of the demo model's recipe (tools/demo_model/README.md), of which groups
that training never saw are read. SAMPLES is a file of JSON lines: reading goes on behind what is
there, so it may be done in parts.
"""
