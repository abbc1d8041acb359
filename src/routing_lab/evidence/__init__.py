"""From records to a verdict: reading runs, statistics, studies, tables, figures and the report.

Nothing in this package imports torch, timm or lightning, so that a report opens in a second.
"""
