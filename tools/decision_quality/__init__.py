"""How good the embedded model's decisions are at raw, L0 and L1: the table of docs/decisions.md.

    python -m tools.decision_quality read DATA SAMPLES [--seconds 150]
    python -m tools.decision_quality show SAMPLES

DATA is the prepared data of the demo model's recipe (tools/demo_model/README.md), of which groups
that training never saw are read. SAMPLES is a file of JSON lines: reading goes on behind what is
there, so it may be done in parts.
"""
